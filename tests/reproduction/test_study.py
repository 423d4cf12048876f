# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Studies: those of the package can be run as they are, and one with a mistake is refused before anything runs."""

from copy import deepcopy
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.needle_prompts import WORDINGS, numbers_for
from diff_transformer.evaluation.recall import keys_and_values
from diff_transformer.reproduction.digest import check_parameters
from diff_transformer.reproduction.pieces import extension_config, pieces_of, training_config, write_configs
from diff_transformer.reproduction.study import DIFF, PAIR, SCALES, STUDIES, TRANSFORMER, Study, load_study
from diff_transformer.reproduction.tasks import TASKS
from diff_transformer.training import extend_64k, pretrain
from diff_transformer.training.architectures import NewModelArguments, new_config
from diff_transformer.training.budget import count_parameters
from diff_transformer.training.runs import parse

FILES = {  # what each task writes
    "text": {"train.jsonl", "validation.jsonl"},
    "recall": {"train", "validation"},
    "needles": {"train", "validation", "haystack.jsonl"},
}
EXPERIMENT = {
    "task": {"kind": "recall", "rows": 4, "pairs": [2], "vocabularies": [8]},
    "sequence_length": 16,
    "config": {"hidden_size": 32},
    "variants": {
        "transformer": {"architecture": "transformer"},
        "diff": {"architecture": "diff"},
        "bare": {"architecture": "diff", "config": {"use_subln": False}, "seeds": [1]},
    },
    "training": {"max_steps": 2, "logging_steps": 1, "eval_steps": 2},
    "evaluations": {"recall": {"pairs": [2]}},
}
STUDY = {
    "title": "A test",
    "machine": "none",
    "minutes": 1,
    "seeds": [0, 1],
    "tokenizer_ranks": 256,
    "experiments": {"small": EXPERIMENT},
}


# --------------------------------------------------------------------------------------------- those of the package


def test_every_scale_is_a_study_and_every_study_a_scale():
    assert {path.stem for path in STUDIES.glob("*.yaml")} == set(SCALES)


@pytest.fixture(params=SCALES)
def study(request) -> Study:
    return load_study(STUDIES / f"{request.param}.yaml")


def test_seeds_and_pieces(study):
    assert len(set(study.seeds)) == len(study.seeds) >= 1
    for name, experiment in study.experiments.items():
        for label in PAIR:
            assert experiment.variants[label].architecture == label
            assert experiment.variants[label].config == {} and study.seeds_of(name, label) == study.seeds
        for label in experiment.variants:
            assert len(set(study.seeds_of(name, label))) == len(study.seeds_of(name, label)) > 0
    pieces = pieces_of(study)
    names, done = [piece.name for piece in pieces], [piece.done for piece in pieces]
    assert len(set(names)) == len(names) and len(set(done)) == len(done)
    for i, piece in enumerate(pieces):
        assert set(piece.needs) <= set(names[:i]), f"{piece.name} comes before what it needs"
        assert not piece.done.is_absolute()


def test_every_training_parses_as_its_stage_reads_it(study, tmp_path):
    file = tmp_path / "config.yaml"

    def parsed(stage, config: dict) -> dict:
        file.write_text(yaml.safe_dump({**config, "use_cpu": True, "bf16": False}))
        return {k: v for part in parse(stage.ARGUMENTS, {}, ["--config", str(file)]) for k, v in vars(part).items()}

    for name, experiment in study.experiments.items():
        for label in experiment.variants:
            seed = study.seeds_of(name, label)[-1]
            got = parsed(pretrain, training_config(study, name, label, seed))
            assert (got["seed"], got["data_seed"], got["record_batches"]) == (seed, seed, True)
            assert got["architecture"] == experiment.variants[label].architecture
            assert got["max_steps"] > 0 and got["eval_strategy"] == "steps"
        if experiment.extension is not None:
            got = parsed(extend_64k, extension_config(study, name, DIFF, study.seeds[0]))
            assert got["sequence_length"] == experiment.extension["sequence_length"] > experiment.sequence_length
            assert got["total_tokens"] and got["validation_rows"] > 0 and got["output_dir"].endswith("extended")


def test_a_folder_goes_on_with_the_arguments_it_was_begun_with(study, tmp_path):
    write_configs(study, tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.yaml")}
    write_configs(study, tmp_path)
    assert files and all(file.read_bytes() == content for file, content in files.items())
    begun, _ = files.popitem()
    begun.write_text(begun.read_text().replace("record_batches: true", "record_batches: false"))
    with pytest.raises(
        ValueError, match=r"begun on another kind of machine \(here is (a|no) GPU\), or with another version"
    ):
        write_configs(study, tmp_path)


def test_the_pair_has_equal_parameters(study):
    tokenizer = cl100k_tokenizer(vocab_size=study.tokenizer_ranks)
    for name, experiment in study.experiments.items():
        parameters = {}
        for label, variant in experiment.variants.items():
            model = NewModelArguments(variant.architecture, config_overrides={**experiment.config, **variant.config})
            parameters[label] = count_parameters(new_config(model, tokenizer, experiment.sequence_length)).total
        check_parameters(name, parameters[TRANSFORMER], parameters[DIFF])


def test_what_is_measured_is_there_and_has_room(study):
    for name, experiment in study.experiments.items():
        kind, extension = experiment.task["kind"], experiment.extension or {}
        for protocol, values in experiment.evaluations.items():
            arguments = import_module(f"diff_transformer.evaluation.{protocol}").Arguments(**values)
            for option in ("dataset", "train_dataset"):
                if value := getattr(arguments, option, None):
                    assert Path(value).parent == Path("data", name) and Path(value).name in FILES[kind], value
                    assert option == "train_dataset" or Path(value).stem != "train", "measured on what was trained on"
            lengths = getattr(arguments, "lengths", None) or [arguments.length]
            model = extension if protocol in experiment.of_extended else vars(experiment)
            assert max(lengths) <= model["sequence_length"], f"{name}: {protocol}"


def test_tasks_are_possible_with_the_tokenizer(study):
    tokenizer = cl100k_tokenizer(vocab_size=study.tokenizer_ranks)
    for experiment in study.experiments.values():
        kind = experiment.task["kind"]
        task = TASKS[kind](**{name: value for name, value in experiment.task.items() if name != "kind"})
        if kind == "recall":
            most = max(len(keys_and_values(tokenizer, vocabulary)[0]) for vocabulary in task.vocabularies)
            assert max(task.pairs) <= most and 2 * max(task.pairs) + 2 <= experiment.sequence_length
            assert max(experiment.evaluations["recall"]["pairs"]) <= most
        elif kind == "needles":
            numbers = len(numbers_for(WORDINGS["plain"], tokenizer))
            asked = [int(pair.split(":")[0]) for pair in experiment.evaluations["needle"]["pairs"]]
            assert max([*task.needles, *asked]) <= min(26, numbers)
            assert 4 * max(task.needles) + 3 * max(task.queries) + 1 < experiment.sequence_length
            assert experiment.evaluations["needle"]["max_new_tokens"] == 1, "any number in the answer would be right"


# --------------------------------------------------------------------------------------------------------- mistakes


def written(folder: Path, content) -> Path:
    file = folder / "study.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


def test_a_study_is_read_whole(tmp_path):
    study = load_study(written(tmp_path, STUDY))
    experiment = study.experiments["small"]
    assert (study.title, study.processes, study.threads, study.minutes_per_call) == ("A test", 1, None, None)
    assert list(experiment.variants) == ["transformer", "diff", "bare"]
    assert experiment.evaluations == {"recall": {"pairs": [2]}}
    assert experiment.variants["bare"].config == {"use_subln": False}
    assert (study.seeds_of("small", "diff"), study.seeds_of("small", "bare")) == ([0, 1], [1])
    given = {f.name for f in fields(experiment)} - set(EXPERIMENT)
    assert given == {"extension", "of_pair", "of_extended"}, "has a default"


REMOVED = object()
SMALL, DIFF_OF_SMALL = "experiments: small", "experiments: small: variants: diff"
MISTAKES = {  # name: (where, what stands there instead, the message)
    "unknown key": ("sed", 1, r"has no place for \['sed'\]; it is made of \['title', 'seeds'"),
    "unknown key of an experiment": (f"{SMALL}: length", 1, rf"{SMALL} has no place for \['length'\]"),
    "unknown key of a variant": (
        f"{DIFF_OF_SMALL}: size",
        1,
        rf"{DIFF_OF_SMALL} has no place for \['size'\]; it is made of \['architecture', 'config', 'seeds'\]",
    ),
    "missing key": ("minutes", REMOVED, r"study.yaml has no \['minutes'\]"),
    "missing key of an experiment": (f"{SMALL}: task", REMOVED, rf"{SMALL} has no \['task'\]"),
    "missing key of a variant": (
        f"{DIFF_OF_SMALL}: architecture",
        REMOVED,
        rf"{DIFF_OF_SMALL} has no \['architecture'\]",
    ),
    "unknown protocol": (f"{SMALL}: evaluations: recal", {}, f"{SMALL} evaluates 'recal'; there are .*recall"),
    "unknown argument": (
        f"{SMALL}: evaluations: recall: pair",
        [2],
        f"{SMALL}: recall has no pair; it has length, pairs, rows, vocabulary",
    ),
    "unknown architecture": (
        f"{SMALL}: variants: bare: architecture",
        "llama",
        f"{SMALL}: bare has the architecture 'llama'; there are diff, transformer",
    ),
    "seeds outside": (
        f"{SMALL}: variants: bare: seeds",
        [1, 2],
        rf"{SMALL}: bare has seeds \[1, 2\]; the study has \[0, 1\]",
    ),
    "no pair": (
        f"{SMALL}: variants: transformer",
        REMOVED,
        f"{SMALL} has the variants .*bare.*; it needs transformer and diff",
    ),
    "unknown task": (f"{SMALL}: task: kind", "copy", "has the task 'copy'; there are text, recall, needles"),
    "no task": (f"{SMALL}: task: kind", REMOVED, "has the task None; there are text"),
    "no arguments of a task": (f"{SMALL}: task: rows", REMOVED, rf"{SMALL}: task has no \['rows'\]"),
    "unknown argument of a task": (f"{SMALL}: task: row", 1, rf"{SMALL}: task has no place for \['row'\]"),
    "nothing to train with": (f"{SMALL}: training", None, f"{SMALL}: training is NoneType, but names with values"),
    "a seed twice": ("seeds", [0, 1, 1], r"the seeds are \[0, 1, 1\]; needed is a list of different numbers"),
    "seeds of the pair": (f"{DIFF_OF_SMALL}: seeds", [1], f"{SMALL}: diff is one of the pair: .* and all seeds"),
    "DIFF that is none": (f"{DIFF_OF_SMALL}: architecture", "transformer", "it has the architecture diff"),
    "an extension of recall": (f"{SMALL}: extension", {}, f"{SMALL} extends models of recall; only text"),
    "evaluations between two entries of the log": (
        f"{SMALL}: training: logging_steps",
        4,
        "logging_steps=4 and eval_steps=2; needed are both, the second a multiple of the first",
    ),
    "no experiments": ("experiments", {}, "study.yaml has no experiments"),
    "a variant without seeds": (f"{SMALL}: variants: bare: seeds", [], f"{SMALL}: bare has no seeds"),
    "no questions": (f"{SMALL}: task", {"kind": "needles", "rows": 1, "needles": [1], "queries": [0]}, "queries=.0."),
    "tokens of a step": (f"{SMALL}: training: tokens_per_step", 64, "give per_device_train_batch_size"),
    "of the pair, but not measured": (
        f"{SMALL}: of_pair",
        ["needle"],
        f"{SMALL} says of needle what it is measured on, but not how",
    ),
    "of extended models that are none": (
        f"{SMALL}: of_extended",
        ["recall"],
        f"{SMALL} measures recall on extended models, but extends none",
    ),
    "a list": ("experiments", [EXPERIMENT], "study.yaml: experiments is list, but names with values are needed"),
    "a name without values": (DIFF_OF_SMALL, None, f"{DIFF_OF_SMALL} is NoneType, but names with values"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path, mistake):
    where, value, message = MISTAKES[mistake]
    *outer, last = where.split(": ")
    content = inside = deepcopy(STUDY)
    for name in outer:
        inside = inside[name]
    if value is REMOVED:
        del inside[last]
    else:
        inside[last] = value
    with pytest.raises(ValueError, match=message):
        load_study(written(tmp_path, content))


@pytest.mark.parametrize("content", ["", "just words", "- a\n- b\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match="study.yaml is (NoneType|str|list), but names with values are needed"):
        load_study(written(tmp_path, content))


def test_a_file_that_is_no_yaml_or_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"study.yaml is not YAML: (.|\n)*line 1"):
        load_study(written(tmp_path, "title: [1, 2"))
    with pytest.raises(ValueError, match="no study .*none.yaml. Name a file, or one of --scale cpu, gpu, ci"):
        load_study(tmp_path / "none.yaml")

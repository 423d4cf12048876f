# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The studies of the package can be run as they are, and a study with mistakes is rejected with a list of them."""

from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from diff_transformer.reproduction import SCALES
from diff_transformer.reproduction.study import STUDIES, Contrast, Endpoint, Experiment, load_study

EXPERIMENT = {
    "task": {"kind": "key_value", "pairs": [2], "keys": 4, "values": 4, "filler": 4},
    "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "arms": ["transformer", "diff", "wide"],
    "endpoint": {"kind": "tokens", "accuracy": 0.9},
    "seeds": [10, 11],
    "tuning_seeds": [0],
    "learning_rates": [0.001, 0.002],
    "training": {"max_steps": 4, "eval_steps": 2, "per_device_train_batch_size": 1},
}
CONTRAST = {"question": "Is DIFF better?", "arms": ["transformer", "diff"]}
STUDY = {"title": "A test", "machine": "none", "minutes": 1}
STUDY |= {"experiments": {"small": EXPERIMENT}, "contrasts": {"design": CONTRAST}}


# ------------------------------------------------------------------------------------------- studies of the package


@pytest.fixture(params=sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_every_scale_has_a_study():
    assert {path.stem for path in STUDIES.glob("*.yaml")} == set(SCALES)


@pytest.mark.oldest
def test_studies_of_the_package_can_be_run(path, tmp_path):
    study = load_study(path)
    for experiment in study.experiments.values():
        task, config = experiment.task, experiment.make_config()
        assert task.vocabulary <= config.vocab_size < task.vocabulary + 64
        assert config.max_position_embeddings == task.length
        assert config.eos_token_id is config.pad_token_id is None
        if task.text is None:
            assert task.rows("train", experiment.seeds[0], 3).input_ids.max() < task.vocabulary
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **experiment.training)
    for name, contrast in study.contrasts.items():
        assert any(set(contrast.arms) <= set(x.arms) for x in study.experiments.values()), f"{name} is never compared"


# --------------------------------------------------------------------------------------------------------- mistakes


def written(folder: Path, content) -> Path:
    file = folder / "study.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


def test_every_field_is_read(tmp_path):
    study = load_study(written(tmp_path, STUDY))
    assert (study.title, study.processes, study.threads, study.minutes_per_call) == ("A test", 1, None, None)
    experiment = study.experiments["small"]
    assert experiment.endpoint == Endpoint("tokens", 0.9) and experiment.tunes
    assert study.contrasts == {"design": Contrast("Is DIFF better?", ["transformer", "diff"], primary=True)}
    assert {f.name for f in fields(Experiment)} - set(EXPERIMENT) == {
        "tuning_steps", "lambda_lr_multiplier", "validation_rows",
    }, "has a default"  # fmt: skip


REMOVED = object()
SMALL, DESIGN = "experiments: small", "contrasts: design"
TASK, CONFIG, TRAINING = f"{SMALL}: task", f"{SMALL}: config", f"{SMALL}: training"
TEXT = {"kind": "text", "length": 8, "text": {"source": "web"}}
MISTAKES = [  # where, the value there, the message
    ("seeds", [1], "seeds: Unexpected keyword argument, got [1]"),
    ("minutes", REMOVED, "minutes: Field required"),
    ("minutes", "long", "minutes: Input should be a valid number"),
    ("minutes_per_call", -1, "minutes_per_call: Input should be greater than 0, got -1"),
    ("processes", 0, "processes: Input should be greater than 0, got 0"),
    ("threads", 0, "threads: Input should be greater than 0, got 0"),
    ("experiments", {}, "experiments: Dictionary should have at least 1 item"),
    ("contrasts", {}, "contrasts: Dictionary should have at least 1 item"),
    (SMALL, None, "experiments.small: Input should be a dictionary or an instance of Experiment, got None"),
    (f"{SMALL}: length", 1, "experiments.small.length: Unexpected keyword argument, got 1"),
    (f"{SMALL}: arms", ["diff"], "experiments.small.arms: List should have at least 2 items"),
    (f"{SMALL}: arms", ["diff", "diff"], "experiments.small.arms: got ['diff', 'diff'], which has a value twice"),
    (f"{SMALL}: arms", ["diff", "llama"], "experiments.small.arms: got llama; the arms are transformer, norm, wide,"),
    (f"{SMALL}: seeds", [], "experiments.small.seeds: List should have at least 1 item"),
    (f"{SMALL}: seeds", [1, 1], "experiments.small.seeds: got [1, 1], which has a value twice"),
    (f"{SMALL}: seeds", [-1], "experiments.small.seeds.0: Input should be greater than or equal to 0, got -1"),
    (f"{SMALL}: tuning_seeds", [0, 11], "tuning_seeds: learning rates are chosen on other seeds than 11"),
    (f"{SMALL}: learning_rates", [0.0], "experiments.small.learning_rates.0: Input should be greater than 0, got 0.0"),
    (f"{SMALL}: learning_rates", [1e-3, 1e-3], "got [0.001, 0.001], which has a value twice"),
    (f"{SMALL}: lambda_lr_multiplier", -0.1, "Input should be greater than or equal to 0, got -0.1"),
    (f"{SMALL}: validation_rows", 0, "experiments.small.validation_rows: Input should be greater than 0, got 0"),
    (f"{SMALL}: tuning_steps", 3, "max_steps and tuning_steps must be multiples of eval_steps=2, got 3"),
    (f"{SMALL}: endpoint: kind", "accuracy", "endpoint.kind: Input should be 'loss', 'log_loss' or 'tokens'"),
    (f"{SMALL}: endpoint: kind", "loss", "got loss and accuracy=0.9; only tokens need an accuracy"),
    (f"{SMALL}: endpoint: accuracy", REMOVED, "got tokens and accuracy=None; only tokens need an accuracy"),
    (f"{SMALL}: endpoint: accuracy", 1.5, "endpoint.accuracy: Input should be less than or equal to 1, got 1.5"),
    (f"{TASK}: kind", "copy", "does not match any of the expected tags: 'key_value', 'text'"),
    (f"{TASK}: kind", REMOVED, "experiments.small.task: Unable to extract tag using discriminator 'kind'"),
    (f"{TASK}: pairs", REMOVED, "task.key_value.pairs: Field required"),
    (f"{TASK}: pair", 1, "task.key_value.pair: Unexpected keyword argument, got 1"),
    (f"{TASK}: pairs", [5], "got up to 5 pairs and 0 decoys; there are 4 keys, and the context has room for 5"),
    (TASK, TEXT, "task.text.text.source: Input should be 'stdlib' or 'packages', got 'web'"),
    (f"{CONFIG}: hidden_sizes", 32, "config: DiffTransformerConfig has no hidden_sizes"),
    (f"{CONFIG}: hidden_size", "32", "Field 'hidden_size' expected int, got str"),
    (f"{CONFIG}: hidden_size", 33, "hidden_size=33 and num_attention_heads=2 were given, but "),
    (f"{TRAINING}: steps", 1, "training: TrainingArguments does not have, or the study sets steps"),
    (f"{TRAINING}: seed", 1, "training: TrainingArguments does not have, or the study sets seed"),
    (f"{TRAINING}: eval_steps", REMOVED, "training: it needs eval_steps"),
    (f"{TRAINING}: max_steps", 5, "max_steps and tuning_steps must be multiples of eval_steps=2, got 5"),
    (f"{DESIGN}: question", REMOVED, "contrasts.design.question: Field required"),
    (f"{DESIGN}: arms", ["diff"], "contrasts.design.arms: List should have at least 2 items"),
    (f"{DESIGN}: arms", ["diff", "wide", "norm"], "should have at most 2 items"),
    (f"{DESIGN}: arms", ["diff", "v2"], "contrasts.design.arms: got v2; the arms are"),
]


@pytest.mark.parametrize(("where", "value", "message"), MISTAKES)
def test_load_study_names_the_mistake(where, value, message, tmp_path):
    *outer, last = where.split(": ")
    content = inside = deepcopy(STUDY)
    for name in outer:
        inside = inside[name]
    if value is REMOVED:
        del inside[last]
    else:
        inside[last] = value
    with pytest.raises(ValueError, match=r"study.yaml is not a study:\n") as error:
        load_study(written(tmp_path, content))
    assert message in str(error.value)


def test_load_study_lists_all_mistakes(tmp_path):
    content = deepcopy(STUDY)
    small = content["experiments"]["small"]
    content["experiments"]["other"] = {**small, "task": {"kind": "text", "length": "many"}}
    content["experiments"]["small"] = {**small, "training": {"max_steps": 1, "seed": 1}, "tuning_seeds": [10]}
    with pytest.raises(ValueError) as error:
        load_study(written(tmp_path, content))
    for part in (
        "the study sets seed; training: it needs eval_steps, per_device_train_batch_size; tuning_seeds: ",
        "experiments.other.task.text.length: ",
        "experiments.other.task.text.text: Field required",
    ):
        assert part in str(error.value)


def test_load_study_rejects_other_files(tmp_path):
    for content in ("", "just text", "- a\n- b\n"):
        with pytest.raises(ValueError, match="(?s)study.yaml is not a study:.*Input should be a dictionary"):
            load_study(written(tmp_path, content))
    with pytest.raises(ValueError, match=r"study.yaml is not YAML: (.|\n)*line 1"):
        load_study(written(tmp_path, "title: [1, 2"))

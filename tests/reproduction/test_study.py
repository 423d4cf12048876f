# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The studies of the package can be run as they are, and a study with mistakes is rejected with a list of them."""

import json
import re
from copy import deepcopy
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from diff_transformer.reproduction import SCALES
from diff_transformer.reproduction.study import STUDIES, Contrast, Endpoint, Experiment, Study, load_study

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
        task, config = experiment.make_task(), experiment.make_config()
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


def test_a_study_is_stored_as_it_was_written(tmp_path):
    stored = asdict(load_study(written(tmp_path, {**STUDY, "minutes_per_call": 8.5})))
    assert list(stored) == [f.name for f in fields(Study)]
    assert json.dumps([stored["minutes"], stored["minutes_per_call"]]) == "[1, 8.5]"
    defaults = {"tuning_steps": None, "lambda_lr_multiplier": 0.1, "validation_rows": 256}
    assert stored["experiments"] == {"small": {**EXPERIMENT, **defaults}}
    assert stored["contrasts"] == {"design": {**CONTRAST, "primary": True}}


REMOVED = object()
SMALL, DESIGN = "experiments: small", "contrasts: design"
TASK, CONFIG, TRAINING = f"{SMALL}: task", f"{SMALL}: config", f"{SMALL}: training"
TEXT = {"kind": "text", "length": 8, "text": {"source": "web"}}
ARMS_ARE = "the arms are transformer, norm, wide, wide_norm, diff, diff_no_norm, diff_no_norm_no_factor, diff_v2."
MISTAKES = [  # where, the value there, the message
    ("seeds", [1], "study.yaml: seeds is unknown."),
    ("minutes", REMOVED, "study.yaml: minutes is missing."),
    ("minutes", "long", "study.yaml: minutes: got 'long'. Input should be a valid number"),
    ("minutes_per_call", -1, "minutes_per_call: got -1. Input should be greater than 0."),
    ("processes", 0, "study.yaml: processes: got 0. Input should be greater than 0."),
    ("threads", 0, "study.yaml: threads: got 0. Input should be greater than 0."),
    ("experiments", {}, "study.yaml: experiments: got {}. Dictionary should have at least 1 item"),
    ("experiments", [EXPERIMENT], "It should be a mapping of names to values."),
    ("contrasts", {}, "study.yaml: contrasts: got {}. Dictionary should have at least 1 item"),
    (SMALL, None, f"{SMALL}: got None. It should be a mapping of names to values."),
    (f"{SMALL}: length", 1, f"{SMALL}: length is unknown."),
    (f"{SMALL}: arms", REMOVED, f"{SMALL}: arms is missing."),
    (f"{SMALL}: arms", ["diff"], f"{SMALL}: arms: got ['diff']. List should have at least 2 items"),
    (f"{SMALL}: arms", ["diff", "diff"], f"{SMALL}: arms: got ['diff', 'diff']. No value may be given twice."),
    (f"{SMALL}: arms", ["diff", "llama"], f"got ['diff', 'llama']. There is no arm llama; {ARMS_ARE}"),
    (f"{SMALL}: arms", ["diff", "wide"], f"{SMALL}: arms: got diff, wide, of which no contrast compares two."),
    (f"{SMALL}: seeds", [], f"{SMALL}: seeds: got []. List should have at least 1 item"),
    (f"{SMALL}: seeds", [1, 1], f"{SMALL}: seeds: got [1, 1]. No value may be given twice."),
    (f"{SMALL}: seeds", [-1], f"{SMALL}: seeds: 0: got -1. Input should be greater than or equal to 0."),
    (f"{SMALL}: tuning_seeds", [0, 11], "tuning_seeds: got [11], which are seeds too. The learning rates are chosen"),
    (f"{SMALL}: learning_rates", [], f"{SMALL}: learning_rates: got []. List should have at least 1 item"),
    (f"{SMALL}: learning_rates", [0.0], f"{SMALL}: learning_rates: 0: got 0.0. Input should be greater than 0."),
    (f"{SMALL}: learning_rates", [1e-3, 1e-3], "got [0.001, 0.001]. No value may be given twice."),
    (f"{SMALL}: lambda_lr_multiplier", -0.1, "got -0.1. Input should be greater than or equal to 0."),
    (f"{SMALL}: validation_rows", 0, f"{SMALL}: validation_rows: got 0. Input should be greater than 0."),
    (f"{SMALL}: tuning_steps", 0, f"{SMALL}: tuning_steps: got 0. Input should be greater than 0."),
    (f"{SMALL}: tuning_steps", 3, "tuning_steps: got 3. It must be a multiple of eval_steps=2, so that the last step"),
    (f"{SMALL}: endpoint: kind", "accuracy", f"{SMALL}: endpoint: kind: got 'accuracy'. Input should be 'loss', 'lo"),
    (f"{SMALL}: endpoint: kind", "loss", "got loss and accuracy=0.9; tokens need an accuracy, and only they do."),
    (f"{SMALL}: endpoint: accuracy", REMOVED, "got tokens and accuracy=None; tokens need an accuracy, and only th"),
    (f"{SMALL}: endpoint: accuracy", 1.5, "endpoint: accuracy: got 1.5. Input should be less than or equal to 1."),
    (f"{SMALL}: endpoint: accuracy", 0.8125, "endpoint: got the accuracy 0.8125. It must be more than 0.812"),
    (f"{TASK}: kind", "copy", f"{TASK}: got the kind 'copy'. The kinds are key_value, text."),
    (f"{TASK}: kind", ["text"], f"{TASK}: got the kind ['text']. The kinds are key_value, text."),
    (f"{TASK}: kind", REMOVED, f"{TASK}: got the kind None. The kinds are key_value, text."),
    (f"{TASK}: pairs", REMOVED, f"{TASK}: pairs is missing."),
    (f"{TASK}: pair", 1, f"{TASK}: pair is unknown."),
    (f"{TASK}: pairs", [0], f"{TASK}: pairs: 0: got 0. Input should be greater than 0."),
    (f"{TASK}: pairs", [5], "got up to 5 pairs and 0 decoys; there are 4 keys, and the context has room for 5"),
    (TASK, TEXT, f"{TASK}: text: source: got 'web'. Input should be 'stdlib' or 'packages'."),
    (f"{CONFIG}: hidden_sizes", 32, f"{CONFIG}: DiffTransformerConfig has no hidden_sizes."),
    (f"{CONFIG}: hidden_size", "32", f"{CONFIG}: Field 'hidden_size' expected int, got str"),
    (f"{CONFIG}: hidden_size", 33, f"{CONFIG}: hidden_size=33 and num_attention_heads=2 were given, but "),
    (f"{CONFIG}: lambda_init", 2.0, f"{CONFIG}: lambda_init=2.0 was given; it must be "),
    (f"{TRAINING}", None, f"{TRAINING}: got None. It should be a mapping of names to values."),
    (f"{TRAINING}: steps", 1, f"{TRAINING}: TrainingArguments has no steps."),
    (f"{TRAINING}: seed", 1, f"{TRAINING}: got seed, which the study sets for every run."),
    (
        f"{TRAINING}: eval_steps",
        REMOVED,
        f"{TRAINING}: got eval_steps=None. It should be a whole number of at least 1.",
    ),
    (
        f"{TRAINING}: max_steps",
        "many",
        f"{TRAINING}: got max_steps='many'. It should be a whole number of at least 1.",
    ),
    (f"{TRAINING}: eval_steps", 0, f"{TRAINING}: got eval_steps=0. It should be a whole number of at least 1."),
    (f"{TRAINING}: max_steps", 5, f"{SMALL}: max_steps: got 5. It must be a multiple of eval_steps=2, so that the"),
    (f"{DESIGN}: question", REMOVED, f"{DESIGN}: question is missing."),
    (f"{DESIGN}: arms", ["diff"], f"{DESIGN}: arms: got ['diff']. List should have at least 2 items"),
    (f"{DESIGN}: arms", ["diff", "wide", "norm"], "got ['diff', 'wide', 'norm']. Value should have at most 2 items"),
    (f"{DESIGN}: arms", ["diff", "v2"], f"{DESIGN}: arms: got ['diff', 'v2']. There is no arm v2; {ARMS_ARE}"),
    (f"{DESIGN}: primary", "perhaps", f"{DESIGN}: primary: got 'perhaps'. Input should be a valid boolean"),
]


@pytest.mark.parametrize(("where", "value", "message"), MISTAKES)
def test_a_mistake_is_named(where, value, message, tmp_path):
    *outer, last = where.split(": ")
    content = inside = deepcopy(STUDY)
    for name in outer:
        inside = inside[name]
    if value is REMOVED:
        del inside[last]
    else:
        inside[last] = value
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_study(written(tmp_path, content))
    assert all(line.startswith(str(tmp_path / "study.yaml")) for line in str(error.value).splitlines())


def test_too_small_a_feed_forward_network_for_v2_is_named(tmp_path):
    content = deepcopy(STUDY)
    content["experiments"]["small"]["arms"] = ["transformer", "diff", "diff_v2"]
    content["experiments"]["small"]["config"]["intermediate_size"] = 8
    with pytest.raises(ValueError, match="small: config: intermediate_size=8 was given, but the queries and lambda"):
        load_study(written(tmp_path, content))


def test_all_mistakes_are_listed(tmp_path):
    content = deepcopy(STUDY)
    small = content["experiments"]["small"]
    content["experiments"]["other"] = {**small, "task": {"kind": "text", "length": "many"}}
    content["experiments"]["small"] = {**small, "training": {"max_steps": 1, "seed": 1}, "tuning_seeds": [10]}
    with pytest.raises(ValueError) as error:
        load_study(written(tmp_path, content))
    assert [line.split(": ")[2:5] for line in str(error.value).splitlines()] == [
        ["small", "tuning_seeds", "got [10], which are seeds too. The learning rates are chosen on other seeds."],
        ["small", "training", "got seed, which the study sets for every run."],
        ["small", "training", "got eval_steps=None, per_device_train_batch_size=None. It should be a whole number of "
         "at least 1."],
        ["other", "task", "length"],
        ["other", "task", "text is missing."],
    ]  # fmt: skip


def test_files_that_are_not_a_study_are_rejected(tmp_path):
    for content in ("", "just text", "- a\n- b\n"):
        with pytest.raises(ValueError, match=r"study.yaml: got .*. It should be a mapping of names to values."):
            load_study(written(tmp_path, content))
    with pytest.raises(ValueError, match=r"study.yaml is not YAML: (.|\n)*line 1"):
        load_study(written(tmp_path, "title: [1, 2"))
    with pytest.raises(ValueError, match=f"study .*none.yaml does not exist. .* --scale {', '.join(SCALES)}"):
        load_study(tmp_path / "none.yaml")

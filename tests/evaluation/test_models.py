# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Loading what is evaluated, what identifies it, and the command line around all protocols."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diff_transformer.evaluation.__main__ import main
from diff_transformer.evaluation.models import check_length, fingerprint, load_model, split_spec


@pytest.mark.parametrize(
    "spec, expected",
    [("A=x/y", ("A", "x/y")), ("x/y", ("x/y", "x/y")), ("=x", ("x", "x"))],
)
def test_a_label_is_given_or_the_name(spec, expected):
    assert split_spec(spec) == expected


def test_a_folder_is_labelled_by_its_name(tmp_path):
    assert split_spec(str(tmp_path)) == (tmp_path.name, str(tmp_path))
    with pytest.raises(ValueError, match="needs a path"):
        split_spec("A=")


def test_the_identity_follows_the_weights(twin_folders, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(twin_folders["DIFF"], folder)
    one = load_model(f"DIFF={twin_folders['DIFF']}", device="cpu").identity
    same = load_model(f"DIFF={folder}", device="cpu").identity
    assert one["revision"] == same["revision"]
    assert one["model_type"] == "diff_transformer" and one["max_positions"] == 2048
    assert one["attn_implementation"] == "flash_diff" and one["dtype"] == "float32"
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(f"DIFF={folder}", device="cpu").identity["revision"] != one["revision"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "modeling_diff.py"])
def test_the_identity_follows_whatever_a_number_depends_on(twin_folders, tmp_path, name):
    folder = Path(shutil.copytree(twin_folders["DIFF"], tmp_path / "copy"))
    before = fingerprint(folder)
    (folder / "README.md").write_text("no part of the model")
    assert fingerprint(folder) == before
    (folder / name).write_text("# another")
    assert fingerprint(folder) != before


def test_a_folder_with_an_equals_sign(tmp_path):
    (tmp_path / "lr=3e-4").mkdir()
    spec = str(tmp_path / "lr=3e-4")
    assert split_spec(spec) == ("lr=3e-4", spec) and split_spec(f"A={spec}") == ("A", spec)


def test_options_reach_the_model(twin_folders):
    folder = str(twin_folders["DIFF"])
    loaded = load_model(folder, dtype="bfloat16", device="cpu", attn_implementation="eager")
    assert loaded.model.dtype == torch.bfloat16 and loaded.identity["attn_implementation"] == "eager"
    assert loaded.identity["dtype"] == "bfloat16"


def test_a_length_beyond_the_model(loaded):
    check_length(loaded.model, 2048, "A prompt")
    with pytest.raises(ValueError, match="A prompt needs 2,049 tokens.*2,048"):
        check_length(loaded.model, 2049, "A prompt")


def test_no_model_there(tmp_path, capsys):
    assert main(["evaluate", "nll_by_position", "--model", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "No causal language model with a tokenizer could be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, said", [(["nothing"], "no protocol 'nothing'"), ([], "needle")])
def test_which_protocols_there_are(arguments, said, capsys):
    main(["evaluate", *arguments])
    output = capsys.readouterr()
    assert said in output.err + output.out and "attention_allocation" in output.err + output.out


def test_two_models_need_two_labels(twin_folders, tmp_path, capsys):
    folder = str(twin_folders["DIFF"])
    assert main(["evaluate", "nll_by_position", "--model", folder, "--model", folder, "--out", str(tmp_path)]) == 1
    assert "same label" in capsys.readouterr().err

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A GGUF file of a Llama-family model becomes a Differential Transformer V2 with the logits of the model in it."""

import gc
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import CASES, F32, write
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from diff_transformer import cl100k_tokenizer
from diff_transformer.conversion import convert, open_checkpoint
from diff_transformer.conversion.__main__ import main


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder of temporary files, which must be empty in the end."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    gc.collect()
    assert not [*folder.iterdir()], "what was unpacked from the file is removed"


@pytest.mark.parametrize("case", CASES)
def test_convert_keeps_the_logits_of_the_model_in_the_file(tmp_path, temporary, case):
    config, kind = CASES[case]
    model = write(tmp_path / "model.gguf", config, kind, {"general.name": "Model", "general.license": "mit"})
    source = open_checkpoint(tmp_path / "model.gguf", config.model_type)
    for name, expected in model.state_dict().items():
        if name in source.files.meta:
            assert torch.equal(source.files.read(name), expected), name
            assert torch.equal(torch.cat([*source.files.read_blocks(name, 8)]), expected), name
    verdicts = convert(source, tmp_path / "ours")
    assert len(verdicts) == 8 and all(verdict.tolerance == 0 for verdict in verdicts)

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    model.set_attn_implementation("eager")
    ids = torch.arange(42).view(2, 21)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids).logits)
    assert ours.config.rope_parameters == config.rope_parameters
    assert (ours.generation_config.bos_token_id, ours.generation_config.eos_token_id) == (1, 2)


def test_convert_takes_the_tokenizer_and_the_license_of_the_file_along(tmp_path, temporary, capsys):
    fields = {"general.license": "apache-2.0", "general.languages": ["en", "fr"], "general.name": "Model"}
    write(tmp_path / "model.gguf", CASES["llama"][0], F32, fields)
    cl100k_tokenizer(vocab_size=300).save_pretrained(tmp_path)  # of another model in the same folder
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "ours"), "--dtype", "bfloat16"]) == 0
    assert "License apache-2.0: it applies to DEST too" in capsys.readouterr().out
    card = (tmp_path / "ours/README.md").read_text()
    assert "converted from `model.gguf` with" in card and "language:\n- en\n- fr\nlicense: apache-2.0\n" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("abcdcdh<|im_end|>").input_ids == [14, 13, 11, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]).input_ids == [12, 2]
    stated = json.loads((tmp_path / "ours/config.json").read_text())
    assert (stated["dtype"], stated["bos_token_id"], stated["eos_token_id"]) == ("bfloat16", 1, 2)


@pytest.mark.parametrize(
    ("pre", "warns"), [("refact", True), *((pre, False) for pre in ("smollm", "gpt-2", "llama-bpe"))]
)
def test_convert_warns_of_a_tokenizer_that_splits_otherwise(tmp_path, temporary, caplog, monkeypatch, pre, warns):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)  # to caplog
    write(tmp_path / "model.gguf", LLAMA, pre=pre)
    source = open_checkpoint(tmp_path / "model.gguf", "llama")
    convert(source, tmp_path / "ours", verify=False)
    assert (f"tokenizer.ggml.pre={pre!r}, which transformers does not know" in caplog.text) == warns
    caplog.clear()
    convert(source, tmp_path / "other", tokenizer=str(tmp_path / "ours"), verify=False)
    assert "tokenizer.ggml.pre" not in caplog.text


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["a", "ĠĠ", *"2024"]), ("gpt-2", ["a", "Ġ", "Ġ2024"])])
def test_convert_splits_numbers_as_the_file_says(tmp_path, temporary, pre, pieces):
    """llama.cpp's patterns for both; it splits off each digit of a SmolLM first."""
    write(tmp_path / "model.gguf", LLAMA, pre=pre)
    convert(open_checkpoint(tmp_path / "model.gguf", "llama"), tmp_path / "ours", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours").backend_tokenizer
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  2024")] == pieces


CUT = "is not a complete GGUF file"
LLAMA, BIAS = CASES["llama"][0], (np.zeros(64, dtype=np.float32), F32)
ROPE = {"rope_freqs.weight": (np.full(8, 3, dtype=np.float32), F32)}
SCALED = {"llama.rope.scaling.type": "yarn", "llama.expert_count": 8}
CANNOT = r"diff_v2 cannot represent: llama.expert_count=8, llama.rope.scaling.type='yarn'\. .*out with --ignore"


@pytest.mark.parametrize(
    ("options", "change", "layout", "message"),
    [
        ({}, lambda file: os.truncate(file, file.stat().st_size - 128), "llama", f"{CUT} .*Copy or download it again"),
        ({}, lambda file: os.truncate(file, 200), "llama", CUT),
        ({}, lambda file: file.write_bytes(file.read_bytes()[1:]), "llama", CUT),
        ({}, lambda file: os.truncate(file, 0), "llama", CUT),
        ({}, Path.unlink, "llama", "does not exist"),
        ({"architecture": "gemma2"}, None, "llama", "architecture gemma2; GGUF files of llama, qwen2, qwen3 can be"),
        ({}, None, "qwen2", "config.json states llama, but qwen2 was requested. Name it with --from"),
        ({"fields": {"split.count": 2}}, None, "llama", "one of 2 parts. Join them first: llama-gguf-split --merge"),
        ({"fields": SCALED}, None, "llama", CANNOT),
        ({"fields": {"llama.rope.dimension_count": 8}}, None, "llama", r"wrong shape: .*q_proj.weight is \(64, 64\)"),
        ({"tensors": {"blk.1.attn_q.bias": BIAS}}, None, "llama", r"unknown: blk.1.attn_q.bias \(64,\)"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, None, "llama", "missing: model.layers.1.mlp.up_proj.weight"),
        ({"tensors": ROPE}, None, "llama", "rope_freqs.weight are not those of Llama 3.1 to 3.3"),
    ],
)
def test_convert_rejects_a_file_that_it_cannot_represent(
    tmp_path, temporary, capsys, options, change, layout, message
):
    path = tmp_path / "model.gguf"
    write(path, LLAMA, **options)
    if change is not None:
        change(path)
    assert main(["convert", str(path), str(tmp_path / "ours"), "--from", layout, "--to", "diff_v2"]) == 1
    assert re.search(f"error: (?s:.*){message}", capsys.readouterr().err)
    assert not (tmp_path / "ours").exists()


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path / "model.gguf", LLAMA)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"gguf is not installed.*pip install 'diff_transformer\[gguf\]'"):
        open_checkpoint(tmp_path / "model.gguf", "llama")


def test_a_folder_with_gguf_files_alone_names_them(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match="no other weights than a.gguf, b.gguf. Pass the path of one"):
        open_checkpoint(tmp_path, "llama")

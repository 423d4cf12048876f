# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A GGUF file of Llama or its like becomes a Differential Transformer V2 with the logits of the model in it."""

import gc
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from diff_transformer.conversion import convert, open_checkpoint
from diff_transformer.conversion.__main__ import main

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", *"abcdefgh", "ab", "cd", "abcd"]
TOKENS += [f"<unused{i}>" for i in range(64 - len(TOKENS))]
CHAT = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
SIZES = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 2**-16}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
THETA = {"rope_type": "default", "rope_theta": 1000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
F32, F16, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
CASES = {
    "llama": (LlamaConfig(**SIZES, rope_parameters=THETA, tie_word_embeddings=True), F32),
    "llama_q8": (LlamaConfig(**SIZES, rope_parameters=THETA), Q8_0),
    "llama3": (LlamaConfig(**SIZES | {"max_position_embeddings": 131072}, rope_parameters=LLAMA3), F16),
    "qwen2": (Qwen2Config(**SIZES, rope_parameters=THETA), F32),
    "qwen3": (Qwen3Config(**SIZES, rope_parameters=THETA, head_dim=32), Q8_0),
}
# As in the documentation of GGUF
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
NAMES |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
NAMES |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}


def write(path: Path, config, kind=F32, fields=(), tensors=(), architecture=None) -> torch.nn.Module:
    """Writes a random model as llama.cpp does, and returns it with the numbers that the file holds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    name = architecture or config.model_type
    writer = GGUFWriter(path, name)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": 16,
    }
    if config.model_type == "qwen3":
        values |= {"rope.dimension_count": 32, "attention.key_length": 32, "attention.value_length": 32}
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in ({f"{name}.{key}": value for key, value in values.items()} | dict(fields)).items():
        add[type(value)](key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 3, *[1] * (len(TOKENS) - 4)])
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)

    held = {}
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.normal_(1.0 if "norm" in name else 0.0, 0.3)
            theirs = name
            for ours, part in NAMES.items():
                theirs = theirs.replace(ours, part)
            own_kind = kind if x.ndim == 2 else F32
            data = gguf.quantize(x.numpy(), own_kind)
            x.copy_(torch.tensor(gguf.dequantize(data, own_kind)))
            if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                data = data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
            held[theirs] = (data, own_kind)
    if config.rope_parameters["rope_type"] == "llama3":
        held["rope_freqs.weight"] = (llama3_factors(config.rope_parameters), F32)
    for name, x in (held | dict(tensors)).items():
        if x is not None:
            writer.add_tensor(name, np.ascontiguousarray(x[0]), raw_dtype=x[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def llama3_factors(rope: dict) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py computes them."""
    factors = []
    low, high = (rope["original_max_position_embeddings"] / rope[f"{x}_freq_factor"] for x in ("low", "high"))
    for i in range(0, 16, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / 16)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


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
    arguments = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "ours"), "--from", "llama", "--to", "diff_v2"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "License apache-2.0: it applies to DEST too" in capsys.readouterr().out
    card = (tmp_path / "ours/README.md").read_text()
    assert "converted from `model.gguf` with" in card and "language:\n- en\n- fr\nlicense: apache-2.0\n" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("abcdcdh<|im_end|>").input_ids == [14, 13, 11, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]).input_ids == [12, 2]
    stated = json.loads((tmp_path / "ours/config.json").read_text())
    assert (stated["dtype"], stated["bos_token_id"], stated["eos_token_id"]) == ("bfloat16", 1, 2)


def edit(start: int, end: int | None = None):
    def change(path: Path) -> None:
        path.write_bytes(path.read_bytes()[start:end])

    return change


LLAMA, BIAS = CASES["llama"][0], (np.zeros(64, dtype=np.float32), F32)
CANNOT = r"diff_v2 cannot represent: {}\. If they do not matter, leave them out with --ignore"


@pytest.mark.parametrize(
    ("options", "change", "layout", "message"),
    [
        ({}, edit(0, -128), "llama", "is not a complete GGUF file .*Copy or download it again"),
        ({}, edit(0, 200), "llama", "is not a complete GGUF file"),
        ({}, edit(1), "llama", "is not a complete GGUF file"),
        ({}, edit(0, 0), "llama", "is not a complete GGUF file"),
        ({}, Path.unlink, "llama", "does not exist"),
        ({"architecture": "gemma2"}, None, "llama", "architecture gemma2; GGUF files of llama, qwen2, qwen3 can be"),
        ({}, None, "qwen2", "config.json states llama, but qwen2 was requested. Name it with --from"),
        ({"fields": {"split.count": 2}}, None, "llama", "one of 2 parts. Join them first: llama-gguf-split --merge"),
        (
            {"fields": {"llama.rope.scaling.type": "yarn", "llama.expert_count": 8}},
            *(None, "llama", CANNOT.format("llama.expert_count=8, llama.rope.scaling.type='yarn'")),
        ),
        ({"fields": {"llama.rope.dimension_count": 8}}, None, "llama", r"wrong shape: .*q_proj.weight is \(64, 64\)"),
        ({"tensors": {"blk.1.attn_q.bias": BIAS}}, None, "llama", r"unknown: blk.1.attn_q.bias \(64,\)"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, None, "llama", "missing: model.layers.1.mlp.up_proj.weight"),
        (
            {"tensors": {"rope_freqs.weight": (np.full(8, 3, dtype=np.float32), F32)}},
            *(None, "llama", "rope_freqs.weight are not those of Llama 3.1 to 3.3"),
        ),
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

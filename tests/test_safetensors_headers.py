# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Headers of safetensors files: what they contain, and errors for damaged files."""

import pytest
import torch
from safetensors.torch import save_file

from diff_transformer.safetensors_headers import TensorHeader, read_header, read_weight_map


def test_read_header_gives_names_types_and_shapes(tmp_path):
    tensors = {"a": torch.ones(3, 4), "b": torch.ones((), dtype=torch.bfloat16), "c": torch.ones(0, 5)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors") == {
        "a": TensorHeader("F32", (3, 4)),
        "b": TensorHeader("BF16", ()),
        "c": TensorHeader("F32", (0, 5)),
    }


def test_damaged_files_are_rejected(tmp_path):
    file, index = tmp_path / "a.safetensors", tmp_path / "index.json"
    save_file({"a": torch.ones(3)}, file)
    for damaged in (file.read_bytes()[:-1], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            read_header(file)
    for content in ("{", "[]", "{}", '{"weight_map": 1}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="not an index of weight files"):
            read_weight_map(index)

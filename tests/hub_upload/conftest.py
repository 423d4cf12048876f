# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A model folder as a training run leaves it, small and random."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from diff_transformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerV2Config,
    DiffTransformerV2ForCausalLM,
    cl100k_tokenizer,
)

sys.path.insert(0, str(Path(__file__).parent.parent))  # hub_server


def write_model(folder: Path, config_class, model_class, **heads) -> Path:
    """Sharded, and without the Hub files, as if `register_for_auto_class` had not been called."""
    torch.manual_seed(0)
    tokenizer = cl100k_tokenizer(vocab_size=300, model_max_length=128)
    config = config_class(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **heads,
    )
    model_class(config).save_pretrained(folder, max_shard_size="150KB")
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    content = json.loads((folder / "config.json").read_text())
    del content["auto_map"]
    (folder / "config.json").write_text(json.dumps(content, indent=2))
    return folder


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """Not to be changed."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("pristine") / "model"
    return write_model(folder, DiffTransformerConfig, DiffTransformerForCausalLM, **heads)


@pytest.fixture(scope="session")
def pristine_v2(tmp_path_factory) -> Path:
    """DIFF V2; not to be changed."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("pristine_v2") / "model"
    return write_model(folder, DiffTransformerV2Config, DiffTransformerV2ForCausalLM, **heads)


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))

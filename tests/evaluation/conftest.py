# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A DIFF Transformer and its twin, small and random, as checkpoints and loaded."""

import pytest
import torch
from transformers import LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, cl100k_tokenizer
from diff_transformer.evaluation.models import load_model
from diff_transformer.training.architectures import transformer_twin


@pytest.fixture(scope="session")
def twin_folders(tmp_path_factory):
    """{"DIFF": folder, "Transformer": folder}: 2 layers, 320 words, 2048 positions."""
    folder = tmp_path_factory.mktemp("twins")
    torch.manual_seed(0)
    tokenizer = cl100k_tokenizer(vocab_size=300, model_max_length=2048)
    config = DiffTransformerConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    twins = {
        "DIFF": DiffTransformerForCausalLM(config),
        "Transformer": LlamaForCausalLM(transformer_twin(config)),
    }
    for label, model in twins.items():
        model.save_pretrained(folder / label)
        tokenizer.save_pretrained(folder / label)
    return {label: folder / label for label in twins}


@pytest.fixture(scope="session", params=["DIFF", "Transformer"])
def loaded(request, twin_folders):
    return load_model(str(twin_folders[request.param]), device="cpu")

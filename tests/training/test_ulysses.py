# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What `enable_ulysses` does in one process; test_training_distributed.py splits sequences between two."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from diff_transformer import DiffTransformerForCausalLM, attention_diff
from diff_transformer.attention_diff import ALL_ATTENTION_FUNCTIONS, FLASH_DIFF, flash_diff_attention_forward
from diff_transformer.training.ulysses import enable_ulysses, ulysses_attention_forward

pytestmark = pytest.mark.oldest


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLASH_DIFF, flash_diff_attention_forward)
    monkeypatch.setattr("transformers.trainer.skip_first_batches", None)


@pytest.mark.parametrize("attn_implementation", [None, "sdpa", "eager"])
def test_whole_sequences_go_to_flash_diff(tiny_config, attn_implementation):
    input_ids = torch.randint(0, 199, (2, 24))
    expected = DiffTransformerForCausalLM._from_config(tiny_config(), attn_implementation=attn_implementation)
    model = DiffTransformerForCausalLM._from_config(tiny_config(), attn_implementation=attn_implementation)
    model.load_state_dict(expected.state_dict())
    expected.set_attn_implementation("flash_diff")
    logits = expected(input_ids).logits
    enable_ulysses(model)
    assert model.config._attn_implementation == "sdpa", "DeepSpeed compares it with the recipe"
    torch.testing.assert_close(model(input_ids).logits, logits, rtol=0, atol=0)
    assert ALL_ATTENTION_FUNCTIONS[FLASH_DIFF] is ulysses_attention_forward
    assert model.config._attn_implementation == "flash_diff"


def test_other_models_are_left_alone_or_rejected(tiny_config):
    enable_ulysses(SimpleNamespace(config=LlamaConfig()))
    remote = SimpleNamespace(model_type="diff_transformer")
    dynamic = tiny_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    for config, message in ((remote, "load without trust_remote_code"), (dynamic, "rope_type='dynamic'")):
        with pytest.raises(ValueError, match=message):
            enable_ulysses(SimpleNamespace(config=config))
    assert ALL_ATTENTION_FUNCTIONS[FLASH_DIFF] is flash_diff_attention_forward


@pytest.mark.parametrize("attn_implementation", [None, "flash_diff", "sdpa"])
def test_split_sequences_are_rejected_before_it_is_called(tiny_config, monkeypatch, attn_implementation):
    model = DiffTransformerForCausalLM._from_config(tiny_config(), attn_implementation=attn_implementation)
    input_ids = torch.randint(0, 199, (1, 8))
    monkeypatch.setattr(attention_diff, "sequence_parallel_group", lambda: "a group")
    with pytest.raises(ValueError, match=r"enable_ulysses\(model\)"):
        model.train()(input_ids)
    model.eval()(input_ids)  # whole on every process

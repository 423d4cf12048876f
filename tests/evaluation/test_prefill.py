# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Chunks over a cache are the whole, and batches shrink when memory runs out, only then."""

import copy

import pytest
import torch
from bigrams import Bigrams
from tolerances import assert_same_computation
from transformers import MambaForCausalLM, OpenAIGPTLMHeadModel

from diff_transformer.evaluation.generate import Batches, chunks, prefill, token_nll

pytestmark = pytest.mark.oldest

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB"


@torch.no_grad()
def assert_logits(logits, loaded, input_ids, positions):
    """That they are those of `positions` in one forward over the whole input."""
    models = loaded.model, copy.deepcopy(loaded.model).double()
    assert_same_computation(logits, *(model(input_ids=input_ids).logits[:, positions] for model in models))


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_chunks_are_the_whole(loaded, size):
    input_ids = torch.randint(0, 300, (2, 50))
    found = {start: outputs.logits for start, outputs in chunks(loaded.model, input_ids, size=size)}
    parts = list(found.values())
    assert list(found) == list(range(0, 50, size))
    assert all(part.shape[1] <= size for part in parts)
    assert_logits(torch.cat(parts, dim=1), loaded, input_ids, slice(None))


@pytest.mark.parametrize("size", [1, 9, 1024])
def test_prefill_ends_where_the_whole_ends(loaded, size):
    input_ids = torch.randint(0, 300, (1, 31))
    cache, logits = prefill(loaded.model, input_ids[:, :20], size=size)
    assert_logits(logits, loaded, input_ids[:, :20], -1)
    same, logits = prefill(loaded.model, input_ids[:, 20:], cache, size=size)
    assert same is cache and cache.get_seq_length() == 31
    assert_logits(logits, loaded, input_ids, -1)


@pytest.mark.parametrize("architecture", [MambaForCausalLM, OpenAIGPTLMHeadModel])
def test_models_that_do_not_continue_over_a_cache_are_rejected(architecture):
    """They take the cache and ignore it: each chunk would be the first."""
    config = architecture.config_class(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, n_embd=16, n_layer=1, n_head=2
    )
    with pytest.raises(ValueError, match="cannot be evaluated in chunks"):
        prefill(architecture(config), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_token_nll_sums_over_words_in_float32_or_better(dtype):
    model, input_ids = Bigrams({}), torch.randint(0, 400, (1, 7))
    model.logits = (torch.randn(400, 400) * 10).to(dtype)
    expected = -model.logits.double().log_softmax(-1)[input_ids[0, :-1], input_ids[0, 1:]]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(token_nll(model, input_ids), expected, rtol=tolerance / 10, atol=tolerance)


class Memory:
    """Squares numbers, in batches of no more than `room`."""

    def __init__(self, room, message=OUT_OF_MEMORY):
        self.room, self.message, self.sizes = room, message, []

    def __call__(self, batch):
        self.sizes.append(len(batch))
        if len(batch) > self.room:
            raise RuntimeError(self.message)
        return [x * x for x in batch]


@pytest.mark.parametrize(
    "room, most, sizes",
    [
        (64, 8, [8, 8, 4]),
        (5, 16, [16, 8, 4, 4, 4, 4, 4]),
        (3, 64, [20, 10, 5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_batches_halve_when_memory_runs_out(room, most, sizes):
    memory, batches = Memory(room), Batches()
    assert list(batches.map(memory, range(20), 9, most)) == [(x, x * x) for x in range(20)]
    assert memory.sizes == sizes
    for length, size in ((9, sizes[-2]), (3, min(3 * sizes[-2], most)), (999_999, 1)):  # later ones, also of others
        memory.sizes.clear()
        next(batches.map(memory, range(20), length, most))
        assert memory.sizes[0] == size


@pytest.mark.parametrize(
    "memory, batch_size, sizes",
    [
        (Memory(5, "shapes cannot be multiplied"), None, [20]),
        (Memory(0), None, [20, 10, 5, 2, 1]),
        (Memory(5), 8, [8]),
    ],
    ids=["another error", "not even one fits", "the size was asked for"],
)
def test_errors_that_no_smaller_batch_mends(memory, batch_size, sizes):
    with pytest.raises(RuntimeError, match=memory.message):
        list(Batches(batch_size).map(memory, range(20)))
    assert memory.sizes == sizes


def test_batches_want_an_outcome_for_every_item():
    with pytest.raises(ValueError, match="shorter"):
        list(Batches().map(lambda batch: batch[:1], [1, 2]))

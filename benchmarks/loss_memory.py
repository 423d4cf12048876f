# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of LM head and loss, forward and backward: with the logits, and without. The stage `loss` of
benchmarks.gpu_suite measures it.

`logits` is an `nn.Linear` followed by transformers' `ForCausalLMLoss`, `chunks` is `linear_cross_entropy`. The peak is
that while the loss and the gradients are computed, minus the memory held before: it includes the gradients of hidden
states and weight, but not the hidden states, the weight and the labels themselves."""

import re
import time
from pathlib import Path

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.timing import peak_memory
from diff_transformer.training.loss import linear_cross_entropy

VOCAB_SIZE = 100_288
# Logits, log-probabilities and their gradients, in float32; beside 16-bit logits and their gradients
COPIES = 3


WAYS = {  # hidden states, head and labels -> loss
    "logits": lambda hidden, head, labels: ForCausalLMLoss(head(hidden), None, VOCAB_SIZE, shift_labels=labels),
    "chunks": lambda hidden, head, labels: linear_cross_entropy(hidden, head.weight, labels, reduction="mean"),
}


def measure(way: str, tokens: int, hidden_size: int, device: str) -> dict:
    """Returns the peak in bytes, the seconds and the loss, measured in this process."""
    cuda = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    head = nn.Linear(hidden_size, VOCAB_SIZE, bias=False, device=device, dtype=dtype)
    hidden_states = torch.randn(1, tokens, hidden_size, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB_SIZE, (1, tokens), device=device)
    WAYS[way](hidden_states[:, :8], head, labels[:, :8]).backward()  # initializes the libraries
    head.weight.grad = hidden_states.grad = None
    start = time.perf_counter()

    def run() -> float:
        loss = WAYS[way](hidden_states, head, labels)
        loss.backward()
        return loss.item()  # waits for the device

    peak, loss = peak_memory(run, device)
    return {"peak": peak, "seconds": time.perf_counter() - start, "loss": loss}


def logits_fit(tokens: int, device: str) -> bool:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        free, copies = torch.cuda.mem_get_info(device)[0], COPIES + 1
    else:
        free, copies = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024, COPIES
    return copies * 4 * tokens * VOCAB_SIZE < 0.8 * free

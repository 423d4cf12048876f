# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of LM head and loss, forward and backward: with the logits, and without.

    python -m benchmarks.loss_memory --out benchmarks/results/loss_memory_<hardware>_<date>

runs each implementation at each number of tokens in a new process: `logits` is an `nn.Linear` followed by
transformers' `ForCausalLMLoss`, `chunks` is `linear_cross_entropy`. The peak is that of the process while it computes
the loss and the gradients, minus the memory held before: it includes the gradients of hidden states and weight, but
not the hidden states, the weight and the labels themselves. On the CPU it is the resident memory as the kernel counts
it; on CUDA, where the stage `loss` of benchmarks.gpu_suite measures, that of torch's allocator. An implementation that
would exhaust the memory does not run. Its row says so and has only the size of the logits, which is computed and not
measured: tokens * vocabulary * 4 bytes, of which ForCausalLMLoss holds several copies. The losses of both
implementations must agree."""

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.report import argument_parser, mebibytes, processor, rounded, show, versions, write
from benchmarks.timing import measure_apart, peak_memory
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


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 12288, 65536])
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # WAY TOKENS HIDDEN
    options = parser.parse_args()
    if options.measure:
        way, tokens, hidden_size = options.measure
        return print(json.dumps(measure(way, int(tokens), int(hidden_size), "cpu")))
    print(f"Budget  10 minutes on two cores; a vocabulary of {VOCAB_SIZE:,}", flush=True)
    where = {"hardware": processor(), **versions("torch", "transformers")}
    sizes = {"vocab": VOCAB_SIZE, "hidden": options.hidden_size, "dtype": "float32"}
    rows = []
    for tokens in options.tokens:
        results: dict[str, dict] = {}
        for way in ("chunks", "logits"):
            row = {"way": way, "tokens": tokens, **sizes, "status": "did not run: would fill the memory"}
            row |= dict.fromkeys(("peak_mib", "over_chunks", "seconds"))
            if way == "chunks" or logits_fit(tokens, "cpu"):
                line = measure_apart("benchmarks.loss_memory", way, tokens, options.hidden_size)
                result = results[way] = json.loads(line)
                row |= {"status": "measured", "peak_mib": mebibytes(result["peak"])}
                row["over_chunks"] = rounded(result["peak"] / results["chunks"]["peak"])
                row["seconds"] = rounded(result["seconds"])
            row["float32_logits_mib_computed_not_measured"] = mebibytes(4 * tokens * VOCAB_SIZE)
            rows.append(show(row) | where)
        first, last = results["chunks"]["loss"], result["loss"]
        if not math.isclose(first, last, rel_tol=1e-6):
            raise SystemExit(f"The losses at {tokens} tokens differ, {first} and {last}: there is nothing to compare.")
    write(options.out, rows)


if __name__ == "__main__":
    main()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of LM head and loss, forward and backward: with the logits, and without.

    python -m benchmarks.loss_memory --out benchmarks/results/loss_memory_<hardware>_<date>

runs each implementation at each number of tokens in a new process: `logits` is an `nn.Linear` followed by
transformers' `ForCausalLMLoss`, `chunks` is `linear_cross_entropy`. The peak is that of the process while it computes
the loss and the gradients, minus the memory held before: it includes the gradients of hidden states and weight, but
not the hidden states, the weight and the labels themselves. On the CPU it is the resident memory as the kernel counts
it, on CUDA that of torch's allocator. An implementation that would exhaust the memory does not run. Its row says so
and has only the size of the logits, which is computed and not measured: tokens * vocabulary * 4 bytes, of which
ForCausalLMLoss holds several copies. The losses of both implementations must agree."""

import argparse
import json
import math
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.report import as_csv, rounded, versions, write
from diff_transformer.training.loss import linear_cross_entropy

VOCAB_SIZE = 100_288
# Logits, log-probabilities and their gradients, in float32; beside 16-bit logits and their gradients
COPIES = 3


def with_logits(hidden_states: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    return ForCausalLMLoss(head(hidden_states), None, VOCAB_SIZE, shift_labels=labels)


def in_chunks(hidden_states: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden_states, head.weight, labels, reduction="mean")


WAYS = {"logits": with_logits, "chunks": in_chunks}


def resident_peak() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


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
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
        before = resident_peak()
    start = time.perf_counter()
    loss = WAYS[way](hidden_states, head, labels)
    loss.backward()
    loss = loss.item()  # waits for the device
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else resident_peak()
    return {"peak": peak - before, "seconds": seconds, "loss": loss}


def measure_apart(*arguments) -> dict:
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def processor() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


def free_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path of the result file, without its extension")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden-size", type=int, help="default: 256, on CUDA 3,072")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 12288, 65536])
    parser.add_argument("--measure", nargs=4, metavar=("WAY", "TOKENS", "HIDDEN", "DEVICE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, tokens, hidden_size, device = options.measure
        print(json.dumps(measure(way, int(tokens), int(hidden_size), device)))
        return
    cuda = torch.device(options.device).type == "cuda"
    hidden_size = options.hidden_size or (3072 if cuda else 256)
    budget = "a minute" if cuda else "10 minutes on two cores"
    print(f"Budget  {budget}; a vocabulary of {VOCAB_SIZE:,}, hidden size {hidden_size}", flush=True)
    rows = []
    for tokens in options.tokens:
        results = {}
        for way in ("chunks", "logits"):
            logits = 4 * tokens * VOCAB_SIZE
            fits = way == "chunks" or (COPIES + cuda) * logits < 0.8 * free_memory(options.device)
            result = measure_apart(way, tokens, hidden_size, options.device) if fits else None
            results[way] = result
            over = result and results["chunks"] and result["peak"] / results["chunks"]["peak"]
            rows.append(
                {
                    "way": way,
                    "tokens": tokens,
                    "vocab": VOCAB_SIZE,
                    "hidden": hidden_size,
                    "dtype": "bfloat16" if cuda else "float32",
                    "status": "measured" if fits else "did not run: would fill the memory",
                    "peak_mib": round(result["peak"] / 2**20) if result else None,
                    "over_chunks": rounded(over) if over else None,
                    "seconds": rounded(result["seconds"]) if result else None,
                    "float32_logits_mib_computed_not_measured": round(logits / 2**20),
                    "hardware": torch.cuda.get_device_name(options.device) if cuda else processor(),
                    **versions("torch", "transformers"),
                }
            )
            print(", ".join(f"{key} {value}" for key, value in list(rows[-1].items())[:-3]), flush=True)
        losses = [result["loss"] for result in results.values() if result]
        if not all(math.isclose(loss, losses[0], rel_tol=1e-3 if cuda else 1e-6) for loss in losses):
            raise SystemExit(
                f"The losses at {tokens} tokens differ, {losses}: there is nothing to compare until they agree."
            )
    if options.out:
        write(options.out.with_suffix(".csv"), as_csv(rows))


if __name__ == "__main__":
    main()

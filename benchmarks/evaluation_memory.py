# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of the evaluations that see every token of a long input, against its length, on the CPU.

    python -m benchmarks.evaluation_memory --out benchmarks/results/evaluation_memory_<hardware>_<date>

runs each protocol on one input of each length in a new process, with a small random model that has a large vocabulary.
The peak is that of the resident memory as the kernel counts it, minus the memory held before the protocol starts. The
memory needed without chunks is computed, not measured: the logits of all positions for `nll_by_position`, the softmax
maps of one layer for the other protocols. The key-value cache and the attention rows of a chunk make the peak linear
in the length. A quadratic peak would be 16 times as high at 4 times the length."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.loss_memory import processor, resident_peak
from benchmarks.report import as_csv, versions, write
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.evaluation.generate import token_nll
from diff_transformer.evaluation.protocols.attention_allocation import SPANS, attention_shares
from diff_transformer.evaluation.protocols.outliers import measure_row
from diff_transformer.training.architectures import transformer_twin

MODELS = ("diff", "transformer")


def attention_allocation(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    spans = torch.arange(input_ids.shape[1])[None] * len(SPANS) // input_ids.shape[1]
    attention_shares(model, input_ids, spans, normalization="row")


PROTOCOLS: dict[str, Callable[[PreTrainedModel, torch.Tensor], object]] = {
    "nll_by_position": token_nll,
    "attention_allocation": attention_allocation,
    "outliers": measure_row,
}


def make_config(vocab_size: int) -> DiffTransformerConfig:
    return DiffTransformerConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2**20,
        eos_token_id=None,
    )


@torch.inference_mode()
def measure(protocol: str, architecture: str, tokens: int, vocab_size: int) -> int:
    """Returns the peak in bytes, minus the memory held before, of this process."""
    torch.manual_seed(0)
    config = make_config(vocab_size)
    diff = architecture == "diff"
    model = DiffTransformerForCausalLM(config) if diff else LlamaForCausalLM(transformer_twin(config))
    input_ids = torch.randint(vocab_size, (1, tokens))
    PROTOCOLS[protocol](model.eval(), input_ids[:, :8])  # initializes the libraries
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
    before = resident_peak()
    PROTOCOLS[protocol](model, input_ids)
    return resident_peak() - before


def measure_apart(*arguments) -> int:
    command = [sys.executable, "-m", "benchmarks.evaluation_memory", "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return int(done.stdout.splitlines()[-1])


def without_chunks(protocol: str, tokens: int, vocab_size: int) -> int:
    """Bytes in float32. Both models have the same number of softmax maps."""
    rows = vocab_size if protocol == "nll_by_position" else 2 * make_config(vocab_size).num_attention_heads * tokens
    return 4 * tokens * rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path of the result file, without its extension")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="lengths of the input")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument(
        "--measure", nargs=4, metavar=("PROTOCOL", "MODEL", "TOKENS", "VOCABULARY"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.measure:
        protocol, architecture, *sizes = options.measure
        print(measure(protocol, architecture, *map(int, sizes)))
        return
    print(f"Budget  10 minutes on one core; a vocabulary of {options.vocab_size:,}", flush=True)
    rows = []
    for protocol in options.protocols:
        for architecture in options.models:
            for tokens in options.tokens:
                peak = measure_apart(protocol, architecture, tokens, options.vocab_size)
                held = without_chunks(protocol, tokens, options.vocab_size)
                rows.append(
                    {
                        "protocol": protocol,
                        "model": architecture,
                        "tokens": tokens,
                        "vocab": options.vocab_size,
                        "peak_mib": round(peak / 2**20),
                        "without_chunks_mib_computed_not_measured": round(held / 2**20),
                        "hardware": processor(),
                        **versions("torch", "transformers"),
                    }
                )
                print(", ".join(f"{key} {value}" for key, value in list(rows[-1].items())[:-3]), flush=True)
    if options.out:
        write(options.out.with_suffix(".csv"), as_csv(rows))


if __name__ == "__main__":
    main()

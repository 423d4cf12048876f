# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of the evaluations that see every token of a long input, against its length, on the CPU.

    python -m benchmarks.evaluation_memory --out benchmarks/results/evaluation_memory_<hardware>_<date>

runs each protocol on one input of each length in a new process, with a small random model that has a large vocabulary.
The peak is that of the resident memory as the kernel counts it, minus the memory held before the protocol starts. The
memory needed without chunks is computed, not measured: the logits of all positions for `nll_by_position`, the softmax
maps of one layer for the other protocols. The key-value cache and the attention rows of a chunk make the peak linear
in the length. A quadratic peak would be 16 times as high at 4 times the length."""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks import timing
from benchmarks.report import argument_parser, mebibytes, processor, show, versions, write
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.evaluation.generate import token_nll
from diff_transformer.evaluation.protocols.attention_allocation import SPANS, attention_shares
from diff_transformer.evaluation.protocols.outliers import measure_row
from diff_transformer.training.architectures import transformer_twin

MODELS = ("diff", "transformer")
measure_apart = partial(timing.measure_apart, "benchmarks.evaluation_memory")


def attention_allocation(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    spans = torch.arange(input_ids.shape[1])[None] * len(SPANS) // input_ids.shape[1]
    attention_shares(model, input_ids, spans, normalization="row")


PROTOCOLS: dict[str, Callable[[PreTrainedModel, torch.Tensor], object]] = {
    "nll_by_position": token_nll,
    "attention_allocation": attention_allocation,
    "outliers": measure_row,
}


def make_config(vocab_size: int) -> DiffTransformerConfig:
    sizes = {"vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return DiffTransformerConfig(**sizes, **heads, max_position_embeddings=2**20, eos_token_id=None)


@torch.inference_mode()
def measure(protocol: str, architecture: str, tokens: int, vocab_size: int) -> int:
    """Returns the peak in bytes, minus the memory held before, of this process."""
    torch.manual_seed(0)
    config = make_config(vocab_size)
    diff = architecture == "diff"
    model = DiffTransformerForCausalLM(config) if diff else LlamaForCausalLM(transformer_twin(config))
    input_ids = torch.randint(vocab_size, (1, tokens))
    PROTOCOLS[protocol](model.eval(), input_ids[:, :8])  # initializes the libraries
    return timing.peak_memory(lambda: PROTOCOLS[protocol](model, input_ids), "cpu")[0]


def without_chunks(protocol: str, tokens: int, vocab_size: int) -> int:
    """Bytes in float32. Both models have the same number of softmax maps."""
    rows = vocab_size if protocol == "nll_by_position" else 2 * make_config(vocab_size).num_attention_heads * tokens
    return 4 * tokens * rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="lengths of the input")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # PROTOCOL MODEL TOKENS VOCABULARY
    options = parser.parse_args()
    if options.measure:
        protocol, architecture, *sizes = options.measure
        print(measure(protocol, architecture, *map(int, sizes)))
        return
    print(f"Budget  10 minutes on one core; a vocabulary of {options.vocab_size:,}", flush=True)
    rows, vocab = [], options.vocab_size
    for protocol, model, tokens in product(options.protocols, options.models, options.tokens):
        row = {"protocol": protocol, "model": model, "tokens": tokens, "vocab": vocab}
        row["peak_mib"] = mebibytes(int(measure_apart(*row.values())))
        row["without_chunks_mib_computed_not_measured"] = mebibytes(without_chunks(protocol, tokens, vocab))
        rows.append({**show(row), "hardware": processor(), **versions("torch", "transformers")})
    write(options.out, rows)


if __name__ == "__main__":
    main()

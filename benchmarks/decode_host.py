# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Host time of `flash_diff_attention_with_kvcache` per call, without its kernels: what eager decoding pays in every
layer for every token, whatever the GPU.

    python -m benchmarks.decode_host --out benchmarks/results/decode_host_<hardware>_<date>

The kernels are replaced by functions that do nothing; tensors are allocated as always, without CUDA on the CPU.
`operator` is what `call` does after its checks, `dispatch` the way of torch through an operator of the same arguments
that does nothing, `custom_op` the same for one registered by `torch.library.custom_op`. A figure is CPU time, and the
fastest of several means.
"""

from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.report import argument_parser, hardware, processor, rounded, show, versions, write
from benchmarks.timing import Step, process_time
from diff_transformer import flash_diff

REPEATS = 7


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def microseconds(function: Callable[[], object], calls: int) -> float:
    def repeat(_):
        for _ in range(calls):
            function()

    [ms] = min(process_time(Step(repeat), "cpu") for _ in range(REPEATS))
    return rounded(1000 * ms / calls)


@torch.no_grad()  # as `generate`
def measure(device: torch.device, calls: int) -> dict[str, float]:
    """One token of a layer of the 3B model (12 heads of 2d = 256) after 4,096 cached tokens."""
    q = torch.randn(1, 1, 12, 256, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, 12, 4096, 256, device=device, dtype=torch.bfloat16).transpose(1, 2)
    lambda_full, weight = torch.tensor(0.5, device=device), torch.ones(256, device=device, dtype=torch.bfloat16)
    inputs = (q, k, k, lambda_full, weight, None, None, 128**-0.5, True, 1e-5, 0.4)
    result = torch.empty_like(q)
    schema = str(flash_diff._decode_op._schema).partition("(")[2]
    custom = torch.library.custom_op("decode_host::custom", lambda *x: result, mutates_args=(), schema=f"({schema}")
    direct = flash_diff._operator("decode_host", f"({schema}", lambda *x: result, lambda *x: result)
    options = {"causal": True, "norm_weight": weight, "out_scale": 0.4}
    steps = {
        "call": lambda: flash_diff.flash_diff_attention_with_kvcache(q, k, k, lambda_full, **options),
        "operator": lambda: flash_diff._decode_op(*inputs),
        "dispatch": lambda: direct(*inputs),
        "custom_op": lambda: custom(*inputs),
    }
    # Nothing is launched, so any device will do
    without = {"split_kernel": NoKernel(), "combine_kernel": NoKernel(), "is_available": lambda device: True}
    with mock.patch.multiple(flash_diff, **without):
        return {name: microseconds(step, calls) for name, step in steps.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000, help="calls per mean (default: %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    where = {"hardware": hardware(options.device) if device.type == "cuda" else processor()}
    rows = []
    for step, time_us in measure(device, options.calls).items():
        rows.append({**show({"step": step, "microseconds": time_us}), **where, **versions("torch", "triton")})
    write(options.out, rows)


if __name__ == "__main__":
    main()

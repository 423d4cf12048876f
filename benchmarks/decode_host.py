# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What eager decoding costs the host in every layer for every token, whatever the GPU: operations and time.

    python -m benchmarks.decode_host --out benchmarks/results/decode_host_<hardware>_<date>

`operations` counts what launches something on a GPU, that is neither views nor allocations, in one layer of DIFF, V2
and Llama, for one token after a cache in bfloat16. DIFF is counted with two kernels (split, combine) and with one.

`microseconds` is the time of `flash_diff_attention_with_kvcache` per call, as CPU time, and the fastest of several
means. `operator` is what `call` does after its checks, `dispatch` the way of torch through an operator of the same
arguments that does nothing, `custom_op` the same for one registered by `torch.library.custom_op`. The kernels are
replaced by functions that do nothing; tensors are allocated as always, without CUDA on the CPU.
"""

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from benchmarks.report import argument_parser, hardware, processor, rounded, show, versions, write
from benchmarks.timing import Step, process_time
from diff_transformer import DiffTransformerConfig, LambdaVectors, flash_diff, modeling_diff
from diff_transformer.training.architectures import diff_v2_twin, transformer_twin

REPEATS = 7
_NO_OPERATIONS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.promote_types.default}  # by another name


class NoKernel:
    """In place of a Triton kernel."""

    launches = 0

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs) -> None:
        NoKernel.launches += 1


@contextmanager
def no_kernels():
    """The Triton kernels do nothing, on any device."""
    kernels = {"split_kernel": NoKernel(), "combine_kernel": NoKernel(), "is_available": lambda device: True}
    with (
        mock.patch.multiple(flash_diff, **kernels),
        mock.patch.object(modeling_diff, "flash_diff_kernel", lambda *_: "triton"),
    ):
        yield


class Operations(TorchDispatchMode):
    """Counts operations that are no views. Ours count as many as they launch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = NoKernel.launches
        out = function(*args, **(kwargs or {}))
        if function.namespace == flash_diff._NAMESPACE:
            self.count += NoKernel.launches - before
        elif not function.is_view and function not in _NO_OPERATIONS:
            self.count += 1
        return out


@torch.no_grad()
def operations(config: PreTrainedConfig) -> int:
    """Of one token in one layer: what a model with two layers does beyond a model with one."""
    counts = []
    for layers in (1, 2):
        config.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.arange(9)[None]
        with no_kernels():
            past = model(ids[:, :8], use_cache=True).past_key_values
            with Operations() as counted:
                model(ids[:, 8:], past_key_values=past, use_cache=True)
        counts.append(counted.count)
    return counts[1] - counts[0]


def count() -> dict[str, int]:
    config = DiffTransformerConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2, eos_token_id=None
    )
    with mock.patch.object(flash_diff, "_LAST_SPLIT_COMBINES", True):
        in_one = operations(config)
    twins = {"DIFF V2": diff_v2_twin(config), "Llama": transformer_twin(config)}
    counts = {"DIFF": operations(config), "DIFF, one kernel": in_one}
    return counts | {name: operations(twin) for name, twin in twins.items()}


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
    vectors = LambdaVectors(*torch.randn(4, 128, device=device, dtype=torch.bfloat16), 0.8)
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    inputs = (q, k, k, list(vectors[:4]), 0.8, weight, None, None, 128**-0.5, True, 1e-5, 0.4)
    result = torch.empty_like(q)
    schema = str(flash_diff._decode_op._schema).partition("(")[2]
    custom = torch.library.custom_op("decode_host::custom", lambda *x: result, mutates_args=(), schema=f"({schema}")
    direct = flash_diff._operator("decode_host", f"({schema}", lambda *x: result, lambda *x: result)
    options = {"causal": True, "norm_weight": weight, "out_scale": 0.4}
    steps = {
        "call": lambda: flash_diff.flash_diff_attention_with_kvcache(q, k, k, vectors, **options),
        "operator": lambda: flash_diff._decode_op(*inputs),
        "dispatch": lambda: direct(*inputs),
        "custom_op": lambda: custom(*inputs),
    }
    with no_kernels():
        return {name: microseconds(step, calls) for name, step in steps.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000, help="calls per mean (default: %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    where = {"hardware": hardware(options.device) if device.type == "cuda" else processor()}
    cells = [{"what": model, "operations": number, "microseconds": None} for model, number in count().items()]
    cells += [
        {"what": step, "operations": None, "microseconds": time}
        for step, time in measure(device, options.calls).items()
    ]
    rows = [{**show(cell), **where, **versions("torch", "triton", "transformers")} for cell in cells]
    write(options.out, rows)


if __name__ == "__main__":
    main()

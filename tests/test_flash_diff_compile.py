# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The Triton kernels compile for GPUs that this machine lacks, without register spills and within their shared memory.

Compilation takes minutes and depends on nothing but the kernels, this file and triton. `make test-compile` compiles
everything and records the digest of these; the other test runs compile only where the recorded digest differs.
"""

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from diff_transformer import (  # noqa: E402
    flash_diff_backward,
    flash_diff_blocks,
    flash_diff_decode,
    flash_diff_forward,
)
from diff_transformer.flash_diff_blocks import SHARED_MEMORY, blocks  # noqa: E402

RECORD = Path(__file__).parent / "fixtures/flash_diff_compiled.txt"


def digest() -> str:
    """The version of triton, and a hash of the kernels, their blocks and what this file compiles of them."""
    modules = (flash_diff_blocks, flash_diff_forward, flash_diff_backward, flash_diff_decode)
    paths = [*(module.__file__ for module in modules), __file__]
    contents = hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths))
    return f"triton {triton.__version__}, kernels {contents.hexdigest()}\n"


ON_REQUEST = os.environ.get("COMPILE_KERNELS") == "1"
COMPILED_BEFORE = RECORD.read_text() == digest()
KERNELS = {
    "forward": flash_diff_forward.forward_kernel,
    "dq": flash_diff_backward.dq_kernel,
    "dkdv": flash_diff_backward.dkdv_kernel,
    "split16": flash_diff_decode.split_kernel,
    "split32": flash_diff_decode.split_kernel,
}
WITHOUT_BLOCKS = {"prepare": flash_diff_backward.prepare_kernel, "combine": flash_diff_decode.combine_kernel}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUMBERS = dict.fromkeys(("scale", "eps", "out_scale"), "fp32") | dict.fromkeys(
    ("T", "S", "num_stats", "splits"), "i32"
)
FLOAT32 = ("lambda_full", "lse", "deltas", "parts", "stats")
ABSENT = ("q_starts", "q_ends", "k_starts", "k_ends", "key_length", "mask", "MASK")

needs_compilation = pytest.mark.skipif(
    COMPILED_BEFORE and not ON_REQUEST, reason="compiled before: `make test-compile` compiles again"
)
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        not isinstance(KERNELS["forward"], triton.JITFunction), reason="the interpreter does not compile"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


def compile_for(
    architecture: int,
    kernel: str,
    d: int,
    cubin: Path,
    dtype: torch.dtype = torch.bfloat16,
    pointers: dict[str, str] | None = None,
    **constants,
) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a causal kernel with two query heads per key head.

    pointers: types of the arguments that a dense batch without masks leaves out. constants: replace the defaults.
    """
    function, element = (KERNELS | WITHOUT_BLOCKS)[kernel], {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    if kernel in KERNELS:
        options = blocks(kernel, divmod(architecture, 10), dtype, d)._asdict()
    else:
        options = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
    precision = "ieee" if dtype == torch.float32 else "tf32"
    constants = {"GROUPS": 2, "D": d, "CAUSAL": True, "SAVE": True, "PRECISION": precision} | constants
    constants |= {"BLOCK_D": triton.next_power_of_2(d)} | {name: options.pop(name) for name in ("BLOCK_M", "BLOCK_N")}
    constants = dict.fromkeys(ABSENT) | constants
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in (pointers or {}):
            signature[name] = pointers[name]
        elif name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            is_stride = re.fullmatch(r".*_(batch|token|head|row|key)", name) is not None
            signature[name] = "i32" if is_stride else "*fp32" if name in FLOAT32 else element
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    cubin.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([CUOBJDUMP, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text).groups()
    return {"registers": int(registers), "spilled": int(stack) + int(local), "shared": compiled.metadata.shared}


@pytest.mark.skipif(ON_REQUEST, reason="the digest is recorded after this compilation")
def test_the_last_change_was_compiled():
    assert COMPILED_BEFORE, "a kernel, its blocks, this file or triton changed: run `make test-compile`"


@needs_compilation
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
def test_no_spills_and_enough_shared_memory(architecture, kernel, d, tmp_path):
    used = compile_for(architecture, kernel, d, tmp_path / "kernel.cubin")
    print(f"sm_{architecture} {kernel} d={d}: {used}")
    assert used["spilled"] == 0
    assert used["shared"] <= SHARED_MEMORY[architecture]


@needs_compilation
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_has_enough_shared_memory(kernel, d, tmp_path):
    """On the architecture with the least. At d = 128 the backward spills registers, whatever its blocks."""
    used = compile_for(86, kernel, d, tmp_path / "kernel.cubin", torch.float32)
    print(f"sm_86 {kernel} d={d} float32: {used}")
    assert used["shared"] <= SHARED_MEMORY[86]


MASK_OF_KEYS = {"pointers": {"mask": "*i1"}, "MASK": "keys"}
FULL_MASK = {"pointers": {"mask": "*i1"}, "MASK": "full", "CAUSAL": False}
SPANS = {"pointers": dict.fromkeys(("q_starts", "q_ends", "k_starts", "k_ends"), "*i64")}
LENGTHS = {"pointers": {"key_length": "*i32"}}
ONE_TOKEN = {"T": 1}  # triton compiles an integer that is 1 into the kernel
VARIANTS = {
    "forward": [MASK_OF_KEYS, FULL_MASK, SPANS, ONE_TOKEN, {"norm_weight": None, "SAVE": False, "lse": None}],
    "dq": [MASK_OF_KEYS, FULL_MASK, SPANS, ONE_TOKEN],
    "dkdv": [MASK_OF_KEYS, FULL_MASK, SPANS, ONE_TOKEN],
    "split16": [MASK_OF_KEYS, FULL_MASK, LENGTHS, ONE_TOKEN],
    "prepare": [{}, SPANS, ONE_TOKEN, {"norm_weight": None, "grad_weight": None}],
    "combine": [{}, ONE_TOKEN, {"splits": 1}, {"norm_weight": None}],
}


@needs_compilation
@pytest.mark.parametrize(("kernel", "variant"), [(kernel, one) for kernel in VARIANTS for one in VARIANTS[kernel]])
def test_every_kind_of_input_compiles(kernel, variant, tmp_path):
    """With d = 96, which the blocks round up."""
    used = compile_for(90, kernel, 96, tmp_path / "kernel.cubin", **variant)
    assert used["shared"] <= SHARED_MEMORY[90]


if __name__ == "__main__":
    RECORD.write_text(digest())

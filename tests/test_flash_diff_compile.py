# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The Triton kernels compile for GPUs that are not here, without spilled registers and within their shared memory."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from diff_transformer import flash_diff_backward, flash_diff_decode, flash_diff_forward  # noqa: E402
from diff_transformer.flash_diff_blocks import SHARED_MEMORY, blocks  # noqa: E402

KERNELS = {
    "forward": flash_diff_forward.forward_kernel,
    "dq": flash_diff_backward.dq_kernel,
    "dkdv": flash_diff_backward.dkdv_kernel,
    "split16": flash_diff_decode.split_kernel,
    "split32": flash_diff_decode.split_kernel,
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUMBERS = {"scale": "fp32", "eps": "fp32", "out_scale": "fp32", "T": "i32", "S": "i32", "num_stats": "i32"}
FLOAT32 = ("lambda_full", "lse", "deltas", "parts", "stats")
ABSENT = ("cu_seqlens_q", "cu_seqlens_k", "key_length", "mask", "MASK")

pytestmark = pytest.mark.skipif(
    not isinstance(KERNELS["forward"], triton.JITFunction), reason="the interpreter does not compile"
)


def compile_for(architecture: int, kernel: str, d: int, cubin: Path) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a kernel in bfloat16, causal, with two heads to a key head."""
    function = KERNELS[kernel]
    options = blocks(kernel, divmod(architecture, 10), torch.bfloat16, d)._asdict()
    constants = {"GROUPS": 2, "D": d, "BLOCK_D": d, "CAUSAL": True, "SAVE": True, "PRECISION": "tf32"}
    constants |= dict.fromkeys(ABSENT) | {name: options.pop(name) for name in ("BLOCK_M", "BLOCK_N")}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            is_stride = re.fullmatch(r".*_(batch|token|head|row|key)", name) is not None
            signature[name] = "i32" if is_stride else "*fp32" if name in FLOAT32 else "*bf16"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    cubin.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([CUOBJDUMP, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text).groups()
    return {"registers": int(registers), "spilled": int(stack) + int(local), "shared": compiled.metadata.shared}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
def test_no_spills_and_enough_shared_memory(architecture, kernel, d, tmp_path):
    used = compile_for(architecture, kernel, d, tmp_path / "kernel.cubin")
    print(f"sm_{architecture} {kernel} d={d}: {used}")
    assert used["spilled"] == 0
    assert used["shared"] <= SHARED_MEMORY[architecture]

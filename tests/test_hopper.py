# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The Gluon kernels for sm_90 (benchmarks/hopper): what their launches compile to, and the arithmetic of their blocks.

As in test_flash_diff_compile, `make test-compile` compiles and records a digest of what was compiled; the other test
runs compile only where the digest differs. A GPU runs the kernels in the `hopper` stage of benchmarks.gpu_suite.
"""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")

import torch  # noqa: E402

from benchmarks.hopper import forward as forward_module  # noqa: E402
from benchmarks.kernel_compiler import TOOLS, compiled_for, inputs  # noqa: E402
from benchmarks.kernel_model import ARCHITECTURES, LATENCY, fractions, main_loop, tensor_loops  # noqa: E402
from diff_transformer.flash_diff_blocks import SHARED_MEMORY  # noqa: E402

RECORD = Path(__file__).parent / "fixtures/hopper_compiled.txt"
PEAK = 989  # TFLOP/s of an H100


def launch_forward(d: int, dtype: torch.dtype, norm: bool = True, causal: bool = True) -> None:
    tensors = inputs(d, dtype)
    if not norm:
        tensors["norm_weight"] = None
    forward_module.forward(*tensors.values(), save=True, causal=causal, scale=d**-0.5, eps=1e-5, out_scale=0.2)


# What launches a kernel, and the multiply-adds that it needs per query, key and d of an iteration (BLOCK_M x BLOCK_N)
KERNELS = {"forward": (launch_forward, 3)}
PATHS = (forward_module.__file__,)


def digest() -> str:
    """The version of triton, and a hash of the kernels and what this file compiles of them."""
    contents = hashlib.sha256(b"".join(Path(path).read_bytes() for path in (*PATHS, __file__)))
    return f"triton {triton.__version__}, kernels {contents.hexdigest()}\n"


ON_REQUEST = os.environ.get("COMPILE_KERNELS") == "1"
COMPILED_BEFORE = RECORD.read_text() == digest()

needs_compilation = pytest.mark.skipif(
    COMPILED_BEFORE and not ON_REQUEST, reason="compiled before: `make test-compile` compiles again"
)


@pytest.mark.compile
@pytest.mark.skipif(ON_REQUEST, reason="the digest is recorded after this compilation")
def test_compiled_digest_is_of_the_last_change():
    assert COMPILED_BEFORE, "a kernel, this file or triton changed: run `make test-compile`"


def ptxas_report(ptx: str, folder: Path) -> str:
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", file, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.compile
@needs_compilation
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_kernel_neither_spills_nor_waits_nor_computes_twice(name, d, tmp_path):
    launch, units = KERNELS[name]
    with compiled_for(90) as compiled:
        launch(d, torch.bfloat16)
    (one,) = compiled
    assert one.spilled == 0
    assert one.shared <= SHARED_MEMORY[90]
    assert "serialized" not in ptxas_report(one.ptx, tmp_path), "ptxas waits for every wgmma"
    waits = [one.operands for loop in tensor_loops(one.sass) for block in loop for one in block if "DEPBAR" in one.opcode]
    assert any(not wait.endswith("0x0") for wait in waits), "no product overlaps with anything"
    loop = main_loop(one, 90, one.constants["num_warps"])
    useful = units * one.constants["BLOCK_M"] * one.constants["BLOCK_N"] * d
    assert loop.executed == useful
    modelled = fractions(loop, useful / ARCHITECTURES[90].tensor, LATENCY[False])["middle"]
    print(
        f"{name} d={d}: {one.registers} registers, {one.shared} B shared, {loop.instructions}, waits for {waits}, "
        f"modelled {modelled:.2f} of peak, {modelled * PEAK:.0f} TFLOP/s"
    )


if __name__ == "__main__":
    RECORD.write_text(digest())

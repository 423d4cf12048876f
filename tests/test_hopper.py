# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The Gluon kernels for sm_90 (benchmarks/hopper): what their launches compile to, and the arithmetic of their blocks.

As in test_flash_diff_compile, `make test-compile` compiles and records a digest of what was compiled; the other test
runs compile only where the digest differs.
"""

import hashlib
import math
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")


import torch  # noqa: E402

from benchmarks import hopper, kernel_compiler, kernel_model  # noqa: E402
from benchmarks.hopper import forward  # noqa: E402
from diff_transformer import flash_diff_attention  # noqa: E402
from diff_transformer.attention_diff import eager_attention_forward  # noqa: E402
from diff_transformer.flash_diff_blocks import SHARED_MEMORY  # noqa: E402
from tests import gluon_interpreter  # noqa: E402
from tests.tolerances import assert_same_computation  # noqa: E402

RECORD = Path(__file__).parent / "fixtures/hopper_compiled.txt"
PEAK = 989  # TFLOP/s of an H100, which kernel_model takes for 2048 multiply-adds per cycle and multiprocessor


# ----------------------------------------------------------------------------------------------------- compilation


def digest() -> str:
    """The version of triton, and a hash of the kernels and what this file compiles of them."""
    paths = [*sorted(Path(hopper.__file__).parent.glob("*.py")), Path(__file__)]
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in paths))
    return f"triton {triton.__version__}, kernels {contents.hexdigest()}\n"


ON_REQUEST = os.environ.get("COMPILE_KERNELS") == "1"
COMPILED_BEFORE = RECORD.read_text() == digest()

needs_compilation = pytest.mark.skipif(
    COMPILED_BEFORE and not ON_REQUEST, reason="compiled before: `make test-compile` compiles again"
)


def launch_forward(d, dtype=torch.bfloat16, tokens=256, norm=True, save=True, causal=True):
    tensors = kernel_compiler.inputs(d, dtype, tokens) | ({} if norm else {"norm_weight": None})
    forward.forward(**tensors, save=save, causal=causal, scale=d**-0.5, eps=1e-5, out_scale=0.2)


# What launches a kernel, and its multiply-adds per query, key and d in an iteration of BLOCK_M queries, BLOCK_N keys
KERNELS = {"forward": (launch_forward, 3)}


def ptxas_report(ptx: str, folder: Path) -> str:
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [kernel_compiler.TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", file, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.compile
@pytest.mark.skipif(ON_REQUEST, reason="the digest is recorded after this compilation")
def test_compiled_digest_is_of_the_last_change():
    assert COMPILED_BEFORE, "a kernel, this file or triton changed: run `make test-compile`"


@pytest.mark.compile
@needs_compilation
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_neither_spills_nor_waits_nor_computes_twice(name, d, tmp_path):
    launch, units = KERNELS[name]
    with kernel_compiler.compiled_for(90) as compiled:
        launch(d)
    (one,) = compiled
    assert one.spilled == 0
    assert one.shared <= SHARED_MEMORY[90]
    assert "serialized" not in ptxas_report(one.ptx, tmp_path), "ptxas waits after every wgmma"
    loops = kernel_model.tensor_loops(one.sass)
    waits = {part.operands for loop in loops for block in loop for part in block if "DEPBAR" in part.opcode}
    assert any(not wait.endswith("0x0") for wait in waits), "no product overlaps with anything"
    loop = kernel_model.main_loop(one, 90, one.constants["num_warps"])
    useful = units * one.constants["BLOCK_M"] * one.constants["BLOCK_N"] * d
    assert loop.executed == useful
    ideal = useful / kernel_model.ARCHITECTURES[90].tensor
    modelled = kernel_model.fractions(loop, ideal, kernel_model.LATENCY[False])["middle"]
    print(
        f"{name} d={d}: {one.registers} registers, {one.shared} B shared, {loop.instructions}, {sorted(waits)}, "
        f"modelled {modelled:.2f} of peak, {modelled * PEAK:.0f} TFLOP/s"
    )


@pytest.mark.compile
@needs_compilation
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("changed", [{"causal": False, "tokens": 1}, {"dtype": torch.float16}])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_every_kind_of_input(name, changed, d):
    with kernel_compiler.compiled_for(90) as compiled:
        KERNELS[name][0](d, **changed)
    assert compiled[0].spilled == 0


@pytest.mark.compile
@needs_compilation
@pytest.mark.parametrize("changed", [{"norm": False}, {"save": False}, {"norm": False, "save": False}])
def test_forward_compiles_without_a_norm_and_without_a_backward(changed):
    with kernel_compiler.compiled_for(90) as compiled:
        launch_forward(128, **changed)
    assert compiled[0].spilled == 0


@pytest.mark.compile
@needs_compilation
def test_kernels_take_the_launches_of_flash_diff_where_they_apply():
    inputs, kernels = kernel_compiler.inputs, (forward.forward_kernel,)
    with kernel_compiler.compiled_for(90, *kernels) as compiled, hopper.kernels() as launched:
        flash_diff_attention(**inputs(64), causal=True)
        assert launched == {"forward": 1} and len(compiled) == 1
        flash_diff_attention(**inputs(96), causal=True)
        flash_diff_attention(**inputs(64, torch.float32), causal=True)
        flash_diff_attention(**inputs(64), mask=torch.ones(1, 256, dtype=torch.bool))
        q, *others = inputs(64).values()
        flash_diff_attention(torch.zeros(1, 256, 4, 132, dtype=q.dtype)[..., :128], *others[:3], causal=True)
        assert launched == {"forward": 1}


# ------------------------------------------------------------------------------------------------------ arithmetic

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
EPS, OUT_SCALE = 0.05, 0.7


def reference(q, k, v, lambda_full, norm_weight, causal):
    """The four results of the forward, by the formula."""
    d, (T, S) = q.shape[-1] // 2, (q.shape[1], k.shape[1])
    mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device).tril(S - T if causal else S)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def attend(queries, keys, factor):
        return eager_attention_forward(torch.nn.Module(), queries, keys, v, mask, factor, d**-0.5)[0]

    diff = attend(q, k, lambda_full)
    second = attend(q.roll(d, -1), k.roll(d, -1), 0.0)
    wide = diff.to(torch.promote_types(diff.dtype, torch.float32))
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm_weight * OUT_SCALE
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.stack([x @ y.mT for x, y in zip(q.chunk(2, -1), keys.chunk(2, -1), strict=True)]) * d**-0.5
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1) / math.log(2)
    return out.to(q.dtype), diff, second, lse.transpose(1, 2).flatten(2)


def interpreted(late: str):
    """The kernel itself, on a CPU."""

    def compute(*args):
        with mock.patch.object(gluon_interpreter.State, "late", late):
            return gluon_interpreter.interpreted(forward.__file__).forward(*args)

    return compute


@pytest.mark.parametrize(
    ("compute", "device"),
    [
        pytest.param(forward.emulate_forward, "cpu", id="emulated"),
        pytest.param(interpreted("copies"), "cpu", id="interpreted with late copies"),
        pytest.param(interpreted("products"), "cpu", id="interpreted with late products"),
        pytest.param(
            forward.forward, "cuda", id="GPU", marks=pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of sm_90")
        ),
    ],
)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads", "d", "causal", "dtype"),
    [
        (1, 1, 1, 1, 64, True, torch.bfloat16),
        (63, 63, 2, 2, 128, True, torch.float16),
        (130, 200, 4, 2, 64, True, torch.bfloat16),
        (130, 200, 2, 1, 128, True, torch.float16),
        (257, 257, 2, 1, 128, True, torch.bfloat16),
        (200, 130, 2, 2, 64, False, torch.float16),
        (63, 200, 3, 1, 128, False, torch.bfloat16),
    ],
)
def test_forward_is_the_formula(q_len, kv_len, heads, kv_heads, d, causal, dtype, compute, device):
    q = torch.randn(2, q_len, heads, 2 * d).to(device, dtype)
    k, v = (torch.randn(2, kv_len, kv_heads, 2 * d).to(device, dtype) for _ in range(2))
    lambda_full, weight = torch.tensor(0.55, device=device), (1 + torch.rand(2 * d)).to(device, dtype)
    exact = reference(*(x.double() for x in (q, k, v)), 0.55, weight.double(), causal)
    plain = reference(q, k, v, 0.55, weight, causal)
    numbers = (causal, d**-0.5, EPS, OUT_SCALE)
    results = compute(q, k, v, lambda_full, weight, True, *numbers)
    for ours, expected, eager in zip(results[:3], exact, plain, strict=False):
        assert_same_computation(ours, eager, expected)
    in_float32 = reference(*(x.float() for x in (q, k, v)), 0.55, weight.float(), causal)
    assert_same_computation(results[3], in_float32[3], exact[3])
    without_norm, *_ = compute(q, k, v, lambda_full, None, False, *numbers)
    assert torch.equal(without_norm, results[1]), "the output without a norm is the difference"


if __name__ == "__main__":
    RECORD.write_text(digest())

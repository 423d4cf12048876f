# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The benchmarks on the CPU with tiny sizes, and the checks that no wrong implementation is timed."""

import csv
import importlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


# ------------------------------------------------------------------------------------------------- attention, timing


@pytest.fixture
def attention(load):
    return load("attention")


@pytest.fixture
def ways(load):
    return load("attention_ways")


def case(ways, task: str, length: int = 33, dtype: torch.dtype = torch.float32, norm: bool = False):
    return ways.Case(task, 16, length, 3 * length, heads=2, dtype=dtype, device="cpu", norm=norm)


def measure(attention, one, *names: str) -> dict[str, dict]:
    rows = attention.measure(one, names, rounds=3, seconds=1, check_length=16)
    return dict(zip(names, rows, strict=True))


WRONG = {  # the reason, and a function of the eager attention and a problem
    "the output is off": lambda eager, p: eager(p) * 1.03,
    "the gradient of v is off": lambda eager, p: eager(replace(p, v=p.v.detach())) + 0 * p.v.sum(),
    "no gradient of lambda_full": lambda eager, p: eager(replace(p, lambda_full=p.lambda_full.detach())),
    "the output is off by nan": lambda eager, p: eager(p) * math.nan,
}


@pytest.mark.parametrize("reason", WRONG)
def test_attention_gives_a_wrong_way_no_speed(attention, ways, monkeypatch, reason):
    way = ways.Way("rival", partial(WRONG[reason], ways.WAYS["eager"].run))
    monkeypatch.setitem(ways.WAYS, "four_calls/sdpa_flash", way)
    found = measure(attention, case(ways, "both"), "eager", "four_calls/sdpa_flash", "two_calls/flash_attn_3")
    right, red, absent = found.values()
    flops = 16 * 2 * 33**2 * 16 / 2 * 2 * 3  # units, 2 N^2 d, halved by causality, 2 heads, 3 sequences
    assert right["status"] == "ok" and right["tflops"] == pytest.approx(flops / right["ms"] / 1e9, rel=2e-3)
    assert red["status"] == "RED" and reason in red["reason"] and red["ms"] is red["tflops"] is None
    assert absent["status"] == "cannot run" and "flash_attn_interface" in absent["reason"] and absent["ms"] is None
    page = "\n".join(attention.tables(list(found.values())))
    assert "### both, d = 16" in page and "| four_calls/sdpa_flash | RED |" in page
    assert f"- RED: four_calls/sdpa_flash: {red['reason']}" in page and "two_calls/flash_attn_3 |" not in page


def test_attention_tables_compare_every_way_with_ours(attention):
    cell = {"task": "both", "d": 64, "length": 8, "status": "ok"}
    rows = [{**cell, "way": "flash_diff", "ms": 2.0, "tflops": 30.0}, {**cell, "way": "x", "ms": 5.0, "tflops": 12.0}]
    page = "\n".join(attention.tables(rows))
    assert "| flash_diff | 30.0 (1.00) |" in page and "| x | 12.0 (2.50) |" in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("task", ["both", "decode"])
def test_attention_compositions_are_right(attention, ways, task, norm, dtype):
    math_sdpa = partial(ways.sdpa, SDPBackend.MATH)  # takes every shape
    for compose in (ways.packed, ways.two_calls, ways.four_calls):
        way = ways.Way("rival", partial(compose, math_sdpa))
        assert attention.fault(way, case(ways, task, dtype=dtype, norm=norm)) == "", compose.__name__


def test_attention_standard_is_attention_of_2h_heads(ways):
    p = ways.make_problem(case(ways, "both"))
    out = ways.standard(partial(ways.sdpa, SDPBackend.MATH), p)
    q, k, v = (x.view(3, 33, 4, 16).transpose(1, 2) for x in (p.q, p.k, p.v))
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    maps = (q @ k.transpose(2, 3) / 4).masked_fill(~mask, -math.inf).softmax(-1)
    torch.testing.assert_close(out, (maps @ v).transpose(1, 2).reshape(3, 33, 2, 32))


def test_attention_eager_keeps_documents_apart(ways):
    p = ways.make_problem(case(ways, "varlen", length=8))
    assert p.documents == [4, 12, 8] and p.cu_seqlens.tolist() == [0, 4, 16, 24]
    whole = ways.WAYS["eager"].run(p)
    second = replace(p, q=p.q[:, 4:16], k=p.k[:, 4:16], v=p.v[:, 4:16], documents=[12], cu_seqlens=None)
    torch.testing.assert_close(whole[:, 4:16], ways.WAYS["eager"].run(second))


def test_attention_counts_useful_work(attention, ways):
    at = partial(ways.Case, d=128, length=1024, tokens=2048, heads=12, dtype=torch.bfloat16, device="cpu")
    unit = 2 * 1024**2 * 128 / 2 * 12 * 2  # 2 N^2 d, halved by causality, 12 heads, 2 sequences
    flops = attention.useful_flops
    assert [flops(at(task), "rival") / unit for task in ("forward", "backward", "both")] == [6, 10, 16]
    assert [flops(at(task), "standard") / unit for task in ("forward", "backward", "both")] == [4, 10, 14]
    assert flops(at("varlen"), "ours") / unit == 16 * (0.5**2 + 1.5**2) / 2, "every document has its own square"
    assert attention.useful_bytes(at("decode")) == 2 * (2 * 1024 * 12 * 256) * 2


def test_take_turns_measures_what_is_timed_in_rounds(load):
    timing = load("timing")
    ran = []

    def clock(step, device):
        return step.timed(step.set_up())

    def prepare(name, *times):
        values = iter(times)
        return lambda: timing.Step(lambda value: ran.append(name) or value, set_up=lambda: next(values))

    def wrong():
        raise timing.Wrong("off")

    contestants = {"a": prepare("a", 0, 100, 1, 9, 2), "wrong": wrong, "b": prepare("b", 0, 200, 8, 7, 6)}
    found = timing.take_turns(contestants, clock, "cpu", rounds=50, seconds=0.1)
    assert found["wrong"] == {"status": "RED", "reason": "off"}
    assert [(found[name]["ms"], found[name]["rounds"]) for name in "ab"] == [(2, 3), (7, 3)], "at least three rounds"
    assert "".join(ran) == "aabb" + 3 * "ab", "two runs to warm up, then turns"
    peak, result = timing.peak_memory(lambda: torch.ones(16 << 20).sum().item(), "cpu")
    assert result == 16 << 20 and 60 << 20 < peak < 128 << 20, "a tensor of 64 MiB"


# ------------------------------------------------------------------------------------------------------------- models


@pytest.fixture
def model_gpu(load):
    return load("model_gpu")


def test_model_gpu_compares_models_of_equal_size(model_gpu):
    diff, llama = model_gpu.build_pair(4096, torch.bfloat16, "meta").values()
    assert llama.config.head_dim == diff.config.diff_head_dim == 128 and llama.config.num_attention_heads == 24
    extra = 28 * (4 * 128 + 256)  # lambda vectors and the head norm of every layer
    assert diff.num_parameters() - llama.num_parameters() == extra


@pytest.mark.slow
def test_model_gpu_rows(model_gpu):
    models = model_gpu.build_pair(32, torch.float32, "cpu", layers=1, tiny=True)
    for task in model_gpu.TASKS:
        rows = model_gpu.measure(task, 16, models, tokens=32, rounds=1, device="cpu")
        assert [row["model"] for row in rows] == list(model_gpu.CONTESTANTS)
        best = max(row["tokens_per_second"] for row in rows[2:] if row["status"] == "ok")
        for row in rows:
            if row["model"].endswith("flash_attention_2"):
                assert row["status"] == "ok" or "FlashAttention2" in row["reason"]
            else:
                assert row["status"] == "ok" and row["batch"] == 2 and row["layers"] == 1, row["reason"]
                ratio = row["tokens_per_second"] / best
                assert row["over_transformer"] == pytest.approx(ratio, rel=1e-2, abs=2e-3)


def test_model_gpu_times_nothing_that_is_wrong(model_gpu, monkeypatch):
    kernel = "diff_transformer.attention_diff.flash_diff_attention_cpu"
    monkeypatch.setattr(kernel, lambda query, *_, **__: query.transpose(1, 2))
    with pytest.raises(model_gpu.Wrong, match="flash_diff is wrong: logits is off by"):
        model_gpu.build_pair(16, torch.float32, "cpu", layers=1, tiny=True)


@pytest.fixture
def model_cpu(load, monkeypatch):
    """With a layer of a small width in each model."""
    module = load("model_cpu")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 4096}
    monkeypatch.setattr(module, "SHARED", module.SHARED | small)
    return module


def test_model_cpu_end_to_end(model_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(model_cpu, "TASKS", {"forward": 16, "forward+backward": 16, "decode": 24})
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    model_cpu.main(["--rounds", "1", "--dtypes", "float32", "--out", str(tmp_path / "speed")])
    rows = read(tmp_path / "speed.csv")
    names = ["DIFF", "DiffLlama", "Llama", "DIFF V2", "Llama GQA"]
    assert [(row["task"], row["model"]) for row in rows] == [(t, name) for t in model_cpu.TASKS for name in names]
    for i, row in enumerate(rows):
        ours = rows[i - i % 5 + (0 if i % 5 < 3 else 3)]  # V2 and its Llama are the last two
        ratio = float(ours["tokens_per_second"]) / float(row["tokens_per_second"])
        assert float(row["ours_over_this"]) == pytest.approx(ratio, rel=1e-3, abs=2e-3)
    table = [line.strip("| ").split(" | ") for line in (tmp_path / "speed.md").read_text().splitlines() if "|" in line]
    assert table[0][2:] == [*names, "DIFF / DiffLlama", "DIFF / Llama", "DIFF V2 / Llama GQA"]
    decode = [row["tokens_per_second"] for row in rows[10:]]
    ratios = [f"{float(rows[i]['ours_over_this']):.2f}" for i in (11, 12, 14)]
    assert table[4] == ["float32", "decode, 24 tokens", *decode, *ratios]


def test_model_cpu_compares_models_of_equal_size(model_cpu):
    size = {name: model.num_parameters() for name, model in model_cpu.untrained_models().items()}
    assert size["DIFF"] - size["Llama"] == 4 * 8 + 16, "lambda vectors and the head norm"
    assert size["DIFF V2"] - size["Llama GQA"] == 4 * 64 - 64 * 4 * 64, "lambda_proj, and half of o_proj"


WRONG_MODELS = {  # the function of the attention, and another
    "DIFF": ("attention_diff.flash_diff_attention_cpu", lambda query, *_, **__: query.transpose(1, 2)),
    "DIFF V2": (
        "modeling_diff_v2.differential_attention",
        lambda _, __, q, *x, **y: (q[:, ::2].transpose(1, 2), None),
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_model_cpu_times_nothing_that_is_wrong(model_cpu, monkeypatch, name):
    function, wrong = WRONG_MODELS[name]
    monkeypatch.setattr(f"diff_transformer.{function}", wrong)
    with pytest.raises(SystemExit, match=f"^{name} is off by .*: there is nothing to compare"):
        model_cpu.build_models(torch.float32)


# ------------------------------------------------------------------------------------------------------ memory, host


def test_conversion_memory_converts_what_it_measures(load, monkeypatch, tmp_path, capsys):
    """In this process, which has seen the larger peaks of other tests."""
    module = load("conversion_memory")

    def measure_here(name, *arguments):
        module.convert_here(list(map(str, arguments)))
        return capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setattr(module, "measure_apart", measure_here)
    sizes = ["--gib", "0.02", "--hidden-size", "256", "--folder", str(tmp_path)]
    module.main([*sizes, "--out", str(tmp_path / "memory")])
    rows = read(tmp_path / "memory.csv")
    assert [row["task"] for row in rows] == ["convert", "convert and verify"]
    for row in rows:
        assert 10 < int(row["checkpoint_mib"]) < 40 and int(row["peak_mib"]) >= int(row["imports_alone_mib"]) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["memory.csv"], "the checkpoints are still there"
    with pytest.raises(SystemExit, match="conversion failed"):
        module.convert_here(["convert", "nowhere", str(tmp_path / "out"), "--from", "yoco"])


def test_decode_host_end_to_end(load, monkeypatch, tmp_path):
    """Two of the four steps reach the place of the two kernels."""
    decode_host, launched = load("decode_host"), []
    monkeypatch.setattr(decode_host.NoKernel, "__getitem__", lambda self, grid: lambda *x, **y: launched.append(grid))
    decode_host.main(["--device", "cpu", "--calls", "3", "--out", str(tmp_path / "host")])
    rows = read(tmp_path / "host.csv")
    assert [row["step"] for row in rows] == ["call", "operator", "dispatch", "custom_op"]
    assert all(float(row["microseconds"]) > 0 for row in rows)
    assert len(launched) == 2 * 2 * 3 * decode_host.REPEATS


# ----------------------------------------------------------------------------------------------------- kernel_model.py


@pytest.fixture
def kernel_model(load):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    return load("kernel_model")


# In a loop over heads, 0x10 to 0x120, a small loop at 0x20 and a larger one at 0x70, which waits in another at 0x150
HOPPER = """
    /*0000*/                   S2R R0, SR_TID.X ;                                /* 0x0000000000007919 */
    /*0010*/                   BRA.U UP0, 0x70 ;                                 /* 0x0000000100187547 */
    /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
    /*0030*/                   FADD R24, R24, R25 ;
    /*0040*/                   HGMMA.64x128x16.F32.BF16 R56, R152, gdesc[UR12], R56 ;
    /*0050*/                   MUFU.EX2 R8, R9 ;
    /*0060*/              @!P2 BRA 0x20 ;
    /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
    /*0080*/              @!P1 BRA 0x150 ;
    /*0090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
    /*00a0*/                   MUFU.EX2 R8, R9 ;
    /*00b0*/                   MUFU.EX2 R10, R11 ;
    /*00c0*/                   HGMMA.64x128x16.F32.BF16 R56, R152, gdesc[UR12], R56 ;
    /*00d0*/                   LDSM.16.MT88.4 R12, [R3] ;
    /*00e0*/                   STS.64 [R3], R12 ;
    /*00f0*/              @!P4 LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR6][R4.64] ;
    /*0100*/                   LDL R12, [R1+0x10] ;
    /*0110*/                   BRA.U !UP0, 0x70 ;
    /*0120*/               @P5 BRA 0x10 ;
    /*0130*/                   EXIT ;
    /*0140*/                   BRA 0x140;
    /*0150*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
    /*0160*/              @!P1 BRA 0x150 ;
    /*0170*/                   BRA 0x90 ;
"""
# The 64 rows of the second product are laid out over 8 warps of 16 rows: every row is computed twice
TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 64, 16]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 32, 16]}>
    %0 = tt.dot %a, %b : tensor<64x64xbf16, #dot> * tensor<64x64xbf16, #dot1> -> tensor<64x64xf32, #mma> loc(#loc1)
    scf.for %i = %c0 to %n step %c1 : i32 {
      %1 = tt.dot %a, %b : tensor<64x64xbf16, #dot> * tensor<64x64xbf16, #dot1> -> tensor<64x64xf32, #mma> loc(#loc1)
      scf.for %j = %c0 to %n step %c64 iter_args(%acc = %cst) -> (tensor<64x128xf32, #mma>) : i32 {
        scf.if %p {
        } loc(#loc2)
        %s = ttng.warp_group_dot %q, %k, %z : !ttg.memdesc<64x48xbf16, #A> * !ttg.memdesc<48x32xbf16, #B> -> SCORES
        %d = ttng.warp_group_dot %p, %v, %acc {isAsync = true, inputPrecision = 0 : i32} : OPERANDS
      } loc(#loc5)
      %2 = tt.dot %a, %b : tensor<64x64xbf16, #dot> * tensor<64x64xbf16, #dot1> -> tensor<64x64xf32, #mma> loc(#loc1)
      %3 = tt.dot %a, %b : tensor<64x64xbf16, #dot> * tensor<64x64xbf16, #dot1> -> tensor<64x64xf32, #mma> loc(#loc1)
      %4 = tt.dot %a, %b : tensor<64x64xbf16, #dot> * tensor<64x64xbf16, #dot1> -> tensor<64x64xf32, #mma> loc(#loc1)
    } loc(#loc6)
"""
TTGIR = TTGIR.replace("SCORES", "tensor<64x32xf32, #mma1> loc(#loc3)").replace(
    "OPERANDS", "tensor<64x32xbf16, #C> * !ttg.memdesc<32x128xbf16, #D> -> tensor<64x128xf32, #mma> loc(#loc4)"
)


def sass(code: list[str]) -> str:
    return "".join(f"/*{16 * i:04x}*/ {one} ;\n" for i, one in enumerate(code))


def test_kernel_model_reads_the_products_of_the_innermost_loop(kernel_model):
    scores, output = kernel_model.dots(TTGIR)
    assert scores[:4] == (64, 32, 48, 2 * 64 * 32 * 48), "the rows that two warps share are executed twice"
    assert output[:4] == (64, 128, 32, 64 * 128 * 32)
    with pytest.raises(ValueError, match="not computed on tensor cores"):
        kernel_model.dots(TTGIR.replace("tensor<64x32xf32, #mma1>", "tensor<64x32xf32, #blocked>"))
    with pytest.raises(ValueError, match="no loop"):
        kernel_model.dots(TTGIR.split("scf.for")[0])


def test_kernel_model_counts_the_cycles_of_a_loop(kernel_model):
    small, large = sorted(kernel_model.tensor_loops(HOPPER), key=lambda loop: loop[0][0].address)
    assert [one.address for block in small for one in block] == list(range(0x20, 0x70, 0x10))
    assert [one.address for block in large for one in block] == [*range(0x70, 0x120, 0x10), 0x170]
    products = [kernel_model.Dot(64, 64, 16, 64 * 64 * 16, True), kernel_model.Dot(64, 128, 16, 64 * 128 * 16, False)]
    cost = kernel_model.cost(large, products, 90, warps=4)
    # 64 x 64 x 16 / 2048 = 32, as long as reading (64 + 64) rows of 32 bytes takes; 64 x 128 x 16 / 2048 = 64
    assert (cost.tensor, cost.operands) == (32 + 64, 32 + 32)
    assert cost.vector == 2 * 4 * 32 / 16, (
        "two exponentials of 4 warps, 16 per cycle; 12 instructions are issued in 12"
    )
    assert cost.shared == 4 * (4 + 2 + 4 + 1), (
        "4 warps x (4 matrices, 8 bytes, 16 bytes and a spilled register a lane)"
    )
    assert cost.instructions == "wgmma m64n128 + wgmma m64n64" and cost.executed == 64 * 192 * 16
    assert cost.overlapped == 44 + 64 and cost.serial(latency=250) == 96 + 16 + 44 + 250
    assert kernel_model.fractions(cost, 54, 250) == {"serial": 0.133, "overlapped": 0.5, "middle": 0.21}

    compiled = kernel_model.Compiled("kernel", {}, 200, 8, 100 << 10, 0, "", HOPPER)
    assert kernel_model.occupancy(compiled, 90, 4) == 2 and kernel_model.occupancy(compiled, 90, 16) == 0
    unrolled = kernel_model.cost([*large, *large], products, 90, warps=4)
    assert unrolled == cost, "an iteration with two pairs of blocks counts as two"
    with pytest.raises(ValueError, match="multiply-adds"):
        kernel_model.cost(large, products[:1] * 4, 90, warps=4)


@pytest.mark.parametrize(
    ("architecture", "rate", "vector"), [(80, 1024, 3 * 8 * 32 / 64), (86, 512, 5 * 8 * 32 / 128)]
)
def test_kernel_model_counts_mma_sync(kernel_model, architecture, rate, vector):
    """The three FP32 instructions count on sm_80, which does 64 per cycle. On sm_86 the issue of all five counts."""
    code = ["HMMA.16816.F32.BF16 R4, R8, R12, R4", *["FFMA R4, R5, R6, R7"] * 3, "BRA 0x00"]
    (loop,) = kernel_model.tensor_loops(sass(code))
    cost = kernel_model.cost(loop, [kernel_model.Dot(64, 16, 16, 8 * 16 * 8 * 16, False)], architecture, warps=8)
    assert cost.tensor == 8 * 16 * 8 * 16 / rate and cost.instructions == "mma.sync"
    assert cost.vector == vector


def test_kernel_model_takes_the_shapes_of_sm_100_from_the_ttgir(kernel_model):
    ttgir = """
    scf.for %n = %c0 to %stop step %c64 : i32 {
      ttng.tc_gen5_mma %q, %k, %s : !ttg.memdesc<128x64xbf16, #shared, #smem>, !ttg.memdesc<64x64xbf16, #shared>
      ttng.tc_gen5_mma %p, %v, %o : !ttg.memdesc<128x64xbf16, #tmem1>, !ttg.memdesc<64x64xbf16, #shared, #smem>
    }
"""
    products = kernel_model.dots(ttgir)
    assert [one.a_in_shared for one in products] == [True, False]
    # The tensor instructions are in a block of their own, which one warp enters
    code = ["LDTM.x4 R4, tmem[UR4]", "@P0 BRA 0xb0", *["UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR15], UPT"] * 8]
    code += ["UTCBAR [UR4], URZ", "FADD R4, R4, R5", "@P1 BRA 0x00", "EXIT"]
    (loop,) = kernel_model.tensor_loops(sass(code))
    cost = kernel_model.cost(loop, products, 100, warps=8)
    # Per product 4 instructions of 128 x 64 x 16; the first reads 128 + 64 rows of 32 bytes, the second 64
    assert cost.tensor == 4 * max(128 * 64 * 16 / 4096, 48) + 4 * max(32, 16) and cost.operands == 4 * 48 + 4 * 16
    assert cost.vector == 4 * 2 + 9 / 4, "4 instructions of 2 warps on each scheduler, and 9 of one warp"
    code[0] = "LDTM.x32 R4, tmem[UR4]"
    (loop,) = kernel_model.tensor_loops(sass(code))
    assert kernel_model.cost(loop, products, 100, warps=8).vector == 32 * 2, "32 registers of 2 warps"
    assert cost.executed == 2 * 128 * 64 * 64 and cost.instructions == "tcgen05 m128n64"


def test_kernel_model_totals(kernel_model, monkeypatch):
    kernel = kernel_model.Kernel
    ours = {"map": kernel(None, 3, programs=2), "gradients": kernel(None, 8), "apart": kernel(None, 10)}
    monkeypatch.setattr(kernel_model, "STANDARD", {"standard": kernel(None, 2, programs=2)})
    monkeypatch.setattr(kernel_model, "KERNELS", ours | kernel_model.STANDARD)
    monkeypatch.setattr(kernel_model, "WAYS", (("map", "gradients"), ("map", "apart")))

    def row(name, fraction, **different):
        fractions = {"serial": fraction / 2, "middle": fraction, "overlapped": fraction}
        return {"architecture": 90, "d": 64, "kernel": name, "status": "ok", **fractions, **different}

    rows = [row("map", 0.5), row("gradients", 0.8), row("gradients", 0.4), row("standard", 0.25, serial=0.2)]
    # (6 / 0.5 + 8 / 0.8) / (4 / 0.25) = 22 / 16, with the better blocks of the second; serial 44 / 20
    assert kernel_model.totals(rows) == {(90, 64): {"serial": 2.2, "middle": 1.38, "overlapped": 1.38}}
    assert kernel_model.totals([*rows, row("apart", 0.5)]) == kernel_model.totals(rows), "(6 / 0.5 + 10 / 0.5) is more"
    assert kernel_model.totals([*rows, row("apart", 2.5)])[90, 64]["middle"] == 1.0, "(6 / 0.5 + 10 / 2.5) is less"
    assert kernel_model.totals([*rows[:3], row("standard", 0.25, status="does not compile")]) == {}


@pytest.mark.compile
def test_kernel_model_rows_of_compiled_kernels(kernel_model, tmp_path, capsys):
    """One kernel compiles, and the other needs more shared memory than there is."""
    arguments = ["--kernels", "standard_forward", "--architectures", "86", "--head-dims", "64"]
    arguments += ["--out", str(tmp_path / "model"), "--blocks", "64/32/4/1", "128/128/4/4"]
    assert kernel_model.main(arguments) == 0, "a trial of blocks looks for what compiles"
    right, failed = read(tmp_path / "model.csv")
    assert failed["status"].startswith("does not ") and failed["serial"] == ""
    assert right["status"] == "ok" and right["executed_over_useful"] == "1.0" and right["instructions"] == "mma.sync"
    # 2 * 64 * 32 * 64 multiply-adds, 512 per cycle
    assert right["tensor"] == "512" and float(right["serial"]) < float(right["overlapped"]) <= 1
    assert "| 64 | standard_forward | 64/32/4/1 | 1.0 | mma.sync |" in (tmp_path / "model.md").read_text()


STANDARD_KERNELS = """
import tests.triton_interpreter
import torch
from torch.testing import assert_close
from benchmarks.kernels_standard import attention
from diff_transformer.flash_diff_blocks import Blocks

T, S, d = 37, 50, 24
torch.manual_seed(0)
q, k, v = (torch.randn(3, length, d, requires_grad=True) for length in (T, S, S))
grad_out = torch.randn(3, T, d)
scores = (q @ k.mT * d**-0.5).masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -torch.inf)
expected = scores.softmax(-1) @ v
expected_grads = torch.autograd.grad(expected, (q, k, v), grad_out)
got = attention(q.detach(), k.detach(), v.detach(), grad_out, Blocks(16, 32, 4, 2))
assert_close(got, (expected.detach(), *expected_grads))
"""


@pytest.mark.process
def test_kernel_model_compares_with_kernels_that_are_right():
    """Standard attention in Triton's interpreter, in a process: triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", STANDARD_KERNELS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]

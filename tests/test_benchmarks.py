# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The benchmarks end to end on the CPU with tiny sizes, and the checks that no wrong implementation is timed."""

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
SIZES = {"--hidden-size": 32, "--head-dims": 16, "--lengths": 16, "--tokens": 32, "--check-length": 16, "--rounds": 1}
TINY = ["--device", "cpu", *(str(word) for option in SIZES.items() for word in option)]
COLUMNS = {"task", "d", "length", "way", "status", "ms", "tflops", "gb_per_s", "over_best_rival", "over_standard"}
COLUMNS |= {"peak_mib", "reason", "hardware", "torch", "triton"}


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.attention")


@pytest.fixture
def ways(attention):
    return importlib.import_module("benchmarks.attention_ways")


def case(ways, task: str, length: int = 33, dtype: torch.dtype = torch.float32, norm: bool = False):
    return ways.Case(task, 16, length, 3 * length, heads=2, dtype=dtype, device="cpu", norm=norm)


# ------------------------------------------------------------------------------------------------------- attention.py


@pytest.mark.process
def test_attention_end_to_end(tmp_path):
    """In a process, since triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="flash_diff needs triton, whose interpreter runs it on the CPU")
    out = tmp_path / "results" / "attention"
    ways = ["flash_diff", "eager", "packed/sdpa", "two_calls/flash_attn_3", "four_calls/sdpa_flash"]
    arguments = [*TINY, "--dtype", "float32", "--norm", "--out", out, "--ways", *ways, "standard/sdpa_flash"]
    command = [sys.executable, "-m", "benchmarks.attention", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, f"the benchmark failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.startswith("Budget  30 minutes for 5 cells x 6 ways"), "no budget before the run"

    rows = read(out.with_suffix(".csv"))
    assert set(rows[0]) >= COLUMNS
    found = {(row["task"], row["way"]): row for row in rows}
    tasks = ("forward", "backward", "both", "decode", "varlen")
    assert set(found) == {(task, way) for task in tasks for way in (*ways, "standard/sdpa_flash")}, "a way is missing"
    for task in tasks:
        ours = found[task, "flash_diff"]
        assert ours["status"] == "ok", f"{task}: {ours['reason']}"
        assert float(ours["ms"]) > 0 and float(ours["gb_per_s" if task == "decode" else "tflops"]) > 0
        best = min(float(found[task, way]["ms"]) for way in ways[1:] if found[task, way]["ms"])
        standard = float(found[task, "standard/sdpa_flash"]["ms"] or "nan")
        for column, rival in (("over_best_rival", best), ("over_standard", standard)):
            # Times have four digits, ratios three decimals; interpreted kernels are slow enough for a ratio of 0.000
            expected = pytest.approx(rival / float(ours["ms"]), rel=2e-4, abs=6e-4, nan_ok=True)
            assert float(ours[column] or "nan") == expected, f"{task}: {column}"
        absent = found[task, "two_calls/flash_attn_3"]
        assert absent["status"] == "cannot run" and "flash_attn_interface" in absent["reason"] and not absent["ms"]
    best = max(float(found["both", way]["over_best_rival"]) for way in ways[1:] if found["both", way]["ms"])
    assert best == 1.0, "the fastest rival is the measure of the others"

    report = out.with_suffix(".md").read_text()
    assert "## varlen, d = 16" in report and "flash_diff / best rival" in report and "--dtype float32" in report
    assert "cannot run: two_calls/flash_attn_3" in report
    assert {path.name for path in out.parent.iterdir()} <= {"attention.csv", "attention.md", "attention.png"}


WRONG = {  # the reason, and a function of the eager attention and a problem
    "the output is off": lambda eager, p: eager(p) * 1.03,
    "the gradient of v is off": lambda eager, p: eager(replace(p, v=p.v.detach())) + 0 * p.v.sum(),
    "no gradient of lambda_full": lambda eager, p: eager(replace(p, lambda_full=p.lambda_full.detach())),
    "the output is off by nan": lambda eager, p: eager(p) * math.nan,
}


@pytest.mark.parametrize("reason", WRONG)
def test_attention_shows_a_wrong_way_red(attention, ways, monkeypatch, tmp_path, capsys, reason):
    way = ways.Way("rival", partial(WRONG[reason], ways.WAYS["eager"].run))
    monkeypatch.setitem(ways.WAYS, "four_calls/sdpa_flash", way)
    arguments = [*TINY, "--tasks", "both", "--ways", "eager", "four_calls/sdpa_flash", "--out", str(tmp_path / "red")]
    assert attention.main(arguments) == 1, "a run with a wrong way must not exit as if all were well"
    right, red = read(tmp_path / "red.csv")
    assert right["status"] == "ok" and right["over_best_rival"] == "1.0"
    assert red["status"] == "RED" and reason in red["reason"]
    assert not (red["ms"] or red["tflops"] or red["over_best_rival"]), "a wrong way got a speed"
    assert f"RED: {red['reason']}" in capsys.readouterr().out
    assert "| four_calls/sdpa_flash | RED |" in (tmp_path / "red.md").read_text()


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


def test_attention_stops_at_its_budget(attention, tmp_path, capsys):
    arguments = [*TINY, "--tasks", "forward", "--ways", "eager", "--out", str(tmp_path / "none"), "--minutes", "0"]
    assert attention.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Budget  0 minutes" in printed and "Left out, as the budget was spent: forward d=16 16" in printed
    assert not list(tmp_path.iterdir())


def test_attention_keeps_the_rows_of_a_killed_run(attention, monkeypatch, tmp_path):
    measure = attention.measure

    def killed_at_decode(one, *rest):
        if one.task == "decode":
            raise KeyboardInterrupt
        return measure(one, *rest)

    monkeypatch.setattr(attention, "measure", killed_at_decode)
    arguments = [*TINY, "--tasks", "forward", "decode", "--ways", "eager", "--out", str(tmp_path / "killed")]
    with pytest.raises(KeyboardInterrupt):
        attention.main(arguments)
    assert [row["task"] for row in read(tmp_path / "killed.csv")] == ["forward"]


# ------------------------------------------------------------------------------------------------------- model_gpu.py


@pytest.fixture
def model_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.model_gpu")


# transformers 5.23 renamed it; the benchmark supports 5.17 too
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("less_memory", [[], ["--gradient-checkpointing", "--loss-chunk", "7", "--layers", "1"]])
def test_model_gpu_end_to_end(model_gpu, tmp_path, capsys, less_memory):
    out = tmp_path / "model"
    arguments = ["--tiny", "--device", "cpu", "--lengths", "16", "32", "--tokens", "32", "--rounds", "1"]
    assert model_gpu.main([*arguments, "--out", str(out), *less_memory]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Budget  20 minutes for 4 cells x 4 contestants")

    rows = read(out.with_suffix(".csv"))
    assert set(rows[0]) >= {"task", "length", "model", "tokens_per_second", "over_transformer", "peak_gib", "reason"}
    for row in rows:
        if row["model"].endswith("flash_attention_2"):
            assert row["status"] == "ok" or "FlashAttention2" in row["reason"]
        else:
            assert row["status"] == "ok" and float(row["tokens_per_second"]) > 0, row["reason"]
            assert float(row["over_transformer"]) > 0
        assert row["layers"] == ("1" if less_memory else "2")
    assert len(rows) == 2 * 2 * 4
    if less_memory:
        assert "gradient checkpointing" in printed and "loss in chunks of 7 tokens" in printed


def test_model_gpu_models_are_of_equal_size(model_gpu):
    options = model_gpu.parse(["--device", "meta"])
    config = model_gpu.diff_config(options)
    diff = model_gpu.build(config, torch.bfloat16, "meta")
    llama = model_gpu.build(model_gpu.transformer_twin(config), torch.bfloat16, "meta")
    assert llama.config.head_dim == config.diff_head_dim == 128 and llama.config.num_attention_heads == 24
    extra = 28 * (4 * 128 + 256)  # lambda vectors and the head norm of every layer
    assert diff.num_parameters() - llama.num_parameters() == extra


def test_model_gpu_loss_in_chunks_is_the_loss(model_gpu):
    config = model_gpu.diff_config(model_gpu.parse(["--tiny", "--device", "cpu", "--lengths", "16"]))
    model = model_gpu.build(config, torch.float32, "cpu")
    ids = torch.randint(0, config.vocab_size, (2, 16))
    whole = model(ids, labels=ids, use_cache=False).loss
    whole.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    chunked = model_gpu.loss_in_chunks(model, ids, 7)
    chunked.backward()
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_model_gpu_times_nothing_that_is_wrong(model_gpu, monkeypatch, tmp_path, capsys):
    kernel = "diff_transformer.attention_diff.flash_diff_attention_cpu"
    monkeypatch.setattr(kernel, lambda query, *_, **__: query.transpose(1, 2))
    arguments = ["--tiny", "--device", "cpu", "--lengths", "16", "--out", str(tmp_path / "red")]
    assert model_gpu.main(arguments) == 1
    assert "RED: flash_diff is wrong" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- conversion_memory.py


@pytest.mark.process
def test_conversion_memory_end_to_end(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    main = importlib.import_module("benchmarks.conversion_memory").main
    main(["--gib", "0.02", "--hidden-size", "256", "--out", str(tmp_path / "memory"), "--folder", str(tmp_path)])
    rows = read(tmp_path / "memory.csv")
    assert [row["task"] for row in rows] == ["convert", "convert and verify"]
    for row in rows:
        assert 10 < int(row["checkpoint_mib"]) < 40 and int(row["peak_mib"]) > int(row["imports_alone_mib"]) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["memory.csv"], "the checkpoints are still there"


# ----------------------------------------------------------------------------------------------------- decode_host.py


def test_decode_host_end_to_end(monkeypatch, tmp_path):
    """Two of the four steps reach the place of the two kernels."""
    monkeypatch.syspath_prepend(str(ROOT))
    decode_host = importlib.import_module("benchmarks.decode_host")
    launched = []
    monkeypatch.setattr(decode_host.NoKernel, "__getitem__", lambda self, grid: lambda *x, **y: launched.append(grid))
    decode_host.main(["--device", "cpu", "--calls", "3", "--out", str(tmp_path / "host")])
    rows = read(tmp_path / "host.csv")
    assert [row["step"] for row in rows] == ["call", "operator", "dispatch", "custom_op"]
    assert all(float(row["microseconds"]) > 0 for row in rows)
    assert len(launched) == 2 * 2 * 3 * decode_host.REPEATS

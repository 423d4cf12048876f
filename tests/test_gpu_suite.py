# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The suite of a GPU end to end on the CPU, its stages, and its report."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
# Python 3.12 warns of every fork in a process with threads; these jobs start none and take no lock
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu_suite")


@pytest.fixture
def jobs(suite):
    return importlib.import_module("benchmarks.gpu_jobs")


@pytest.fixture
def gpu_report(suite):
    return importlib.import_module("benchmarks.gpu_report")


@pytest.mark.process
@pytest.mark.slow
def test_dry_run_fills_every_stage(suite, gpu_report, tmp_path):
    """In a process, since triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="flash_diff needs triton, whose interpreter runs it on the CPU")
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=500)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, f"the suite failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}\n{log[-4000:]}"
    rows = [json.loads(line) for line in (tmp_path / "gpu_suite.jsonl").read_text().splitlines()]
    assert all(row["dry_run"] for row in rows)
    assert {row["name"] for row in rows if row["is_job"]} >= set(suite.STAGES), "a stage did not end"
    names = [(row["stage"], row["name"]) for row in rows]
    assert len(names) == len(set(names)), "a row is there twice"
    assert len([name for _, name in names if name.startswith("tests/")]) == 2, "each part runs one test"
    packed = next(row for row in rows if row.get("way") == "packed/sdpa")
    assert packed["ms"] > 0 and packed["sdpa_backend"] in ("MATH", "FLASH_ATTENTION")
    timed = {row["kernel"] for row in rows if row["stage"] == "tuning" and "ms" in row}
    table = json.loads((tmp_path / "dry_run_blocks.json").read_text())
    assert timed == set(table["86"]) >= {"forward", "dq", "split16"}
    speeds = {row["name"] for row in rows if row.get("tokens_per_second")}
    assert {"decode 4 DIFF flash_diff", "decode static 4 DIFF V2 sdpa", "forward 4 Transformer sdpa"} <= speeds
    assert {f"forward+backward, compiled 4 {name}" for name in ("DIFF flash_diff", "Transformer sdpa")} <= speeds
    found = {row["name"] for row in rows if row["status"] == "ok"}
    assert {"chunks 16", "logits 16", "DIFF", "Transformer", "equal bits varlen d=16 16 norm float16"} <= found
    with pytest.raises(SystemExit, match="of a dry run"):
        suite.main(["--report", str(tmp_path)])
    page = gpu_report.report(rows)
    for text in ("### decode, d = 16", "| split16 |", "| DIFF flash_diff |", "| chunks 16 |", "| Transformer | ok |"):
        assert text in page
    assert "Not run" not in page
    for text in ("|  | DIFF flash_diff | DIFF V2 sdpa |", "### decode, 4: DIFF V2 sdpa", "| aten::mm |"):
        assert text in page


def test_plan_names_a_command_for_every_stage_without_torch():
    blocked = "import sys; sys.modules['torch'] = None; from benchmarks.gpu_suite import main; main(['--plan'])"
    lines = subprocess.check_output([sys.executable, "-c", blocked], cwd=ROOT, text=True).splitlines()
    stages = [line.split("STAGE=")[1].split()[0] for line in lines[:-1]]
    assert stages[0] == "correctness" and "reproduce --scale gpu" in lines[-1]
    assert all(0 < int(line.split()[0]) <= 8 for line in lines), "a call of a lent machine ends after ten minutes"


def test_jobs_take_their_arguments_on_a_gpu(suite, jobs, monkeypatch):
    """Those of a GPU run nowhere else in the tests."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for stage in suite.STAGES:
        for job in (job for step in jobs.plan(stage, jobs.FULL) for job in step):
            inspect.signature(getattr(jobs, job.function)).bind(None, {}, jobs.FULL, **job.arguments)
    case = jobs.FULL.case("both", 128, 4096, jobs.FULL.tokens)
    assert (case.batch, case.heads, case.dtype, case.device) == (16, 12, torch.bfloat16, "cuda")


# -------------------------------------------------------------------------------------------------------------- stages


@pytest.fixture
def run(suite, jobs, monkeypatch, tmp_path):
    """Runs a stage of functions `job(emit, done, sizes)`, each a step of its own, and returns the rows by name."""

    def run_stage(functions: dict, resume: bool = False) -> dict[str, dict]:
        for name, function in functions.items():
            monkeypatch.setattr(jobs, name, function, raising=False)
        monkeypatch.setattr(jobs, "plan", lambda *_: [[jobs.Job(name, name)] for name in functions])
        results = suite.Results(tmp_path / "rows.jsonl", {"dry_run": True})
        suite.run_stage("loss", results, tmp_path, dry_run=True, resume=resume)
        rows = results.rows()
        assert len({row["name"] for row in rows}) == len(rows), "a row is there twice"
        return {row["name"]: row for row in rows}

    return run_stage


def good(emit, done, sizes):
    emit("good result", ms=1.5)


def test_stage_records_the_error_of_a_job_and_runs_the_next(run, suite, tmp_path):
    def raises(emit, done, sizes):
        emit("before", ms=2)
        raise ValueError("the reason\nand more")

    def dies(emit, done, sizes):
        os._exit(7)

    rows = run({"raises": raises, "dies": dies, "good": good})
    assert rows["before"]["status"] == rows["good result"]["status"] == rows["good"]["status"] == "ok"
    assert rows["raises"]["status"] == "error" and rows["raises"]["reason"] == "ValueError: the reason"
    assert rows["dies"]["status"] == "error" and "ended with the status 7" in rows["dies"]["reason"]
    assert rows["loss"]["status"] == "error", "the stage is not whole"
    with pytest.raises(SystemExit, match="has rows of a dry run"):
        suite.Results(tmp_path / "rows.jsonl", {"dry_run": False})


def test_stage_ends_at_its_limit(suite, run, monkeypatch, tmp_path):
    def hangs(emit, done, sizes):
        emit("before")
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(60)

    monkeypatch.setattr(suite, "MINUTES", (suite.SECONDS_TO_END + 2) / 60)
    rows = run({"hangs": hangs, "good": good})
    assert rows["before"]["status"] == "ok" and rows["hangs"]["status"] == "error"
    assert "time of the stage was spent" in rows["hangs"]["reason"]
    assert rows["good"]["status"] == "left out" and "good result" not in rows
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "what the job started still runs"


def test_resume_runs_what_is_missing(run, tmp_path):
    def job(emit, done, sizes):
        (tmp_path / "seen").write_text(json.dumps(done))
        emit("wrong", "RED", "a finding, not to be tried again") if "wrong" not in done else None
        if not (tmp_path / "repaired").exists():
            raise ValueError("later")
        emit("second")

    assert run({"good": good, "job": job})["job"]["status"] == "error"
    (tmp_path / "repaired").touch()

    def again(emit, done, sizes):
        raise AssertionError("it has ended")

    rows = run({"good": again, "job": job}, resume=True)
    assert rows["job"]["status"] == rows["good"]["status"] == rows["loss"]["status"] == "ok"
    assert rows["wrong"]["status"] == "RED" and rows["second"]["status"] == "ok"
    assert json.loads((tmp_path / "seen").read_text()) == {"good result": "ok", "wrong": "RED"}
    assert set(run({"good": good})) == {"good", "good result", "loss"}, "without --resume a stage replaces its rows"


# ------------------------------------------------------------------------------------------------------- jobs, report


@pytest.mark.parametrize(("returned", "status"), [(0, "ok"), (86, "RED"), (1, "skipped")])
def test_memcheck_reports_the_exit_status_of_its_tool(jobs, monkeypatch, returned, status):
    def fake_run(command, **options):
        return SimpleNamespace(returncode=returned if command[0] == "tool" else 0, stdout="first\nlast")

    monkeypatch.setattr(jobs.shutil, "which", lambda name: "tool")
    monkeypatch.setattr(jobs.subprocess, "run", fake_run)
    rows = []
    jobs.memcheck(lambda *row: rows.append(row), {}, jobs.FULL)
    [(_, got, reason)] = rows
    assert got == status and (status == "ok" or "last" in reason)


def test_kernels_job_shows_errors_and_unequal_bits(jobs, monkeypatch):
    calls = []

    def drifting(p):
        calls.append(p)
        return jobs.WAYS["eager"].run(p) * (1 + 0.1 * len(calls))

    monkeypatch.setattr(jobs, "OURS", jobs.attention.Way("ours", drifting))
    rows = {}
    sizes = jobs.DRY._replace(checked=8, dtype="float32")
    jobs.kernels(lambda name, status, reason: rows.update({name: (status, reason)}), {}, sizes, d=16, norm=True)
    assert len(rows) == 2 * 3 and {status for status, _ in rows.values()} == {"RED"}
    assert "output is off by" in rows["error both d=16 8 norm float32"][1]
    assert rows["equal bits both d=16 8 norm float32"][1].startswith("output, q, k, v")


def test_report_of_the_committed_result(suite, gpu_report, tmp_path, capsys):
    files = sorted((ROOT / "benchmarks/results").glob("gpu_suite_*.jsonl"))
    assert files and suite.main(["--report", str(files[-1])]) == 0
    page = capsys.readouterr().out
    assert "110 ok." in page and "| packed/sdpa | 127.8 (2.34) |" in page, "flash_diff took 1 / 2.34 of the time"
    assert "| four_calls/sdpa_cudnn | RED |" in page and "No module named 'flash_attn'" in page
    assert "| dv | 128 | backward | 4096 | 32/64/4/2 | 15.32 | 64/128/8/2 | 15.58 |" in page
    assert "# Training\n\nNot run." in page
    winners = gpu_report.winning_table(gpu_report.read(files[-1]))
    assert winners["90"]["dq"] == {"128": "128/32/8/3", "64": "64/64/4/2", "96": "128/64/8/2"}

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The suite of a GPU end to end on the CPU, and the rule by which its result file makes `flash_diff` the default."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diff_transformer import flash_diff_blocks

ROOT = Path(__file__).parents[1]
WHERE = {
    "dry_run": False,
    "hardware": "H",
    "capability": "9.0",
    "versions": {"torch": "2"},
    "commit": "c",
    "kernels": "k",
}
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
def evidence(suite):
    return importlib.import_module("benchmarks.gpu_evidence")


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.process
@pytest.mark.slow
def test_dry_run_end_to_end(suite, evidence, monkeypatch, tmp_path):
    """In a process, since triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="flash_diff needs triton, whose interpreter runs it on the CPU")
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=500)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, f"the suite failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}\n{log[-4000:]}"
    assert done.stdout.startswith("Budget  at most 8 minutes each for correctness, attention, tuning")
    assert done.stdout.splitlines()[-1].startswith("Next    the same on a GPU")
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_suite.jsonl", "log.txt", "dry_run_blocks.json"}

    rows = read(tmp_path / "gpu_suite.jsonl")
    keys = {"stage", "job", "name", "status", "reason", "seconds", "is_job", "dry_run", "hardware", "capability"}
    keys |= {"versions", "commit", "kernels", "command"}
    assert all(set(row) >= keys and row["dry_run"] for row in rows)
    assert {row["name"] for row in rows if row["is_job"]} >= set(suite.STAGES), "a stage did not end"
    names = [(row["stage"], row["name"]) for row in rows]
    assert len(names) == len(set(names)), "a row is there twice"
    tests = [name for _, name in names if name.startswith("tests/")]
    assert len(tests) == 2 and "errors_of_the_other" in str(tests) and "deltas_follow" in str(tests)
    packed = next(row for row in rows if row.get("way") == "packed/sdpa")
    assert packed["ms"] > 0 and packed["sdpa_backend"] in ("MATH", "FLASH_ATTENTION")
    timed = {row["kernel"] for row in rows if row["stage"] == "tuning" and "ms" in row}
    assert (
        timed == set(json.loads((tmp_path / "dry_run_blocks.json").read_text())["86"]) >= {"forward", "dq", "split16"}
    )
    speeds = {row["name"] for row in rows if row.get("tokens_per_second")}
    assert {"decode 4 DIFF flash_diff", "forward+backward 4 Transformer sdpa", "DIFF", "Transformer"} <= speeds
    assert {"chunks 32", "logits 32"} <= {row["name"] for row in rows if row.get("peak_mib")}

    with pytest.raises(ValueError, match="of a dry run"):
        evidence.read(tmp_path)
    with pytest.raises(SystemExit, match="of a dry run"):
        suite.main(["--report", str(tmp_path)])
    assert evidence.refusals(rows)[0] == "the rows are of a dry run"
    # The rule knows the rows that the suite writes: with other sizes and times they would be evidence
    monkeypatch.setattr(evidence, "DIMS", (16,))
    monkeypatch.setattr(evidence, "LENGTHS", (16,))
    for row in rows:
        row["dry_run"] = False
        row |= {"ms": 1e-9} if row.get("way") == "flash_diff" else {}
    assert evidence.refusals(rows) == []
    page = evidence.report(rows, suite.STAGES)
    for text in (
        "may be the default of sm_86",
        "### decode, d = 16",
        "| split16 |",
        "| DIFF flash_diff |",
        "| chunks 32 |",
    ):
        assert text in page
    assert "Not run" not in page


@pytest.mark.parametrize(
    "stage", ["correctness", "attention", "tuning", "attention-tuned", "model", "loss", "training"]
)
def test_arguments_fit_on_a_gpu(suite, jobs, monkeypatch, stage):
    """Those of a GPU run nowhere else in the tests."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for job in (job for step in suite.plan(stage, dry_run=False) for job in step):
        inspect.signature(getattr(jobs, job.function)).bind(None, {}, **job.arguments)
        if job.function == "attention_ways":
            options = jobs.attention.parse([*job.arguments["options"], "--head-dims", str(job.arguments["d"])])
            assert options.device == "cuda" and options.dtype == "bfloat16" and options.tokens == 65536
        if job.function == "model":
            assert jobs.model_gpu.parse(job.arguments["options"]).minutes > suite.MINUTES, "only the stage has a limit"


# -------------------------------------------------------------------------------------------------------------- stages


@pytest.fixture
def run(suite, jobs, monkeypatch, tmp_path):
    """Runs a stage of functions `job(emit, done)`, each a step of its own, and returns the new rows by name."""

    def run_stage(functions: dict, stage: str = "loss", resume: bool = False) -> dict[str, dict]:
        for name, function in functions.items():
            monkeypatch.setattr(jobs, name, function, raising=False)
        monkeypatch.setattr(suite, "plan", lambda *_: [[suite.Job(name, name, {})] for name in functions])
        results = suite.Results(tmp_path / "rows.jsonl", {**WHERE, "dry_run": True, "command": "c"})
        suite.run_stage(stage, results, tmp_path, dry_run=True, resume=resume)
        assert read(tmp_path / "rows.jsonl") == results.rows
        assert len({row["name"] for row in results.rows}) == len(results.rows), "a row is there twice"
        return {row["name"]: row for row in results.rows}

    return run_stage


def good(emit, done):
    emit("good result", ms=1.5)


def test_a_failed_job_leaves_its_error_and_the_next_runs(run):
    def raises(emit, done):
        emit("before", ms=2)
        raise ValueError("the reason\nand more")

    def dies(emit, done):
        os._exit(7)

    rows = run({"raises": raises, "dies": dies, "good": good})
    assert rows["before"]["status"] == rows["good result"]["status"] == rows["good"]["status"] == "ok"
    assert rows["raises"]["status"] == "error" and rows["raises"]["reason"] == "ValueError: the reason"
    assert rows["dies"]["status"] == "error" and "ended with the status 7" in rows["dies"]["reason"]
    assert rows["loss"]["status"] == "error", "the stage is not whole"


def test_a_stage_ends_at_its_limit(suite, run, monkeypatch, tmp_path):
    def hangs(emit, done):
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


def test_resuming_runs_what_is_missing(run, tmp_path):
    def job(emit, done):
        (tmp_path / "seen").write_text(json.dumps(done))
        emit("wrong", "RED", "a finding, not to be tried again") if "wrong" not in done else None
        if not (tmp_path / "repaired").exists():
            raise ValueError("later")
        emit("second")

    first = run({"good": good, "job": job})
    assert first["job"]["status"] == "error"
    (tmp_path / "repaired").touch()

    def again(emit, done):
        raise AssertionError("it has ended")

    rows = run({"good": again, "job": job}, resume=True)
    assert rows["job"]["status"] == rows["good"]["status"] == rows["loss"]["status"] == "ok"
    assert rows["wrong"]["status"] == "RED" and rows["second"]["status"] == "ok"
    assert json.loads((tmp_path / "seen").read_text()) == {"good result": "ok", "wrong": "RED"}
    assert set(run({"good": good})) == {"good", "good result", "loss"}, "without --resume a stage replaces its rows"


def test_tuned_attention_uses_the_winners(run, tmp_path):
    def job(emit, done):
        emit("blocks", path=os.environ["DIFF_TRANSFORMER_BLOCKS"])

    rows = run({"job": job}, stage="attention-tuned")
    assert (
        rows["attention-tuned"]["status"] == "error"
        and "the stage tuning writes it" in rows["attention-tuned"]["reason"]
    )
    (tmp_path / "dry_run_blocks.json").write_text("{}")
    assert run({"job": job}, stage="attention-tuned")["blocks"]["path"] == str(tmp_path / "dry_run_blocks.json")
    assert "DIFF_TRANSFORMER_BLOCKS" not in os.environ


def test_dry_rows_and_others_stay_apart(suite, run, tmp_path):
    run({"good": good})
    with pytest.raises(SystemExit, match="has rows of a dry run"):
        suite.Results(tmp_path / "rows.jsonl", {**WHERE, "dry_run": False})


def test_needs_a_gpu(suite, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sees no GPU. --dry-run tries"):
        suite.main(["--out", str(tmp_path)])


# ---------------------------------------------------------------------------------------------------------------- jobs


@pytest.mark.parametrize(("returned", "status"), [(0, "ok"), (86, "RED"), (1, "skipped")])
def test_memcheck(jobs, monkeypatch, returned, status):
    ran = []

    def fake_run(command, **options):
        ran.append(command[0])
        return SimpleNamespace(returncode=returned if command[0] == "tool" else 0, stdout="first\nlast", stderr="")

    monkeypatch.setattr(jobs.shutil, "which", lambda name: "tool")
    monkeypatch.setattr(jobs.subprocess, "run", fake_run)
    rows = []
    jobs.memcheck(lambda *row: rows.append(row), {}, device="cuda", seconds=1)
    assert ran == [sys.executable, "tool"], "the kernels are compiled before they are watched"
    [(_, got, *reason)] = rows
    assert got == status and (status == "ok" or "last" in reason[0])


def test_kernels_show_errors_and_unequal_bits(jobs, monkeypatch):
    calls = []

    def drifting(p):
        calls.append(p)
        return jobs.WAYS["eager"].run(p) * (1 + 0.1 * len(calls))

    monkeypatch.setattr(jobs, "OURS", jobs.attention.Way("ours", drifting))
    rows = {}
    sizes = {"d": 16, "length": 8, "hidden_size": 32, "dtype": "float32", "device": "cpu"}
    for norm in (False, True):
        jobs.kernels(lambda name, status, reason: rows.update({name: (status, reason)}), {}, norm=norm, **sizes)
    assert len(rows) == 2 * 2 * 3 and {status for status, _ in rows.values()} == {"RED"}
    assert "output is off by" in rows["error both d=16 8 float32"][1]
    assert rows["equal bits both d=16 8 norm float32"][1].startswith("output, q, k, v")


@pytest.fixture
def own_blocks(jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("DIFF_TRANSFORMER_BLOCKS", "restored after the test")
    jobs.use_blocks({}, tmp_path)
    yield
    jobs.forget_blocks()


@pytest.mark.parametrize("d", [64, 80, 128])
def test_candidates_are_the_blocks_in_use(jobs, own_blocks, tmp_path, d):
    where = ((8, 6), torch.float16, d)
    kernels = jobs.kernels_of("cpu", torch.float16, d)
    assert {"forward", "dq", "split16"} < set(kernels)
    for kernel in kernels:
        jobs.use_blocks({}, tmp_path)
        table = flash_diff_blocks.blocks(kernel, *where)
        found = jobs.candidates(kernel, "cpu", torch.float16, d, limit=3)
        assert found[0] == "/".join(map(str, table)) and len(set(found)) == 3
        for blocks in found:
            jobs.use_blocks(jobs.table_of("cpu", kernel, d, blocks), tmp_path)
            assert "/".join(map(str, flash_diff_blocks.blocks(kernel, *where))) == blocks


# ---------------------------------------------------------------------------------------------------------------- rule


def whole_run(evidence, hardware: str = "H", ours: float = 1.0) -> list[dict]:
    """The rows of a run in which flash_diff is correct and takes `ours` milliseconds, the best rival 2."""
    rows = []

    def add(stage: str, name: str, status: str = "ok", is_job: bool = False, **figures) -> None:
        shared = {**WHERE, "hardware": hardware, "job": "job", "reason": "", "is_job": is_job}
        rows.append({"stage": stage, "name": name, "status": status, **shared, **figures})

    add("correctness", "tests/test_flash_diff.py::test_one")
    add("correctness", "tests/test_flash_diff.py::test_two", "skipped")
    for check, task, d in product(evidence.CHECKS, evidence.TASKS, (64, 96, 128)):
        add("correctness", f"{check} {task} d={d} 2048 bfloat16")
    add("correctness", "correctness", is_job=True)
    for task, d, length in product(evidence.TASKS, (128, 64), (2048, 4096, 8192, 32768)):
        cell = {"task": task, "d": d, "length": length}
        for way, kind, ms in (("flash_diff", "ours", ours), ("packed/sdpa", "rival", 2), ("eager", "rival", None)):
            status = {"status": "ok", "ms": ms} if ms else {"status": "cannot run", "reason": "out of memory"}
            add("attention", f"{task} d={d} {length} {way}", way=way, kind=kind, **status, **cell)
        add("attention", f"{task} d={d} {length} standard/x", way="standard/x", kind="standard", ms=0.1, **cell)
    add("attention", "attention", is_job=True)
    return rows


def change(name: str, **values):
    def apply(rows: list[dict]) -> None:
        [row] = [row for row in rows if row["name"] == name]
        row.update(values)

    return apply


def without(text: str):
    def apply(rows: list[dict]) -> None:
        rows[:] = [row for row in rows if text not in row["name"]]

    return apply


REFUSED = {
    "the rows are of a dry run": change("decode d=64 2048 eager", dry_run=True),
    "tests/test_flash_diff.py::test_one: RED": change("tests/test_flash_diff.py::test_one", status="RED"),
    "no test passed": change("tests/test_flash_diff.py::test_one", status="skipped"),
    "error both d=96 2048 bfloat16: RED": change("error both d=96 2048 bfloat16", status="RED"),
    "equal bits decode d=64: not checked": without("equal bits decode d=64"),
    "the stage correctness: error": change("correctness", status="error"),
    "the stage attention: did not end": without("attention"),
    "both d=128 32768: not measured": without("both d=128 32768"),
    "decode d=64 8192: packed/sdpa 0.9 ms, flash_diff 1.0 ms": change("decode d=64 8192 packed/sdpa", ms=0.9),
    "both d=128 2048: packed/sdpa 1.0 ms": change("both d=128 2048 packed/sdpa", ms=1.0),
    "both d=128 4096: flash_diff has no time": change("both d=128 4096 flash_diff", status="RED"),
    "both d=128 4096: no rival has a time": change("both d=128 4096 packed/sdpa", status="cannot run"),
    "the rows differ in their kernels": change("both d=128 4096 eager", kernels="others"),
    "the rows differ in their hardware": change("both d=128 4096 eager", hardware="another"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rule_refuses(suite, evidence, reason):
    rows = whole_run(evidence)
    assert evidence.refusals(rows) == [], "the rows are evidence before the change"
    REFUSED[reason](rows)
    assert any(text.startswith(reason) for text in evidence.refusals(rows)), evidence.refusals(rows)
    assert "`flash_diff` does not become the default of sm_90" in evidence.report(rows, suite.STAGES)


def test_rule_counts_no_rival_that_is_wrong(evidence):
    rows = whole_run(evidence)
    change("both d=64 2048 eager", status="RED", ms=0.1)(rows)
    assert evidence.refusals(rows) == []


def test_proven_needs_the_last_file_of_all_hardware(evidence, tmp_path):
    def write(name: str, **options) -> None:
        rows = whole_run(evidence, **options)
        (tmp_path / f"gpu_suite_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert evidence.proven(tmp_path) == {}
    write("b_2026-01-01", hardware="B", ours=3.0)
    assert evidence.proven(tmp_path) == {}
    write("b_2026-01-02", hardware="B")
    write("a_2026-01-03", hardware="A")
    assert evidence.proven(tmp_path) == {90: "gpu_suite_a_2026-01-03.jsonl"}
    write("b_2026-01-04", hardware="B", ours=3.0)
    assert evidence.proven(tmp_path) == {}, "slower on other hardware of the architecture"


def test_default_is_what_the_committed_results_show(evidence):
    assert evidence.proven() == flash_diff_blocks.PROVEN


def test_winners_are_the_fastest_right_candidates(evidence):
    def row(d: int, blocks: str, **figures) -> dict:
        table = {"90": {"dq": {str(d): blocks}}}
        return {"stage": "tuning", "status": "ok", "kernel": "dq", "d": d, "table": table, **figures}

    rows = [row(128, "a", ms=2.0), row(128, "b", ms=1.0), row(64, "c", ms=3.0), row(128, "d", compile_seconds=1)]
    rows += [row(128, "e", ms=0.1, status="RED"), row(128, "f", ms=0.1, stage="attention")]
    assert evidence.winning_table(rows) == {"90": {"dq": {"128": "b", "64": "c"}}}


def test_report_says_what_is_missing(suite, evidence):
    rows = whole_run(evidence)
    page = evidence.report(rows, suite.STAGES)
    assert "correct and faster than every rival that could run" in page and page.count("Not run.") == 5
    assert "cannot run: eager: out of memory" in page and "skipped: tests/test_flash_diff.py::test_two" in page
    change("correctness", status="error", reason="the end")(rows)
    assert "- error: correctness: the end" in evidence.report(rows, suite.STAGES)

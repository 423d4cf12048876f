# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`run_jobs` with jobs of the shell: their order, how many run at a time, and how they stop and resume."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from diff_transformer.reproduction.jobs import Job
from diff_transformer.reproduction.run import JobError, Stopped, run_jobs
from diff_transformer.training.whole_checkpoints import seal

ROOT = Path(__file__).parents[2]
UNTIL_STOPPED = "while :; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    monkeypatch.setattr("diff_transformer.reproduction.run._POLL_SECONDS", 0.01)


def job(name: str, body: str = "", needs: tuple[str, ...] = ()) -> Job:
    """A job that notes when it begins, ends or is stopped, and writes its file at the end."""
    script = f"""
        trap 'echo stopped {name} >> notes.txt; exit 143' TERM
        echo began {name} >> notes.txt
        {body}
        touch {name}
        echo ended {name} >> notes.txt
    """
    return Job(name, ("sh", "-c", script), Path(name), needs)


def until(note: str) -> str:
    return f"until grep -q '{note}' notes.txt; do sleep 0.02; done"


def notes(folder: Path) -> list[str]:
    return (folder / "notes.txt").read_text().splitlines()


def test_a_job_begins_when_the_jobs_that_it_needs_have_ended(tmp_path):
    """d needs nothing, so it begins beside a, which waits for it."""
    environment = "echo threads $OMP_NUM_THREADS offline $HF_HUB_OFFLINE"
    jobs = [job("a", f"{environment}; {until('began d')}"), job("b", "sleep 0.1", ("a",)), job("c", "", ("a", "b"))]
    run_jobs([*jobs, job("d")], tmp_path, processes=3, threads=1, minutes=1)
    found = notes(tmp_path)
    assert found.index("began b") > found.index("ended a") and found.index("began c") > found.index("ended b")
    assert (tmp_path / "logs/a.log").read_text() == "threads 1 offline 1\n"


def test_as_many_jobs_run_as_there_are_processes(tmp_path):
    run_jobs([job(name, "sleep 0.2") for name in "abcd"], tmp_path, processes=2, threads=None)
    running = most = 0
    for note in notes(tmp_path):
        running += 1 if note.startswith("began") else -1
        most = max(most, running)
    assert most == 2


def test_finished_jobs_are_not_run_again(tmp_path):
    (tmp_path / "a").touch()
    for _ in range(2):
        run_jobs([job("a"), job("b", needs=("a",))], tmp_path, 1, 1)
    assert notes(tmp_path) == ["began b", "ended b"]


def test_an_error_stops_the_other_jobs_and_shows_the_end_of_the_log(tmp_path):
    bad = job("bad", f"{until('began slow')}; echo out of memory; exit 1")
    with pytest.raises(JobError, match=r"bad ended with exit status 1. The end of .*bad.log:\n(.*\n)*out of memory\n"):
        run_jobs([bad, job("slow", UNTIL_STOPPED), job("next", "", ("bad",))], tmp_path, 2, 1, minutes=1)
    assert sorted(notes(tmp_path)) == ["began bad", "began slow", "stopped slow"]


def test_a_job_that_ends_without_its_file_is_an_error(tmp_path):
    with pytest.raises(JobError, match="a ended with exit status 0 without model/config.json"):
        run_jobs([Job("a", ("true",), Path("model/config.json"))], tmp_path, 1, 1)


@pytest.mark.slow
def test_running_jobs_stop_after_the_minutes_and_the_same_call_resumes(tmp_path):
    last = job("c", needs=("b",))
    with pytest.raises(Stopped, match="Stopped after 0.03 minutes"):
        run_jobs([job("a"), job("b", UNTIL_STOPPED, ("a",)), last], tmp_path, 1, 1, minutes=0.03)
    assert notes(tmp_path) == ["began a", "ended a", "began b", "stopped b"]
    run_jobs([job("a"), job("b", "", ("a",)), last], tmp_path, 1, 1, minutes=1)
    assert notes(tmp_path)[4:] == ["began b", "ended b", "began c", "ended c"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_jobs(tmp_path, number):
    """The job sends it to the process that runs it: this one."""

    def not_caught(*_):
        raise AssertionError("the signal reached the handler of the caller")

    before = signal.signal(number, not_caught)
    try:
        with pytest.raises(Stopped, match="Stopped by a signal"):
            run_jobs([job("a", f"kill -{number} $PPID; {UNTIL_STOPPED}")], tmp_path, 1, 1, minutes=1)
        assert signal.getsignal(number) is not_caught, "the caller's handler was not restored"
    finally:
        signal.signal(number, before)
    assert notes(tmp_path) == ["began a", "stopped a"]


def test_a_training_resumes_from_its_last_whole_checkpoint(tmp_path):
    training = Job("train", ("stage", "--config", "x"), Path("run/model"), output_dir=Path("run"))
    assert training.resumed(tmp_path) == ["stage", "--config", "x"]
    (tmp_path / "run/checkpoint-7").mkdir(parents=True)
    seal(tmp_path / "run/checkpoint-7")
    (tmp_path / "run/checkpoint-9").mkdir()  # incomplete: the stage sets it aside
    assert training.resumed(tmp_path) == ["stage", "--config", "x", "--resume_from_checkpoint", "last"]


def test_a_training_with_incomplete_checkpoints_only_starts_over(tmp_path):
    training = Job("train", ("stage", "--config", "x"), Path("run/model"), output_dir=Path("run"))
    (tmp_path / "run/checkpoint-9").mkdir(parents=True)
    assert training.resumed(tmp_path) == ["stage", "--config", "x"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["faulty-checkpoint-9"]


@pytest.mark.process
def test_a_folder_is_in_use_until_the_jobs_of_a_killed_run_have_ended(tmp_path):
    code = """
import sys
from pathlib import Path
from diff_transformer.reproduction.jobs import Job
from diff_transformer.reproduction.run import run_jobs
run_jobs([Job("a", ("sh", "-c", sys.argv[1]), Path("a"))], Path("."), 1, 1)
"""
    command = [sys.executable, "-c", code, job("a", until("may end")).command[-1]]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not (tmp_path / "notes.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    with pytest.raises(JobError, match="is in use by another run, or by the jobs of a run that was killed"):
        run_jobs([job("b")], tmp_path, 1, 1)
    assert notes(tmp_path) == ["began a"]
    (tmp_path / "notes.txt").write_text("may end\n")
    while time.monotonic() < deadline:
        with suppress(JobError):  # until the job has ended
            run_jobs([job("a"), job("b")], tmp_path, 1, 1)
            break
        time.sleep(0.02)
    assert notes(tmp_path) == ["may end", "ended a", "began b", "ended b"]

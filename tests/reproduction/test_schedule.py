# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Pieces as real processes: in order, so many at a time, stopped and gone on with."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from diff_transformer.reproduction.pieces import Piece
from diff_transformer.reproduction.schedule import PieceError, Stopped, run_pieces
from diff_transformer.training.whole_checkpoints import seal

ROOT = Path(__file__).parents[2]
# A piece: says when it began and ended, and what it was told; writes its file at the end
JOB = """
import os, pathlib, signal, sys, time

name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

def note(what):
    with open("notes.txt", "a") as file:
        file.write(f"{what} {name}\\n")

def stop(*_):
    note("stopped")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
note("began")
print("threads", os.environ.get("OMP_NUM_THREADS"), "offline", os.environ["HF_HUB_OFFLINE"])
time.sleep(seconds)
if status:
    sys.exit(f"{name} is out of luck")
pathlib.Path(name).touch()
note("ended")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def job(name: str, seconds: float = 0.0, status: int = 0, needs: tuple[str, ...] = ()) -> Piece:
    return Piece(name, "job", (name, str(seconds), str(status)), Path(name), needs)


def notes(folder: Path) -> list[str]:
    return (folder / "notes.txt").read_text().splitlines()


def test_a_piece_begins_when_what_it_needs_has_ended(folder):
    pieces = [job("a", 0.5), job("b", 0.1, needs=("a",)), job("c", needs=("a", "b")), job("d")]
    run_pieces(pieces, folder, processes=3, threads=1)
    found = notes(folder)
    assert found.index("began b") > found.index("ended a") and found.index("began c") > found.index("ended b")
    assert found.index("began d") < found.index("ended a"), "it needs nothing and did not begin beside the first"
    assert (folder / "logs/a.log").read_text() == "threads 1 offline 1\n"


def test_so_many_at_a_time(folder):
    run_pieces([job(name, 0.3) for name in "abcd"], folder, processes=2, threads=None)
    running = most = 0
    for note in notes(folder):
        running += 1 if note.startswith("began") else -1
        most = max(most, running)
    assert most == 2


def test_what_is_done_is_not_run_again(folder):
    pieces = [job("a"), job("b", needs=("a",))]
    (folder / "a").touch()
    run_pieces(pieces, folder, 1, 1)
    run_pieces(pieces, folder, 1, 1)
    assert notes(folder) == ["began b", "ended b"]


def test_an_error_stops_the_others_and_shows_the_end_of_the_log(folder):
    pieces = [job("bad", 2, status=1), job("slow", 60), job("next", needs=("bad",))]
    with pytest.raises(PieceError, match=r"bad ended with 1. The end of .*bad.log:\n(.*\n)*bad is out of luck\n"):
        run_pieces(pieces, folder, 2, 1)
    assert sorted(notes(folder)) == ["began bad", "began slow", "stopped slow"]


def test_a_piece_that_leaves_nothing_is_an_error(folder):
    piece = Piece("a", "job", ("other", "0", "0"), Path("a"))
    with pytest.raises(PieceError, match="a ended with 0"):
        run_pieces([piece], folder, 1, 1)


def test_the_minutes_end_what_runs_and_the_same_call_goes_on(folder):
    pieces = [job("a"), job("b", 60, needs=("a",)), job("c", needs=("b",))]
    with pytest.raises(Stopped, match="Stopped after 0.07 minutes"):
        run_pieces(pieces, folder, 1, 1, minutes=0.07)
    assert notes(folder)[-1] == "stopped b" and not (folder / "c").exists()
    run_pieces([job("a"), job("b", needs=("a",)), pieces[2]], folder, 1, 1, minutes=1)
    assert notes(folder)[-4:] == ["began b", "ended b", "began c", "ended c"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on(folder, number):
    code = """
import pathlib
from diff_transformer.reproduction.pieces import Piece
from diff_transformer.reproduction.schedule import Stopped, run_pieces
try:
    run_pieces([Piece("a", "job", ("a", "60", "0"), pathlib.Path("a"))], pathlib.Path("."), 1, 1)
except Stopped as stopped:
    print(stopped)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "notes.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "Stopped by a signal\n"
    assert notes(folder) == ["began a", "stopped a"]


def test_a_training_goes_on_from_its_checkpoint(tmp_path):
    piece = Piece("train", "stage", ("--config", "x"), Path("run/model"), output_dir=Path("run"))
    assert piece.command(tmp_path)[1:] == ["-m", "stage", "--config", "x"]
    (tmp_path / "run/checkpoint-7").mkdir(parents=True)
    seal(tmp_path / "run/checkpoint-7")
    (tmp_path / "run/checkpoint-9").mkdir()  # cut off: the stage leaves it aside
    assert piece.command(tmp_path)[-2:] == ["--resume_from_checkpoint", "last"]


def test_a_training_with_a_checkpoint_that_was_cut_off_begins_again(tmp_path):
    piece = Piece("train", "stage", ("--config", "x"), Path("run/model"), output_dir=Path("run"))
    (tmp_path / "run/checkpoint-9").mkdir(parents=True)
    assert piece.command(tmp_path)[1:] == ["-m", "stage", "--config", "x"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["faulty-checkpoint-9"]


def test_a_folder_in_use_is_refused_also_by_pieces_that_outlive_their_parent(folder):
    code = """
import pathlib
from diff_transformer.reproduction.pieces import Piece
from diff_transformer.reproduction.schedule import run_pieces
run_pieces([Piece("a", "job", ("a", "4", "0"), pathlib.Path("a"))], pathlib.Path("."), 1, 1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not (folder / "notes.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    with pytest.raises(PieceError, match="is in use, by another run or by pieces of one that was killed"):
        run_pieces([job("b")], folder, 1, 1)
    assert not (folder / "b").exists()
    while time.monotonic() < deadline:
        with suppress(PieceError):  # until it has ended
            run_pieces([job("a"), job("b")], folder, 1, 1)
            break
        time.sleep(0.2)
    assert notes(folder) == ["began a", "ended a", "began b", "ended b"]

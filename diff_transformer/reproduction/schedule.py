# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Runs the pieces of a study, several at a time, each a process of its own; what is finished is not run again."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from .pieces import Piece

_POLL_SECONDS = 0.2
_STOP_SECONDS = 60  # for the checkpoint of a training that is told to stop
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class PieceError(RuntimeError):
    """A piece ended with an error."""


class Stopped(Exception):
    """The study was told to stop, or its minutes are over, before all was done."""


def run_pieces(
    pieces: Sequence[Piece], folder: Path, processes: int, threads: int | None, minutes: float | None = None
) -> None:
    """Runs those that are not done yet.

    Args:
        processes: How many at the same time, with `threads` CPU threads each (all of the machine's if not given).
        minutes: When they are over, running trainings save a checkpoint and stop.

    Raises:
        PieceError: One of them failed; the others that ran were stopped.
        Stopped: SIGTERM, Ctrl-C or the end of the minutes; the same call goes on.
    """
    with _alone(folder) as lock, _stop_signals() as received:
        waiting = [piece for piece in pieces if not (folder / piece.done).exists()]
        missing, running = {piece.name for piece in waiting}, dict[str, tuple[Piece, subprocess.Popen]]()
        end, shown = None if minutes is None else time.monotonic() + 60 * minutes, ""
        bar = tqdm(total=len(pieces), initial=len(pieces) - len(waiting), desc="Pieces", unit="piece")
        try:
            while waiting or running:
                if received or (end is not None and time.monotonic() > end):
                    raise Stopped(f"Stopped {'by a signal' if received else f'after {minutes:g} minutes'}")
                for piece in [piece for piece in waiting if missing.isdisjoint(piece.needs)]:
                    if len(running) < processes:
                        running[piece.name] = piece, _start(piece, folder, threads, lock)
                        waiting.remove(piece)
                if shown != (shown := ", ".join(running)):
                    bar.set_postfix_str(shown)
                time.sleep(_POLL_SECONDS)
                for name, (piece, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        _check(piece, process, folder)
                        missing.remove(name)
                        bar.update()
        finally:
            bar.close()
            _stop([process for _, process in running.values()])


def _start(piece: Piece, folder: Path, threads: int | None, lock: int) -> subprocess.Popen:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str((folder / "cache").absolute())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    # One GPU: of several Trainer would use all, with a larger batch
    environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # glibc would return the large buffers to the system after every step: a quarter of the time
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
    log = folder / piece.log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        # In a session of its own, lest a Ctrl-C reach it beside our SIGTERM
        return subprocess.Popen(
            piece.command(folder),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _check(piece: Piece, process: subprocess.Popen, folder: Path) -> None:
    if process.returncode == 0 and (folder / piece.done).exists():
        return
    if process.returncode in _STOPPED:
        raise Stopped(f"{piece.name} was stopped")
    log = (folder / piece.log).read_text(encoding="utf-8", errors="replace")
    raise PieceError(
        f"{piece.name} ended with {process.returncode}. The end of {folder / piece.log}:\n{log[-2000:].strip()}\n"
        "What is done is kept: the same command goes on."
    )


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """A lock on the folder, which the pieces inherit: they may outlive a process that was killed."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PieceError(
                f"{folder} is in use, by another run or by pieces of one that was killed. Wait for them or end them "
                f"(`fuser {folder}/.lock` finds them), then give the same command."
            ) from None
        yield lock.fileno()


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals to stop that came."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["PieceError", "Stopped", "run_pieces"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What happens to a run that is stopped, killed or damaged: real processes of the pretraining stage."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diff_transformer.training import pretrain
from diff_transformer.training.whole_checkpoints import FILES, last_whole_checkpoint

STEPS = 8
ARGUMENTS = ["--smoke", "--eval_strategy", "no", "--save_steps", "2"]
RESUME = ["--resume_from_checkpoint", "last"]
TIMEOUT = 180
pytestmark = [pytest.mark.process, pytest.mark.slow]


def pretrain_in(folder: Path, argv: list[str]) -> None:
    """What the processes of `start` run; `folder.log` has their output."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import datasets
    import torch

    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = folder.parent / "datasets_cache"
    pretrain.main([*ARGUMENTS, "--output_dir", str(folder), *argv])


@pytest.fixture
def start() -> Iterator[Callable]:
    """Starts the stage in a process of its own. One server imports everything, for all tests, and forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diff_transformer.training.pretrain"])
    processes = []

    def start(folder: Path, *argv: str) -> multiprocessing.Process:
        process = context.Process(target=pretrain_in, args=(folder, list(argv)))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def log_of(folder: Path) -> str:
    log = folder.with_suffix(".log")
    return log.read_text(errors="replace") if log.exists() else ""


def wait_for(what: Callable[[], bool], folder: Path, is_running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert is_running() and time.monotonic() < deadline, f"it did not come so far:\n{log_of(folder)[-4000:]}"
        time.sleep(0.02)


def run_here(folder: Path, *argv: str) -> None:
    pretrain.main([*ARGUMENTS, "--output_dir", str(folder), "--max_steps", str(STEPS), *argv])


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def losses(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_killed_run_with_a_truncated_checkpoint_resumes_bit_for_bit(start, tmp_path):
    """kill -9 in the middle of an epoch, the last checkpoint damaged on top: the one before it is used."""
    uninterrupted, folder = tmp_path / "uninterrupted", tmp_path / "killed"
    run_here(uninterrupted)
    process = start(folder, "--max_steps", str(STEPS))
    wait_for((folder / "checkpoint-4" / FILES).exists, folder, process.is_alive)
    os.killpg(process.pid, signal.SIGKILL)
    process.join(TIMEOUT)
    last, _ = last_whole_checkpoint(folder)
    assert int(last.name.partition("-")[2]) < STEPS, "it was over before it was killed: the test shows nothing"
    file = last / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    run_here(folder, *RESUME)
    assert (folder / f"faulty-{last.name}" / "model.safetensors").is_file()
    assert weights(folder) == weights(uninterrupted)
    assert losses(folder) == losses(uninterrupted)

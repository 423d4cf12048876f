# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What happens to a run that is stopped, killed or damaged: real processes of the pretraining stage."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import diff_transformer
from diff_transformer.training import pretrain
from diff_transformer.training.whole_checkpoints import FILES, fault, last_whole_checkpoint

STEPS = 12
COMMAND = ["-m", "diff_transformer.training.pretrain", "--smoke", "--eval_strategy", "no", "--save_steps", "2"]
RESUME = ["--resume_from_checkpoint", "last"]
TIMEOUT = 180


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def start(folder: Path, *argv: str, launcher: Iterable[str] = (), **kwargs) -> subprocess.Popen:
    environment = {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        **os.environ,
        "PYTHONPATH": str(Path(diff_transformer.__file__).parents[1]),
        "HF_DATASETS_CACHE": str(folder.parent / "datasets_cache"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *launcher, *COMMAND, "--output_dir", str(folder), *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **kwargs,
    )


def wait_for(file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{file} did not appear:\n{process.communicate()[1][-4000:]}")
        time.sleep(0.02)


def wait_for_step(step: int, process: subprocess.Popen) -> None:
    """Reads the progress bar."""
    seen = ""
    while not any(int(done) >= step for done in re.findall(r"(\d+)/100000 ", seen)):
        piece = process.stderr.read(64)
        assert piece, f"the training did not begin:\n{seen[-4000:]}"
        seen += piece


def run_here(folder: Path, *argv: str) -> None:
    pretrain.main([*COMMAND[2:], "--output_dir", str(folder), "--max_steps", str(STEPS), *argv])


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def losses(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.fixture
def uninterrupted(tmp_path) -> Path:
    run_here(tmp_path / "uninterrupted")
    return tmp_path / "uninterrupted"


def test_a_killed_run_with_a_truncated_checkpoint_continues_bit_for_bit(uninterrupted, tmp_path):
    """kill -9 in the middle of an epoch, the last checkpoint damaged on top: the one before it is used."""
    folder = tmp_path / "killed"
    process = start(folder, "--max_steps", str(STEPS))
    wait_for(folder / "checkpoint-6" / FILES, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    last, _ = last_whole_checkpoint(folder)
    assert int(last.name.partition("-")[2]) < STEPS, "it was over before it was killed: the test shows nothing"
    file = last / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    run_here(folder, *RESUME)
    assert (folder / f"faulty-{last.name}" / "model.safetensors").is_file()
    assert weights(folder) == weights(uninterrupted)
    assert losses(folder) == losses(uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path):
    folder = tmp_path / "run"

    def deliver_interrupts():  # a shell starts jobs in the background with Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    arguments = ("--max_steps", "100000", "--save_steps", "100000", "--lr_scheduler_type", "constant")
    process = start(folder, *arguments, preexec_fn=deliver_interrupts)
    wait_for_step(3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number
    assert "--resume_from_checkpoint last" in output and signal.Signals(number).name in output
    (checkpoint,) = folder.glob("checkpoint-*")
    step = int(checkpoint.name.partition("-")[2])
    assert fault(checkpoint) is None and f"Stopped after step {step} of 100,000" in output
    assert not (folder / "model").exists(), "a run that was stopped has no final model"
    assert (folder / "training.png").is_file()

    # the same command, in this process
    pretrain.main([*COMMAND[2:], "--output_dir", str(folder), *arguments, "--max_steps", str(step + 2), *RESUME])
    assert (folder / "model" / "model.safetensors").is_file()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step + 2


def test_two_processes_stop_after_the_same_step(tmp_path):
    """The launcher is told to end, as a cluster's scheduler does it, and passes it on."""
    folder = tmp_path / "run"
    recipe = str(Path(__file__).parents[2] / "recipes" / "accelerate" / "ddp.yaml")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", recipe, "--num_processes", "2"]
    launcher += ["--mixed_precision", "no", "--main_process_port", "0"]
    process = start(folder, "--max_steps", "100000", "--save_steps", "100000", launcher=launcher)
    wait_for_step(3, process)
    process.terminate()
    output, errors = process.communicate(timeout=TIMEOUT)
    checkpoint, faulty = last_whole_checkpoint(folder)
    assert checkpoint is not None and not faulty, errors[-4000:]
    assert "--resume_from_checkpoint last" in output
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in checkpoint.iterdir()}


def test_a_full_disk_loses_no_checkpoint(tmp_path):
    """Files may not grow beyond 100 KB after the second checkpoint; a checkpoint's weights are 480 KB."""
    folder = tmp_path / "run"
    process = start(folder, "--max_steps", "100000", "--save_total_limit", "1", "--save_steps", "40")
    wait_for(folder / "checkpoint-40" / FILES, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode not in (0, None)
    whole, faulty = last_whole_checkpoint(folder)
    assert whole is not None and not faulty, f"{faulty}\n{errors[-3000:]}"
    assert "could not be saved" in errors and "--resume_from_checkpoint last" in errors

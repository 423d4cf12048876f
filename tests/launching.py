# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Starts the processes of distributed tests, and leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import diff_transformer

TIMEOUT = 240  # seconds; a scenario takes about 20 on an idle core


def launch(module: str, *arguments: str, timeout: float = TIMEOUT, **environment: str) -> None:
    """Runs `python -m module arguments`, which starts other processes, on the CPU with one thread each.

    Fails the test with the end of the output if it fails, and ends every process of it if it does not end in time.
    """
    roots = [str(Path(diff_transformer.__file__).parents[1]), str(Path(__file__).parent)]
    paths = [*roots, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env | environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher then ends its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        pytest.fail(f"python -m {module} {' '.join(arguments)} failed:\n{output[-6000:]}")

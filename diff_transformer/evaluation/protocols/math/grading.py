# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Grading in separate processes, because an answer can keep SymPy busy forever or crash it.

The processes run `answers.py` as a script, which imports SymPy but neither torch nor this package. The kernel enforces
the limit of processor time, even inside C code and whatever the number of processes.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from . import answers

RIGHT, WRONG, TIMED_OUT, CRASHED = "right", "wrong", "timed out", "crashed"

TIME_LIMIT = 10.0  # seconds of processor time per answer
_MAX_PROCESSES = 16  # each takes a second to start, and grades most answers in milliseconds
_SCRIPT = answers.__file__


def grade(
    pairs: Iterable[tuple[str, str | None]], processes: int | None = None, time_limit: float = TIME_LIMIT
) -> list[str]:
    """RIGHT, WRONG, TIMED_OUT or CRASHED for each pair of a gold answer and an answer; no answer (None) is wrong.

    `processes` is by default one per available processor, up to 16; `time_limit` is in seconds of processor time.

    Raises RuntimeError if the processes do not start.
    """
    pairs = list(pairs)
    processes = processes or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    answered = [i for i, (_, answer) in enumerate(pairs) if answer is not None]
    shares = [answered[i::processes] for i in range(processes)]
    outcomes = [WRONG] * len(pairs)
    with ThreadPoolExecutor(processes) as threads:
        graded = threads.map(lambda share: _grade([pairs[i] for i in share], time_limit), shares)
        for share, found in zip(shares, graded, strict=True):
            for i, outcome in zip(share, found, strict=True):
                outcomes[i] = outcome
    return outcomes


def _grade(pairs: list[tuple[str, str | None]], time_limit: float) -> list[str]:
    """The outcomes of answers in one process after another: each takes the answers after that which ended the last."""
    outcomes: list[str] = []
    while len(outcomes) < len(pairs):
        requests = "".join(json.dumps(pair) + "\n" for pair in pairs[len(outcomes) :])
        command = [sys.executable, _SCRIPT, str(time_limit)]
        process = subprocess.run(command, input=requests, stdout=subprocess.PIPE, text=True)
        ready, *replies = process.stdout.splitlines() or [""]
        if not ready:
            raise RuntimeError(f"A grading process did not start: its exit code is {process.returncode}.")
        if process.returncode == -signal.SIGINT:
            raise KeyboardInterrupt
        outcomes += [RIGHT if json.loads(reply) else WRONG for reply in replies]
        if len(outcomes) < len(pairs):
            outcomes.append(TIMED_OUT if process.returncode == -signal.SIGPROF else CRASHED)
    return outcomes

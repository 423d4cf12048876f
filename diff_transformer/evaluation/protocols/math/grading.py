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
from queue import SimpleQueue

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
    processes = processes or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    graders = [_Grader(time_limit) for _ in range(processes)]
    idle: SimpleQueue[_Grader] = SimpleQueue()
    for grader in graders:
        idle.put(grader)

    def grade_one(pair: tuple[str, str | None]) -> str:
        gold, answer = pair
        grader = idle.get()
        try:
            return WRONG if answer is None else grader.grade(gold, answer)
        finally:
            idle.put(grader)

    try:
        with ThreadPoolExecutor(processes) as threads:
            return list(threads.map(grade_one, pairs))
    finally:
        for grader in graders:
            grader.stop()


class _Grader:
    """A process that grades, and is replaced if it was killed."""

    def __init__(self, time_limit: float):
        self.time_limit = time_limit
        self.process: subprocess.Popen[str] | None = None

    def grade(self, gold: str, answer: str) -> str:
        if self.process is None:
            command = [sys.executable, _SCRIPT, str(self.time_limit)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self._reply() is None:
                raise RuntimeError(f"A grading process did not start: its exit code is {self.stop()}.")
        correct = self._reply(json.dumps([gold, answer]) + "\n")
        if correct is None:
            return TIMED_OUT if self.stop() == -signal.SIGPROF else CRASHED
        return RIGHT if correct else WRONG

    def _reply(self, request: str = "") -> bool | None:
        """None if the process has ended."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def stop(self) -> int | None:
        """Ends the process. Returns its exit code; negative for the signal that ended it."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.communicate()  # ends its input, and waits
        return process.returncode

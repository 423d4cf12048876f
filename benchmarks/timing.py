# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Time and peak memory, for all benchmarks: clocks, contestants that take turns, and separate processes."""

import functools
import gc
import math
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import first_line

MIN_ROUNDS = 3


class Wrong(Exception):
    """The results of a contestant are wrong, so there is nothing to time."""


class Step(NamedTuple):
    """`timed(set_up())`, of which only `timed` counts."""

    timed: Callable[[Any], object]
    set_up: Callable[[], Any] = lambda: None


# --------------------------------------------------------------------------- clocks: the milliseconds of a step


def process_time(step: Step, device: str) -> float:
    """CPU time of this process, which another program on the machine does not lengthen."""
    return _elapsed(step, time.process_time)


def wall_time(step: Step, device: str) -> float:
    """Including Python, until the device is idle again."""
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    return _elapsed(step, lambda: synchronize() or time.perf_counter())


def _elapsed(step: Step, now: Callable[[], float]) -> float:
    prepared = step.set_up()
    start = now()
    step.timed(prepared)
    return 1000 * (now() - start)


@functools.cache
def _larger_than_any_cache(device: str) -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device=device)


def device_time(step: Step, device: str) -> float:
    """Time of the GPU without Python: the L2 cache is flushed, and the launches queue up behind a short sleep."""
    if torch.device(device).type != "cuda":
        return wall_time(step, device)
    prepared = step.set_up()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _larger_than_any_cache(device).zero_()
    torch.cuda._sleep(2_000_000)  # clock cycles, about a millisecond
    start.record()
    step.timed(prepared)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def take_turns(
    contestants: Mapping[str, Callable[[], Step]],
    clock: Callable[[Step, str], float],
    device: str,
    rounds: int,
    seconds: float = math.inf,
) -> dict[str, dict]:
    """Prepares every contestant and warms it up, then times all of them in turns.

    There are at most `rounds` rounds. After `MIN_ROUNDS` they end once they have taken `seconds`. Returns for every
    contestant its `status`: "ok", with the median `ms`, the `peak` memory of a run in bytes and the `rounds`; "RED",
    if it raised `Wrong`; "cannot run", if it raised anything else. The last two have a `reason`. Only an unusable
    device ends the benchmark.
    """
    found: dict[str, dict] = {}
    ready: dict[str, Step] = {}
    a_round = 0.0
    for name, prepare in contestants.items():
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                step = prepare()
                clock(step, device)
                peak, ms = peak_memory(functools.partial(clock, step, device), device)
            except Wrong as error:
                found[name] = {"status": "RED", "reason": str(error)}
            except Exception as error:
                found[name] = {"status": "cannot run", "reason": first_line(error, noted)}
            else:
                found[name] = {"status": "ok", "peak": peak}
                ready[name] = step
                a_round += ms / 1000
                continue
        gc.collect()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()  # raises if the device is lost
            torch.cuda.empty_cache()
    if math.isfinite(seconds) and ready:
        rounds = min(rounds, max(MIN_ROUNDS, int(seconds / a_round)))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, step in ready.items():
            times[name].append(clock(step, device))
    for name, measured in times.items():
        found[name] |= {"ms": statistics.median(measured), "rounds": rounds}
    return found


# ------------------------------------------------------------------------------------------------- memory, processes


def resident_peak() -> int:
    """The largest resident memory of this process, in bytes, since it began or since it was reset."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak_memory(run: Callable[[], Any], device: str) -> tuple[int, Any]:
    """Peak memory in bytes during `run()`, above what was held before, and what it returned.

    On CUDA it is that of torch's allocator, on a CPU the resident memory of the process as the kernel counts it.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
        held, peak = resident_peak(), resident_peak
    result = run()
    return peak() - held, result


def measure_apart(module: str, *arguments) -> str:
    """The last line that `python -m MODULE --measure ARGUMENTS` prints in a separate process."""
    command = [sys.executable, "-m", module, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]

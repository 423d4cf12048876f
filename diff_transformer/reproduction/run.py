# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Trains the runs of a study in a pool of processes. Finished runs are not trained again."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from traceback import format_exception

from tqdm.auto import tqdm

from ..extras import skip_unused_deepspeed
from ..training.callbacks import StopOnSignal
from .findings import chosen_learning_rates
from .results import RESULTS, Result, RunId, load
from .study import Study

_START_METHOD = "spawn"  # a forked process cannot use CUDA
_STOP = StopOnSignal()  # of a worker: a signal that comes too late for one run stops the next one
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunError(RuntimeError):
    """A run failed, or the folder is in use."""


class Stopped(Exception):
    """The study was stopped before all runs were done: by a signal, or because its minutes were over."""


def run_study(study: Study, folder: Path, minutes: float | None = None) -> None:
    """Trains what is missing in the folder's results.

    After the minutes, and after SIGTERM, SIGHUP or Ctrl-C, running trainings save a checkpoint, and Stopped is raised;
    the same call resumes. Raises RunError if a run failed, after those beside it were stopped.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    total = sum(x.runs for x in study.experiments.values())
    os.environ.update(_environment(study.threads))
    pool = ProcessPoolExecutor(study.processes, get_context(_START_METHOD), _start_worker)
    with _locked(folder), _stop_signals(), tqdm(total=total, desc="Runs", unit="run") as bar:
        try:
            for tuning in (True, False):
                results = load(folder / RESULTS)
                bar.update(len(results) - bar.n)
                done = {x.run for x in results}
                missing = [run for run in planned_runs(study, results, tuning) if run not in done]
                futures = {pool.submit(_train, folder, run): run for run in missing}
                for future in as_completed(futures, None if end is None else end - time.monotonic()):
                    if error := future.exception():
                        raise RunError(
                            f"{' '.join(map(str, futures[future]))} failed, or its process was killed. Finished runs "
                            f"are kept; run the same command to resume.\n{''.join(format_exception(error))}"
                        ) from error
                    bar.update()
        except TimeoutError:
            _stop_workers()
            raise Stopped(f"Stopped after {minutes:g} minutes") from None
        except BaseException:
            _stop_workers()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def planned_runs(study: Study, results: Sequence[Result], tuning: bool) -> list[RunId]:
    """Those that choose learning rates, or the others; the latter without experiments whose rates are not chosen yet.

    They are ordered by seeds: a study that is stopped early has whole seeds.
    """
    by_seed: list[tuple[int, RunId]] = []
    for name, x in study.experiments.items():
        if tuning:
            rates = {arm: x.learning_rates for arm in x.arms if x.tunes}
        else:
            rates = {arm: [rate] for arm, rate in chosen_learning_rates(x, name, results).items()}
        for i, seed in enumerate(x.tuning_seeds if tuning else x.seeds):
            by_seed += [(i, RunId(name, arm, seed, rate, tuning)) for arm in rates for rate in rates[arm]]
    return [run for _, run in sorted(by_seed, key=lambda pair: pair[0])]


def _train(folder: Path, run: RunId) -> None:
    from .train import train_run  # accelerate

    try:
        train_run(folder, run, _STOP)
    except SystemExit as stopped:  # by a signal, after a checkpoint; the pool would keep the process
        os._exit(stopped.code)  # type: ignore[arg-type]


def _start_worker() -> None:
    """The first process decides what a signal to all of them means; when it is killed, the others end."""
    skip_unused_deepspeed()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _stop_workers() -> None:
    for process in active_children():
        process.terminate()


def _environment(threads: int | None) -> dict[str, str]:
    """What the workers inherit."""
    return {
        # Trainer would use every visible GPU, with a larger batch
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        # Otherwise glibc returns the large buffers to the system after every step, which takes a quarter of the time
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder} is in use by another call. Wait for it or end it, then try again.") from None
        yield


@contextmanager
def _stop_signals() -> Iterator[None]:
    """The first stop signal raises Stopped, and further ones are ignored."""

    def stop(number, frame):
        for other in _STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(f"Stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Callbacks of the stages: the progress bar, a warning when gradients spike, and a clean stop on a signal."""

import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import ProgressCallback, TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


class Bar(ProgressCallback):
    """Trainer's progress bar with the last log entry on it, instead of one line per entry."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or "loss" not in logs:
            return
        shown = {"loss": f"{logs['loss']:.3f}", "grad": f"{logs.get('grad_norm', float('nan')):.2f}"}
        if "tokens_per_second" in logs:
            shown["tokens/s"] = f"{logs['tokens_per_second']:,.0f}"
        if "mfu" in logs:
            shown["MFU"] = f"{logs['mfu']:.1%}"
        self.training_bar.set_postfix(shown)


class SpikeWarning(TrainerCallback):
    """Warns of a gradient norm above ten times the median of the last 50 entries of the log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        before = [entry["grad_norm"] for entry in state.log_history[-51:-1] if "grad_norm" in entry]
        norm = logs.get("grad_norm", 0.0)
        if state.is_world_process_zero and len(before) >= 10 and norm > 10 * statistics.median(before):
            logger.warning(f"Step {state.global_step}: the gradient norm spiked to {norm:.3g}.")


class StopOnSignal(TrainerCallback):
    """On SIGTERM or Ctrl-C: finish the step, save, stop. All processes of a run stop after the same step.

    A second Ctrl-C interrupts at once, without saving.
    """

    # A launcher forwards a Ctrl-C that the terminal has already sent to every process
    SAME_SIGNAL_SECONDS = 2.0

    def __init__(self):
        self.stopped_by = 0  # the signal, once all processes know of it; after the last step it is too late
        self._received, self._when = 0, 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        now = time.monotonic()
        if self._received and number == signal.SIGINT and now - self._when > self.SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        if not self._received:
            self._received, self._when = number, now
            print(f"\n{signal.Signals(number).name}: finishing the step, then saving a checkpoint", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            return  # only the model remains to be saved
        self.stopped_by = self._received
        if args.world_size > 1:  # the signal may reach the other processes a step later, or not at all
            received = torch.tensor(self._received, device=args.device)
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
            self.stopped_by = int(received)
        if self.stopped_by:
            control.should_save = control.should_training_stop = True

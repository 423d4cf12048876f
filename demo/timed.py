# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What both demos share: a training that ends in time, and a folder of results."""

import sys
import time
from pathlib import Path

from transformers import TrainerCallback

MARK = ".diff_transformer_demo"  # marks a folder that a demo may overwrite


class Clock(TrainerCallback):
    """Decays the learning rate and ends the training by the steps or by the time, whichever is further along.

    The time counts only when training falls behind. A run that finishes its steps in time follows the steps from start
    to end, so its result does not depend on how long the single steps took.
    """

    def __init__(self, steps: int, minutes: float):
        self.steps, self.seconds, self.start = steps, 60 * minutes, None

    def elapsed(self) -> float:
        return 0.0 if self.start is None else (time.monotonic() - self.start) / self.seconds

    def learning_rate(self, step: int) -> float:
        """Relative to its peak: warm-up over the first 5 % of the steps, and a linear decay to zero."""
        decay = 1.0 - max(step / self.steps, (self.elapsed() - 0.2) / 0.8)
        return min(1.0, (step + 1) / (0.05 * self.steps)) * max(0.0, decay)

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self.elapsed() >= 1.0


def claim(out: Path) -> None:
    """Makes the folder. Ends the process if it has files that no demo wrote."""
    if out.exists() and not (out.is_dir() and ((out / MARK).exists() or not any(out.iterdir()))):
        sys.exit(f"{out} exists and was not made by a demo, so it is not overwritten. Pass another folder as --out.")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A record of the data of every step: two runs on the same data write the same file."""

import hashlib
from pathlib import Path

import torch
from transformers import TrainerCallback

from ..folders import whole_file


class BatchRecord(TrainerCallback):
    """Writes a line for every optimizer step, a digest of its tokens and labels, in their order: the first process to
    `batches.txt`, each other to `batches_<rank>.txt`. A resumed run continues after the line of its checkpoint.
    """

    def __init__(self, output_dir: str | Path, process_index: int = 0):
        self.file = Path(output_dir) / (f"batches_{process_index}.txt" if process_index else "batches.txt")
        self._digest = hashlib.sha256()

    def see(self, inputs: dict[str, torch.Tensor]) -> None:
        """Adds a micro-batch to the step: `input_ids` and `labels`, (rows, tokens)."""
        for name in ("input_ids", "labels", "shift_labels"):  # the last one for sequences that processes share
            if name in inputs:
                self._digest.update(f"{name} {tuple(inputs[name].shape)} ".encode())
                self._digest.update(inputs[name].to("cpu", torch.int64).numpy().tobytes())

    def on_train_begin(self, args, state, control, **kwargs):
        self._digest = hashlib.sha256()  # an earlier run may have stopped within a step
        lines = self.file.read_text().splitlines() if state.global_step and self.file.exists() else []
        if len(lines) < state.global_step:
            raise ValueError(
                f"{self.file} has {len(lines)} steps, but the checkpoint is of step {state.global_step}. Resume "
                "without --record_batches, or start again in another folder."
            )
        with whole_file(self.file) as file:
            file.write_text("".join(f"{line}\n" for line in lines[: state.global_step]))

    def on_step_end(self, args, state, control, **kwargs):
        with self.file.open("a") as file:
            file.write(f"{self._digest.hexdigest()[:32]}\n")
        self._digest = hashlib.sha256()

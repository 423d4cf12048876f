# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The record of a run's batches: equal for runs on the same data, with any model, resumed or not."""

import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.training.callbacks import BatchRecord
from diff_transformer.training.trainer import RunTrainer

STEPS = 5


@pytest.fixture
def rows():
    ids = torch.randint(0, 199, (14, 12))  # an epoch ends in the middle of the steps
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def record(tiny_config, rows, tmp_path, training_arguments):
    """A function that trains, and returns the lines that the run wrote."""

    def train(name: str, resume=None, max_steps=STEPS) -> list[str]:
        model = DiffTransformerForCausalLM(tiny_config(num_hidden_layers=1))
        kwargs = {"output_dir": str(tmp_path / name), "max_steps": max_steps, "record_batches": True}
        RunTrainer(model=model, args=training_arguments(**kwargs), train_dataset=rows).train(
            resume_from_checkpoint=None if resume is None else str(tmp_path / name / f"checkpoint-{resume}")
        )
        return (tmp_path / name / "batches.txt").read_text().splitlines()

    return train


@pytest.mark.slow
def test_resumed_record_equals_the_uninterrupted_one(record, tmp_path):
    """Although the run had gone beyond the checkpoint. A step is a line, not a micro-batch."""
    lines = record("whole")
    assert len(lines) == STEPS
    assert record("stopped", max_steps=3) == lines[:3]
    assert record("stopped", resume=2) == lines
    file = tmp_path / "stopped" / "batches.txt"
    for kept in (1, None):
        file.write_text(f"{lines[0]}\n") if kept else file.unlink()
        with pytest.raises(ValueError, match=f"has {kept or 0} steps, but the checkpoint is of step 2"):
            record("stopped", resume=2)


def test_digest_depends_on_all_that_is_seen_in_a_step(tmp_path):
    state = type("State", (), {"global_step": 0})
    one, two = ({name: torch.full((2, 3), value) for name in ("input_ids", "labels")} for value in (1, 2))
    shared = {"input_ids": one["input_ids"], "shift_labels": one["labels"]}  # of sequences that processes share
    steps = {
        "as it is": [one, two],
        "another order": [two, one],
        "other tokens": [one, two | {"input_ids": one["input_ids"]}],
        "other labels": [one, two | {"labels": one["labels"]}],
        "shared labels": [one, shared],
        "other shared labels": [one, shared | {"shift_labels": two["labels"]}],
    }
    lines = []
    for name, seen in [*steps.items(), ("after an unfinished step", [one, two])]:
        record = BatchRecord(tmp_path / name)
        if len(lines) == len(steps):
            record.see(two)
        record.on_train_begin(None, state, None)
        for batch in seen:
            record.see(batch)
        record.on_step_end(None, state, None)
        lines.append(record.file.read_text())
    assert len(set(lines)) == len(steps) and lines[-1] == lines[0]
    assert record.file.name == "batches.txt" and BatchRecord(tmp_path, 1).file.name == "batches_1.txt"

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The record of a run's batches: equal for runs on the same data, with any model, resumed or not."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.training import pretrain
from diff_transformer.training.architectures import transformer_twin
from diff_transformer.training.batch_record import BatchRecord
from diff_transformer.training.trainer import RunTrainer

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.fixture
def rows():
    ids = torch.randint(0, 199, (14, 12))  # an epoch ends in the middle of the steps
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def record(tiny_config, rows, tmp_path, training_arguments):
    """A function that trains, and returns the lines that the run wrote."""

    def train(name: str, rows=rows, twin=False, resume=None, **kwargs) -> list[str]:
        config = tiny_config(num_hidden_layers=1)
        model = LlamaForCausalLM(transformer_twin(config)) if twin else DiffTransformerForCausalLM(config)
        defaults = {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_steps": 2}
        args = training_arguments(output_dir=str(tmp_path / name), **{**defaults, **kwargs})
        RunTrainer(model=model, args=args, train_dataset=rows, record_batches=True).train(
            resume_from_checkpoint=None if resume is None else str(tmp_path / name / f"checkpoint-{resume}")
        )
        return (tmp_path / name / "batches.txt").read_text().splitlines()

    return train


def test_the_same_data_leave_the_same_file_and_another_order_another(record):
    lines = record("diff")
    assert len(lines) == STEPS == len(set(lines)), "the lines of two steps are the same, or some are missing"
    assert record("transformer", twin=True) == lines
    assert not set(record("other", data_seed=1)) & set(lines)
    assert record("again", seed=7, data_seed=42) == lines, "the seed of the weights changes the data"
    assert record("diff", max_steps=3) == lines[:3], "a new run does not start a new file"


def test_a_single_token_or_label_that_differs_changes_its_steps(record, rows):
    lines = record("one", max_steps=3)  # not a whole epoch: row 5 is seen once, if at all
    ids, labels = rows[5]["input_ids"].clone(), rows[5]["labels"].clone()
    ids[3] = (ids[3] + 1) % 199
    labels[3] = -100
    for name, row in {"ids": {"input_ids": ids}, "labels": {"labels": labels}}.items():
        other = record(name, [*rows[:5], rows[5] | row, *rows[6:]], max_steps=3)
        assert [a == b for a, b in zip(lines, other, strict=True)].count(False) == 1, name


def test_a_line_is_a_step_not_a_micro_batch(record):
    lines = record("run", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert len(lines) == STEPS == len(set(lines))
    seen, other = BatchRecord("unused"), BatchRecord("unused")
    one, two = ({name: torch.full((2, 3), value) for name in ("input_ids", "labels")} for value in (1, 2))
    for first, second in ((one, two), (two, one)):
        seen.see(first)
        other.see(second)
    assert seen._digest.digest() != other._digest.digest(), "the order of micro-batches has no effect"


@pytest.mark.parametrize("stopped_after, accumulation", [(2, 2), (3, 1), (STEPS, 2)])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(record, stopped_after, accumulation):
    """Even if it had run beyond the checkpoint."""
    kwargs = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    lines = record("whole", **kwargs)
    assert record("stopped", **kwargs, max_steps=stopped_after) == lines[:stopped_after]
    assert record("stopped", **kwargs, resume=2) == lines


def test_a_record_that_lacks_steps_cannot_be_resumed(record, tmp_path):
    lines = record("run", max_steps=2)
    file = tmp_path / "run" / "batches.txt"
    for kept in (1, 0, None):
        file.unlink() if kept is None else file.write_text("".join(f"{line}\n" for line in lines[:kept]))
        message = f"has {kept or 0} steps, but the checkpoint is of step 2.*another folder"
        with pytest.raises(ValueError, match=message):
            record("run", resume=2)


def test_a_step_that_ended_in_the_middle_is_forgotten(tmp_path):
    batch = {name: torch.arange(6).reshape(2, 3) for name in ("input_ids", "labels")}
    state = type("State", (), {"global_step": 0})
    whole, again = BatchRecord(tmp_path / "whole"), BatchRecord(tmp_path / "again")
    again.see({name: ids + 1 for name, ids in batch.items()})
    for seen in (whole, again):
        seen.on_train_begin(None, state, None)
        seen.see(batch)
        seen.on_step_end(None, state, None)
    assert whole.file.read_text() == again.file.read_text()


def test_every_process_has_a_file_and_labels_of_shared_sequences_count(tmp_path):
    ids = torch.arange(6).reshape(2, 3)
    first, second = BatchRecord(tmp_path), BatchRecord(tmp_path, 1)
    assert (first.file.name, second.file.name) == ("batches.txt", "batches_1.txt")
    first.see({"input_ids": ids, "shift_labels": ids})
    second.see({"input_ids": ids, "shift_labels": ids - 1})
    assert first._digest.digest() != second._digest.digest()


@pytest.mark.slow
def test_pretraining_leaves_a_record_if_asked(tmp_path):
    """The twins through the stage itself, with a corpus of text."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [{"text": f"{i} and {i * i}. " * 40, "meta": {"source": "sums"}} for i in range(40)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in texts))

    def run(name: str, *argv: str) -> Path:
        folder = tmp_path / name
        argv = ("--validation_rows", "2", "--max_steps", "3", "--save_strategy", "no", *argv)
        pretrain.main(["--smoke", "--dataset", str(corpus), "--output_dir", str(folder), *argv])
        return folder / "batches.txt"

    first = run("diff", "--record_batches", "true").read_text()
    assert len(first.splitlines()) == 3
    assert run("transformer", "--record_batches", "true", "--architecture", "transformer").read_text() == first
    assert not run("without").exists()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The benchmark of the evaluations' memory: end to end, and what it says would be held without chunks."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def evaluation_memory(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.evaluation_memory")


@pytest.mark.process
def test_end_to_end(evaluation_memory, tmp_path, monkeypatch, capsys):
    """Measured in a process of its own, started from this one."""
    arguments = ["evaluation_memory", "--out", str(tmp_path / "out" / "memory"), "--protocols", "nll_by_position"]
    arguments += ["--models", "diff", "--tokens", "2048", "--vocab-size", "16384"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    evaluation_memory.main()
    assert capsys.readouterr().out.startswith("Budget  10 minutes on one core; a vocabulary of 16,384")
    [row] = read(tmp_path / "out" / "memory.csv")
    assert row["without_chunks_mib_computed_not_measured"] == "128"
    # A chunk of 1,024 tokens has 64 MiB of logits, and as much again of what becomes of them
    assert 64 <= int(row["peak_mib"]) < 256


def test_every_protocol_on_every_model(evaluation_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_memory, "measure_apart", evaluation_memory.measure)
    arguments = ["evaluation_memory", "--tokens", "32", "64", "--vocab-size", "128", "--out", str(tmp_path / "memory")]
    monkeypatch.setattr(sys, "argv", arguments)
    evaluation_memory.main()
    rows = read(tmp_path / "memory.csv")
    cells = [(row["protocol"], row["model"], row["tokens"]) for row in rows]
    assert cells == [
        (protocol, model, tokens)
        for protocol in ("nll_by_position", "attention_allocation", "outliers")
        for model in ("diff", "transformer")
        for tokens in ("32", "64")
    ]
    assert all(int(row["peak_mib"]) < 100 for row in rows)


def test_what_would_be_held(evaluation_memory):
    of = evaluation_memory.without_chunks
    assert of("nll_by_position", 16384, 32768) == 2 * 2**30
    assert of("outliers", 16384, 32768) == of("attention_allocation", 16384, 1) == 4 * 4 * 16384**2
    config = evaluation_memory.make_config(32768)
    assert evaluation_memory.transformer_twin(config).num_attention_heads == 4, "as many softmax maps"


def test_a_process_that_fails_is_an_error(evaluation_memory, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="--measure nll_by_position diff 32 128 failed"):
        evaluation_memory.measure_apart("nll_by_position", "diff", 32, 128)

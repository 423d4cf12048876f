# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The benchmark of the evaluations' memory: end to end, and what it says would be held without chunks."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def evaluation_memory(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.evaluation_memory")


def test_every_protocol_on_every_model(evaluation_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_memory, "measure_apart", evaluation_memory.measure)
    arguments = ["evaluation_memory", "--tokens", "32", "64", "--vocab-size", "128", "--out", str(tmp_path / "memory")]
    monkeypatch.setattr(sys, "argv", arguments)
    evaluation_memory.main()
    rows = list(csv.DictReader((tmp_path / "memory.csv").read_text().splitlines()))
    cells = [(row["protocol"], row["model"], row["tokens"]) for row in rows]
    assert cells == [
        (protocol, model, tokens)
        for protocol in ("nll_by_position", "attention_allocation", "outliers")
        for model in ("diff", "transformer")
        for tokens in ("32", "64")
    ]
    assert all(int(row["peak_mib"]) < 100 for row in rows)


def test_evaluation_memory_names_what_would_be_held(evaluation_memory):
    of = evaluation_memory.without_chunks
    assert of("nll_by_position", 16384, 32768) == 2 * 2**30
    assert of("outliers", 16384, 32768) == of("attention_allocation", 16384, 1) == 4 * 4 * 16384**2
    config = evaluation_memory.make_config(32768)
    assert evaluation_memory.transformer_twin(config).num_attention_heads == 4, "as many softmax maps"


def test_evaluation_memory_reports_a_process_that_fails(evaluation_memory, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="--measure nll_by_position diff 32 128 failed"):
        evaluation_memory.measure_apart("nll_by_position", "diff", 32, 128)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Activation outliers: against all activations at once, held and sorted; through the command line; in the report."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from diff_transformer.evaluation.__main__ import Options, main
from diff_transformer.evaluation.comparison import DIFFERS, PAPER_DIFF, PAPER_TRANSFORMER
from diff_transformer.evaluation.models import load_model
from diff_transformer.evaluation.probe import Probe, attention_probe
from diff_transformer.evaluation.protocols import outliers
from diff_transformer.evaluation.protocols.outliers import (
    ACTIVATIONS,
    Arguments,
    decoder_layers,
    layer_outputs,
    measure_row,
    section,
)
from diff_transformer.evaluation.results import Measure, Results, ResultSet

OPTIONS = Options(device="cpu")


@torch.no_grad()
def all_activations(model, input_ids):
    """The magnitude of every visible logit and of every number in a layer's output, a tensor a layer."""
    logits, last = [], []

    class All(Probe):
        def on_logits(self, module, x, visible):
            logits.append(x.masked_select(visible).abs())
            return x

    handle = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with attention_probe(model, All()):
        states = model(input_ids=input_ids, output_hidden_states=True).hidden_states
    handle.remove()
    # transformers has the embeddings first, and the last layer's output after the final norm
    hidden = [x.flatten().abs() for x in (*states[1:-1], *last)]
    assert len(logits) == len(hidden) == 2
    return dict(zip(ACTIVATIONS, (logits, hidden), strict=True))


def corpus(folder, words=700):
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(words)))
    return str(folder)


@pytest.mark.parametrize("chunk_size", [7, 50, 64])
def test_measures_are_those_of_all_activations(loaded, chunk_size):
    input_ids = torch.randint(0, 300, (1, 50))
    expected = all_activations(loaded.model, input_ids)
    found = measure_row(loaded.model, input_ids, chunk_size)
    for name in ACTIVATIONS:
        values = torch.cat(expected[name]).double().numpy()
        measures, data = found[name].measures(), found[name].data()
        descending = np.sort(values)[::-1]
        for rank in (1, 2, 3, 10, 100):
            assert measures[f"top_{rank}"].value == pytest.approx(descending[rank - 1], rel=1e-4), (name, rank)
            assert measures[f"top_{rank}"].n == len(values), "masked logits were counted, or visible ones left out"
        assert measures["median"].value == pytest.approx(np.median(values), rel=data["median_relative_error"] + 1e-4)
        largest = max(range(len(expected[name])), key=lambda i: expected[name][i].max())
        assert data["top_layers"][0] == largest
        assert sum(data["octave_counts"]) == len(values)


def test_the_median_is_that_of_magnitudes_not_of_values(loaded):
    found = measure_row(loaded.model, torch.randint(0, 300, (1, 20)))
    assert found["hidden_states"].measures()["median"].value > 0.1, "the median of signed values is about zero"


def hooks(model):
    return [list(layer._forward_hooks) for layer in decoder_layers(model)]


def test_the_model_is_as_before(loaded):
    before = loaded.model.config._attn_implementation, hooks(loaded.model)
    input_ids = torch.randint(0, 300, (1, 20))
    with torch.no_grad():
        expected = loaded.model(input_ids=input_ids).logits
        measure_row(loaded.model, input_ids)
        assert torch.equal(loaded.model(input_ids=input_ids).logits, expected)
    assert (loaded.model.config._attn_implementation, hooks(loaded.model)) == before


def test_hooks_go_when_something_fails(loaded):
    before = hooks(loaded.model)
    with pytest.raises(ZeroDivisionError), layer_outputs(loaded.model, lambda values, layer: 1 / 0):
        loaded.model(input_ids=torch.tensor([[1, 2]]))
    assert hooks(loaded.model) == before


def test_layers_of_another_architecture():
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32)).eval()
    assert list(decoder_layers(model)) == list(model.transformer.h)
    found = measure_row(model, torch.randint(0, 50, (1, 12)), chunk_size=5)
    assert found["hidden_states"].total == 3 * 12 * 16
    assert found["attention_logits"].total == 3 * 2 * 12 * 13 / 2
    model.config.n_layer = 5
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no list of 5 decoder layers"):
        decoder_layers(model)


def test_infinite_activations_are_rejected(twin_folders):
    loaded = load_model(str(twin_folders["DIFF"]), device="cpu")
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="infinite or not a number"):
        measure_row(loaded.model, torch.tensor([[1, 2, 3]]))


def test_a_stopped_run_resumes_where_it_was(loaded, tmp_path, monkeypatch):
    arguments = Arguments(dataset=corpus(tmp_path / "texts"), tokens=100, length=32, chunk_size=20)

    def run(folder):
        results = Results.open(folder, "outliers", loaded.identity, asdict(arguments), 0)
        outliers.run(loaded, arguments, OPTIONS, results)
        return Results.load(results.path)

    whole = run(tmp_path / "whole")
    assert [cell.key["activation"] for cell in whole.cells] == list(ACTIVATIONS)
    assert whole.cells[0].data["tokens"] == 128, "100 tokens are four rows of 32"

    measured, stop_after = [], 2

    def stopping(*args):
        if len(measured) == stop_after:
            raise KeyboardInterrupt
        measured.append(args)
        return measure_row(*args)

    monkeypatch.setattr(outliers, "measure_row", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    stop_after = 99
    with pytest.raises(ValueError, match="another length"):
        Results.open(tmp_path / "parts", "outliers", loaded.identity, {**asdict(arguments), "length": 16}, 0)
    parts = run(tmp_path / "parts")
    assert len(measured) == 4, "rows were measured again, or left out"
    assert [(c.key, c.measures, c.data) for c in parts.cells] == [(c.key, c.measures, c.data) for c in whole.cells]
    run(tmp_path / "parts")
    assert len(measured) == 4, "a finished run was done again"


@pytest.mark.slow
def test_command_line_and_report(twin_folders, tmp_path, capsys):
    models = [word for folder in twin_folders.values() for word in ("--model", str(folder))]
    arguments = ["--dataset", corpus(tmp_path / "texts"), "--length", "64", "--device", "cpu", "--limit", "2"]
    assert main(["evaluate", "outliers", *models, *arguments, "--out", str(tmp_path / "out")]) == 0
    results = [Results.load(tmp_path / "out" / "outliers" / f"{label}.json") for label in twin_folders]
    found = section(ResultSet(results))
    table = found.comparisons[0].table()
    assert table.columns == ["of", "magnitude", PAPER_TRANSFORMER, PAPER_DIFF, "DIFF", "Transformer", DIFFERS]
    rows = {", ".join(map(str, row[:2])): row[2:] for row in table.rows}
    assert len(rows) == 12
    assert rows["attention logits, top 1"][:2] == [318.0, 38.8]
    assert rows["hidden states, top 100"][:2] == [2448.2, 740.9]
    assert rows["hidden states, median"][:2] == [0.6, 1.2]
    for i, r in enumerate(results):
        cells = {cell.key["activation"]: cell for cell in r.cells}
        assert rows["attention logits, top 10"][2 + i].value == cells["attention_logits"]["top_10"]
        assert rows["hidden states, median"][2 + i].value == cells["hidden_states"]["median"]
        assert cells["hidden_states"].measures["top_1"].n == 2 * 64 * 2 * 64  # rows, tokens, layers, channels
    assert "tokens 128 (paper: 400,000)" in rows["hidden states, top 1"][-1]
    assert any("the largest is from layer" in note for note in found.notes)
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "| attention logits | top 1 | 318.0 | 38.8 |" in (tmp_path / "out" / "report.md").read_text()


def test_a_report_of_as_many_tokens_does_not_say_otherwise(twin_folders, tmp_path):
    content = {
        "schema": 1,
        "protocol": "outliers",
        "model": {"label": "DIFF"},
        "settings": {"dataset": "books", "length": 4096},
        "seed": 0,
        "runs": [],
        "cells": [
            {
                "key": {"activation": "hidden_states"},
                "measures": {"top_1": {"value": 7.5, "n": 9}, "median": {"value": 1.0, "n": 9}},
                "data": {
                    "top": [7.5],
                    "top_layers": [3],
                    "median_relative_error": 0.002,
                    "octaves": [0, 2],
                    "octave_counts": [8, 1],
                    "tokens": 401_408,
                },
                "seconds": 1.0,
            }
        ],
    }
    path = tmp_path / "DIFF.json"
    path.write_text(json.dumps(content))
    table = section(ResultSet([Results.load(path)])).comparisons[0].table()
    rows = {", ".join(map(str, row[:2])): row[2:] for row in table.rows}
    differs = "tokens 401,408 (paper: 400,000); not stated in the paper: dataset books, length 4,096"
    assert rows["hidden states, top 1"][2:] == [Measure(7.5, 9), differs]
    assert rows["hidden states, top 2"][2] is None, "a value that was not measured"
    assert rows["attention logits, top 1"][2] is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "99999"], "but 1,563 were asked for"),
        (["--length", "4096"], "needs 4,096 tokens, but the model has max_position_embeddings=2,048"),
        (["--length", "2000", "--no_join"], "No document has 2,000 tokens"),
        (["--dataset", "nowhere.jsonl"], "cannot be opened"),
    ],
)
def test_bad_input(twin_folders, tmp_path, capsys, arguments, message):
    fixed = ["--model", str(twin_folders["DIFF"]), "--device", "cpu", "--out", str(tmp_path / "out")]
    texts = corpus(tmp_path / "texts", words=40)
    assert main(["evaluate", "outliers", *fixed, "--dataset", texts, "--length", "64", *arguments]) == 1
    assert message in capsys.readouterr().err

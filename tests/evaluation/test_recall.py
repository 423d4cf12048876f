# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Associative recall: rows by property, a perfect model, models that guess, the run, and its report."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.__main__ import main
from diff_transformer.evaluation.protocols.recall import (
    RecallRow,
    keys_and_values,
    recall_accuracy,
    recall_row,
    section,
)
from diff_transformer.evaluation.results import ResultSet, load_results

KEYS, VALUES = list(range(0, 80, 2)), list(range(1, 81, 2))


@given(st.integers(1, 40), st.integers(0, 60), st.booleans(), st.integers())
def test_recall_row_asks_for_what_it_says(pairs, room, has_start, seed):
    start = [99] * has_start
    length = len(start) + 2 * pairs + 2 + room
    row = recall_row(KEYS, VALUES, pairs, length, random.Random(seed), start)
    assert length - 1 <= len(row.input_ids) <= length and row.input_ids[: len(start)] == start
    first = len(start) + 2 * pairs
    told = list(zip(row.input_ids[len(start) : first : 2], row.input_ids[len(start) + 1 : first : 2], strict=True))
    assert len(dict(told)) == pairs, "a key has two values"
    asked = [row.input_ids[query] for query in row.queries]
    assert row.queries == list(range(first, first + 2 * len(asked), 2))
    assert len(asked) == len(set(asked)) == min(pairs, (length - first) // 2), "a key is asked for the first time once"
    for query in range(first, len(row.input_ids), 2):
        assert row.input_ids[query + 1] == dict(told)[row.input_ids[query]]
    assert row == recall_row(KEYS, VALUES, pairs, length, random.Random(seed), start)


def test_recall_row_rejects_what_does_not_fit():
    for pairs, length in ((0, 8), (41, 256), (4, 9)):
        with pytest.raises(ValueError, match="room for"):
            recall_row(KEYS, VALUES, pairs, length, random.Random(0))


def test_keys_and_values_are_ordinary_tokens_and_different():
    tokenizer = cl100k_tokenizer(vocab_size=300)
    keys, values = keys_and_values(tokenizer)
    assert not set(keys) & set(values) and not set(keys + values) & set(tokenizer.all_special_ids)
    assert set(keys + values) == set(range(300)) and len(keys) == len(values) == 150
    keys, values = keys_and_values(tokenizer, 64)
    assert len(keys) == len(values) == 32 and max(keys + values) == 63
    for wrong in (1, 301):
        with pytest.raises(ValueError, match="300 ordinary tokens"):
            keys_and_values(tokenizer, wrong)


class Guesser:
    """Answers each query with `answer(tokens before and with it)`."""

    device = torch.device("cpu")

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, input_ids, logits_to_keep, **_):
        answers = [[self.answer(row[: query + 1].tolist()) for query in logits_to_keep] for row in input_ids]
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.tensor(answers), 100).float())


def test_recall_accuracy_of_models_that_look_up_or_copy_or_guess():
    def look_up(tokens):
        return tokens[tokens.index(tokens[-1]) + 1]

    def copy(tokens):
        later = tokens[2 * 5 : -1]  # after the pairs
        return later[later.index(tokens[-1]) + 1] if tokens[-1] in later else 0

    rows = [recall_row(KEYS, VALUES, 5, 100, random.Random(i)) for i in range(50)]
    assert recall_accuracy(Guesser(look_up), rows) == [1.0] * 50
    assert recall_accuracy(Guesser(copy), rows) == [0.0] * 50, "only the first query of a key counts"
    row = RecallRow([2, 3, 4, 5, 4, 5, 2, 3, 4, 5], [4, 6, 8])
    assert recall_accuracy(Guesser(lambda tokens: 5), [row]) == [2 / 3]


def test_recall_accuracy_reads_the_model_at_the_queries(loaded):
    rows = [recall_row(KEYS, VALUES, 3, 24, random.Random(i)) for i in range(4)]
    expected = []
    for row in rows:
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([row.input_ids])).logits[0]
        expected.append([int(logits[q].argmax()) == row.input_ids[q + 1] for q in row.queries])
    assert recall_accuracy(loaded.model, rows) == pytest.approx([sum(e) / len(e) for e in expected])


def test_run_resumes_with_more_pairs_and_is_reported(twin_folders, tmp_path, capsys):
    command = ["evaluate", "recall", "--model", f"DIFF={twin_folders['DIFF']}", "--out", str(tmp_path)]
    command += ["--device", "cpu", "--length", "40", "--rows", "6", "--pairs"]
    assert main([*command, "2"]) == 0
    (first,) = load_results(tmp_path)["recall"]
    assert main([*command, "2", "8"]) == 0
    (results,) = load_results(tmp_path)["recall"]
    assert results.cells[:1] == first.cells and [cell.key for cell in results.cells] == [{"pairs": 2}, {"pairs": 8}]
    assert results.cells[1].measures["accuracy"].n == 6 and results.cells[1].data == {"queries": 8}
    table = section(ResultSet([results])).comparisons[0].table()
    assert [row[:2] for row in table.rows] == [[2, 1 / 2], [8, 1 / 8]]
    assert table.rows[1][2] == results.cells[1].measures["accuracy"]
    assert main([*command, "2", "20"]) == 1
    assert "20 pairs in 40 tokens" in capsys.readouterr().err
    assert main([*command, "2", "--rows", "2"]) == 1
    assert "another rows" in capsys.readouterr().err

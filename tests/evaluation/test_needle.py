# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Multi-needle retrieval: the scoring by hand, a model that copies and ones that err, the run, and its report."""

import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.comparison import DIFFERS, PAPER_DIFF, PAPER_TRANSFORMER
from diff_transformer.evaluation.generate import Generated
from diff_transformer.evaluation.models import LoadedModel
from diff_transformer.evaluation.protocols import needle
from diff_transformer.evaluation.protocols.needle import Arguments, accuracy, assigned_numbers, parse_pair, section
from diff_transformer.evaluation.results import Measure, Results, ResultSet
from diff_transformer.evaluation.text import BOOKS

TOKENIZER = cl100k_tokenizer(vocab_size=300)
SMALL = Arguments(needle.__file__, lengths=[1000], pairs=["1:1", "3:2"], depths=[0, 100], samples=3, max_new_tokens=40)


def test_accuracy_of_one_city_takes_its_whole_number_anywhere():
    for answer in ("123", "99 or 123", "The special magic New York number is: 123, I think", "123.\nWhat else?"):
        assert accuracy(answer, {"New York": "123"}) == 1, answer
    for answer in ("51234", "1234", "0123", "1,123", "123.5", "", "no idea"):
        assert accuracy(answer, {"New York": "123"}) == 0, answer


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("123 and 4567", 1),
        ("123, 4567\nThe special magic Oslo number is: 99", 1),  # the first number that a city is given counts
        ("4567 and 123", 0),
        ("123 and 45678", 0.5),
        ("123", 0.5),
        ("The special magic number for Oslo is 4567, and for New York it is 123.", 1),
        ("New York: 4567, Oslo: 123", 0),
        ("Oslo is 4567", 0.5),
        ("for New York and Oslo they are 123 and 4567", 1),
        ("for Oslo and New York they are 123 and 4567", 0),
        ("New York has 123 456, Oslo 4567", 1),
        ("", 0),
    ],
)
def test_accuracy_of_two_cities(answer, expected):
    assert accuracy(answer, {"New York": "123", "Oslo": "4567"}) == expected


def test_assigned_numbers_of_three_cities():
    assert assigned_numbers("C: 3, A and B: 1, 2, 9", ["A", "B", "C"]) == {"C": "3", "A": "1", "B": "2"}
    assert assigned_numbers("1 2", ["A", "B", "C"]) == {"A": "1", "B": "2"}


@pytest.mark.parametrize("pair", ["6", "6:", "2:6", "0:0", "a:b", "6:-1", "6:2:1"])
def test_parse_pair_rejects(pair):
    with pytest.raises(ValueError, match=r"it must be N:R"):
        parse_pair(pair)


def in_order(cities, numbers):
    return " and ".join(numbers[city] for city in cities)


def swapped(cities, numbers):
    return " and ".join(numbers[city] for city in reversed(cities)) if len(cities) > 1 else "0"


@pytest.fixture
def read_with(run, monkeypatch):
    """Runs a model that reads needles and question from its tokens and gives `answer(cities, numbers)`."""

    def read_with(answer, folder="out", limit=None, **changes):
        def iterate_texts(model, tokenizer, rows, max_new_tokens, *_, chunk_size):
            for i, text in enumerate(tokenizer.batch_decode(rows)):
                read_with.lengths.append(len(rows[i]) + max_new_tokens)
                asked = re.search(r"\? The special magic (.+) numbers? (is|are) $", text)[1].split(" and ")
                numbers = dict(re.findall(r"\nThe special magic (.+) number is: (\d+)\n", text))
                yield i, Generated(answer(asked, numbers), 1, True)

        model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=4096))
        monkeypatch.setattr(needle, "iterate_texts", iterate_texts)
        loaded = LoadedModel("Reader", model, TOKENIZER, {"label": "Reader"})
        return run(needle, loaded, replace(SMALL, **changes), folder, limit=limit)

    read_with.lengths = []
    return read_with


@pytest.mark.parametrize("answer, expected", [(in_order, 1.0), (swapped, 0.0)])
def test_run_scores_models_that_copy_and_that_err(read_with, answer, expected):
    results = read_with(answer, lengths=[4096, 900])
    assert [cell.measures["accuracy"] for cell in results.cells] == [Measure(expected, 3, 0.0)] * 8
    assert read_with.lengths == [900] * 12 + [4096] * 12, "a prompt and its answer do not have the length"
    record = results.select(length=900, needles=3, queried=2, depth=100)[0].data["answers"][0]
    assert len(record["wanted"]) == 2 and record["answer"] == answer(list(record["wanted"]), record["wanted"])


def test_run_draws_samples_that_depend_on_no_other_cell_or_sample(read_with):
    alone = read_with(in_order, "alone", limit=2, pairs=["3:2"], depths=[100])
    (expected,) = read_with(in_order, "whole").select(needles=3, depth=100)
    assert alone.cells[0].data["answers"] == expected.data["answers"][:2]


def results_of(label, values, folder, arguments=None):
    """values: {(length, needles, queried): [accuracy at each depth]}."""
    arguments = arguments or Arguments()
    results = Results.open(folder, "needle", {"label": label}, asdict(arguments), 0)
    for (length, needles, queried), row in values.items():
        for depth, value in zip(arguments.depths, row, strict=False):
            key = {"length": length, "needles": needles, "queried": queried, "depth": depth}
            results.add(key, {"accuracy": Measure(value, 50, 0.03)})
    return results


def test_section_of_table_2(tmp_path):
    ours = results_of("ours", {(4096, 1, 1): [1.0] * 5, (4096, 6, 2): [0.5, 0.6, 0.7, 0.8, 0.9]}, tmp_path)
    other = results_of("other", {(4096, 1, 1): [0.2, 0.3, 0.4]}, tmp_path)
    found = section(ResultSet([ours, other]))
    table = found.comparisons[0].table()
    assert table.columns == ["tokens", "N", "R", PAPER_TRANSFORMER, PAPER_DIFF, "ours", "other", DIFFERS]
    one, six = table.rows
    assert one[:5] == [4096, 1, 1, 1.00, 1.00] and six[:5] == [4096, 6, 2, 0.55, 0.85]
    assert one[5].value == 1 and one[5].n == 250 and one[5].stderr == pytest.approx(0.03 / 5**0.5)
    assert one[6].value == pytest.approx(0.3) and six[5].value == pytest.approx(0.7) and six[6] is None
    assert one[-1] == f"not stated in the paper: dataset {BOOKS}, wording yoco; other unfinished"
    by_depth = found.tables[1].rows
    assert [row[:4] for row in by_depth] == [[4096, n, r, x] for n, r in ((1, 1), (6, 2)) for x in ("ours", "other")]
    assert by_depth[1][4].value == 0.2 and by_depth[1][7:] == by_depth[3][4:6] == [None, None]


def test_section_shows_the_papers_values_beside_the_same_length_n_and_r_alone(tmp_path):
    asked = [(4096, 2, 2), (4096, 4, 1), (4096, 6, 1), (8192, 6, 2)]
    found = section(ResultSet([results_of("ours", dict.fromkeys(asked, [0.5] * 5), tmp_path)]))
    assert {row[3] for row in found.tables[1].rows} == {"ours"}
    shown = {tuple(row[:3]): row[3:5] for row in found.comparisons[0].table().rows}
    assert shown == dict.fromkeys(asked, [None, None]) | {(4096, 2, 2): [0.85, 0.92]}


def test_section_of_figure_5(tmp_path):
    arguments = Arguments(lengths=[8192, 65536], pairs=["8:1"], depths=[0, 25])
    ours = results_of("ours", {(8192, 8, 1): [0.25, 0.75], (65536, 8, 1): [0.11]}, tmp_path, arguments)
    found = section(ResultSet([ours]))
    rows = found.comparisons[0].table().rows
    assert [row[:3] for row in rows] == [[8192, 8, 1], [65536, 8, 1]]
    assert [[round(value, 2) for value in row[3:5]] for row in rows] == [[0.95, 1.00], [0.52, 0.86]]
    assert "depth 0, 25 (paper: 0, 25, 50, 75, 100)" in rows[0][-1]

    table = found.tables[1]
    assert table.columns == ["tokens", "N", "R", "model", "depth 0 %", "depth 25 %"]
    shown = {tuple(row[:4]): [x.value if isinstance(x, Measure) else x for x in row[4:]] for row in table.rows}
    assert shown == {
        (8192, 8, 1, "ours"): [0.25, 0.75],
        (8192, 8, 1, PAPER_TRANSFORMER): [0.96, 0.92],
        (8192, 8, 1, PAPER_DIFF): [1.00, 1.00],
        (65536, 8, 1, "ours"): [0.11, None],
        (65536, 8, 1, PAPER_TRANSFORMER): [0.04, 0.12],
        (65536, 8, 1, PAPER_DIFF): [0.60, 0.88],
    }

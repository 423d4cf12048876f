# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Every number of the paper that a protocol or a page shows is in tests/paper_values.csv, where it was read again."""

import ast
import csv
import re
from pathlib import Path

import pytest

from diff_transformer.evaluation import protocols
from diff_transformer.evaluation.protocols import (
    attention_allocation,
    fine_grained_loss,
    hallucination,
    harness,
    logit_quantization,
    many_shot,
    math,
    needle,
    outliers,
    throughput,
)
from diff_transformer.evaluation.protocols.hallucination.samples import TASKS
from diff_transformer.evaluation.render import markdown_page
from diff_transformer.evaluation.results import mean
from diff_transformer.reproduction.report import Report
from diff_transformer.reproduction.study import STUDIES, load_study

ROOT = Path(__file__).parents[2]
MODELS = ("Transformer", "DIFF")
HARNESS = ("ARC-C", "ARC-E", "BoolQ", "HellaSwag", "OBQA", "PIQA", "WinoGrande", "Avg")
LENGTHS = {1024 * k: f"{k}K" for k in range(8, 65, 8)}
NO_NUMBERS_OF_THE_PAPER = {"MEDIAN_ERROR", "_SIZES"}


def read_again() -> dict[tuple[str, str, str], float]:
    lines = (ROOT / "tests/paper_values.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    found = {(row["place"], row["row"], row["column"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows), "a place is there twice"
    return found


def of_protocols() -> dict[tuple[str, str, str], float | None]:
    """What the protocols have, by place."""
    found: dict[tuple[str, str, str], float | None] = {}

    def add(place, row, columns, values):
        found.update({(place, row, column): value for column, value in zip(columns, values, strict=True)})

    def add_pair(place, column, values, rows=MODELS):
        for row, value in zip(rows, values, strict=True):
            add(place, row, [column], [value])

    for label, values in harness.TABLE_1.items():
        add("Table 1", label.removeprefix("paper: "), HARNESS, values)
    for shots, by_model in harness.TABLE_8.items():
        for label, values in by_model.items():
            add("Table 8", f"{shots}-shot {label.removeprefix('paper: ')}", HARNESS, values)
    for (n, r), values in needle.PAPER_TABLE_2.items():
        add_pair("Table 2", f"N={n} R={r}", values)
    for length, columns in needle.PAPER_FIGURE_5.items():
        for model, column in zip(MODELS, columns, strict=True):
            for depth, value in zip(needle.PAPER_DEPTHS, column, strict=True):
                add("Figure 5", f"{model} {depth}", [LENGTHS[length]], [value])
    for what, table in (("answer", attention_allocation.PAPER_ANSWER), ("noise", attention_allocation.PAPER_NOISE)):
        for depth, values in table.items():
            add_pair("Table 3", f"{what} {depth}", values)
    for caption, by_dataset in hallucination.PAPER.items():
        for name, values in by_dataset.items():
            add_pair(caption.partition(":")[0], TASKS[name].title, values)
    statistics = [name.replace("_", "-").capitalize() for name in outliers.STATISTICS]
    for activation, by_model in outliers.PAPER.items():
        for model, values in zip(MODELS, by_model, strict=True):
            add("Table 5", f"{model} {outliers.NAMES[activation].title()}", statistics, values)
    for label, (heads, d, _, *losses) in fine_grained_loss.PAPER.items():
        add("Table 6", label, ("heads", "d", "validation", "AR-Hit", "others"), (heads, d, *losses))
    for (size, length, task), values in throughput.TABLE_7.items():
        rows = [f"{model} {size} {length // 1024}K" for model in MODELS]
        add_pair("Table 7", task.replace("+", " + "), values, rows)
    for name, (title, *values) in many_shot.AVERAGES.items():
        add("Figure 6", title, (*MODELS, "gain"), (*values, round(values[1] - values[0], 1)))
        add("Figure 11", title, (*MODELS, "orders"), many_shot.MARGINS[name, "random"])
    for order, row in (("random", "TREC at random"), ("alternating", "TREC alternating")):
        add("Figure 7", row, (*MODELS, "orders"), many_shot.MARGINS["trec", order])
    for label, curve in logit_quantization.FIGURE_8.items():
        add("Figure 8", label.removeprefix("paper: "), [f"{bits} bits" for bits in curve], curve.values())
    (_, _, average, _), (_, _, accuracies, lengths) = math._PAPER["cot"], math._PAPER["boxed"]
    add_pair("Figure 9", "20B tokens", average["average"])
    titles = {"average": "Average"} | {name: benchmark.title for name, benchmark in math.BENCHMARKS.items()}
    for name, values in accuracies.items():
        add_pair("Figure 10", titles[name], values)
    add_pair("Appendix C", "length", lengths["average"])
    for prompt, figure in (("cot", "Figure 9"), ("boxed", "Figure 10")):
        add("Appendix C", "output", [figure], [math.MAX_NEW_TOKENS[prompt]])
    add("Section 3.4", "samples", ["each depth and length"], [needle.PAPER_SAMPLES])
    add("Section 3.6", "samples", ["each dataset"], [hallucination.PAPER_SAMPLES])
    add("Section 3.7", "tokens", ["Table 5"], [outliers.PAPER_TOKENS])
    return {place: value for place, value in found.items() if value is not None}


def test_paper_values_of_protocols_equal_the_second_reading():
    again, found = read_again(), of_protocols()
    wrong = {place: (value, again.get(place)) for place, value in found.items() if again.get(place) != value}
    assert not wrong, "(protocol, read again)"
    only_read = {place for place in again.keys() - found.keys() if not place[1].endswith("Avg.")}
    assert only_read == {("Appendix C", "gap", "Figure 9"), ("Appendix C", "gain", "Figure 10")}, "in no protocol"


def test_paper_values_of_figure_5_average_to_those_printed():
    again = read_again()
    for model in MODELS:
        for length in LENGTHS.values():
            average = mean(again["Figure 5", f"{model} {depth}", length] for depth in needle.PAPER_DEPTHS)
            assert abs(average - again["Figure 5", f"{model} Avg.", length]) <= 0.0050001


@pytest.mark.parametrize("name", protocols.names())
def test_protocols_have_no_number_without_a_second_reading(name):
    """The decimal fractions among a module's constants, under any name."""
    known, folder = set(read_again().values()), Path(protocols.__file__).parent
    files = [folder / f"{name}.py"] if (folder / f"{name}.py").is_file() else sorted((folder / name).glob("*.py"))
    for file in files:
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if ast.unparse(target) in NO_NUMBERS_OF_THE_PAPER:
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(node.value, float):
                    assert node.value in known, f"{file.name}, line {node.lineno}: {node.value}"


@pytest.mark.parametrize("prompt, figure", [("cot", "Figure 9"), ("boxed", "Figure 10")])
def test_findings_in_words(prompt, figure):
    again = read_again()
    known = {value for (place, row, column), value in again.items() if place == "Appendix C"}
    numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)", math._PAPER[prompt][1])
    assert numbers and {float(number.replace(",", "")) for number in numbers} <= known


# Arms of `diff-transformer reproduce` that the paper has, by their rows in Table 6
ARMS = {
    "transformer": "Transformer",
    "wide": "Transformer, 8 heads",
    "wide_norm": "Transformer, 8 heads, GroupNorm",
    "diff": "DIFF",
    "diff_no_norm": "DIFF without GroupNorm",
}


def of_paper(page: str) -> list[tuple[str, float]]:
    """The arms of a reproduction's page with the paper's losses, `| arm | paper | ours | ... |`."""
    table = re.search(r"^\| arm \| paper \|.*\n\|[-:| ]+\n((?:\|.*\n?)+)", page, re.MULTILINE)
    assert table is not None, "the page is not read"
    rows = [[cell.strip() for cell in line.split("|")] for line in table[1].splitlines()]
    return [(arm, float(value)) for _, arm, value, *_ in rows]


@pytest.mark.parametrize(
    "name", [None, *sorted(str(x.relative_to(ROOT)) for x in ROOT.glob("docs/results/*/report.md"))]
)
def test_reports_show_the_paper_values(name):
    """On a page without results, and on those of docs/results."""
    if name is None:
        report = Report(load_study(STUDIES / "ci.yaml"), [])
        page = markdown_page("", report.sections(), report.opening())
    else:
        page = (ROOT / name).read_text(encoding="utf-8")
    again = read_again()
    assert of_paper(page) == [(arm, again["Table 6", row, "validation"]) for arm, row in ARMS.items()]

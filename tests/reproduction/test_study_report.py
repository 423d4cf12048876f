# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The page of the made-up study: its numbers by hand, its figures, and what it says of an unfinished study."""

import math
import re
from dataclasses import replace

import pytest
from made_up_study import changed, make_result, make_results, make_study
from matplotlib.figure import Figure as Canvas

from diff_transformer.evaluation.render import markdown_page
from diff_transformer.reproduction.report import INK, Report, _mean
from diff_transformer.reproduction.study import Contrast

pytestmark = pytest.mark.slow
STUDY, RESULTS = make_study(), make_results()
GREEN, RED, BLACK, GREY = "#009E73", "#D55E00", "#333333", "#bbbbbb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    html, markdown = Report(STUDY, RESULTS).write(folder)
    assert (html.name, markdown.name) == ("report.html", "report.md")
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def markdown(study, results) -> str:
    """The page without its figures, which take long to draw."""
    report = Report(study, results)
    return markdown_page(study.title, report.sections(), report.opening())


def table(page: str, caption: str) -> list[dict[str, str]]:
    """The rows of the table under this caption, by the names of the columns."""
    lines = page.partition(f"**{caption}**\n\n")[2].partition("\n\n")[0].splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_the_contrasts(page):
    """Effects and intervals are those of test_findings.py; detectable is at the level 0.05 / 5.

    The quantiles of 99.5 % and 80 % are 5.84091 and 0.97847 with 3 degrees of freedom, 3.70743 and 0.90570 with 6.
    """
    rows = {(x["experiment"], x["contrast"]): x for x in table(page, "Contrasts")}
    assert len(rows) == 6
    text = rows["text", "transformer → diff"]
    assert text["effect [95 %]"] == "-0.1000 [-0.1260, -0.0740]" and text["seeds"] == "4"
    assert text["detectable"] == f"{(5.84091 + 0.97847) * math.sqrt(0.0008 / 12):.4f}" == "0.0557"
    assert (text["p"], text["p, Holm"], text["verdict"]) == ("0.0012", "0.0035", "better")
    assert text["test"] == "paired t, r = 1.00"
    design = rows["retrieval", "transformer → diff"]
    stderr = math.sqrt(0.04 / 6)
    assert design["effect [95 %]"] == "× 0.135 [0.111, 0.165]" and design["test"] == "Welch, r = -0.20"
    assert design["detectable"] == f"× {math.exp((3.70743 + 0.90570) * stderr):.3g}" == "× 1.46"
    assert (design["p"], design["p, Holm"]) == ("< 0.0001", "< 0.0001")
    factor = rows["retrieval", "diff_no_norm_no_factor → diff_no_norm"]
    assert (factor["p"], factor["p, Holm"], factor["verdict"]) == ("–", "descriptive", "not learnt by either")
    recall = rows["recall", "transformer → diff"]
    assert recall["effect [95 %]"].startswith(f"× {(2 * 3 * 4 * 5 / (9 * 10**3)) ** 0.25:.3g} [")
    assert (recall["test"], recall["p"], recall["verdict"]) == ("log-rank", "0.0351", "no difference shown")
    subtraction = rows["text", "wide_norm → diff"]
    assert (subtraction["verdict"], subtraction["p, Holm"]) == ("no difference shown", "1.0000")
    assert "-0.0000" not in page
    opening = page.partition("\n## ")[0]
    assert "Models of 1 to 1 million parameters, trained for 0.00064 to 0.0032 million tokens" in opening
    assert "not finished" not in opening


def test_the_endpoints_and_the_papers_table_6(page):
    """Tokens have no decimals, and a loss has two digits of its standard error."""
    assert page.count("**At the end**") == 3
    rows = {x["arm"]: x for x in table(page, "Validation loss of the paper, and our endpoints")}
    paper = {arm: row["paper"] for arm, row in rows.items()}
    losses = ("3.087", "3.088", "3.086", "3.062", "3.122")
    assert paper == dict(zip(("transformer", "wide", "wide_norm", "diff", "diff_no_norm"), losses, strict=True))
    # 640 to 1,600 tokens: a mean of 1,120 and a standard error of 320 · √(5/3) / 2 = 207
    assert rows["diff"]["recall"] == "1,120 ± 207"
    assert rows["transformer"]["recall"] == "3,120 ± 80"  # 2,880 once, and 3,200
    # 3.0 to 3.3: √(0.05 / 3) / 2 = 0.065
    assert rows["transformer"]["text"] == "3.150 ± 0.065"
    low, high = math.exp(-5.1), math.exp(-4.9)
    error = (high - low) / 2 * math.sqrt(4 / 3) / 2
    assert rows["diff"]["retrieval"] == f"{(low + high) / 2:.5f} ± {error:.5f}"
    assert rows["wide"]["text"] == rows["diff_no_norm"]["recall"] == "–"
    recall = table(page.partition("## recall: training")[2], "At the end")
    assert [(x["arm"], x["seeds"], x["reached"]) for x in recall] == [
        ("transformer", "4", "2 of 4"),
        ("diff", "4", "4 of 4"),
    ]
    assert recall[1]["tokens"] == "1,120 ± 207" and recall[0]["accuracy"].startswith("0.900 ± ")
    assert "A model that has not learnt the task has a loss of 3.900." in page
    assert "A model that has not learnt the task has an accuracy of 0.781." in page  # 1/2 + 1/2 · 1/8, and 1


def test_the_loss_on_each_kind_of_row(page):
    retrieval = page.partition("## retrieval: training")[2]
    row = next(x for x in table(retrieval, "At the end") if x["arm"] == "transformer")
    losses = [math.exp(-3 + x) for x in (0.1, -0.1, 0.1, -0.1)]
    for n in (0, 2):
        assert row[f"{n} decoys"] == _mean(x * (1 + n) for x in losses)


def test_seeds_whose_lambda_leaves_the_range_are_listed_by_layer(page):
    rows = {(x["experiment"], x["layer"]): x for x in table(page, "Lambda")}
    assert set(rows) == {("text", "1"), ("text", "2"), ("recall", "1"), ("recall", "2")}
    assert rows["text", "1"]["seeds outside [0, 1]"] == "none" and rows["text", "2"]["seeds outside [0, 1]"] == "12"
    assert rows["text", "1"]["lambda_init"] == "0.200" and rows["text", "1"]["at the end"] == "0.300 ± 0.000"
    # 0.5 three times and -0.1
    assert rows["text", "2"]["at the end"] == "0.350 ± 0.150"
    assert (rows["text", "2"]["lowest"], rows["text", "2"]["highest"]) == ("-0.100", "0.500")


@pytest.mark.parametrize(("value", "is_outside"), [(0.0, False), (1.0, False), (-1e-6, True), (1.01, True)])
def test_the_range_of_lambda_is_closed(value, is_outside):
    where = {"experiment": "recall", "arm": "diff", "seed": 11}
    results = changed(RESULTS, where, lambdas=[[10, 0.2, value], [20, 0.2, 0.5]])
    row = next(
        x for x in table(markdown(STUDY, results), "Lambda") if (x["experiment"], x["layer"]) == ("recall", "2")
    )
    assert row["seeds outside [0, 1]"] == ("11" if is_outside else "none")


def test_arms_and_where_they_ran():
    results = [replace(x, packages={"torch": "2.1"}, date="2026-02-03T00:00:00Z") for x in RESULTS[:30]]
    page = markdown(STUDY, [*results, *RESULTS[30:]])
    rates = {x["arm"]: (x["learning rate"], x["of"]) for x in table(page, "Arms") if x["experiment"] == "retrieval"}
    assert rates["wide_norm"] == ("0.001", "0.001, 0.002, 0.004") and rates["diff"][0] == "0.004"
    assert {x["learning rate"] for x in table(page, "Arms") if x["experiment"] == "text"} == {"0.001"}
    where = [(x["date"], x["packages"], x["runs"]) for x in table(page, "Where it ran")]
    assert where == [("2026-02-03", "torch 2.1", "30"), ("2026-01-01", "torch 2.0", "40")]


def test_the_figures(folder, page):
    named = re.findall(r"\(figures/(.+?)\)", page)
    assert sorted(named) == sorted(path.name for path in (folder / "figures").iterdir())
    assert set(named) == {"forest.png", "text_curves.png", "retrieval_curves.png", "recall_curves.png"}
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png") == len(named)
    assert not re.search(r'(src|href)="(?!data:|#)', html), "the page needs another file"


def test_drawn_again_the_figures_are_the_same(folder, tmp_path):
    Report(STUDY, RESULTS).write(tmp_path)
    for file in (folder / "figures").iterdir():
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG") and content == (tmp_path / "figures" / file.name).read_bytes(), file.name


def test_nothing_on_the_pages_is_not_a_number(folder):
    for name in ("report.md", "report.html"):
        text = re.sub(r'src="data:[^"]+"', "", (folder / name).read_text(encoding="utf-8"))
        assert not re.search(r"\b(nan|inf|None)\b", text)


def lines(name: str) -> list[dict[str, list]]:
    """Of each panel of a figure: the values of the lines by color."""
    canvas = Canvas()
    (figure,) = (figure for x in Report(STUDY, RESULTS).sections() for figure in x.figures if figure.name == name)
    figure.draw(canvas)
    return [{line.get_color(): list(line.get_ydata()) for line in axes.lines} for axes in canvas.axes]


def test_the_curves_are_means_beside_their_difference_from_the_first_arm():
    losses, differences = lines("text_curves")
    assert losses[INK["transformer"]] == pytest.approx([3.9, 3.15])
    assert differences[INK["transformer"]] == [0, 0]
    assert differences[INK["diff"]] == pytest.approx([0, -0.1])
    assert lines("retrieval_curves")[0][INK["diff"]] == pytest.approx([2.0, (math.exp(-5.1) + math.exp(-4.9)) / 2])


def test_a_run_that_has_ended_keeps_its_last_accuracy_in_the_mean():
    """DIFF's four runs end after two to five evaluations of ten, at 0.95."""
    (accuracies, _) = lines("recall_curves")
    assert accuracies[INK["diff"]] == pytest.approx([0.5, *(0.5 + 0.45 * n / 4 for n in (1, 2, 3, 4, 4, 4, 4, 4, 4))])


def drawn(study=STUDY, results=RESULTS) -> dict[str, dict[str, tuple]]:
    """By experiment and contrast of the forest plot: the ends of the bar and the point, from left to right in pixels,
    those of the line of no difference, and the color."""
    canvas = Canvas(figsize=(11, 4))
    Report(study, results).draw_forest(canvas)
    canvas.canvas.draw()
    names, found = [label.get_text() for label in canvas.axes[0].get_yticklabels()], {}
    for axes in canvas.axes:
        *lines, nothing = axes.lines
        (middle,) = {round(axes.transData.transform((x, 0))[0], 6) for x in nothing.get_xdata()}
        rows = found[axes.get_title()] = {}
        for bar, point in zip(lines[::2], lines[1::2], strict=True):
            pixels = [axes.transData.transform((x, 0))[0] for x in (*bar.get_xdata(), *point.get_xdata())]
            assert point.get_color() == bar.get_color() and min(pixels) < pixels[2] < max(pixels)
            assert axes.get_xlim()[0] != axes.get_xlim()[1] and 0 <= bar.get_ydata()[0] < len(names)
            rows[names[int(bar.get_ydata()[0])]] = min(pixels) - middle, max(pixels) - middle, bar.get_color()
    return found


def test_right_of_the_line_the_second_arm_is_better():
    found = drawn()
    assert list(found) == ["text", "retrieval", "recall"]
    for experiment in found:
        left, right, color = found[experiment]["transformer → diff"]
        # p of recall is 0.035, and 0.07 after Holm's correction
        assert 0 < left < right and color == (BLACK if experiment == "recall" else GREEN), experiment
    left, right, color = found["retrieval"]["wide_norm → diff"]
    assert left < right < 0 and color == RED
    left, right, color = found["text"]["wide_norm → diff"]
    assert left < 0 < right and color == BLACK
    assert set(found["retrieval"]) == {"transformer → diff", "wide_norm → diff"}, "what is not learnt is drawn"
    assert set(found["recall"]) == {"transformer → diff"}


def test_left_of_the_line_it_is_worse():
    exchanged = {"design": replace(STUDY.contrasts["design"], arms=["diff", "transformer"])}
    for experiment, rows in drawn(replace(STUDY, contrasts={**STUDY.contrasts, **exchanged})).items():
        left, right, color = rows["diff → transformer"]
        assert left < right < 0 and color == (BLACK if experiment == "recall" else RED), experiment


def test_descriptive_contrasts_are_grey():
    contrast = Contrast("Is it better?", ["transformer", "diff"], primary=False)
    rows = drawn(replace(STUDY, contrasts={"design": contrast}))
    assert {row["transformer → diff"][2] for row in rows.values()} == {GREY}


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (lambda x: False, "(text: 0 of 12 runs; retrieval: 0 of 50 runs, no learning rates yet; recall: 0 of 8 runs)"),
        (lambda x: x.tuning, "(text: 0 of 12 runs; retrieval: 30 of 50 runs; recall: 0 of 8 runs)"),
        (
            lambda x: x.seed in (0, 10),
            "(text: 3 of 12 runs; retrieval: 20 of 50 runs, no learning rates yet; recall: 2",
        ),
        (lambda x: x.tuning or x.seed == 10, "(text: 3 of 12 runs; retrieval: 35 of 50 runs; recall: 2 of 8 runs)"),
        (
            lambda x: x.arm == "diff" or x.seed != 11,
            "(text: 10 of 12 runs; retrieval: 46 of 50 runs; recall: 7 of 8 runs)",
        ),
        (lambda x: x.experiment != "recall", "(recall: 0 of 8 runs)"),
    ],
)
def test_a_study_that_is_not_finished(tmp_path, monkeypatch, kept, told):
    monkeypatch.setattr("diff_transformer.evaluation.render._DPI", 40)
    html, path = Report(STUDY, [x for x in RESULTS if kept(x)]).write(tmp_path)
    page = path.read_text()
    assert f"The study is not finished {told}" in page.partition("\n## ")[0]
    assert not re.search(r"\bnan\b", page) and html.stat().st_size > 4000


def test_runs_that_diverged_are_named(tmp_path):
    lost = {"experiment": "text", "arm": "diff", "seed": 12}
    results = changed(RESULTS, lost, diverged=True, curve=[], batches=[])
    page = Report(STUDY, results).write(tmp_path)[1].read_text().partition("\n## ")[0]
    assert "The loss became infinite or NaN in text diff 12. These arms are not compared." in page
    assert "not finished" not in page


def test_a_study_without_results_says_so(tmp_path):
    _, path = Report(STUDY, []).write(tmp_path)
    page = path.read_text()
    assert page.startswith("# Made up\n\nThe study is not finished (") and "There are no results yet." in page
    assert list((tmp_path / "figures").iterdir()) == []


def test_arms_without_lambda_and_maps(tmp_path):
    experiments = {"text": replace(STUDY.experiments["text"], arms=["transformer", "wide"])}
    contrasts = {"width": Contrast("Do wide heads help?", ["transformer", "wide"])}
    results = [
        make_result("text", arm, seed, 1e-3, [[640, 3.0 + seed / 100, 0.5]], data="text", unigram_loss=4.0)
        for arm in ("transformer", "wide")
        for seed in (10, 11, 12, 13)
    ]
    _, path = Report(replace(STUDY, experiments=experiments, contrasts=contrasts), results).write(tmp_path)
    assert "| 0.0000 [0.0000, 0.0000] |" in path.read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"forest.png", "text_curves.png"}


def test_enormous_intervals_are_drawn():
    """Two seeds, whose log losses differ by thousands."""
    results = [x for x in RESULTS if x.tuning or x.seed in (10, 11)]
    where = {"experiment": "retrieval", "arm": "diff", "seed": 10, "tuning": False}
    results = changed(results, where, curve=[[640, 2.0, 0.3], [1280, 1e-300, 1.0]])
    assert re.search(r"\[\d\S*e-\d+, \d\S*e\+\d+\]", markdown(STUDY, results))
    drawn(results=results)


def test_means_have_two_digits_of_their_error():
    values = {"1,120 ± 207": (640, 960, 1280, 1600), "3.150 ± 0.065": (3.0, 3.1, 3.2, 3.3), "2.50 ± 0.00": (2.5,) * 3,
              "3,200": (3200,), "3.15": (3.15,), "0": (0.0,)}  # fmt: skip
    assert [_mean(x) for x in values.values()] == list(values)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The pages of docs/results and the sentences of the README are what the results there say."""

import math
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from diff_transformer.reproduction.findings import never_reached, planned_runs, tuned
from diff_transformer.reproduction.results import RESULTS, STUDY, load
from diff_transformer.reproduction.statistics import compare_times
from diff_transformer.reproduction.study import STUDIES, load_study

ROOT = Path(__file__).parents[2]

spec = spec_from_file_location("update_results", ROOT / "docs/results/update.py")
update = module_from_spec(spec)
spec.loader.exec_module(update)

COMMITTED = sorted(path.parent for path in (ROOT / "docs/results").glob(f"*/{RESULTS}"))


def test_committed_pages_are_what_would_be_drawn():
    pages = update.texts()
    assert set(pages) == {ROOT / "README.md", *(folder / "report.md" for folder in COMMITTED)}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python docs/results/update.py`"
        for figure in re.findall(r"!\[.*?\]\(((?!https).+?)\)", text):
            assert (path.parent / figure).is_file(), figure


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_results_are_all_of_the_packages_study_or_the_page_says_that_runs_are_missing(folder):
    study, results = load_study(folder / STUDY), load(folder / RESULTS)
    assert study == load_study(STUDIES / f"{folder.name}.yaml")
    planned = [run for name, x in study.experiments.items() for part in planned_runs(x, name, results) for run in part]
    done, page = {result.run for result in results}, (folder / "report.md").read_text(encoding="utf-8")
    assert done <= set(planned)
    assert (done == set(planned)) != ("The study is not finished (" in page.split("\n\n")[1])


def test_the_sentences_of_the_readme_agree_with_the_results():
    report = next(report for folder, report in update.reports().items() if folder.name == "mechanism")
    rows = {(x.experiment, x.name): x for x in report.findings}
    # On text
    long = next(report for folder, report in update.reports().items() if folder.name == "cpu-long")
    (text,) = (x for x in long.findings if (x.experiment, x.name) == ("text", "design"))
    assert text.verdict == update.NOT_SHOWN and text.comparison.interval[0] > -0.025
    # On recall: every arm with one map, the second map added or left out
    times = {arm: [(x.tokens, x.accuracy >= 0.9) for x in runs] for arm, runs in report.arms["recall"].items()}
    for arm in ("transformer", "wide", "wide_norm", "wide_gain", "wide_init"):
        found = compare_times(times[arm], times["diff"])
        assert 0.3 < math.exp(found.effect) < 0.6 and found.p < 0.001, arm
    for name in ("sign", "size"):
        assert (
            rows["recall", name].verdict == update.BETTER
            and 0.2 < math.exp(rows["recall", name].comparison.effect) < 0.23
        )
        assert rows["recall_8_heads", name].verdict == update.BETTER
    experiment = report.study.experiments["recall_8_heads"]
    assert never_reached(experiment, "recall_8_heads", report.results) == ["transformer", "diff_plus"]
    assert len(tuned(experiment, "recall_8_heads", "diff_plus", report.results)[0]) == 6
    assert rows["recall_8_heads", "subtraction"].verdict == update.NOT_SHOWN, "one map with the same norm"
    assert rows["recall_8_heads", "gain"].verdict == update.NOT_SHOWN, "runs never reached the accuracy"
    assert math.exp(max(map(abs, rows["recall_8_heads", "gain"].comparison.interval))) < 1.25
    # On retrieval
    for name in ("gain_of_wide", "norm"):
        assert rows["retrieval", name].verdict == update.BETTER, "the loud arms"
    assert (
        rows["retrieval", "gain_of_diff"].verdict == update.BETTER
        and rows["retrieval", "gain"].verdict == update.NOT_SHOWN
    )
    assert rows["retrieval", "sign"].verdict == update.EQUAL
    begin = {arm: runs[0].probes["begin"]["amplitude"][0] for arm, runs in report.arms["retrieval"].items()}
    assert begin["wide_norm"] > 10 * begin["wide"] and begin["diff"] > 10 * begin["diff_no_norm"], "as loud"
    assert begin["diff_0.8_gain"] == pytest.approx(begin["diff"], rel=0.1)
    (loud,) = (
        x for x in report.findings if x.experiment == "retrieval" and x.contrast.arms == ["diff", "diff_0.8_gain"]
    )
    assert loud.verdict == update.WORSE
    # On needles
    needles = report.arms["needles"]
    times = {arm: [(x.tokens, x.accuracy >= 0.9) for x in runs] for arm, runs in needles.items()}
    for arm in ("wide_norm", "wide_gain", "wide_init", "diff", "diff_gain", "diff_plus"):
        begin = [needles[x][0].probes["begin"]["amplitude"][0] for x in ("transformer", arm)]
        found = compare_times(times["transformer"], times[arm])
        assert begin[1] > 10 * begin[0] and found.effect < 0 and found.p < 0.001, arm
    assert rows["needles", "sign"].verdict == update.EQUAL
    assert rows["needles", "gain"].verdict == update.BETTER
    fastest = min(times, key=lambda arm: np.mean(np.log([tokens for tokens, _ in times[arm]])))
    assert fastest == "wide_gain" and 1.1 < math.exp(compare_times(times[fastest], times["diff"]).effect) < 1.3
    assert rows["needles", "subtraction_of_gain"].verdict == update.WORSE
    # In 512 tokens
    experiment, times = report.study.experiments["retrieval_512"], {}
    assert never_reached(experiment, "retrieval_512", report.results) == ["transformer"]
    for arm, runs in report.arms["retrieval_512"].items():
        times[arm] = [(x.tokens, x.accuracy >= 0.9) for x in runs]
        if arm != "transformer":
            begin = [report.arms["retrieval_512"][x][0].probes["begin"]["amplitude"][0] for x in ("transformer", arm)]
            found = compare_times(times["transformer"], times[arm])
            assert begin[1] > 10 * begin[0] and found.effect < 0 and found.p < 0.001, arm
    assert rows["retrieval_512", "sign"].verdict == update.EQUAL
    for name in ("gain", "gain_of_diff"):
        assert rows["retrieval_512", name].verdict == update.BETTER
    fastest = min(times, key=lambda arm: np.mean(np.log([tokens for tokens, _ in times[arm]])))
    assert fastest == "wide_gain" and 1.3 < math.exp(compare_times(times[fastest], times["diff"]).effect) < 1.5
    assert rows["retrieval_512", "subtraction_of_gain"].verdict == update.WORSE
    # Of docs/diff_v2.md
    assert rows["needles", "v2"].verdict == update.WORSE
    assert rows["needles", "amplitude_of_v2"].verdict == update.NOT_SHOWN
    low, high = (math.exp(x) for x in rows["needles", "v2"].comparison.interval)
    assert 1.15 < low < high < 1.55
    assert rows["retrieval", "amplitude_of_v2"].verdict == update.EQUAL
    assert rows["retrieval", "gain_of_v2"].verdict == update.BETTER

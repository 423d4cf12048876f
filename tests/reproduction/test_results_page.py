# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The pages of docs/results and the sentences of the README are what the results there say."""

import math
import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from diff_transformer.reproduction.arms import amplitudes, asked, new_model
from diff_transformer.reproduction.findings import at_equal_rates, never_reached, planned_runs, runs_by_arm, tuned
from diff_transformer.reproduction.results import RESULTS, STUDY, load
from diff_transformer.reproduction.statistics import compare, compare_times
from diff_transformer.reproduction.study import STUDIES, load_study
from diff_transformer.reproduction.train import Data, probe_rows

ROOT = Path(__file__).parents[2]

spec = spec_from_file_location("update_results", ROOT / "docs/results/update.py")
update = module_from_spec(spec)
spec.loader.exec_module(update)

COMMITTED = sorted(path.parent for path in (ROOT / "docs/results").glob(f"*/{RESULTS}"))


@pytest.fixture(scope="module")
def reports():
    """By the name of the study."""
    return {folder.name: report for folder, report in update.reports().items()}


@pytest.fixture
def root(tmp_path):
    """A copy of the committed results, of the studies in the README."""
    for name in ("mechanism", "cpu-long"):
        (tmp_path / "docs/results" / name).mkdir(parents=True)
        for file in (RESULTS, STUDY):
            shutil.copy(ROOT / "docs/results" / name / file, tmp_path / "docs/results" / name)
    shutil.copy(ROOT / "docs/replications.md", tmp_path / "docs")
    (tmp_path / "README.md").write_text("# A\n\n<!-- results -->\nold\n<!-- /results -->\n\nmore\n")
    return tmp_path


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


def ratio(comparison, places: int = 3) -> str:
    """`× 0.585 [0.475, 0.721]`"""
    effect, low, high = (f"{math.exp(x):.{places}f}" for x in (comparison.effect, *comparison.interval))
    return f"× {effect} [{low}, {high}]"


def at_lowest_rate(report, experiment: str, contrast: str) -> str:
    """`× 0.98`: the ratio of tokens with the tuning seeds at the lowest rate that both arms have tried."""
    effects = at_equal_rates(
        report.study.experiments[experiment], experiment, report.study.contrasts[contrast], report.results
    )
    return f"× {math.exp(np.mean(effects[min(effects)])):.2f}"


def test_caveats_of_cpu_agree_with_the_results(reports):
    report = reports["cpu"]
    retrieval, recall = report.arms["retrieval"], report.arms["recall"]
    of_kinds = {
        arm: {x.seed: math.log(np.mean([kind["loss"] for kind in x.conditions.values()])) for x in retrieval[arm]}
        for arm in ("wide_norm", "diff")
    }
    losses = [{x.seed: math.log(x.loss) for x in retrieval[arm]} for arm in ("transformer", "wide")]
    paired, welch = (compare(*losses, paired=x).p for x in (True, False))
    rows, kinds = report.study.experiments["retrieval"].validation_rows, len(retrieval["diff"][0].conditions)
    task = report.study.experiments["recall"].task
    questions = [(task.length - task._context(n)) // 2 for n in task.pairs]
    hardest = [
        np.mean([x.conditions["4 pairs"]["accuracy"] for x in runs])
        for runs in recall.values()
        if all(x.accuracy >= 0.9 for x in runs)
    ]
    rates = [recall[arm][0].learning_rate for arm in ("diff_no_norm", "diff")]
    page = "\n".join(update.CAVEATS["cpu"])
    for told in (
        f"on all {kinds * rows} rows of three kinds `wide_norm → diff` is "
        + ratio(compare(of_kinds["wide_norm"], of_kinds["diff"], paired=True), 2),
        f"p = {paired:.3f} paired and {welch:.3f} by Welch's test. {rows} validation rows",
        f"{100 * questions[0] / sum(questions):.0f} % of its questions",
        f"at {min(hardest):.2f} to {max(hardest):.2f}. `diff_no_norm → diff` compares learning rates of "
        f"{rates[0]:g} and {rates[1]:g}.",
    ):
        assert told in page


def test_caveats_of_cpu_long_agree_with_the_results(reports):
    report = reports["cpu-long"]
    needles, text = (report.study.experiments[name] for name in ("needles", "text"))
    rates, best = tuned(needles, "needles", "diff_v2", report.results)
    at_top = [arm for arm in text.arms if tuned(text, "text", arm, report.results)[1] == max(text.learning_rates)]
    found = {(x.experiment, x.name): x.comparison for x in report.findings}["text", "design"]
    low, high = found.interval
    assert best == min(rates) and low > -0.025
    page = "\n".join(update.CAVEATS["cpu-long"])
    for told in (
        f"V2's rate of {best:g} is the lowest",
        f"V2 needs {at_lowest_rate(report, 'needles', 'v2')} of",
        f"{len(at_top)} of {len(text.arms)} arms have the highest rate",
        f"differ by {found.effect:.3f} nats [{low:.3f}, {high:.3f}]",
    ):
        assert told in page


def test_caveats_of_mechanism_agree_with_the_results(reports):
    report = reports["mechanism"]
    times = [[(x.tokens, x.accuracy >= 0.9) for x in report.arms["recall"][arm]] for arm in ("wide", "diff")]
    lowest = [
        f"`{' → '.join(report.study.contrasts[name].arms)}` {at_lowest_rate(report, 'recall', name)}"
        for name in ("subtraction", "sign", "size")
    ]
    page = "\n".join(update.CAVEATS["mechanism"])
    assert f"`wide → diff` is {ratio(compare_times(*times))} on `recall`" in page
    assert f"smaller at 0.0005: {', '.join(lowest)}." in page


@pytest.mark.slow
def test_losses_on_retrieval_have_the_order_of_the_amplitudes():
    """As a caveat says, except among the arms with the head norm, which all begin equally loud."""
    folder = ROOT / "docs/results/cpu"
    experiment, results = load_study(folder / STUDY).experiments["retrieval"], load(folder / RESULTS)
    input_ids, labels = probe_rows(Data(experiment, folder, 0).validation())
    losses, loud = {}, {}
    for arm, runs in runs_by_arm(experiment, "retrieval", results).items():
        losses[arm] = np.mean([x.loss for x in runs])
        seeds = [new_model(arm, experiment.make_config(), seed) for seed in experiment.seeds]
        loud[arm] = np.mean([amplitudes(model, input_ids, asked(labels))[0] for model in seeds])
    normed = {"norm", "wide_norm", "diff"}
    assert min(loud[x] for x in normed) > 10 * max(loud[x] for x in set(loud) - normed)
    assert max(losses[x] for x in normed) < min(losses[x] for x in set(loud) - normed)
    others = sorted(set(loud) - normed, key=losses.get)
    assert others == sorted(others, key=loud.get, reverse=True)
    assert 0.5 < loud["diff_v2"] / loud["transformer"] < 0.65


def test_the_sentences_of_the_readme_agree_with_the_results(reports):
    report = reports["mechanism"]
    rows = {(x.experiment, x.name): x for x in report.findings}
    # On recall: every arm with one map, the second map added or left out
    times = {arm: [(x.tokens, x.accuracy >= 0.9) for x in runs] for arm, runs in report.arms["recall"].items()}
    for arm in ("transformer", "wide", "wide_norm", "wide_gain", "wide_init"):
        found = compare_times(times[arm], times["diff"])
        assert 0.3 < math.exp(found.effect) < 0.6 and found.p < 0.001, arm
    for name in ("sign", "size"):
        assert rows["recall", name].verdict == update.BETTER
        assert 0.2 < math.exp(rows["recall", name].comparison.effect) < 0.23
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
    assert rows["retrieval", "gain_of_diff"].verdict == update.BETTER
    assert rows["retrieval", "gain"].verdict == update.NOT_SHOWN
    assert rows["retrieval", "sign"].verdict == update.EQUAL
    begin = {arm: runs[0].probes["begin"]["amplitude"][0] for arm, runs in report.arms["retrieval"].items()}
    assert begin["wide_norm"] > 10 * begin["wide"] and begin["diff"] > 10 * begin["diff_no_norm"], "as loud"
    assert begin["diff_0.8_gain"] == pytest.approx(begin["diff"], rel=0.1)
    (loud,) = (
        x for x in report.findings if x.experiment == "retrieval" and x.contrast.arms == ["diff", "diff_0.8_gain"]
    )
    assert loud.verdict == update.WORSE
    # Of docs/diff_v2.md
    assert rows["retrieval", "amplitude_of_v2"].verdict == update.EQUAL
    assert rows["retrieval", "gain_of_v2"].verdict == update.BETTER


@pytest.mark.slow
def test_update_writes_the_pages_and_the_readme(root):
    readme = root / "README.md"
    pages = [root / f"docs/results/{name}/report.md" for name in ("mechanism", "cpu-long")]
    assert sorted(update.update(root)) == sorted([readme, *pages])
    text = readme.read_text()
    assert text.startswith("# A\n\n<!-- results -->\n\nAt 0.1 to 0.3 million") and "\nold\n" not in text
    assert "(docs/results/mechanism/figures/forest.png)" in text and text.endswith("\n\n<!-- /results -->\n\nmore\n")
    assert all("[The sources, one by one](../../replications.md)" in page.read_text() for page in pages)
    before, file = update.texts(root), root / "docs/results/mechanism" / RESULTS
    assert all(path.read_text() == content for path, content in before.items()), "drawn again it differs"
    swapped = {'"arm":"diff"': '"arm":"diff_plus"', '"arm":"diff_plus"': '"arm":"diff"'}
    file.write_text(re.sub("|".join(swapped), lambda match: swapped[match[0]], file.read_text()))
    after = update.texts(root)
    assert before[readme] != after[readme] and before[pages[0]] != after[pages[0]], "the results do not matter"


@pytest.mark.parametrize("text", ["# A\n", "<!-- results -->\n", "<!-- /results -->\n<!-- results -->\n"])
def test_update_writes_nothing_without_a_study_or_a_place(root, text):
    readme = root / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match=r"README.md has no place"):
        update.update(root)
    for file in root.glob(f"docs/results/*/{RESULTS}"):
        file.unlink()
    with pytest.raises(ValueError, match="There is no study in "):
        update.update(root)
    assert readme.read_text() == text and not list(root.rglob("report.md"))

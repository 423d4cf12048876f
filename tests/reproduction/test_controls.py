# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The section on learning rates, amplitudes and gradients: its numbers by hand."""

import math
from dataclasses import replace

import pytest
from made_up_study import changed, make_results, make_study
from matplotlib.figure import Figure as Canvas

from diff_transformer.reproduction.controls import (
    controls,
    draw_lambda,
    draw_rates,
    equal_rates,
    pair_rows,
    probe_rows,
)
from diff_transformer.reproduction.findings import runs_by_arm
from diff_transformer.reproduction.report import INK
from diff_transformer.reproduction.study import Contrast

STUDY, RESULTS = make_study(), make_results()
RUNS = {name: runs_by_arm(x, name, RESULTS) for name, x in STUDY.experiments.items()}


def probed(result, layers: tuple[float, float], factor: float):
    """Amplitude and gradients of two layers, and `factor` times as much in the end."""
    begin = {name: [i * x for x in layers] for i, name in enumerate(("amplitude", "q", "k", "v"), 1)}
    end = {name: [factor * x for x in values] for name, values in begin.items()}
    return replace(result, probes={"begin": begin, "end": end})


def test_equal_rates_have_the_mean_ratio_and_the_seeds_that_agree():
    """Losses of the Transformer and DIFF with seed 0: 1.5 and 2.5, 0.5 and 1.5, 2.5 and 0.5; with 1 one more."""
    rows = equal_rates(STUDY, "retrieval", RESULTS)
    assert [row[:2] for row in rows] == [
        ["retrieval", "transformer → diff"],
        ["retrieval", "wide_norm → diff"],
        ["retrieval", "diff_no_norm_no_factor → diff_no_norm"],
    ]
    ratios = [math.sqrt(2.5 / 1.5 * 3.5 / 2.5), math.sqrt(1.5 / 0.5 * 2.5 / 1.5), math.sqrt(0.5 / 2.5 * 1.5 / 3.5)]
    expected = [f"{rate:g}: × {x:.3g} (2 of 2)" for rate, x in zip((1e-3, 2e-3, 4e-3), ratios, strict=True)]
    assert rows[0][2] == "; ".join(expected)
    assert rows[2][2] == "0.001: × 1 (0 of 2); 0.002: × 1 (0 of 2); 0.004: × 1 (0 of 2)", "the arms are equal"


def test_equal_rates_leave_out_rates_that_one_arm_has_not_tried():
    results = [x for x in RESULTS if not (x.tuning and x.arm == "diff" and x.learning_rate != 1e-3)]
    assert equal_rates(STUDY, "retrieval", results)[0][2] == "0.001: × 1.53 (2 of 2)"
    results = [x for x in RESULTS if not (x.tuning and x.arm == "diff")]
    assert equal_rates(STUDY, "retrieval", results)[0][2] is None


def test_equal_rates_of_a_loss_are_differences():
    experiment = STUDY.experiments["retrieval"]
    study = replace(
        STUDY, experiments={"retrieval": replace(experiment, endpoint=replace(experiment.endpoint, kind="loss"))}
    )
    results = changed(
        RESULTS, {"tuning": True, "arm": "diff", "seed": 1, "learning_rate": 4e-3}, curve=[[640, 3.9, 0.5]]
    )
    assert equal_rates(study, "retrieval", results)[0][2].split("; ") == [
        "0.001: +1.0000 (2 of 2)", "0.002: +1.0000 (2 of 2)", "0.004: -0.8000 (1 of 2)",  # -2 and 0.4
    ]  # fmt: skip


def test_probe_rows_have_the_means_of_each_layer_at_the_beginning_and_the_end():
    runs = [probed(RUNS["text"]["diff"][i], (0.1 + i / 10, 2.0), 10) for i in (0, 1)]
    assert probe_rows("text", "diff", runs) == [
        ["text", "diff", 1, None, "0.15 → 1.5", "0.3 → 3", "0.45 → 4.5", "0.6 → 6"],
        ["text", "diff", 2, None, "2 → 20", "4 → 40", "6 → 60", "8 → 80"],
    ]
    gained = [replace(x, gains=[12.75, 1.5]) for x in runs]
    assert [row[3] for row in probe_rows("text", "diff", gained)] == ["12.75", "1.5"]
    assert probe_rows("text", "diff", [*runs, RUNS["text"]["diff"][2]]) == [], "one of the runs measured nothing"


def test_pair_rows_have_the_means_of_what_an_arm_has():
    """A Transformer has neither pairs nor lambda."""
    runs = [
        replace(
            probed(RUNS["text"]["diff"][i], (0.1, 2.0), 10),
            probes={
                when: {"activation": [4.0 * x, 8.0 * x], "lambda": [0.01 * x, 0.02 * x], "pairs": [0.1 * x, 0.2 * x]}
                for when, x in (("begin", 1 + i), ("end", 3 + i))
            },
        )
        for i in (0, 1)
    ]
    assert pair_rows("text", "upcycled", runs) == [
        ["text", "upcycled", 1, "0.15 → 0.35", "0.015 → 0.035", "6 → 14"],
        ["text", "upcycled", 2, "0.3 → 0.7", "0.03 → 0.07", "12 → 28"],
    ]
    plain = [replace(x, probes={when: {"activation": y["activation"]} for when, y in x.probes.items()}) for x in runs]
    assert pair_rows("text", "transformer", plain)[0] == ["text", "transformer", 1, None, None, "6 → 14"]
    assert pair_rows("text", "diff", [probed(runs[0], (0.1, 2.0), 10)]) == [], "an earlier version measured nothing"

    experiments = {"text": replace(STUDY.experiments["text"], arms=["transformer", "upcycled"], begins_with="first")}
    first = replace(STUDY.experiments["text"], arms=["transformer"])
    study = replace(STUDY, experiments={"first": first, **experiments})
    amplitudes = dict.fromkeys(("amplitude", *"qkv"), [1.0, 2.0])
    whole = [replace(x, probes={when: {**amplitudes, **y} for when, y in x.probes.items()}) for x in runs]
    (section,) = controls(study, RESULTS, {"text": {"upcycled": whole}}, INK)
    assert section.tables[-1].rows == pair_rows("text", "upcycled", whole)
    (section,) = controls(STUDY, RESULTS, {"text": {"diff": whole}}, INK)
    assert not any(x.caption.startswith("Pairs") for x in section.tables), "it is trained from scratch"


@pytest.mark.parametrize("name", ["text", "retrieval"])
def test_the_section_is_left_out_of_a_study_without_either(name):
    study, runs = replace(STUDY, experiments={name: STUDY.experiments[name]}), {name: RUNS[name]}
    sections = controls(study, RESULTS, runs, INK)
    assert len(sections) == (name == "retrieval")
    if sections:
        assert [table.caption for table in sections[0].tables] == ["At equal learning rates"] and sections[0].figures
    runs[name] = {"diff": [probed(x, (1.0, 2.0), 3) for x in runs[name]["diff"]]}
    (section,) = controls(study, RESULTS, runs, INK)
    captions = [table.caption for table in section.tables]
    assert [figure.name for figure in section.figures] == (["lambda"] if name == "text" else ["rates"]), "no lambda"
    assert captions[-1].startswith("From the beginning to the end") and len(captions) == 1 + (name == "retrieval")


def test_draw_rates_draws_the_geometric_means_of_the_tuning_runs():
    canvas = Canvas()
    draw_rates(canvas, STUDY, RESULTS, ["retrieval"], INK)
    (axes,) = canvas.axes
    lines = {line.get_color(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    rates, losses = lines[INK["diff"]]
    assert rates == [1e-3, 2e-3, 4e-3]
    assert losses == pytest.approx([math.sqrt(2.5 * 3.5), math.sqrt(1.5 * 2.5), math.sqrt(0.5 * 1.5)])
    assert len(lines) == 5 and axes.get_title() == "retrieval"
    one_rate = changed(RESULTS, {"arm": "diff", "tuning": True, "learning_rate": 4e-3}, diverged=True, curve=[])
    canvas = Canvas()
    draw_rates(canvas, STUDY, one_rate, ["retrieval"], INK)
    assert {line.get_color(): len(line.get_xdata()) for line in canvas.axes[0].lines}[INK["diff"]] == 2


def test_draw_lambda_draws_the_means_of_each_layer():
    """On text lambda of layer 2 ends at 0.5 and once at -0.1. On recall the runs end after two to five evaluations."""
    canvas = Canvas()
    draw_lambda(canvas, {name: RUNS[name] for name in ("text", "retrieval", "recall")}, INK)
    panels = {axes.get_title(): axes.lines for axes in canvas.axes}
    assert list(panels) == ["text, layer 1", "text, layer 2", "recall, layer 1", "recall, layer 2"]
    (line,) = panels["text, layer 2"]
    assert line.get_color() == INK["diff"] and list(line.get_xdata()) == [10, 20]
    assert list(line.get_ydata()) == pytest.approx([0.4, (3 * 0.5 - 0.1) / 4])
    assert list(panels["recall, layer 1"][0].get_xdata()) == [10, 20, 30, 40, 50]
    deep = [replace(x, lambdas=[[10, 0.1, 0.2, 0.3, 0.4]]) for x in RUNS["text"]["diff"]]
    canvas = Canvas()
    draw_lambda(canvas, {"text": {"diff": deep}}, INK)
    assert [axes.get_title() for axes in canvas.axes] == ["text, layer 1", "text, layer 4"]
    assert list(canvas.axes[1].lines[0].get_ydata()) == [0.4]


def test_a_contrast_of_arms_that_are_not_trained_has_no_row():
    study = replace(STUDY, contrasts={"other": Contrast("Is it?", ["wide", "diff"])})
    assert equal_rates(study, "retrieval", RESULTS) == []

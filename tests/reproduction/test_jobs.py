# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Which runs a study has, in which order, and how each arm gets its learning rate."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_study import RATES, SEEDS, changed, make_results, make_study

from diff_transformer.reproduction.jobs import Job, chosen_learning_rates, endpoint, jobs_of, planned_runs
from diff_transformer.reproduction.results import Run
from diff_transformer.reproduction.study import Endpoint

STUDY, RESULTS = make_study(), make_results()
RETRIEVAL = STUDY.experiments["retrieval"]


def test_the_learning_rate_is_that_of_the_lowest_mean_and_of_equal_ones_the_smallest():
    assert chosen_learning_rates(RETRIEVAL, "retrieval", RESULTS) == RATES
    reversed_grid = replace(RETRIEVAL, learning_rates=[4e-3, 2e-3, 1e-3])
    assert chosen_learning_rates(reversed_grid, "retrieval", RESULTS) == RATES


def test_the_mean_decides_not_one_seed():
    where = {"tuning": True, "arm": "transformer", "learning_rate": 4e-3}
    # With 3.5 on seed 1 a geometric mean of 1.02, not below √(0.5 · 1.5) = 0.87; with 1.8 it is 0.73
    results = changed(RESULTS, {**where, "seed": 0}, curve=[[1280, 0.3, 0.5]])
    assert chosen_learning_rates(RETRIEVAL, "retrieval", results)["transformer"] == 2e-3
    results = changed(results, {**where, "seed": 1}, curve=[[1280, 1.8, 0.5]])
    assert chosen_learning_rates(RETRIEVAL, "retrieval", results)["transformer"] == 4e-3


@pytest.mark.parametrize("kept", [lambda x: not x.tuning, lambda x: x is not RESULTS[7], lambda x: x.seed != 1])
def test_nothing_is_chosen_while_tuning_runs_are_missing(kept):
    assert chosen_learning_rates(RETRIEVAL, "retrieval", [x for x in RESULTS if kept(x)]) == {}


def test_one_learning_rate_needs_no_tuning():
    text = STUDY.experiments["text"]
    assert not text.tunes and chosen_learning_rates(text, "text", []) == dict.fromkeys(text.arms, 1e-3)


def test_of_tokens_fewer_are_better_whatever_the_loss():
    """Seeds 0 and 1 of each rate: its tokens, the last of which did not suffice, and its loss."""
    experiment = replace(RETRIEVAL, arms=["diff", "wide_norm"], endpoint=Endpoint("tokens", 0.9))
    results = [x for x in RESULTS if x.tuning and x.arm in experiment.arms]
    for rate, tokens in {1e-3: 3200, 2e-3: 960, 4e-3: 1280}.items():
        curve = [[tokens, rate, 0.5 if tokens == 3200 else 0.95]]
        results = changed(results, {"learning_rate": rate}, curve=curve)
    assert chosen_learning_rates(experiment, "retrieval", results) == {"diff": 2e-3, "wide_norm": 2e-3}
    assert endpoint(experiment, results[0]) == 3200 and endpoint(RETRIEVAL, results[0]) == math.log(1e-3)


def test_a_rate_at_which_a_run_diverged_is_not_chosen():
    """That of the Transformer is 2e-3 otherwise."""
    arm = {"experiment": "retrieval", "arm": "transformer", "tuning": True}
    results = changed(RESULTS, {**arm, "learning_rate": 2e-3, "seed": 1}, diverged=True, curve=[])
    assert chosen_learning_rates(RETRIEVAL, "retrieval", results)["transformer"] == 1e-3
    with pytest.raises(ValueError, match="of transformer became infinite or NaN with each .* 0.001, 0.002, 0.004"):
        chosen_learning_rates(RETRIEVAL, "retrieval", changed(RESULTS, arm, diverged=True, curve=[]))


def test_tuning_comes_first_and_then_whole_seeds():
    study = replace(
        STUDY, experiments={**STUDY.experiments, "recall": replace(STUDY.experiments["recall"], seeds=[5])}
    )
    jobs = jobs_of(study)
    assert jobs[:2] == [Job("retrieval", 0, True), Job("retrieval", 1, True)]
    seeds = [(job.experiment, job.seed) for job in jobs[2:]]
    assert seeds[:5] == [("text", 10), ("retrieval", 10), ("recall", 5), ("text", 11), ("retrieval", 11)]
    assert len(seeds) == 9 and not any(job.tuning for job in jobs[2:])


def test_the_runs_of_a_job():
    job, tuning = Job("retrieval", 12, False), Job("retrieval", 1, True)
    assert job.runs(STUDY, []) == [], "the learning rates are open"
    assert job.runs(STUDY, RESULTS) == [Run("retrieval", arm, 12, rate) for arm, rate in RATES.items()]
    rates = (1e-3, 2e-3, 4e-3)
    assert tuning.runs(STUDY, []) == [Run("retrieval", arm, 1, rate, True) for arm in RATES for rate in rates]
    assert Job("text", 10, False).runs(STUDY, [])[0] == Run("text", "transformer", 10, 1e-3)


def test_the_jobs_have_all_planned_runs_and_each_once():
    runs = [run for job in jobs_of(STUDY) for run in job.runs(STUDY, RESULTS)]
    assert len(runs) == len(set(runs)) == planned_runs(*STUDY.experiments.values()) == 5 * 3 * 2 + (3 + 5 + 2) * 4
    assert set(runs) == {x.run for x in RESULTS}


def test_jobs_differ_in_name_command_and_log():
    tuning, job = Job("text", 1, True), Job("text", 1, False)
    assert (tuning.name, job.name) == ("text, tuning seed 1", "text, seed 1")
    assert (tuning.log, job.log) == (Path("logs/text-tuning-1.log"), Path("logs/text-1.log"))
    assert job.command[1:] == ["-m", "diff_transformer.reproduction.train", "text", "1"]
    assert tuning.command == [*job.command, "tuning"]
    assert len(SEEDS) * 3 + 2 == len({x.log for x in jobs_of(STUDY)})

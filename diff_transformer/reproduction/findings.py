# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a study found: every contrast on the endpoint of every experiment, with a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..evaluation.results import Measure, mean
from .results import Result, RunId
from .statistics import LEVEL, Comparison, compare, compare_times, correlation, holm
from .study import Contrast, Experiment, Study
from .tasks import Floor

BETTER, WORSE, NOT_SHOWN, NOT_LEARNT = "better", "worse", "no difference shown", "not learnt by either"
_LEAST_LOSS = 2.0**-24  # of a token, other than zero, in float32


@dataclass(frozen=True)
class Finding:
    """One contrast in one experiment."""

    experiment: str
    name: str
    contrast: Contrast
    comparison: Comparison | None  # None with too few runs, with none that reached the accuracy, or if one diverged
    correlation: float | None  # of the arms of the experiment over their seeds; None for tokens
    seeds: int  # that both arms have
    learnt: bool  # by at least one of the arms
    p: float  # what decides: of primary contrasts after Holm's method; 1 where nothing is tested
    level: float = LEVEL  # for primary contrasts Holm's strictest

    @property
    def verdict(self) -> str:
        """On the second arm."""
        if not self.learnt:
            return NOT_LEARNT
        if self.comparison is None or self.p >= LEVEL:
            return NOT_SHOWN
        return BETTER if self.comparison.effect < 0 else WORSE


def findings(study: Study, results: Sequence[Result]) -> list[Finding]:
    """All contrasts of all experiments whose learning rates are chosen.

    Raises ValueError if arms were not trained under equal conditions.
    """
    found: list[Finding] = []
    for name, experiment in study.experiments.items():
        arms, threshold = runs_by_arm(experiment, name, results), experiment.endpoint.accuracy
        check_parity(name, arms)
        diverged = {x.arm for x in results if x.experiment == name and x.diverged and not x.tuning}
        values = {arm: {x.seed: endpoint(experiment, x) for x in runs} for arm, runs in arms.items()}
        together = correlation(list(values.values())) if arms and threshold is None else None
        for key, contrast in study.contrasts.items():
            if not set(contrast.arms) <= set(arms):
                continue
            first, second = (values[arm] for arm in contrast.arms)
            if diverged & set(contrast.arms):
                comparison = None
            elif threshold is not None:
                times = [[(x.tokens, x.accuracy >= threshold) for x in arms[arm]] for arm in contrast.arms]
                comparison = compare_times(*times)
            else:
                comparison = compare(first, second, paired=(together or 0.0) > 0)
            learnt = any(has_learnt(arms[arm], floor_of(experiment, arms)) for arm in contrast.arms)
            seeds, p = len(first.keys() & second.keys()), comparison.p if comparison and learnt else 1.0
            found.append(Finding(name, key, contrast, comparison, together, seeds, learnt, p))
    pairs = [set(x.arms) for x in study.contrasts.values() if x.primary]
    planned = sum(pair <= set(x.arms) for x in study.experiments.values() for pair in pairs)
    primary = [x.p for x in found if x.contrast.primary]
    # Those without results count as 1, so that a study does not find more before it is finished
    adjusted = iter(holm([*primary, *[1.0] * (planned - len(primary))]))
    return [replace(x, p=next(adjusted), level=LEVEL / planned) if x.contrast.primary else x for x in found]


def endpoint(experiment: Experiment, result: Result) -> float:
    """The value that is compared; lower is better. A run that never reaches the accuracy has all its tokens."""
    if result.diverged:
        return math.inf
    if experiment.endpoint.kind == "tokens":
        return result.tokens
    return math.log(max(result.loss, _LEAST_LOSS)) if experiment.endpoint.kind == "log_loss" else result.loss


def chosen_learning_rates(experiment: Experiment, name: str, results: Sequence[Result]) -> dict[str, float]:
    """The learning rate of each arm; empty while tuning runs are missing. Raises ValueError if an arm has none."""
    if not experiment.tunes:
        return dict.fromkeys(experiment.arms, experiment.learning_rates[0])
    found = {x.run: endpoint(experiment, x) for x in results if x.tuning}
    chosen = {}
    for arm in experiment.arms:
        means = {}
        for rate in sorted(experiment.learning_rates):
            runs = [RunId(name, arm, seed, rate, True) for seed in experiment.tuning_seeds]
            if not found.keys() >= set(runs):
                return {}
            means[rate] = mean(found[run] for run in runs)
        chosen[arm] = min(means, key=means.__getitem__)  # of equal ones the first, which is the smallest
        if math.isinf(means[chosen[arm]]):
            rates = ", ".join(f"{rate:g}" for rate in means)
            raise ValueError(
                f"{name}: the loss of {arm} is infinite or NaN at each learning rate: {rates}. Add smaller."
            )
    return chosen


def runs_by_arm(experiment: Experiment, name: str, results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each arm with its learning rate, in the order of the seeds, without those that diverged; nothing
    while the rates are not chosen."""
    found = {}
    for arm, rate in chosen_learning_rates(experiment, name, results).items():
        wanted = (name, arm, rate, False, False)
        runs = [x for x in results if (x.experiment, x.arm, x.learning_rate, x.tuning, x.diverged) == wanted]
        if runs:
            found[arm] = sorted(runs, key=lambda x: x.seed)
    return found


def check_parity(name: str, arms: Mapping[str, Sequence[Result]]) -> None:
    """Raises ValueError unless the arms have equally many parameters, within 0.1 %, and those of a seed began with
    the same matrices and saw the same text and batches."""
    check_parameters(name, {arm: results[0].parameters for arm, results in arms.items()})
    for seed in sorted({x.seed for results in arms.values() for x in results}):
        runs = [x for results in arms.values() for x in results if x.seed == seed]
        common = min(len(x.batches) for x in runs)  # those that came to an end have fewer
        seen = {x.arm: (x.matrices, x.data, x.batches[common - 1]) for x in runs}
        if len(set(seen.values())) > 1:
            raise ValueError(
                f"{name}, seed {seed}: the arms had different initial matrices, text or batches: {seen}. Remove the "
                "lines of this seed from the results, and run the same command again on one machine."
            )


def check_parameters(name: str, parameters: Mapping[str, int]) -> None:
    """parameters: by arm. Raises ValueError if one differs by more than 0.1 % from that of the first arm."""
    wanted = next(iter(parameters.values()), 0)
    if any(abs(number - wanted) > 0.001 * wanted for number in parameters.values()):
        raise ValueError(
            f"{name}: the parameters of the arms differ by more than 0.1 %: {parameters}. Larger layers make lambda, "
            "the head norms and the rounded feed-forward size of DIFF V2 a smaller share."
        )


def has_learnt(results: Sequence[Result], floor: Floor) -> bool:
    """Whether the mean over the seeds is better, by two standard errors, than a model that has not learnt the task."""
    sign = 1 if floor.metric == "accuracy" else -1
    measure = Measure.of(sign * getattr(x, floor.metric) for x in results)
    return measure.value - 2 * (measure.stderr or 0.0) > sign * floor.value


def floor_of(experiment: Experiment, arms: Mapping[str, Sequence[Result]]) -> Floor:
    """What a model scores that has not learnt the experiment's task."""
    return experiment.task.floor(next(iter(arms.values()))[0].unigram_loss)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a study found: every contrast on the endpoint of every experiment, with a verdict."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..evaluation.results import Measure, mean
from .results import Result, RunId
from .statistics import LEVEL, Comparison, compare, compare_times, correlation, holm
from .study import Contrast, Experiment, Study
from .tasks import Floor

BETTER, WORSE, NOT_SHOWN, NOT_LEARNT = "better", "worse", "no difference shown", "not learnt by either"
_LEAST_LOSS = 2.0**-24  # of a token, other than zero, in float32
TOLERANCE = 0.001  # the largest relative difference between the parameters of two arms


class ParityError(ValueError):
    """The models were not trained under equal conditions."""


@dataclass(frozen=True)
class Finding:
    """One contrast in one experiment."""

    experiment: str
    name: str
    contrast: Contrast
    comparison: Comparison | None  # None with too few runs, with none that reached the accuracy, or if one diverged
    correlation: float | None  # of the arms of the experiment over their seeds; None for tokens
    seeds: int  # that both arms have
    learnt: tuple[bool, bool]
    adjusted: float | None = None  # p after Holm's method, over all planned primary contrasts
    level: float = LEVEL  # for primary contrasts Holm's strictest

    @property
    def verdict(self) -> str:
        """On the second arm."""
        if not any(self.learnt):
            return NOT_LEARNT
        if self.comparison is None or self.p is None or self.p >= LEVEL:
            return NOT_SHOWN
        return BETTER if self.comparison.effect < 0 else WORSE

    @property
    def p(self) -> float | None:
        """What decides: adjusted for primary contrasts."""
        return self.adjusted if self.contrast.primary or self.comparison is None else self.comparison.p


def findings(study: Study, results: Sequence[Result]) -> list[Finding]:
    """All contrasts of all experiments whose learning rates are chosen. Raises ParityError."""
    found: list[Finding] = []
    for name, experiment in study.experiments.items():
        arms = runs_by_arm(experiment, name, results)
        check_parity(name, arms)
        diverged = {x.arm for x in results if x.experiment == name and x.diverged and not x.tuning}
        found += _of_experiment(study, experiment, name, arms, diverged)
    pairs = [set(x.arms) for x in study.contrasts.values() if x.primary]
    planned = sum(pair <= set(x.arms) for x in study.experiments.values() for pair in pairs)
    tested = {i: x.comparison.p for i, x in enumerate(found) if x.contrast.primary and x.comparison and any(x.learnt)}
    # Those without results count as 1, so that a study does not find more before it is finished
    adjusted = holm([*tested.values(), *[1.0] * (planned - len(tested))])
    by_index = dict(zip(tested, adjusted, strict=False))
    return [
        replace(x, adjusted=by_index.get(i), level=LEVEL / planned if x.contrast.primary else LEVEL)
        for i, x in enumerate(found)
    ]


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
            raise ValueError(
                f"{name}: the loss of {arm} became infinite or NaN with each of the learning rates "
                f"{', '.join(f'{rate:g}' for rate in means)}. Give the study smaller ones."
            )
    return chosen


def runs_by_arm(experiment: Experiment, name: str, results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each arm with its learning rate, in the order of the seeds, without those that diverged; nothing
    while the rates are not chosen."""
    found = {}
    for arm, rate in chosen_learning_rates(experiment, name, results).items():
        runs = [x for x in results if (x.experiment, x.arm, x.learning_rate, x.tuning) == (name, arm, rate, False)]
        found[arm] = sorted((x for x in runs if not x.diverged), key=lambda x: x.seed)
    return {arm: runs for arm, runs in found.items() if runs}


def check_parity(name: str, arms: Mapping[str, Sequence[Result]]) -> None:
    """Raises ParityError unless the arms have equally many parameters, within 0.1 %, and those of a seed began with
    the same matrices and saw the same text and batches."""
    check_parameters(name, {arm: results[0].parameters for arm, results in arms.items()})
    for seed in sorted({x.seed for results in arms.values() for x in results}):
        runs = [x for results in arms.values() for x in results if x.seed == seed]
        common = min(len(x.batches) for x in runs)  # those that came to an end have fewer
        seen = {x.arm: (x.matrices, x.data, x.batches[common - 1]) for x in runs}
        if len(set(seen.values())) > 1:
            raise ParityError(
                f"{name}, seed {seed}: the arms had different initial matrices, text or batches: {seen}. Remove the "
                "lines of this seed from the results, and run the same command again on one machine."
            )


def check_parameters(name: str, parameters: Mapping[str, int]) -> None:
    """parameters: by arm. Raises ParityError if one differs by more than 0.1 % from that of the first arm."""
    wanted = next(iter(parameters.values()), 0)
    if any(abs(number - wanted) > TOLERANCE * wanted for number in parameters.values()):
        raise ParityError(
            f"{name}: the parameters of the arms differ by more than {TOLERANCE:.1%}: {parameters}. Larger layers "
            "make lambda, the head norms and the rounded feed-forward size of DIFF V2 a smaller share."
        )


def has_learnt(results: Sequence[Result], floor: Floor) -> bool:
    """Whether the mean over the seeds is better, by two standard errors, than a model that has not learnt the task."""
    sign = 1 if floor.metric == "accuracy" else -1
    measure = Measure.of(sign * getattr(x, floor.metric) for x in results)
    return measure.value - 2 * (measure.stderr or 0.0) > sign * floor.value


def floor_of(experiment: Experiment, arms: Mapping[str, Sequence[Result]]) -> Floor:
    """What a model scores that has not learnt the experiment's task."""
    return experiment.task.floor(next(iter(arms.values()))[0].unigram_loss)


def _of_experiment(
    study: Study, experiment: Experiment, name: str, arms: Mapping[str, Sequence[Result]], diverged: set[str]
) -> Iterator[Finding]:
    threshold = experiment.endpoint.accuracy
    values = {arm: {x.seed: endpoint(experiment, x) for x in results} for arm, results in arms.items()}
    together = correlation(list(values.values())) if arms and threshold is None else None
    for key, contrast in study.contrasts.items():
        first, second = contrast.arms
        if not {first, second} <= set(arms):
            continue
        if diverged & {first, second}:
            comparison = None
        elif threshold is not None:
            times = [[(x.tokens, x.accuracy >= threshold) for x in arms[arm]] for arm in contrast.arms]
            comparison = compare_times(*times)
        else:
            comparison = compare(values[first], values[second], paired=(together or 0.0) > 0)
        floor = floor_of(experiment, arms)
        learnt = has_learnt(arms[first], floor), has_learnt(arms[second], floor)
        seeds = len(values[first].keys() & values[second].keys())
        yield Finding(name, key, contrast, comparison, together, seeds, learnt)

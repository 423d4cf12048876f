# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a study found: every contrast on the endpoint of every experiment, with a verdict."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..evaluation.results import Measure
from .jobs import chosen_learning_rates, endpoint
from .results import Result
from .statistics import LEVEL, Comparison, compare, compare_times, correlation, holm
from .study import Contrast, Experiment, Study
from .tasks import Floor

BETTER, WORSE, NOT_SHOWN, NOT_LEARNT = "better", "worse", "no difference shown", "not learnt by either"
TOLERANCE = 0.001  # the largest relative difference between the parameters of two arms


class ParityError(ValueError):
    """The models were not trained under equal conditions."""


@dataclass(frozen=True)
class Finding:
    """One contrast in one experiment.

    comparison: of the endpoint; None if there are too few runs, or none that reached the accuracy, or if some of an
        arm diverged: those that did not are not its usual ones.
    correlation: of the arms of the experiment over their seeds; None for tokens.
    seeds: how many both arms have.
    learnt: whether the arms learnt the task.
    adjusted: p after Holm's method, over all primary contrasts that the study plans; None for the others.
    level: that at which this contrast is decided: Holm's strictest for primary ones.
    """

    experiment: str
    name: str
    contrast: Contrast
    comparison: Comparison | None
    correlation: float | None
    seeds: int
    learnt: tuple[bool, bool]
    adjusted: float | None = None
    level: float = LEVEL

    @property
    def verdict(self) -> str:
        """Of the second arm."""
        if not any(self.learnt):
            return NOT_LEARNT
        p = self.p
        if self.comparison is None or p is None or p >= LEVEL:
            return NOT_SHOWN
        return BETTER if self.comparison.effect < 0 else WORSE

    @property
    def p(self) -> float | None:
        """What decides: adjusted for primary contrasts."""
        if self.contrast.primary or self.comparison is None:
            return self.adjusted
        return self.comparison.p


def findings(study: Study, results: Sequence[Result]) -> list[Finding]:
    """All contrasts of all experiments whose learning rates are chosen. Raises ParityError."""
    found: list[Finding] = []
    for name, experiment in study.experiments.items():
        arms = of_arms(experiment, name, results)
        check_parity(name, arms)
        if arms:
            diverged = {x.arm for x in results if x.experiment == name and x.diverged and not x.tuning}
            found += _of_experiment(study, experiment, name, arms, diverged)
    primary = [x for x in found if x.contrast.primary and x.comparison is not None and any(x.learnt)]
    p_values = [x.comparison.p for x in primary if x.comparison]
    planned = sum(x.primary for e in study.experiments.values() for x in _contrasts(study, e.arms).values())
    p_values += [1.0] * (planned - len(primary))  # so that a study does not find more before it is finished
    adjusted = dict(zip(map(id, primary), holm(p_values), strict=False))
    level = LEVEL / max(1, planned)
    return [replace(x, adjusted=adjusted.get(id(x)), level=level if x.contrast.primary else LEVEL) for x in found]


def _contrasts(study: Study, arms: Collection[str]) -> dict[str, Contrast]:
    """Those that compare two of the arms."""
    return {name: x for name, x in study.contrasts.items() if set(x.arms) <= set(arms)}


def of_arms(experiment: Experiment, name: str, results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each arm with its learning rate, in the order of the seeds, without those that diverged; nothing
    while the rates are open."""
    rates = chosen_learning_rates(experiment, name, results)
    runs = [x for x in results if x.experiment == name and not (x.tuning or x.diverged)]
    found = {
        arm: sorted((x for x in runs if (x.arm, x.learning_rate) == (arm, rate)), key=lambda x: x.seed)
        for arm, rate in rates.items()
    }
    return {arm: found[arm] for arm in found if found[arm]}


def check_parity(name: str, arms: Mapping[str, Sequence[Result]]) -> None:
    """Raises ParityError unless the arms have equally many parameters, within 0.1 %, and those of a seed began with
    the same matrices and saw the same text and batches."""
    sizes = {arm: results[0].parameters for arm, results in arms.items()}
    check_parameters(name, sizes)
    for seed in sorted({x.seed for results in arms.values() for x in results}):
        runs = [x for results in arms.values() for x in results if x.seed == seed]
        common = min(len(x.batches) for x in runs)  # those that came to an end have fewer
        compared: dict[str, dict[str, str | None]] = {
            "initial matrices": {x.arm: x.matrices for x in runs},
            "text": {x.arm: x.data for x in runs},
            "batches": {x.arm: x.batches[common - 1] for x in runs},
        }
        for what, values in compared.items():
            if len(set(values.values())) > 1:
                raise ParityError(
                    f"{name}, seed {seed}: the arms had different {what}: {values}. Remove the lines of this seed "
                    "from the results, and run the same command again on one machine."
                )


def check_parameters(name: str, parameters: Mapping[str, int]) -> None:
    """parameters: by arm. Raises ParityError if one differs by more than 0.1 % from that of the first arm."""
    for arm, number in parameters.items():
        first, wanted = next(iter(parameters.items()))
        if abs(number - wanted) > TOLERANCE * wanted:
            raise ParityError(
                f"{name}: {arm} has {number:,} parameters and {first} {wanted:,}, which differ by more than "
                f"{TOLERANCE:.1%}. In larger layers lambda and the head norms of DIFF, and the rounded feed-forward "
                "size of DIFF V2, are a smaller share."
            )


def has_learnt(results: Sequence[Result], floor: Floor) -> bool:
    """Whether the mean over the seeds is better, by two standard errors, than a model that has not learnt the task."""
    sign = 1 if floor.metric == "accuracy" else -1
    measure = Measure.of(sign * getattr(x, floor.metric) for x in results)
    return measure.value - 2 * (measure.stderr or 0.0) > sign * floor.value


def floor_of(experiment: Experiment, arms: Mapping[str, Sequence[Result]]) -> Floor:
    """What a model scores that has not learnt the experiment's task."""
    return experiment.make_task().floor(next(iter(arms.values()))[0].unigram_loss)


def _of_experiment(
    study: Study, experiment: Experiment, name: str, arms: Mapping[str, Sequence[Result]], diverged: set[str]
) -> Iterator[Finding]:
    floor, threshold, together = floor_of(experiment, arms), experiment.endpoint.accuracy, None
    values = {arm: {x.seed: endpoint(experiment, x) for x in results} for arm, results in arms.items()}
    if threshold is None:
        together = correlation(list(values.values()))
    for key, contrast in _contrasts(study, arms).items():
        first, second = contrast.arms
        if diverged & {first, second}:
            comparison = None
        elif threshold is not None:
            times = [[(x.tokens, x.accuracy >= threshold) for x in arms[arm]] for arm in contrast.arms]
            comparison = compare_times(*times)
        else:
            comparison = compare(values[first], values[second], paired=(together or 0.0) > 0)
        seeds = len(values[first].keys() & values[second].keys())
        learnt = has_learnt(arms[first], floor), has_learnt(arms[second], floor)
        yield Finding(name, key, contrast, comparison, together, seeds, learnt)

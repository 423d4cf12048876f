# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The jobs of a study: processes that train all arms of an experiment with one seed.

In the study's folder `study.yaml` and `results.jsonl` are what counts; `data/`, `checkpoints/` and `logs/` can be made
again.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.results import mean
from .results import Result, Run
from .study import Experiment, Study

_LEAST_LOSS = 2.0**-24  # of a token, other than zero, in float32
STUDY, DATA, LOGS, CHECKPOINTS = "study.yaml", "data", "logs", "checkpoints"


@dataclass(frozen=True)
class Job:
    """The runs of one experiment and seed."""

    experiment: str
    seed: int
    tuning: bool

    @property
    def name(self) -> str:
        return f"{self.experiment}, {'tuning ' if self.tuning else ''}seed {self.seed}"

    @property
    def command(self) -> list[str]:
        module = f"{__package__}.train"
        return [sys.executable, "-m", module, self.experiment, str(self.seed), *(["tuning"] if self.tuning else [])]

    @property
    def log(self) -> Path:
        return Path(LOGS, f"{self.experiment}-{'tuning-' if self.tuning else ''}{self.seed}.log")

    def runs(self, study: Study, results: Sequence[Result]) -> list[Run]:
        """The runs of this job; none while the learning rates that they need are not chosen."""
        experiment = study.experiments[self.experiment]
        if self.tuning:
            rates = {arm: experiment.learning_rates for arm in experiment.arms}
        else:
            rates = {arm: [rate] for arm, rate in chosen_learning_rates(experiment, self.experiment, results).items()}
        return [Run(self.experiment, arm, self.seed, rate, self.tuning) for arm in rates for rate in rates[arm]]


def jobs_of(study: Study) -> list[Job]:
    """First those that choose learning rates, then the others, seed by seed: a study that is stopped early has whole
    seeds."""
    jobs = [Job(name, seed, True) for name, x in study.experiments.items() for seed in x.tuning_seeds if x.tunes]
    longest = max(len(x.seeds) for x in study.experiments.values())
    for i in range(longest):
        jobs += [Job(name, x.seeds[i], False) for name, x in study.experiments.items() if i < len(x.seeds)]
    return jobs


def planned_runs(*experiments: Experiment) -> int:
    """How many runs these experiments have."""
    return sum(
        len(x.arms) * (len(x.seeds) + (len(x.tuning_seeds) * len(x.learning_rates) if x.tunes else 0))
        for x in experiments
    )


def endpoint(experiment: Experiment, result: Result) -> float:
    """The value of the endpoint, of which less is better. A run that never reaches the accuracy has all its tokens."""
    if result.diverged:
        return math.inf
    match experiment.endpoint.kind:
        case "tokens":
            return result.tokens
        case "log_loss":
            return math.log(max(result.loss, _LEAST_LOSS))
    return result.loss


def chosen_learning_rates(experiment: Experiment, name: str, results: Sequence[Result]) -> dict[str, float]:
    """The learning rate of each arm; empty while tuning runs are missing. Raises ValueError if an arm has none."""
    if not experiment.tunes:
        return dict.fromkeys(experiment.arms, experiment.learning_rates[0])
    found = {x.run: endpoint(experiment, x) for x in results if x.experiment == name and x.tuning}
    chosen = {}
    for arm in experiment.arms:
        means = {}
        for rate in sorted(experiment.learning_rates):
            runs = [Run(name, arm, seed, rate, True) for seed in experiment.tuning_seeds]
            if not all(run in found for run in runs):
                return {}
            means[rate] = mean(found[run] for run in runs)
        if math.isinf(min(means.values())):
            raise ValueError(
                f"{name}: the loss of {arm} became infinite or NaN with each of the learning rates "
                f"{', '.join(f'{rate:g}' for rate in means)}. Give the study smaller ones."
            )
        chosen[arm] = min(means, key=means.__getitem__)  # of equal ones the first, which is the smallest
    return chosen

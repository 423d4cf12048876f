# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The statistics of a study: two arms over their seeds, a difference with its interval, and what could have been seen.

Values are compared by the mean difference: with the paired t test where the seeds correlate, since arms of one seed
share their data and initial matrices, otherwise with Welch's. Times until an event, some of which are censored, are
tested by the log-rank test, and the difference is that of their logarithms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

LEVEL, POWER = 0.05, 0.8

Method = Literal["paired t", "Welch", "log-rank"]


@dataclass(frozen=True)
class Comparison:
    """The second of two samples against the first.

    effect: mean of the second - mean of the first, of times of their logarithms.
    df: degrees of freedom of the interval.
    p: two-sided; of times that of the log-rank test, while the interval is Welch's.
    null_stderr, null_df: the standard error with which an effect is detected, and its degrees of freedom; for times
        those of the log hazard ratio if the samples were equal.
    """

    effect: float
    stderr: float
    df: float
    method: Method
    p: float
    null_stderr: float
    null_df: float

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        half = float(stats.t.ppf(1 - level / 2, self.df)) * self.stderr
        return self.effect - half, self.effect + half

    def minimum_detectable(self, level: float = LEVEL, power: float = POWER) -> float:
        """The smallest effect that a study like this one, with this standard error, finds with this power.

        For times it is a log hazard ratio, and an approximation: if a third of them are censored, a later event is
        found with a power of about 0.7, and a sooner one with 0.85.
        """
        return float(stats.t.ppf([1 - level / 2, power], self.null_df).sum()) * self.null_stderr


def correlation(arms: Sequence[Mapping[int, float]]) -> float:
    """The mean correlation of two arms over the seeds that all arms have; 0 with fewer than three seeds."""
    seeds = sorted(set.intersection(*(set(arm) for arm in arms)))
    values = np.array([[arm[seed] for seed in seeds] for arm in arms])
    values = values[values.std(1) > 0] if len(seeds) >= 3 else values[:0]
    if len(values) < 2:
        return 0.0
    return float(np.corrcoef(values)[np.triu_indices(len(values), 1)].mean())


def compare(first: Mapping[int, float], second: Mapping[int, float], paired: bool) -> Comparison | None:
    """Two samples of values by their seeds; None if there are fewer than two seeds.

    Pairing costs degrees of freedom, and pays if the arms correlate. Whether they do is judged by all arms together
    (`correlation`): choosing the smaller error for each two of them would find too much. So does this choice if there
    are few arms: of equal ones 5.2 % differ at a level of 5 % with eight arms and ten seeds, 6.2 % with two arms.
    """
    if paired:
        seeds = [seed for seed in first if seed in second]
        first, second = ({seed: x[seed] for seed in seeds} for x in (first, second))
    if min(len(first), len(second)) < 2:
        return None
    a, b = np.array(list(first.values())), np.array(list(second.values()))
    if paired:
        effect, df = float(np.mean(b - a)), float(len(a) - 1)
        stderr = float(np.std(b - a, ddof=1)) / math.sqrt(len(a))
    else:
        effect, stderr, df = _welch(a, b)
    method: Method = "paired t" if paired else "Welch"
    return Comparison(effect, stderr, df, method, _two_sided(effect, stderr, df), stderr, df)


def _welch(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """The mean of `b` - that of `a`, its standard error, and its degrees of freedom."""
    parts = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    squares = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    df = sum(parts) ** 2 / squares if squares else len(a) + len(b) - 2
    return float(b.mean() - a.mean()), math.sqrt(sum(parts)), df


def _two_sided(effect: float, stderr: float, df: float) -> float:
    if stderr == 0.0:
        return 1.0 if effect == 0.0 else 0.0
    return float(2 * stats.t.sf(abs(effect) / stderr, df))


def compare_times(first: Sequence[tuple[float, bool]], second: Sequence[tuple[float, bool]]) -> Comparison | None:
    """Two samples of times, each with whether the event happened then or the time was not enough; None if no event
    tells the samples apart, or there are fewer than two times in one.

    The effect takes the times that were not enough as they are, and is too close to zero if there are any. The hazard
    ratio that belongs to the log-rank test would be no help: it has a bound, which is reached when all events of one
    sample come before those of the other.
    """
    if min(len(first), len(second)) < 2:
        return None
    with np.errstate(invalid="ignore"):  # 0 / 0 if no event tells them apart
        surplus = stats.logrank(_censored(second), _censored(first)).statistic  # of early events in the second
    if math.isnan(surplus):
        return None
    effect, stderr, df = _welch(*(np.log([time for time, _ in x]) for x in (first, second)))
    # Student's t, because with 10 or 20 times the normal distribution finds too much: 6 % at a level of 5 %
    n = len(first) + len(second)
    p = _two_sided(surplus, 1.0, n - 2) if surplus * effect < 0 else 1.0  # neither is sooner if the two disagree
    events = sum(happened for _, happened in (*first, *second))
    null_stderr = n / math.sqrt(events * len(first) * len(second))
    return Comparison(effect, stderr, df, "log-rank", p, null_stderr, n - 2)


def _censored(sample: Sequence[tuple[float, bool]]) -> stats.CensoredData:
    times, happened = zip(*sample, strict=True)
    return stats.CensoredData.right_censored(times, np.logical_not(happened))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted by Holm's method: if those below 5 % are called found, the chance of any false one is at most 5 %."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a study says: each measurement of the pair beside the paper's, with a verdict that the seeds bear.

Two models of one seed were trained on the same data in the same order, so it is their difference that counts, seed by
seed: its mean, and the 95 % interval of Student's t. An interval that includes 0 shows nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..evaluation.logit_quantization import UNQUANTIZED
from ..evaluation.outliers import ACTIVATIONS
from ..evaluation.report.attention_allocation import PAPER_ANSWER, PAPER_NOISE
from ..evaluation.report.content import PAPER_DIFF, PAPER_TRANSFORMER
from ..evaluation.report.fine_grained_loss import PAPER as TABLE_6
from ..evaluation.report.logit_quantization import FIGURE_8
from ..evaluation.report.needle import PAPER_FIGURE_5, PAPER_TABLE_2
from ..evaluation.report.outliers import NAMES as ACTIVATION_NAMES
from ..evaluation.report.outliers import PAPER as TABLE_5
from ..evaluation.report.throughput import TABLE_7
from ..evaluation.results import Measure, Results
from .reading import Checkpoint, Pairs, Reading, readings
from .study import DIFF, PAIR, TRANSFORMER

LOWER, HIGHER = "lower", "higher"
WINS, LOSES, NOT_SHOWN, UNDECIDED = "DIFF wins", "DIFF loses", "no difference shown", "one seed, undecided"
BETTER, WORSE = "better", "worse"
SAME, OPPOSITE, OPEN, EQUAL = "same direction", "opposite direction", "undecided", "equal in the paper"
NOT_IN_PAPER = "not in the paper"

# Quantile 0.975 of Student's t, from one degree of freedom on; of more than 30 that of 30, a little too wide
# fmt: off
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on

# Labels of the studies for the paper's ablations
_ABLATIONS = {
    "no_groupnorm": "DIFF without GroupNorm",
    "lambda_init_0.8": "DIFF with lambda_init = 0.8",
    "lambda_init_0.5": "DIFF with lambda_init = 0.5",
    "wide_heads": "Transformer, 8 heads",
}


@dataclass(frozen=True)
class Paper:
    """Where the paper has a row, its two values, and whether the second is the better: None if they are equal."""

    where: str
    values: tuple[float | str | None, float | str | None]
    wins: bool | None


@dataclass(frozen=True)
class Finding:
    """One row: a measurement of two models, `labels`, of which the second is asked whether it is the better.

    pairs: the two values, for every seed that both were trained with.
    """

    experiment: str
    protocol: str
    metric: str
    what: str
    better: str  # LOWER or HIGHER
    pairs: Pairs
    paper: Paper | None = None
    labels: tuple[str, str] = PAIR
    key: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> tuple[Measure, Measure]:
        """The means over seeds, n of them."""
        first, second = zip(*self.pairs.values(), strict=True)
        return Measure.of(first), Measure.of(second)

    @property
    def differences(self) -> list[float]:
        """Second - first, of every seed."""
        return [second - first for first, second in self.pairs.values()]

    @property
    def difference(self) -> float:
        return math.fsum(self.differences) / len(self.differences)

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval of the mean difference; None for one seed."""
        stderr = Measure.of(self.differences).stderr
        return None if stderr is None else _STUDENT[min(len(self.pairs) - 1, len(_STUDENT)) - 1] * stderr

    @property
    def seeds_won(self) -> int:
        return sum(x < 0 if self.better == LOWER else x > 0 for x in self.differences)

    @property
    def wins(self) -> bool | None:
        """Whether the second is the better, None if the seeds do not show it."""
        if self.half_width is None or abs(self.difference) <= self.half_width:
            return None
        return (self.difference < 0) == (self.better == LOWER)

    @property
    def is_ablation(self) -> bool:
        return self.labels != PAIR

    @property
    def verdict(self) -> str:
        if self.half_width is None:
            return UNDECIDED
        won, lost = (BETTER, WORSE) if self.is_ablation else (WINS, LOSES)
        return NOT_SHOWN if self.wins is None else won if self.wins else lost

    @property
    def direction(self) -> str:
        """Against the paper's."""
        if self.paper is None:
            return NOT_IN_PAPER
        if self.paper.wins is None:
            return EQUAL
        if self.wins is None:
            return OPEN
        return SAME if self.wins == self.paper.wins else OPPOSITE


def findings(digest: Results) -> list[Finding]:
    """All rows that the digest has the cells of; those of the ablations are last in each experiment."""
    found = []
    for reading in readings(digest):
        for rows in (
            _training,
            _losses,
            _positions,
            _outliers,
            _quantization,
            _recall,
            _needles,
            _attention,
            _ablations,
        ):
            found += [finding for finding in rows(reading) if finding.pairs]
    return found


def loss_at(curve: list[Checkpoint], seconds: float) -> float | None:
    """The validation loss after so many seconds of training, interpolated between checkpoints; None outside."""
    for a, b in zip(curve, curve[1:], strict=False):
        if a.seconds <= seconds <= b.seconds:
            share = (seconds - a.seconds) / (b.seconds - a.seconds) if b.seconds > a.seconds else 1.0
            return a.loss + share * (b.loss - a.loss)
    return None


def _training(reading: Reading) -> Iterator[Finding]:
    row = partial(Finding, reading.name, "training", "validation_loss", better=LOWER)
    if tokens := _last_common_tokens(reading, PAIR):
        pairs = reading.pairs(PAIR, "training", "validation_loss", tokens=tokens)
        paper = _printed("Table 6", _table_6(3), LOWER) if reading.is_text else None
        yield row(f"validation loss after {tokens:,} tokens", pairs=pairs, paper=paper, key={"at": "tokens"})
    share = _steady_share(reading)
    when = "" if share == 1 else ", before the learning rate falls"
    pairs = _at_equal_time(reading, share)
    yield row(f"validation loss at equal training time{when}", pairs=pairs, key={"at": "time"})
    paper = None
    if reading.is_text:
        paper = _printed("Table 7: 3B, 2K tokens", TABLE_7["3B", 2048, "forward+backward"], HIGHER)
    pairs = reading.pairs(PAIR, "run", "tokens_per_second")
    yield Finding(reading.name, "run", "tokens_per_second", "training speed, tokens/s", HIGHER, pairs, paper)


def _losses(reading: Reading) -> Iterator[Finding]:
    for column, metric, of in ((4, "ar_hit", "AR-Hit tokens"), (5, "others", "the other tokens")):
        pairs = reading.pairs(PAIR, "fine_grained_loss", metric)
        paper = _printed("Table 6", _table_6(column), LOWER)
        yield Finding(reading.name, "fine_grained_loss", metric, f"loss of {of}", LOWER, pairs, paper)


def _positions(reading: Reading) -> Iterator[Finding]:
    for (position,) in reading.keys("nll_by_position", "position")[-1:]:
        pairs = reading.pairs(PAIR, "nll_by_position", "nll", position=position)
        extended = "nll_by_position" in reading.settings["of_extended"]
        what = f"loss of the first {position + 1:,} tokens of a text{', after the extension' if extended else ''}"
        paper = Paper("Figure 4, without numbers", (None, "lower"), wins=True)
        yield Finding(reading.name, "nll_by_position", "nll", what, LOWER, pairs, paper, key={"position": position})


def _outliers(reading: Reading) -> Iterator[Finding]:
    for activation in ACTIVATIONS:
        pairs = reading.pairs(PAIR, "outliers", "top_1", activation=activation)
        paper = _printed("Table 5", [values[0] for values in TABLE_5[activation]], LOWER)
        what = f"largest magnitude of {ACTIVATION_NAMES[activation]}"
        yield Finding(reading.name, "outliers", "top_1", what, LOWER, pairs, paper, key={"activation": activation})


def _quantization(reading: Reading) -> Iterator[Finding]:
    """What is lost against the logits as they are."""
    for granularity, bits in reversed(reading.keys("logit_quantization", "granularity", "bits")):
        if bits == UNQUANTIZED:
            continue
        key = {"task": "nll", "granularity": granularity}
        few, full = (reading.pairs(PAIR, "logit_quantization", "nll", **key, bits=x) for x in (bits, UNQUANTIZED))
        pairs = {seed: (few[seed][0] - full[seed][0], few[seed][1] - full[seed][1]) for seed in few if seed in full}
        curves = FIGURE_8[PAPER_TRANSFORMER], FIGURE_8[PAPER_DIFF]
        paper = None
        if all(bits in curve for curve in curves):
            lost = [curve[UNQUANTIZED] - curve[bits] for curve in curves]
            texts = (f"{lost[0]:.1f} points of HellaSwag", f"{lost[1]:.1f} points")
            paper = Paper("Figure 8, read off", texts, _better(lost, LOWER))
        what = f"loss added by attention logits in {bits} bits, one range a {granularity}"
        key = {"bits": bits, "granularity": granularity}
        yield Finding(reading.name, "logit_quantization", "nll", what, LOWER, pairs, paper, key=key)


def _recall(reading: Reading) -> Iterator[Finding]:
    for (count,) in reading.keys("recall", "pairs"):
        pairs = reading.pairs(PAIR, "recall", "accuracy", pairs=count)
        what = f"recall, {count:,} pairs"
        yield Finding(reading.name, "recall", "accuracy", what, HIGHER, pairs, key={"pairs": count})


def _needles(reading: Reading) -> Iterator[Finding]:
    """Averaged over depths."""
    for length, needles, queried in reading.keys("needle", "length", "needles", "queried"):
        key = {"length": length, "needles": needles, "queried": queried}
        pairs = reading.pairs(PAIR, "needle", "accuracy", **key)
        what = f"needles: {queried} of {needles} asked for in {length:,} tokens"
        paper = _paper_needles(needles)
        yield Finding(reading.name, "needle", "accuracy", what, HIGHER, pairs, paper, key=key)


def _paper_needles(needles: int) -> Paper | None:
    """At the shortest length that the paper has with so many."""
    for (n, queried), values in PAPER_TABLE_2.items():
        if n == needles:
            return _printed(f"Table 2: {queried} of {n}, 4K tokens", values, HIGHER)
    if needles == 8:
        length, columns = min(PAPER_FIGURE_5.items())
        means = [math.fsum(column) / len(column) for column in columns]
        return _printed(f"Figure 5: 1 of 8, {length // 1024}K tokens", means, HIGHER)
    return None


def _attention(reading: Reading) -> Iterator[Finding]:
    """Averaged over depths."""
    for metric, table, better in (("answer", PAPER_ANSWER, HIGHER), ("noise", PAPER_NOISE, LOWER)):
        pairs = reading.pairs(PAIR, "attention_allocation", metric)
        means = [math.fsum(column) / len(column) for column in zip(*table.values(), strict=True)]
        paper = _printed("Table 3, mean over depths", means, better)
        what = "attention to the answer" if metric == "answer" else "attention noise"
        yield Finding(reading.name, "attention_allocation", metric, what, better, pairs, paper)


def _ablations(reading: Reading) -> Iterator[Finding]:
    """Every other variant beside the model of the pair that it is a variant of."""
    for label in reading.labels:
        if label in PAIR:
            continue
        labels = (TRANSFORMER if reading.architecture(label) == "transformer" else DIFF), label
        protocol, metric, what = "fine_grained_loss", "all", "loss on all tokens"
        pairs = reading.pairs(labels, protocol, metric)
        if not pairs and (tokens := _last_common_tokens(reading, labels)):
            protocol, metric, what = "training", "validation_loss", f"validation loss after {tokens:,} tokens"
            pairs = reading.pairs(labels, protocol, metric, tokens=tokens)
        paper = None
        if reading.is_text and label in _ABLATIONS:
            of = "Transformer" if labels[0] == TRANSFORMER else "DIFF"
            paper = _printed("Table 6", _table_6(3, of, _ABLATIONS[label]), LOWER)
        yield Finding(reading.name, protocol, metric, what, LOWER, pairs, paper, labels)


def _last_common_tokens(reading: Reading, labels: tuple[str, str]) -> int | None:
    """Where every seed of both models has a checkpoint; of the untrained models there is none."""
    seeds = set.intersection(*(set(reading.seeds(label)) for label in labels))
    tokens = [{point.tokens for point in reading.curve(label, seed)} for label in labels for seed in seeds]
    return max(set.intersection(*tokens), default=None) or None if tokens else None


def _steady_share(reading: Reading) -> float:
    """The part of the training before the learning rate falls towards its end, where the schedule has such a part:
    a slower model that is still at full rate would be read beside a faster one that has settled."""
    training = reading.settings["training"]
    if training.get("lr_scheduler_type") != "warmup_stable_decay":
        return 1.0
    return 1 - training["lr_scheduler_kwargs"]["num_decay_steps"] / training["max_steps"]


def _at_equal_time(reading: Reading, share: float) -> Pairs:
    """When the faster one of each seed had done this share of its training."""
    found = {}
    for seed in sorted(set.intersection(*(set(reading.seeds(label)) for label in PAIR))):
        curves = [reading.curve(label, seed) for label in PAIR]
        if all(curves):
            first, second = (loss_at(curve, share * min(c[-1].seconds for c in curves)) for curve in curves)
            if first is not None and second is not None:
                found[seed] = first, second
    return found


def _table_6(column: int, first: str = "Transformer", second: str = "DIFF") -> list[float]:
    return [float(TABLE_6[model][column]) for model in (first, second)]


def _printed(where: str, values: Sequence[float], better: str) -> Paper:
    first, second = values
    return Paper(where, (first, second), _better(values, better))


def _better(values: Sequence[float], better: str) -> bool | None:
    first, second = values
    return None if first == second else (second < first) == (better == LOWER)


__all__ = ["Finding", "Paper", "findings", "loss_at"]

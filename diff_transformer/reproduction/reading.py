# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""One experiment of a digest, as its readers ask for it: by model, seed and point of a protocol's grid."""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from ..evaluation.results import Cell, Measure, Results
from .study import PAIR

Point = tuple[tuple[str, Any], ...]  # what a cell's key has beside model, seed and protocol, and was not asked for
Values = dict[int, dict[Point, float]]  # by seed and point
Pairs = dict[int, tuple[float, float]]  # by seed, of two models


class Checkpoint(NamedTuple):
    tokens: int
    seconds: float
    loss: float


class Reading:
    """The cells of an experiment. `labels` are its models, the pair first."""

    def __init__(self, digest: Results, name: str):
        self.name, self.settings = name, digest.settings["experiments"][name]
        self.cells: list[Cell] = digest.select(experiment=name)
        found = {cell.key["model"] for cell in self.cells if "model" in cell.key}
        self.labels = [label for label in dict.fromkeys([*PAIR, *self.settings["variants"]]) if label in found]

    @property
    def sequence_length(self) -> int:
        return self.settings["sequence_length"]

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Of the data; empty if the digest has none."""
        return next((cell.data for cell in self.cells if cell.key["protocol"] == "data"), {})

    @property
    def is_text(self) -> bool:
        """Whether the models are trained on text, as the paper's are."""
        return self.manifest.get("task", {}).get("kind") == "text"

    def architecture(self, label: str) -> str:
        return self.settings["variants"][label]["architecture"]

    def seeds(self, label: str) -> list[int]:
        return sorted({cell.key["seed"] for cell in self.cells if cell.key.get("model") == label})

    def select(self, label: str, protocol: str, **key: Any) -> list[Cell]:
        return [cell for cell in self.cells if cell.matches(model=label, protocol=protocol, **key)]

    def keys(self, protocol: str, *names: str) -> list[tuple]:
        """The different values of these parts of a protocol's keys, sorted."""
        return sorted({tuple(cell.key[x] for x in names) for cell in self.cells if cell.matches(protocol=protocol)})

    def values(self, label: str, protocol: str, metric: str, **key: Any) -> Values:
        found: Values = {}
        for cell in self.select(label, protocol, **key):
            if metric in cell.measures:
                point = tuple((k, v) for k, v in sorted(cell.key.items()) if k not in {*_COMMON, *key})
                found.setdefault(cell.key["seed"], {})[point] = cell[metric]
        return found

    def over_seeds(self, label: str, protocol: str, metric: str, **key: Any) -> Measure | None:
        """The mean over seeds, of each the mean over its points, with its standard error; None if there are none."""
        found = self.values(label, protocol, metric, **key)
        return Measure.of(mean(points.values()) for points in found.values()) if found else None

    def by_point(self, label: str, protocol: str, metric: str, name: str) -> dict[Any, list[float]]:
        """The values of the seeds for each value of this part of the key, sorted."""
        found = {}
        for (x,) in self.keys(protocol, name):
            if seeds := self.values(label, protocol, metric, **{name: x}):
                found[x] = [mean(points.values()) for points in seeds.values()]
        return found

    def pairs(self, labels: tuple[str, str], protocol: str, metric: str, **key: Any) -> Pairs:
        """Of the seeds that both models have, each the mean over the points that both have."""
        a, b = (self.values(label, protocol, metric, **key) for label in labels)
        found = {}
        for seed in sorted(a.keys() & b.keys()):
            if common := sorted(a[seed].keys() & b[seed].keys(), key=str):
                found[seed] = mean(a[seed][point] for point in common), mean(b[seed][point] for point in common)
        return found

    def curve(self, label: str, seed: int) -> list[Checkpoint]:
        """The validation loss over the training."""
        return self._curves.get((label, seed), [])

    @cached_property
    def _curves(self) -> dict[tuple[str, int], list[Checkpoint]]:
        found: dict[tuple[str, int], list[Checkpoint]] = {}
        for cell in sorted(
            (cell for cell in self.cells if cell.matches(protocol="training")), key=lambda cell: cell.key["tokens"]
        ):
            point = Checkpoint(cell.key["tokens"], cell.data["seconds"], cell["validation_loss"])
            found.setdefault((cell.key["model"], cell.key["seed"]), []).append(point)
        return found


def readings(digest: Results) -> list[Reading]:
    """The experiments that have models, in the order of the study."""
    found = [Reading(digest, name) for name in digest.settings["experiments"]]
    return [reading for reading in found if reading.labels]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


_COMMON = ("experiment", "model", "seed", "protocol")

__all__ = ["Checkpoint", "Pairs", "Reading", "mean", "readings"]

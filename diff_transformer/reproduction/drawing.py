# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What the figures of a study share."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ..evaluation.report.content import Figure, colour
from .reading import Reading, mean


def figure(
    reading: Reading, name: str, caption: str, draw: Callable[[Canvas], None], size: tuple[float, float] = (7.0, 4.0)
) -> Figure:
    """Its file has the name of the experiment, too."""
    return Figure(re.sub(r"[^\w.-]+", "_", f"{reading.name}_{name}"), caption, draw, size)


def draw_band(axes: Axes, reading: Reading, label: str, points: Mapping[float, Sequence[float]], **line) -> None:
    """The mean over seeds, and from the lowest seed to the highest; points: the values of the seeds by x."""
    x, ink = list(points), colour(reading.labels, label)
    axes.plot(x, [mean(values) for values in points.values()], color=ink, label=label, **line)
    low, high = ([side(values) for values in points.values()] for side in (min, max))
    axes.fill_between(x, low, high, color=ink, alpha=0.15, linewidth=0)


def some(points: Sequence[int], number: int = 6) -> list[int]:
    """At most so many, evenly, with the last."""
    step = max(1, math.ceil(len(points) / number))
    return list(points[::-1][::step])[::-1]


__all__ = ["draw_band", "figure", "some"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The paper's values and settings beside ours. A protocol declares them as data, and `Comparison` says what differs.

A comparison has a `Row` for each value of the paper: which measure of which cells is ours, and what the paper has.
A report draws it as a table; a model card reads the same measures from the same cells.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..configuration_diff import DiffTransformerConfig
from ..configuration_diff_v2 import DiffTransformerV2Config
from .render import Table
from .results import Cell, Measure, ResultSet

# Column names for the paper's own two models
PAPER_TRANSFORMER, PAPER_DIFF = "paper: Transformer", "paper: DIFF"
DIFFERS = "what differs from the paper"
# Bounds on the parameters of the paper's models, the 3B of which has 3.5 billion
PAPER_3B, PAPER_1_4B = (3.3e9, 3.9e9), (1.2e9, 1.6e9)
UNSTATED = object()  # the paper has this setting and does not say which


@dataclass(frozen=True)
class Row:
    """`metric` of the cells whose keys contain `key`, averaged, beside the paper's values of the same.

    name: How the row is named, a text or number for each of the comparison's `names`.
    paper: The paper's values in the order of the comparison's `columns`; empty if it has none.
    differs: What differs from the paper in this row and is no setting.
    """

    name: Sequence[str | int]
    metric: str
    key: Mapping[str, Any] = field(default_factory=dict)
    paper: Sequence[float | None] = ()
    differs: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """Rows of the paper's values and ours. `columns` name the paper's, `names` what names a row.

    settings: The paper's settings by name. A name is that of a setting of the results, of an entry of the cells' data,
        of a part of their keys (a tuple: all that are averaged), or `samples`, the n of the measure. The value
        `UNSTATED` lists ours; None is a default that needs no mention.
    parameters: Bounds on the size of the paper's models.
    contrast: The name of a column for the paper's models and for ours, if one of these is a DIFF Transformer and one
        is not differential, and its text from the values of the Transformer and of DIFF.
    percent: Whether our shares are shown in percent.
    """

    caption: str
    results: ResultSet
    names: Sequence[str]
    rows: Sequence[Row]
    settings: Mapping[str, Any]
    parameters: tuple[float, float] = PAPER_3B
    columns: Sequence[str] = (PAPER_TRANSFORMER, PAPER_DIFF)
    contrast: tuple[str, Callable[[float, float], str]] | None = None
    percent: bool = False
    digits: int = 3

    def measure(self, row: Row, label: str) -> Measure | None:
        """Ours; None if the model has no such cell."""
        return self.results.measure(label, row.metric, **row.key)

    def table(self) -> Table:
        labels, twins = self.results.labels, self._twins()
        contrast = [] if self.contrast is None else [self.contrast[0]]
        columns = [*self.names, *self.columns, *(f"paper: {name}" for name in contrast), *labels]
        columns += [*(contrast if twins else []), DIFFERS]
        rows: list[list[Any]] = []
        for row in self.rows:
            paper = list(row.paper) or [None] * len(self.columns)
            ours = [self.measure(row, label) for label in labels]
            ours = [percent(measure) for measure in ours] if self.percent else ours
            values = {label: measure.value for label, measure in zip(labels, ours, strict=True) if measure}
            rows.append([*row.name, *paper, *self._contrast(paper), *ours])
            rows[-1] += self._contrast([values.get(label) for label in twins]) if twins else []
            rows[-1].append("; ".join(self.differences(row)) or "only the training of the models")
        return Table(self.caption, columns, rows, self.digits)

    def markdown(self) -> str:
        return self.table().markdown()

    def differences(self, row: Row) -> list[str]:
        """What differs between the measurements of a row and the paper's."""
        found, unstated = other_models(self.results, *self.parameters), []
        cells = [[x for x in r.select(**row.key) if row.metric in x.measures] for r in self.results.results]
        for name, paper in self.settings.items():
            ours = _texts(self._value(name, row, cell) for of_one in cells for cell in of_one)
            expected = _texts(paper if isinstance(paper, tuple) else [paper])
            setting = f"{name.replace('_', ' ')} {', '.join(ours)}"
            if paper is UNSTATED:
                unstated += [setting] if ours else []
            elif ours and ours != expected:
                found.append(setting if paper is None else f"{setting} (paper: {', '.join(expected)})")
        if unstated:
            found.append(f"not stated in the paper: {', '.join(unstated)}")
        most = max(map(len, cells), default=0)
        both = list(zip(self.results.results, cells, strict=True))
        has_some = {r.label for r, of_one in both if of_one}
        few = [r.label for r, of_one in both if r.label in has_some and len(of_one) < most]
        return [*found, *row.differs, *(f"{label} unfinished" for label in dict.fromkeys(few))]

    def _value(self, name: str, row: Row, cell: Cell) -> Any:
        samples = {"samples": cell.measures[row.metric].n}
        return {**self.results.settings, **cell.data, **cell.key, **samples}.get(name)

    def _twins(self) -> tuple[str, str] | None:
        """The labels of the only model without differential attention and of the only DIFF Transformer."""
        kinds = {label: self.results.of(label)[0].model.get("model_type") for label in self.results.labels}
        diff = [label for label, kind in kinds.items() if kind == DiffTransformerConfig.model_type]
        differential = (DiffTransformerConfig.model_type, DiffTransformerV2Config.model_type)
        others = [label for label, kind in kinds.items() if kind not in differential]
        return (others[0], diff[0]) if len(diff) == len(others) == 1 else None

    def _contrast(self, values: Sequence[float | None]) -> list[str | None]:
        """The contrast of (Transformer, DIFF), if there is one to show."""
        if self.contrast is None:
            return []
        transformer, diff = values
        return [None if transformer is None or diff is None else self.contrast[1](transformer, diff)]


def other_models(results: ResultSet, least: float = PAPER_3B[0], most: float = PAPER_3B[1]) -> list[str]:
    """How the models differ from the paper's: in their parameters, and in that the paper's DIFF is V1."""
    sizes = sorted({r.model["parameters"] for r in results.results if "parameters" in r.model})
    found = []
    if not all(least < size < most for size in sizes):
        found = [f"models of {' and '.join(dict.fromkeys(f'{size / 1e6:,.1f}' for size in sizes))} million parameters"]
    v2 = DiffTransformerV2Config.model_type
    labels = [label for label in results.labels if results.of(label)[0].model.get("model_type") == v2]
    return [*found, f"{' and '.join(labels)}: DIFF V2, the paper has V1"] if labels else found


def percent(measure: Measure | None) -> Measure | None:
    """A share in percent."""
    return measure and Measure(100 * measure.value, measure.n, measure.stderr and 100 * measure.stderr)


def _texts(values: Iterable[Any]) -> list[str]:
    """The distinct values as text, sorted; what is None or off is left out."""
    found = {_text(value) for value in values if value is not None and value is not False}
    return sorted(found, key=lambda text: (len(text), text))  # numbers by size


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if value is True:
        return "on"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""One module per protocol, which holds everything about it. To add a protocol, add a module; nothing else lists them.

A protocol module has

- a docstring, whose first line `diff-transformer evaluate` prints;
- `ORDER`, its place in a report;
- `Arguments`, a dataclass of its command-line arguments; `NO_SETTINGS` names those on which no number depends, so that
  a later run may change them and resume;
- `run(loaded, arguments, options, results)`, which adds a cell to the results for each point of its grid;
- `section(results: ResultSet) -> Section`, its part of a report, with the paper's values;
- optionally `headline(results: ResultSet) -> list[Headline]`, the numbers by which a study compares two models;
- optionally `condense(results) -> {key: measures}`, if a study should not keep all cells of a run.
"""

import ast
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Paper:
    """Where the paper reports a number, its values for the Transformer and for DIFF, and whether DIFF is better there;
    None if both are equal."""

    where: str
    values: tuple[float | str | None, float | str | None]
    wins: bool | None

    @classmethod
    def printed(cls, where: str, values: Sequence[float], better: str) -> "Paper":
        first, second = values
        return cls(where, (first, second), None if first == second else (second < first) == (better == LOWER))


@dataclass(frozen=True)
class Headline:
    """A number of a protocol by which two models are compared: the mean of `metric` over the cells that `key` selects,
    less the one that `baseline` selects, if given."""

    metric: str
    what: str
    better: str  # LOWER or HIGHER
    key: Mapping[str, Any] = field(default_factory=dict)
    paper: Paper | None = None
    baseline: Mapping[str, Any] | None = None


def names() -> list[str]:
    """The protocols, by name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def describe(name: str) -> str:
    """The first line of a protocol's docstring, read without importing the module and what it needs."""
    folder = Path(__file__).parent / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def load(name: str) -> ModuleType:
    """Raises ValueError if there is no such protocol."""
    if name not in names():
        raise ValueError(f"There is no protocol {name!r}. Choose one of {', '.join(names())}.")
    return import_module(f"{__name__}.{name}")

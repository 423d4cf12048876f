# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""On what terms the models of a study were compared: sizes, batches, data, and how to do it again."""

import json
from collections.abc import Iterable, Iterator, Mapping

from ..evaluation.report.content import Section, Table
from ..evaluation.results import Measure, Results
from .reading import Reading
from .study import TRANSFORMER


def parity(reading: Reading, processes: int) -> Section:
    rows: list[list] = []
    batches: dict[int, dict[str, str]] = {}
    for cell in (cell for label in reading.labels for cell in reading.select(label, "run")):
        batches.setdefault(cell.key["seed"], {})[cell.key["model"]] = cell.data["batches"]
    for label in reading.labels:
        cells = reading.select(label, "run")
        same = all(batches[cell.key["seed"]].get(TRANSFORMER) == cell.data["batches"] for cell in cells)
        numbers = [_whole(cell["parameters"] for cell in cells), _whole(cell["flops_per_token"] for cell in cells)]
        speed = reading.over_seeds(label, "run", "tokens_per_second")
        row = [label, reading.architecture(label), len(cells), *numbers, _rounded(speed), "yes" if same else "NO"]
        rows.append([*row, json.dumps(reading.settings["variants"][label]["config"])])
    columns = [
        "model",
        "architecture",
        "seeds",
        "parameters",
        "FLOPs per token",
        "tokens/s",
        "the Transformer's batches",
    ]
    return Section(
        title=f"{reading.name}: equal terms",
        paper="Section 3.2 and Tables 9 and 10 have the paper's terms",
        text="The models of a seed differ in their architecture, or in what is named last, and in nothing else: the "
        "tokens of every step were recorded, and their digest is compared.",
        tables=[Table("The models", [*columns, "differs in"], rows)],
        notes=["Speed was measured while other trainings ran on the same machine."] if processes > 1 else [],
    )


def data(reading: Reading) -> Section | None:
    rows = list(_condensed(reading.manifest))
    if not rows:
        return None
    return Section(
        title=f"{reading.name}: data",
        paper="Section 3.1 has the paper's",
        text="What the models were trained and validated on.",
        tables=[Table("The data", ["", "value"], rows)],
    )


def again(digest: Results) -> Section:
    """The command, and where it ran."""
    rows: list[list] = []
    for run in digest.runs:
        packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items())
        rows.append([run["date"], run["hardware"], packages, run["command"]])
    seeds = ", ".join(map(str, digest.settings["seeds"]))
    return Section(
        title="Run it again",
        paper="Appendices D and E have the paper's recipe",
        text=f"{digest.settings.get('command', 'diff-transformer reproduce')}: the study "
        f'"{digest.settings["title"]}", seeds {seeds}, about {digest.settings["minutes"]:g} minutes on '
        f"{digest.settings['machine']}. A run that is stopped goes on with the same command. Everything on this page "
        "is drawn from the file of results that it leaves.",
        tables=[Table("Where it ran", ["date", "hardware", "packages", "command"], rows)],
    )


def _condensed(content: Mapping, prefix: str = "") -> Iterator[list]:
    """A line for each value; long lists are counted."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _condensed(value, f"{prefix}{name}: ")
        elif isinstance(value, list) and len(value) > 12:
            yield [f"{prefix}{name}", f"{len(value):,}, from {value[0]} to {value[-1]}"]
        elif isinstance(value, list):
            yield [f"{prefix}{name}", ", ".join(map(str, value))]
        else:
            yield [f"{prefix}{name}", f"{value:,}" if type(value) is int else str(value)]


def _whole(values: Iterable[float]) -> str:
    return " or ".join(f"{value:,.0f}" for value in sorted(set(values)))


def _rounded(measure: Measure | None) -> str | None:
    if measure is None:
        return None
    return f"{measure.value:,.0f}" + ("" if measure.stderr is None else f" ± {measure.stderr:,.0f}")


__all__ = ["again", "data", "parity"]

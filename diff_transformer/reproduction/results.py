# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The results of a study: one line of JSON for every training run, complete in itself, in one file.

The file can be copied to another machine and continued there. A run trains a model of one arm, on one task, with one
seed and learning rate:

| field | content |
| --- | --- |
| `experiment`, `arm`, `seed`, `learning_rate`, `tuning` | which run; `tuning` for those that choose a learning rate |
| `curve` | `[tokens, validation loss, validation accuracy]` at each evaluation |
| `conditions` | loss and accuracy on each kind of rows, at the end |
| `lambdas` | `[step, lambda of the first layer, ...]` at each entry of the log; of DIFF V2 the mean |
| `parameters`, `flops_per_token`, `lambda_init` | of the model; the last by layer |
| `diverged` | whether the loss became infinite or NaN; the curve ends before |
| `unigram_loss` | of text: the validation loss of a model that knows how frequent each token is, and nothing else |
| `matrices`, `data`, `batches` | digests of the initial matrices, the text, and all batches up to each evaluation |
| `map` | of the first seed: where the first question of a row looks, by layer and head, and if the answer is right |
| `seconds`, `date`, `hardware`, `packages` | how long it took since it was last resumed, when and where |
"""

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "results.jsonl"


class Run(NamedTuple):
    """What identifies a run."""

    experiment: str
    arm: str
    seed: int
    learning_rate: float
    tuning: bool = False


@dataclass(frozen=True)
class Result:
    """A finished run: its line."""

    experiment: str
    arm: str
    seed: int
    learning_rate: float
    tuning: bool
    curve: list[list[float]]
    parameters: int
    flops_per_token: float
    matrices: str
    data: str | None
    batches: list[str]
    seconds: float
    date: str
    hardware: str
    packages: dict[str, str]
    diverged: bool = False
    unigram_loss: float | None = None
    lambda_init: list[float] = field(default_factory=list)
    lambdas: list[list[float]] = field(default_factory=list)
    conditions: dict[str, dict[str, float]] = field(default_factory=dict)
    map: dict[str, Any] | None = None

    @property
    def run(self) -> Run:
        return Run(self.experiment, self.arm, self.seed, self.learning_rate, self.tuning)

    @property
    def tokens(self) -> float:
        return self.curve[-1][0]

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    @property
    def accuracy(self) -> float:
        return self.curve[-1][2]


def load(file: Path) -> list[Result]:
    """The finished runs, in the order in which they finished. The half line of a process that was killed is left out.
    Raises ValueError for any other line that is not a result."""
    if not file.exists():
        return []
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    found: dict[Run, Result] = {}
    for i, line in enumerate(lines, 1):
        try:
            result = Result(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {i} is not the result of a run: {error}. Remove the line.") from error
        if result.run in found:
            raise ValueError(f"{file}, line {i} is a second {result.run}. Remove one of the two lines.")
        found[result.run] = result
    return list(found.values())


def append(file: Path, result: Result) -> None:
    """Adds a line. Several processes may do so at the same time."""
    line = json.dumps(vars(result), separators=(",", ":"), allow_nan=False) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        content_end = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        whole = stream.read().rfind(b"\n") + 1
        if whole < content_end:  # a process was killed while it wrote
            stream.truncate(whole)
        stream.write(line.encode())

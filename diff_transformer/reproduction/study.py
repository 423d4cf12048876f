# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A study: which arms are trained on which tasks, and what is compared. It is a YAML file, written before the run."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from huggingface_hub.errors import StrictDataclassError
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from transformers import TrainingArguments

from ..configuration_diff import DiffTransformerConfig
from . import SCALES
from .arms import ARMS
from .tasks import TASKS, KeyValue, Task

STUDIES = Path(__file__).parent / "studies"
_FORBID = ConfigDict(extra="forbid")


def _different(values: list) -> list:
    if len(set(values)) < len(values):
        raise ValueError("No value may be given twice")
    return values


def _known(arms: list[str]) -> list[str]:
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(f"There is no arm {', '.join(unknown)}; the arms are {', '.join(ARMS)}")
    return arms


Seeds = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_different)]
Arms = Annotated[list[str], Field(min_length=2), AfterValidator(_different), AfterValidator(_known)]
# Written to the results as it is in the file: 2, not 2.0
Minutes = Annotated[PositiveFloat, AfterValidator(lambda minutes: int(minutes) if minutes.is_integer() else minutes)]


@dataclass(frozen=True, config=_FORBID)
class Endpoint:
    """What is compared; lower is better.

    kind: `loss`, the validation loss after the last step, in nats; `log_loss`, its natural logarithm, for tasks whose
        loss goes to zero; `tokens`, the tokens of training until the validation accuracy is at least `accuracy`, where
        training ends. Runs that never get there are censored.
    """

    kind: Literal["loss", "log_loss", "tokens"]
    accuracy: Annotated[float, Field(gt=0, le=1)] | None = None

    def __post_init__(self):
        if (self.kind == "tokens") != (self.accuracy is not None):
            raise ValueError(
                f"got {self.kind} and accuracy={self.accuracy}; tokens need an accuracy, and only they do"
            )


@dataclass(frozen=True, config=_FORBID)
class Experiment:
    """Arms that are trained on one task.

    task: `kind`, one of `TASKS`, and its arguments.
    config: fields of DiffTransformerConfig, from which the other arms are made.
    training: arguments of transformers' `TrainingArguments`.
    learning_rates: each arm takes the one with the lowest mean of the endpoint over the `tuning_seeds`, of equal ones
        the smallest. Runs that never get to the accuracy count all their tokens.
    tuning_steps: steps of these runs, by default as many as of the others.
    lambda_lr_multiplier: the learning rate of lambda over that of the rest.
    validation_rows: the same in all runs.
    """

    task: dict[str, Any]
    config: dict[str, Any]
    arms: Arms
    endpoint: Endpoint
    seeds: Seeds
    tuning_seeds: Seeds
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1), AfterValidator(_different)]
    training: dict[str, Any]
    tuning_steps: PositiveInt | None = None
    lambda_lr_multiplier: NonNegativeFloat = 0.1
    validation_rows: PositiveInt = 256

    @property
    def tunes(self) -> bool:
        """Whether there is a choice."""
        return len(self.learning_rates) > 1

    def make_task(self) -> Task:
        return TASKS[self.task["kind"]](**{name: value for name, value in self.task.items() if name != "kind"})

    def make_config(self) -> DiffTransformerConfig:
        """DIFF's configuration."""
        task = self.make_task()
        sizes = {"vocab_size": -(-task.vocabulary // 64) * 64, "max_position_embeddings": task.length}
        no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return DiffTransformerConfig(**{**sizes, **no_tokens, **self.config})


@dataclass(frozen=True, config=_FORBID)
class Contrast:
    """One question: is the second arm better than the first? `primary` ones are what the study decides, together at a
    level of 5 %; the others only describe."""

    question: str
    arms: Annotated[Arms, Field(max_length=2)]
    primary: bool = True


@dataclass(frozen=True, config=_FORBID)
class Study:
    """Experiments, what is compared in each of them, and how they are run.

    contrasts: by name; an experiment has those whose arms it trains.
    processes: how many jobs run at the same time, with `threads` CPU threads each.
    minutes: how long the whole study takes on `machine`; it is printed as the budget.
    minutes_per_call: after this time a call stops; the next one resumes.
    """

    title: str
    experiments: Annotated[dict[str, Experiment], Field(min_length=1)]
    contrasts: Annotated[dict[str, Contrast], Field(min_length=1)]
    minutes: Minutes
    machine: str
    processes: PositiveInt = 1
    threads: PositiveInt | None = None
    minutes_per_call: Minutes | None = None


def load_study(path: str | Path) -> Study:
    """Reads and checks a study. Raises ValueError, which lists what is wrong and where, if the file is not a study."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        scales = ", ".join(SCALES)
        raise ValueError(f"The study {path} does not exist. Name a file, or use --scale {scales}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        study = TypeAdapter(Study).validate_python(content)
    except ValidationError as error:
        raise ValueError("\n".join(_messages(error, str(path)))) from None
    found = {name: _problems(experiment, study) for name, experiment in study.experiments.items()}
    if problems := [f"{path}: experiments: {name}: {x}" for name, some in found.items() for x in some]:
        raise ValueError("\n".join(problems))
    return study


def _messages(error: ValidationError, where: str) -> Iterator[str]:
    for details in error.errors():
        place, kind = ": ".join([where, *map(str, details["loc"])]), details["type"]
        needed = details["msg"].removeprefix("Value error, ")
        if kind in ("dict_type", "dataclass_type"):
            needed = "It should be a mapping of names to values"
        if kind == "missing":
            yield f"{place} is missing."
        elif kind == "unexpected_keyword_argument":
            yield f"{place} is unknown."
        else:
            yield f"{place}: got {details['input']!r}. {needed}."


def _problems(experiment: Experiment, study: Study) -> Iterator[str]:
    """What the types of the fields do not express."""
    kind, arguments = experiment.task.get("kind"), {k: v for k, v in experiment.task.items() if k != "kind"}
    if kind not in list(TASKS):  # also if it is a list
        yield f"task: got the kind {kind!r}. The kinds are {', '.join(TASKS)}."
        return
    try:
        TypeAdapter(TASKS[kind]).validate_python(arguments)
    except ValidationError as error:
        yield from _messages(error, "task")
        return
    if unknown := sorted(set(experiment.config) - {x.name for x in fields(DiffTransformerConfig)}):
        yield f"config: DiffTransformerConfig has no {', '.join(unknown)}."
    try:
        config = experiment.make_config()
        for arm in experiment.arms:
            ARMS[arm][1](config)
    except StrictDataclassError as error:
        yield f"config: {error.__cause__}"
    except (TypeError, ValueError) as error:
        yield f"config: {error}"
    threshold, task = experiment.endpoint.accuracy, experiment.make_task()
    if threshold is not None and isinstance(task, KeyValue) and threshold <= task.floor().value:
        yield (
            f"endpoint: got the accuracy {threshold:g}. It must be more than {task.floor().value:.3f}, which a model "
            "that has not learnt the task has."
        )
    if both := sorted(set(experiment.seeds) & set(experiment.tuning_seeds)):
        yield f"tuning_seeds: got {both}, which are seeds too. The learning rates are chosen on other seeds."
    known = {x.name for x in fields(TrainingArguments)}
    if unknown := sorted(set(experiment.training) - known):
        yield f"training: TrainingArguments has no {', '.join(unknown)}."
    if own := sorted({"learning_rate", "seed", "data_seed", "output_dir"} & set(experiment.training)):
        yield f"training: got {', '.join(own)}, which the study sets for every run."
    names = ("max_steps", "eval_steps", "per_device_train_batch_size")
    needed: dict[str, Any] = {name: experiment.training.get(name) for name in names}
    if wrong := [f"{x}={value!r}" for x, value in needed.items() if not (isinstance(value, int) and value > 0)]:
        yield f"training: got {', '.join(wrong)}. It should be a whole number of at least 1."
    else:
        for name, steps in (("max_steps", needed["max_steps"]), ("tuning_steps", experiment.tuning_steps)):
            if steps is not None and steps % needed["eval_steps"]:
                yield (
                    f"{name}: got {steps}. It must be a multiple of eval_steps={needed['eval_steps']}, so that the "
                    "last step is measured."
                )
    if not any(set(contrast.arms) <= set(experiment.arms) for contrast in study.contrasts.values()):
        yield f"arms: got {', '.join(experiment.arms)}, of which no contrast compares two."

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A study: which models are trained on what, and what is measured on them. A small file of YAML."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ..evaluation import PROTOCOLS
from ..training.architectures import ARCHITECTURES
from .tasks import TASKS

STUDIES = Path(__file__).parent / "studies"
SCALES = ("cpu", "gpu", "ci")
TRANSFORMER, DIFF = PAIR = ("transformer", "diff")


@dataclass(frozen=True)
class Variant:
    """One of the models. `config` are fields of DiffTransformerConfig that it has other than the experiment's; a
    Transformer is the twin of that DIFF. `seeds` are all of the study's if not given."""

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] | None = None


@dataclass(frozen=True)
class Experiment:
    """Models that are equal but for their architecture, on one task.

    task: `kind`, one of `TASKS`, and its arguments.
    config: fields of DiffTransformerConfig.
    training: arguments of `diff_transformer.training.pretrain`.
    extension: arguments of `diff_transformer.training.extend_64k`, which continues the pair's models.
    evaluations: the arguments of each protocol of `diff-transformer evaluate`.
    of_pair: the protocols that are measured on the pair only, not on the other variants.
    of_extended: those that are measured on the extended models.
    """

    task: dict[str, Any]
    sequence_length: int
    config: dict[str, Any]
    variants: dict[str, Variant]
    training: dict[str, Any]
    evaluations: dict[str, dict[str, Any]]
    extension: dict[str, Any] | None = None
    of_pair: list[str] = field(default_factory=list)
    of_extended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """processes: pieces that run at the same time, with `threads` CPU threads each.

    minutes: what all of it takes on `machine`, for the budget that is printed; `minutes_per_call`: after which a run
    stops, to be gone on with.
    """

    title: str
    seeds: list[int]
    tokenizer_ranks: int
    experiments: dict[str, Experiment]
    minutes: float
    machine: str
    processes: int = 1
    threads: int | None = None
    minutes_per_call: float | None = None

    def seeds_of(self, experiment: str, variant: str) -> list[int]:
        seeds = self.experiments[experiment].variants[variant].seeds
        return self.seeds if seeds is None else seeds


def load_study(path: str | Path) -> Study:
    """Reads and checks a study. Raises ValueError for a file that is none, with what is wrong in it."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no study {path}. Name a file, or one of --scale {', '.join(SCALES)}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    study = _build(Study, content, str(path))
    if not isinstance(study.seeds, list) or not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise ValueError(f"{path}: the seeds are {study.seeds}; needed is a list of different numbers.")
    if not study.experiments:
        raise ValueError(f"{path} has no experiments; needed is one at least.")
    experiments = {}
    for name, values in _mapping(study.experiments, f"{path}: experiments").items():
        where = f"{path}: experiments: {name}"
        experiment = _build(Experiment, values, where)
        variants = {
            label: _build(Variant, variant, f"{where}: variants: {label}")
            for label, variant in _mapping(experiment.variants, f"{where}: variants").items()
        }
        experiments[name] = Experiment(**{**_shallow(experiment), "variants": variants})
        _check(experiments[name], study, where)
    return Study(**{**_shallow(study), "experiments": experiments})


def _check(experiment: Experiment, study: Study, where: str) -> None:
    for name in ("task", "config", "training", "evaluations"):
        _mapping(getattr(experiment, name), f"{where}: {name}")
    if not set(PAIR) <= set(experiment.variants):
        raise ValueError(f"{where} has the variants {', '.join(experiment.variants)}; it needs {' and '.join(PAIR)}.")
    for label, variant in experiment.variants.items():
        if variant.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{where}: {label} has the architecture {variant.architecture!r}; there are "
                f"{', '.join(ARCHITECTURES)}."
            )
        if label in PAIR and variant != Variant(architecture=label):
            raise ValueError(
                f"{where}: {label} is one of the pair: it has the architecture {label}, the experiment's "
                "config and all seeds."
            )
        if variant.seeds == []:
            raise ValueError(f"{where}: {label} has no seeds. Leave them out for all of the study's, or the variant.")
        if variant.seeds is not None and not set(variant.seeds) <= set(study.seeds):
            raise ValueError(f"{where}: {label} has seeds {variant.seeds}; the study has {study.seeds}.")
    logging, evaluating = (experiment.training.get(name) for name in ("logging_steps", "eval_steps"))
    if not logging or not evaluating or evaluating % logging:
        raise ValueError(
            f"{where}: training has logging_steps={logging} and eval_steps={evaluating}; needed are both, the second "
            "a multiple of the first, which notes the time."
        )
    if "tokens_per_step" in experiment.training:
        raise ValueError(f"{where} has tokens_per_step; give per_device_train_batch_size, of one device.")
    if experiment.task.get("kind") not in TASKS:
        raise ValueError(f"{where} has the task {experiment.task.get('kind')!r}; there are {', '.join(TASKS)}.")
    _build(TASKS[experiment.task["kind"]], {k: v for k, v in experiment.task.items() if k != "kind"}, f"{where}: task")
    for protocol, arguments in experiment.evaluations.items():
        if protocol not in PROTOCOLS:
            raise ValueError(f"{where} evaluates {protocol!r}; there are {', '.join(PROTOCOLS)}.")
        known = {f.name for f in fields(import_module(f"diff_transformer.evaluation.{protocol}").Arguments)}
        unknown = sorted(set(arguments or {}) - known)
        if unknown:
            raise ValueError(f"{where}: {protocol} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    if experiment.extension is not None and experiment.task["kind"] != "text":
        raise ValueError(f"{where} extends models of {experiment.task['kind']}; only text has longer documents.")
    named = {*experiment.of_pair, *experiment.of_extended} - set(experiment.evaluations)
    if named:
        raise ValueError(f"{where} says of {', '.join(sorted(named))} what it is measured on, but not how.")
    if experiment.of_extended and experiment.extension is None:
        raise ValueError(f"{where} measures {', '.join(experiment.of_extended)} on extended models, but extends none.")


def _build(cls: type, values: Any, where: str) -> Any:
    values = _mapping(values, where)
    known = {f.name: f for f in fields(cls)}
    unknown, missing = (
        sorted(set(values) - set(known)),
        [
            name
            for name, f in known.items()
            if name not in values and f.default is MISSING and f.default_factory is MISSING
        ],
    )
    if unknown or missing:
        raise ValueError(
            f"{where} has {f'no place for {unknown}' if unknown else f'no {missing}'}; it is made of {list(known)}."
        )
    return cls(**values)


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {type(values).__name__}, but names with values are needed.")
    return values


def _shallow(instance: Any) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


__all__ = ["DIFF", "PAIR", "SCALES", "STUDIES", "TRANSFORMER", "Experiment", "Study", "Variant", "load_study"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The pieces of a study but its trainings, in its folder: `data EXPERIMENT` and `measure EXPERIMENT SEED`."""

import sys
from importlib import import_module
from pathlib import Path

from transformers.utils import logging

from .. import cl100k_tokenizer
from ..evaluation.__main__ import Options, run
from .pieces import FINISHED, STUDY, results_folder, run_folder, variants_of
from .study import PAIR, Study, load_study
from .tasks import write_task


def write_data(study: Study, name: str) -> None:
    experiment = study.experiments[name]
    tokenizer = cl100k_tokenizer(vocab_size=study.tokenizer_ranks, model_max_length=experiment.sequence_length)
    write_task(experiment.task, Path("data", name), tokenizer, experiment.sequence_length)


def measure(study: Study, name: str, seed: int) -> None:
    """Every protocol on every model of a seed; what is there already is not measured again."""
    experiment, folder = study.experiments[name], results_folder(name, seed)
    for protocol, arguments in experiment.evaluations.items():
        labels = [x for x in variants_of(study, name, seed) if x in PAIR or protocol not in experiment.of_pair]
        runs = {label: run_folder(name, label, seed) for label in labels}
        if protocol in experiment.of_extended:
            runs = {label: path / "extended" for label, path in runs.items() if label in PAIR}
        models = [f"{label}={path / 'model'}" for label, path in runs.items()]
        settings = import_module(f"diff_transformer.evaluation.{protocol}").Arguments(**(arguments or {}))
        run(protocol, models, settings, Options(out=str(folder), seed=seed))
    (folder / FINISHED).touch()


def main() -> None:
    logging.set_verbosity_warning()
    study, (what, name, *rest) = load_study(STUDY), sys.argv[1:]
    if what == "data":
        write_data(study, name)
    elif what == "measure":
        measure(study, name, int(rest[0]))
    else:
        raise ValueError(f"Got {what!r}; the pieces are data and measure.")


if __name__ == "__main__":
    main()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""From a study's budget to its report."""

import argparse
import os
import shutil
from pathlib import Path

import torch

from ..extras import require
from ..folders import whole_file
from ..training.budget import model_flops_per_token
from .arms import layer_lambda_init, new_model
from .findings import check_parameters
from .results import DATA, RESULTS, STUDY, load
from .run import Stopped, run_study
from .study import STUDIES, Study, load_study

UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h


def reproduce(options: argparse.Namespace) -> int:
    """Returns the exit status: 0 when all is done, 75 when the study was stopped."""
    require("accelerate", "matplotlib", "scipy")  # for the runs, and for the report after them
    path = options.study or STUDIES / f"{options.scale}.yaml"
    study = load_study(path)
    folder = options.out or Path("runs", f"reproduction-{options.scale or path.stem}")
    print_plan(study, folder)
    if options.dry_run:
        return 0
    claim_folder(path, folder)
    check_texts(study, folder)
    minutes = study.minutes_per_call if options.minutes is None else options.minutes or None
    status = 0
    try:
        run_study(study, folder, minutes)
    except Stopped as stopped:
        print(f"{stopped}. Finished runs and checkpoints are kept. Run the same command to resume.")
        status = UNFINISHED
    from .report import Report  # matplotlib

    print(folder / RESULTS, *Report(study, load(folder / RESULTS)).write(folder), sep="\n")
    return status


def claim_folder(path: Path, folder: Path) -> None:
    """Copies the study into the folder. Raises ValueError if the folder belongs to another study."""
    kept = folder / STUDY
    if not kept.exists():
        if folder.exists() and any(not file.name.startswith(f".{STUDY}.") for file in folder.iterdir()):
            raise ValueError(f"{folder} has files, but no study. Choose another --out, or empty it.")
        with whole_file(kept) as part:
            shutil.copyfile(path, part)
    elif load_study(kept) != load_study(path):
        raise ValueError(
            f"{folder} belongs to another study, or to an earlier version of this one: {kept} differs from "
            f"{path}. Choose another --out, or resume that study with --study {kept}."
        )


def print_plan(study: Study, folder: Path) -> None:
    """Prints the budget, and the size of all models. Raises ParityError if the sizes differ."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    total, done = sum(x.runs for x in study.experiments.values()), len(load(folder / RESULTS))
    stops = "" if study.minutes_per_call is None else f", in calls of at most {study.minutes_per_call:g}"
    print(
        f"Study    {study.title}\nRuns     {total}; {done} are done\n"
        f"Budget   about {study.minutes:g} minutes{stops}, on {study.machine}; this machine has {device}\n"
        f"Folder   {folder}\n\n"
        f"{'Experiment':<14}{'Arm':<24}{'Seeds':>5}{'Parameters':>13}{'FLOPs per token':>17}  lambda_init by layer"
    )
    for name, experiment in study.experiments.items():
        parameters, length = {}, experiment.task.length
        for arm in experiment.arms:
            with torch.device("meta"):
                model = new_model(arm, experiment.make_config(), seed=0)
            parameters[arm], flops = model.num_parameters(), model_flops_per_token(model.config, length)
            init = ", ".join(f"{x:.2f}" for x in layer_lambda_init(model.config))
            print(f"{name:<14}{arm:<24}{len(experiment.seeds):>5}{parameters[arm]:>13,}{flops:>17,.0f}  {init}")
        check_parameters(name, parameters)
    print(flush=True)


def check_texts(study: Study, folder: Path) -> None:
    """Prepares the text of this machine that the tasks need. Raises ValueError if the results have another."""
    results = load(folder / RESULTS)
    for name, experiment in study.experiments.items():
        text = experiment.task.text
        digest = None if text is None else text.load(folder / DATA).digest()
        if other := {x.data for x in results if x.experiment == name} - {digest}:
            raise ValueError(
                f"{name}: the results in {folder} were made with the text {', '.join(map(str, other))}, and this "
                f"machine has {digest}: another version of Python or of the packages. Continue the study with the "
                "versions that its results name, or choose another --out."
            )

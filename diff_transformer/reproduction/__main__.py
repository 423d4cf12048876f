# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer reproduce --scale cpu|gpu [--out DIR]` compares DIFF with its Transformer twin.

Trains the matched pair and its ablations on the same data with several seeds, evaluates them, and writes report.html,
report.md and results.json. Run the same command again to resume a run that was stopped.
"""

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from .. import cl100k_tokenizer
from ..folders import whole_file
from ..training.architectures import NewModelArguments, new_config
from ..training.budget import count_parameters, model_flops_per_token
from .collect import RESULTS, check_parameters, collect
from .jobs import STUDY, jobs_of, write_configs
from .report import write_report
from .run import JobError, Stopped, run_jobs
from .study import DIFF, SCALES, STUDIES, TRANSFORMER, Study, load_study

UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h


def reproduce(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="diff-transformer reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    text = "a study of this package: for two CPU cores, for a GPU, or a test of two minutes"
    which.add_argument("--scale", choices=SCALES, help=text)
    which.add_argument("--study", type=Path, metavar="FILE", help="a study of your own")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: runs/reproduction-SCALE)")
    text = "stop with checkpoints after this many minutes, 0 for never (default: as the study says)"
    parser.add_argument("--minutes", type=float, metavar="M", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print budget and parity, then exit")
    options = parser.parse_args(arguments)

    for name in ("accelerate", "lm_eval", "matplotlib", "trl"):  # for the jobs, the last of them after an hour
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    path = options.study or STUDIES / f"{options.scale}.yaml"
    study = load_study(path)
    folder = options.out or Path("runs", f"reproduction-{options.scale or path.stem}")
    print_budget(study, folder)
    print_parity(study)
    if options.dry_run:
        return 0
    claim_folder(path, folder)
    write_configs(study, folder)
    minutes = study.minutes_per_call if options.minutes is None else options.minutes or None
    try:
        run_jobs(jobs_of(study), folder, study.processes, study.threads, minutes)
    except Stopped as stopped:
        print(f"{stopped}. Finished jobs and checkpoints are kept. Run the same command to resume.")
        return UNFINISHED
    which_one = f"--study {path.name}" if options.scale is None else f"--scale {options.scale}"
    results = collect(study, folder, f"diff-transformer reproduce {which_one}")
    print(folder / RESULTS, *write_report(results, folder), sep="\n")
    return 0


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


def print_budget(study: Study, folder: Path) -> None:
    jobs = jobs_of(study)
    trainings, done = (
        sum(job.output_dir is not None for job in jobs),
        sum((folder / job.done).exists() for job in jobs),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(
        f"Study    {study.title}\n"
        f"Seeds    {', '.join(map(str, study.seeds))}\n"
        f"Jobs     {len(jobs)}, {trainings} of them trainings; {done} are done\n"
        f"Budget   about {study.minutes:g} minutes on {study.machine}; this machine has {device}\n"
        f"Folder   {folder}"
    )
    if study.minutes_per_call is not None:
        print(f"Stops    after {study.minutes_per_call:g} minutes; run the same command to resume")


def print_parity(study: Study) -> None:
    """Prints parameters and FLOPs of all models. Raises ParityError if the pair's parameters differ too much."""
    print(f"\n{'Experiment':<12}{'Model':<20}{'Parameters':>14}{'FLOPs per token':>18}")
    for name, experiment in study.experiments.items():
        tokenizer = cl100k_tokenizer(vocab_size=study.tokenizer_ranks)
        parameters, length = {}, experiment.sequence_length
        for label, variant in experiment.variants.items():
            model = NewModelArguments(variant.architecture, config_overrides={**experiment.config, **variant.config})
            config = new_config(model, tokenizer, length)
            parameters[label], flops = count_parameters(config).total, model_flops_per_token(config, length)
            print(f"{name:<12}{label:<20}{parameters[label]:>14,}{flops:>18,.0f}")
        check_parameters(name, parameters[TRANSFORMER], parameters[DIFF])
    print(flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 when all is done, 75 when the run was stopped, 1 after an error, which is printed."""
    try:
        return reproduce(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, OSError, JobError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

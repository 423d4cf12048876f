# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer reproduce --scale cpu|gpu [--out DIR]`: does DIFF beat its Transformer? One command answers.

Trains the matched pair and its ablations on the same data with several seeds, measures them, and writes report.html,
report.md and results.json. A run that is stopped goes on with the same command.
"""

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from .. import cl100k_tokenizer
from ..training.architectures import NewModelArguments, new_config
from ..training.budget import count_parameters, model_flops_per_token
from .digest import DIGEST, check_parameters, write_digest
from .pieces import STUDY, pieces_of, write_configs
from .report import write_report
from .schedule import PieceError, Stopped, run_pieces
from .study import DIFF, SCALES, STUDIES, TRANSFORMER, Study, load_study

TO_BE_CONTINUED = 75  # EX_TEMPFAIL of sysexits.h
_NEEDED = ("accelerate", "lm_eval", "matplotlib", "trl")  # by the pieces: better missed now than after an hour


def reproduce(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="diff-transformer reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--scale", choices=SCALES, help="a study of this package: two CPU cores, a GPU, two minutes")
    which.add_argument("--study", type=Path, metavar="FILE", help="a study of your own")
    parser.add_argument("--out", type=Path, metavar="DIR", help="runs/reproduction-SCALE by default")
    text = "stop after so many minutes, with checkpoints; by default as the study says, 0 for never"
    parser.add_argument("--minutes", type=float, metavar="M", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print budget and parity, and run nothing")
    options = parser.parse_args(arguments)

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"Not installed: {', '.join(missing)}. Two extras have them: pip install -e '.[train,eval]'")
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
        run_pieces(pieces_of(study), folder, study.processes, study.threads, minutes)
    except Stopped as stopped:
        print(f"{stopped}. What is done is kept: the same command goes on.")
        return TO_BE_CONTINUED
    which_one = f"--study {path.name}" if options.scale is None else f"--scale {options.scale}"
    digest = write_digest(study, folder, f"diff-transformer reproduce {which_one}")
    pages = write_report(digest, folder)
    print("\n".join(f"{page}" for page in [folder / DIGEST, *pages]))
    return 0


def claim_folder(study: Path, folder: Path) -> None:
    """Keeps the study in the folder. Raises ValueError if the folder is of another one."""
    kept = folder / STUDY
    if kept.exists() and kept.read_bytes() != study.read_bytes():
        raise ValueError(
            f"{folder} has the runs of another study, or of an earlier version of this one ({kept} differs from "
            f"{study}). Choose another --out, or go on with that study: --study {kept}."
        )
    if kept.exists():
        return
    temporary = kept.with_name(f".{STUDY}.part")
    if folder.exists() and any(file != temporary for file in folder.iterdir()):
        raise ValueError(f"{folder} has files, but no study. Choose another --out, or empty it.")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(study, temporary)
    temporary.replace(kept)


def print_budget(study: Study, folder: Path) -> None:
    pieces = pieces_of(study)
    left = [piece for piece in pieces if not (folder / piece.done).exists()]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    trainings = sum(piece.output_dir is not None for piece in pieces)
    print(
        f"Study    {study.title}\n"
        f"Seeds    {', '.join(map(str, study.seeds))}\n"
        f"Pieces   {len(pieces)}, {trainings} of them trainings; {len(pieces) - len(left)} are done\n"
        f"Budget   about {study.minutes:g} minutes on {study.machine}; here are {device}\n"
        f"Folder   {folder}"
    )
    if study.minutes_per_call is not None:
        print(f"Stops    after {study.minutes_per_call:g} minutes, to be gone on with by the same command")


def print_parity(study: Study) -> None:
    """Parameters and FLOPs of all models. Raises ParityError, before anything is trained, if the pair's differ."""
    print(f"\n{'Experiment':<12}{'Model':<20}{'Parameters':>14}{'FLOPs per token':>18}")
    for name, experiment in study.experiments.items():
        tokenizer = cl100k_tokenizer(vocab_size=study.tokenizer_ranks)
        parameters = {}
        for label, variant in experiment.variants.items():
            model = NewModelArguments(
                architecture=variant.architecture, config_overrides={**experiment.config, **variant.config}
            )
            config = new_config(model, tokenizer, experiment.sequence_length)
            parameters[label] = count_parameters(config).total
            flops = model_flops_per_token(config, experiment.sequence_length)
            print(f"{name:<12}{label:<20}{parameters[label]:>14,}{flops:>18,.0f}")
        check_parameters(name, parameters[TRANSFORMER], parameters[DIFF])
    print(flush=True)


def main(arguments: list[str] | None = None) -> int:
    """0 if all went well, 75 if there is more to do, 1 if something was wrong; the reason is printed."""
    try:
        return reproduce(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, OSError, PieceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

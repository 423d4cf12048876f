# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The jobs of a study: commands that any user could type in the study's folder.

data/<experiment>/                     what the models are trained on
runs/<experiment>/<variant>/seed<k>/   config.yaml and the output of `diff_transformer.training`; likewise extended/
results/<experiment>/seed<k>/          the output of `diff-transformer evaluate`, read by `diff-transformer report`
logs/                                  the printed output of the jobs
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from ..training.whole_checkpoints import last_whole_checkpoint, set_aside
from .study import PAIR, Experiment, Study

STUDY = "study.yaml"
BATCHES = "batches.txt"
FINISHED = "finished"  # written to the folder of results after the last protocol
_RUN = "diff_transformer.reproduction.run"
_ONLY_PRETRAINING = ("max_steps", "total_tokens", "eval_steps", "eval_strategy")  # not passed to the extension


@dataclass(frozen=True)
class Job:
    """A command that runs in the study's folder, to which all paths are relative.

    done: the file that exists once the job has finished.
    needs: the names of the jobs that must finish first.
    output_dir: the folder of a training, which resumes from its last checkpoint.
    """

    name: str
    command: tuple[str, ...]
    done: Path
    needs: tuple[str, ...] = ()
    output_dir: Path | None = None

    def resumed(self, folder: Path) -> list[str]:
        """The command, which continues from the last whole checkpoint if there is one."""
        command = list(self.command)
        if self.output_dir is not None and (folder / self.output_dir).is_dir():
            whole, faulty = last_whole_checkpoint(folder / self.output_dir)
            if whole is not None:
                command += ["--resume_from_checkpoint", "last"]
            else:
                for checkpoint in faulty:  # incomplete, and there is no other: the training starts over
                    set_aside(checkpoint)
        return command

    @property
    def log(self) -> Path:
        return Path("logs", f"{self.name.replace('/', '-')}.log")


def run_folder(experiment: str, variant: str, seed: int) -> Path:
    return Path("runs", experiment, variant, f"seed{seed}")


def results_folder(experiment: str, seed: int) -> Path:
    return Path("results", experiment, f"seed{seed}")


def variants_of(study: Study, experiment: str, seed: int) -> list[str]:
    """The variants that are trained with this seed."""
    return [label for label in study.experiments[experiment].variants if seed in study.seeds_of(experiment, label)]


def jobs_of(study: Study) -> list[Job]:
    """All jobs, each after those that it needs, seed by seed: a study that is stopped early has complete seeds."""
    jobs = [
        Job(f"data/{name}", _python(_RUN, "data", name), Path("data", name, "manifest.json"))
        for name in study.experiments
    ]
    for seed in study.seeds:
        for name, experiment in study.experiments.items():
            trainings: list[Job] = []
            for label in variants_of(study, name, seed):
                trainings += _trainings(name, experiment, label, seed)
            measurement = Job(
                f"measure/{name}/seed{seed}",
                _python(_RUN, "measure", name, str(seed)),
                results_folder(name, seed) / FINISHED,
                needs=tuple(job.name for job in trainings),
            )
            jobs += [*trainings, measurement]
    return jobs


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _trainings(name: str, experiment: Experiment, label: str, seed: int) -> Iterator[Job]:
    folder = run_folder(name, label, seed)
    train = f"train/{name}/{label}/seed{seed}"
    yield Job(
        train,
        _python("diff_transformer.training.pretrain", "--config", str(folder / "config.yaml")),
        folder / "model" / "config.json",
        needs=(f"data/{name}",),
        output_dir=folder,
    )
    if experiment.extension is not None and label in PAIR:
        extended = folder / "extended"
        yield Job(
            f"extend/{name}/{label}/seed{seed}",
            _python("diff_transformer.training.extend_64k", "--config", str(folder / "extended.yaml")),
            extended / "model" / "config.json",
            needs=(train,),
            output_dir=extended,
        )


def write_configs(study: Study, folder: Path) -> None:
    """Writes the config of every training, for the device of this machine.

    Raises ValueError, before anything is written, if a training command does not have one of the arguments.
    """
    _check_arguments(study)
    for name, experiment in study.experiments.items():
        for label in experiment.variants:
            for seed in study.seeds_of(name, label):
                run = run_folder(name, label, seed)
                (folder / run).mkdir(parents=True, exist_ok=True)
                _write(folder / run / "config.yaml", training_config(study, name, label, seed))
                if experiment.extension is not None and label in PAIR:
                    _write(folder / run / "extended.yaml", extension_config(study, name, label, seed))


def _check_arguments(study: Study) -> None:
    from ..training import extend_64k, pretrain  # slow to import, and not needed by the other jobs

    known = {stage: {f.name for part in stage.ARGUMENTS for f in fields(part)} for stage in (pretrain, extend_64k)}
    for name, experiment in study.experiments.items():
        configs = {pretrain: training_config(study, name, PAIR[0], study.seeds[0])}
        if experiment.extension is not None:
            configs[extend_64k] = extension_config(study, name, PAIR[0], study.seeds[0])
        for stage, config in configs.items():
            if unknown := sorted(set(config) - known[stage]):
                raise ValueError(
                    f"{name}: there is no argument {', '.join(unknown)}. See `python -m {stage.__name__} --help`."
                )


def training_config(study: Study, name: str, label: str, seed: int) -> dict[str, Any]:
    """The arguments of `diff_transformer.training.pretrain`."""
    experiment = study.experiments[name]
    variant = experiment.variants[label]
    data = Path("data", name)
    split = "{}.jsonl" if experiment.task["kind"] == "text" else "{}"
    return {
        **_common(seed),
        "architecture": variant.architecture,
        "config_overrides": json.dumps({**experiment.config, **variant.config}),
        "tokenizer_ranks": study.tokenizer_ranks,
        "dataset": str(data / split.format("train")),
        "validation_dataset": str(data / split.format("validation")),
        "sequence_length": experiment.sequence_length,
        "output_dir": str(run_folder(name, label, seed)),
        **experiment.training,
    }


def extension_config(study: Study, name: str, label: str, seed: int) -> dict[str, Any]:
    """The arguments of `diff_transformer.training.extend_64k`."""
    experiment, folder = study.experiments[name], run_folder(name, label, seed)
    training = {k: v for k, v in experiment.training.items() if k not in _ONLY_PRETRAINING}
    return {
        **_common(seed),
        **training,
        "model_name_or_path": str(folder / "model"),
        "dataset": str(Path("data", name, "train.jsonl")),
        "source_column": "source",
        "output_dir": str(folder / "extended"),
        **(experiment.extension or {}),
    }


def _common(seed: int) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "seed": seed,
        "data_seed": seed,
        "record_batches": True,
        "use_cpu": not on_gpu,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "report_to": "none",
        "save_strategy": "no",  # except for the checkpoint of a run that is stopped
        "dataloader_num_workers": 0,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    """Raises ValueError if the folder was started with other arguments, as on another kind of machine."""
    text = yaml.safe_dump(content, sort_keys=False)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{path} differs from the arguments of this run: the study was started on another kind of machine (this "
            f"one has {'a' if torch.cuda.is_available() else 'no'} GPU) or with another version of this package. "
            "Resume it there, or choose another --out."
        )
    path.write_text(text, encoding="utf-8")

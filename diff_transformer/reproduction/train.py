# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Trains the runs of a job one after another: `python -m diff_transformer.reproduction.train EXPERIMENT SEED`, with
`tuning` after it for the runs that choose learning rates, in the folder of a study."""

import hashlib
import math
import shutil
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback
from transformers.utils import logging

from ..evaluation.results import this_run
from ..training.budget import model_flops_per_token
from ..training.callbacks import StopOnSignal
from ..training.run_arguments import RunArguments
from ..training.trainer import NonFiniteLossError, RunTrainer
from ..training.whole_checkpoints import last_whole_checkpoint
from .arms import layer_lambda_init, matrices_digest, new_model
from .jobs import CHECKPOINTS, DATA, STUDY, Job
from .results import RESULTS, Result, Run, append, load
from .study import Experiment, load_study
from .tasks import IGNORED, KeyValue, Rows


class _Rows(Dataset):
    """Rows as `Trainer` takes them."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.input_ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.rows.input_ids[i]), "labels": torch.from_numpy(self.rows.labels[i])}


class _StopAt(TrainerCallback):
    """Ends the training once the validation accuracy is at least `accuracy`."""

    def __init__(self, accuracy: float):
        self.accuracy = accuracy

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics["eval_accuracy"] >= self.accuracy:
            control.should_training_stop = True


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of the labels that are the likeliest token. `predictions` are the likeliest tokens, (rows, tokens)."""
    guesses, labels = np.asarray(prediction.predictions)[:, :-1], np.asarray(prediction.label_ids)[:, 1:]
    asked = labels != IGNORED
    return {"accuracy": float((guesses == labels)[asked].mean())}


def _likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


class Trainings:
    """The trainings of one experiment and seed, which share their data, in the folder of a study."""

    def __init__(self, experiment: Experiment, folder: Path, seed: int):
        self.experiment, self.folder, self.seed = experiment, folder, seed
        self.stop = StopOnSignal()  # of all trainings: the next one stops if a signal came too late for the last
        self.task, arguments = experiment.make_task(), experiment.training
        self.tokens = None if self.task.text is None else self.task.text.load(folder / DATA)
        step = arguments["per_device_train_batch_size"] * arguments.get("gradient_accumulation_steps", 1)
        self.tokens_per_step = step * self.task.length
        self.rows = _Rows(self.task.rows("train", seed, step * arguments["max_steps"], self.tokens))
        self.validation = self._validation()

    def _validation(self, **condition: int) -> _Rows:
        """The same rows for all seeds."""
        return _Rows(self.task.rows("validation", 0, self.experiment.validation_rows, self.tokens, **condition))

    def train(self, run: Run) -> Result:
        """Trains a new model. While `self.stop` listens, SIGTERM ends the process after a checkpoint, from which the
        next call resumes."""
        output_dir = self.folder / CHECKPOINTS / "-".join(map(str, run))
        on_gpu = torch.cuda.is_available()
        arguments = {
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "data_seed": run.seed,
            "use_cpu": not on_gpu,
            "bf16": on_gpu and torch.cuda.is_bf16_supported(),
            "report_to": "none",
            "save_strategy": "no",  # except for the checkpoint of a run that is stopped
            "eval_strategy": "steps",
            "logging_steps": self.experiment.training["eval_steps"],
            "disable_tqdm": True,
            "record_batches": True,
            "lambda_lr_multiplier": self.experiment.lambda_lr_multiplier,
            **self.experiment.training,
        }
        if run.tuning and self.experiment.tuning_steps is not None:
            arguments["max_steps"] = self.experiment.tuning_steps
        model = new_model(run.arm, self.experiment.make_config(), run.seed, attn_implementation="sdpa")
        matrices = matrices_digest(model)
        threshold = self.experiment.endpoint.accuracy
        trainer = RunTrainer(
            model=model,
            args=RunArguments(output_dir=str(output_dir), **arguments),
            train_dataset=self.rows,
            eval_dataset=self.validation,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=_likeliest,
            callbacks=[self.stop, *([_StopAt(threshold)] if threshold is not None else [])],
        )
        checkpoint = last_whole_checkpoint(output_dir)[0] if output_dir.is_dir() else None
        diverged = False
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except NonFiniteLossError:
            diverged = True
        history, here = trainer.state.log_history, this_run(model.device)
        evaluations = [x for x in history if "eval_loss" in x]
        finite = list(takewhile(lambda x: math.isfinite(x["eval_loss"]), evaluations))
        diverged |= len(finite) < len(evaluations)
        steps = [int(x["step"]) for x in finite]
        curve = [[x["step"], x["eval_loss"], x["eval_accuracy"]] for x in finite]
        is_finished = threshold is not None and bool(curve) and curve[-1][2] >= threshold
        if self.stop.stopped_by and not is_finished:
            sys.exit(128 + self.stop.stopped_by)
        batches = (output_dir / "batches.txt").read_text().splitlines()
        layers = sorted({name for x in history for name in x if name.startswith("lambda/")})
        lambdas = [[x["step"], *(x[name] for name in layers)] for x in history if layers and layers[0] in x]
        result = Result(
            **run._asdict(),
            curve=[[step * self.tokens_per_step, *rest] for step, *rest in curve],
            conditions={} if run.tuning or diverged else self._conditions(trainer),
            parameters=model.num_parameters(),
            flops_per_token=model_flops_per_token(model.config, self.task.length),
            diverged=diverged,
            lambda_init=layer_lambda_init(model.config),
            lambdas=list(takewhile(lambda entry: all(math.isfinite(x) for x in entry), lambdas)),
            matrices=matrices,
            data=None if self.tokens is None else self.tokens.digest(),
            unigram_loss=None if self.tokens is None else self.tokens.unigram_loss(),
            batches=[hashlib.sha256("".join(batches[:step]).encode()).hexdigest()[:8] for step in steps],
            map=self._map(model) if self._is_shown(run) and not diverged else None,
            seconds=sum(x["train_runtime"] for x in history if "train_runtime" in x),
            **{name: here[name] for name in ("date", "hardware", "packages")},
        )
        shutil.rmtree(output_dir)
        return result

    def _conditions(self, trainer: RunTrainer) -> dict[str, dict[str, float]]:
        found = {}
        for name, condition in self.task.conditions.items():
            metrics = trainer.evaluate(self._validation(**condition))
            found[name] = {metric: metrics[f"eval_{metric}"] for metric in ("loss", "accuracy")}
        return found

    def _is_shown(self, run: Run) -> bool:
        return isinstance(self.task, KeyValue) and run.seed == self.experiment.seeds[0] and not run.tuning

    def _map(self, model: PreTrainedModel) -> dict[str, Any]:
        """The attention of all layers' heads from the first question of a row, one of the hardest, to its context."""
        assert isinstance(self.task, KeyValue)
        *_, hardest = [{}, *self.task.conditions.values()]
        row, labels = (x[0] for x in self._validation(**hardest).rows)
        question = int((labels != IGNORED).argmax()) - 1
        model.set_attn_implementation("eager")
        with torch.no_grad():
            output = model(torch.from_numpy(row[None]).to(model.device), output_attentions=True)
        layers = [x[0, :, question, : question + 1].tolist() for x in output.attentions]
        return {
            "layers": [[[round(x, 4) for x in head] for head in heads] for heads in layers],
            "answer": self.task.answer_place(row, question),
            "solved": bool(output.logits[0, question].argmax() == row[question + 1]),
        }


def main(arguments: list[str] | None = None) -> None:
    logging.set_verbosity_warning()
    name, seed, *tuning = sys.argv[1:] if arguments is None else arguments
    folder, study, job = Path(), load_study(STUDY), Job(name, int(seed), bool(tuning))
    results = load(folder / RESULTS)
    done = {result.run for result in results}
    missing = [run for run in job.runs(study, results) if run not in done]
    trainings = Trainings(study.experiments[name], folder, job.seed)
    with trainings.stop.listening():
        for run in missing:
            append(folder / RESULTS, trainings.train(run))


if __name__ == "__main__":
    main()

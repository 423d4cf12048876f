# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a stage does around its trainer: arguments, batch and steps from tokens, budget, resuming, training, saving."""

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import ProgressCallback, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled, is_tensorboard_available
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging
from trl import ModelConfig, TrlParser

from ..extras import skip_unused_deepspeed
from . import smoke
from .budget import Budget
from .callbacks import Bar, SpikeWarning, StopOnSignal
from .run_arguments import RunArguments
from .trainer import RunTrainer
from .whole_checkpoints import FILES, fault, last_whole_checkpoint, set_aside

logger = logging.get_logger(__name__)


def parse(dataclass_types: Iterable[type], stage: str, argv: list[str] | None = None) -> tuple:
    """Parses `--config FILE.yaml` and the command line, which overrides the file.

    With `--smoke`, the values of the stage's smoke recipe override the file and are overridden by the command line.
    """
    skip_unused_deepspeed()
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--smoke" in argv:
        for name, value in smoke.recipe(stage).items():
            argv = [f"--{name}", value if isinstance(value, str) else json.dumps(value), *argv]
    parser = TrlParser(dataclass_types)
    parser.set_defaults_with_config(
        report_to="tensorboard" if is_tensorboard_available() else "none",
        logging_nan_inf_filter=False,  # RunTrainer stops at such a loss
        logging_first_step=True,
        ddp_find_unused_parameters=False,  # every parameter takes part in every step
        remove_unused_columns=False,
    )
    return parser.parse_args_and_config(argv)


def begin(training: RunArguments, data: Any, chosen_model: ModelConfig, trains_all: bool = True) -> str | None:
    """Prepares a run: the seed, and the inputs of `--smoke`. Returns the checkpoint to resume, None for a new run.

    Raises ValueError for adapters and quantized weights, if the stage trains all weights.
    """
    names = [name for name in ("use_peft", "load_in_4bit", "load_in_8bit") if getattr(chosen_model, name)]
    if trains_all and names:
        raise ValueError(f"{', '.join(names)} was given, but this stage trains all weights. Leave it out.")
    resume = checkpoint_to_resume(training)
    set_seed(training.seed)
    smoke.write_inputs(training, data, chosen_model)
    return resume


def set_batch(training: RunArguments, sequence_length: int) -> None:
    """Sets accumulation and steps from tokens, for rows of `sequence_length` tokens on all processes.

    Raises ValueError if `tokens_per_step` is not a multiple of the tokens that the processes take at a time.
    """
    replicas = training.world_size // sequence_parallel_size()
    at_a_time = training.per_device_train_batch_size * sequence_length * replicas
    if training.tokens_per_step is not None:
        if training.tokens_per_step % at_a_time:
            raise ValueError(
                f"tokens_per_step={training.tokens_per_step:,.0f} was given, but the processes take {at_a_time:,} "
                "tokens at a time. Choose a multiple of that, or another per_device_train_batch_size."
            )
        training.gradient_accumulation_steps = int(training.tokens_per_step) // at_a_time
    if training.total_tokens is not None and training.max_steps <= 0:
        training.max_steps = -(-int(training.total_tokens) // (at_a_time * training.gradient_accumulation_steps))


def print_budget(trainer: RunTrainer, sequence_length: int) -> None:
    """Prints the budget, on the first process."""
    training, rows = trainer.args, trainer.train_dataset
    if training.process_index != 0:
        return
    num_rows = len(rows) if isinstance(rows, Dataset) else None
    is_zero3 = is_deepspeed_zero3_enabled()
    is_sharded = is_zero3 or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    replicas = training.world_size // sequence_parallel_size()
    num_sequences = training.max_steps * replicas
    num_sequences *= training.per_device_train_batch_size * training.gradient_accumulation_steps
    if training.max_steps <= 0:
        num_sequences = math.ceil(training.num_train_epochs * num_rows)
    gpu = torch.cuda.get_device_properties(training.device) if training.device.type == "cuda" else None
    budget = Budget(
        trainer.model.config,
        sequence_length,
        num_sequences * sequence_length,
        data_parallel=replicas,
        sequence_parallel=sequence_parallel_size(),
        shard=training.world_size if is_sharded else 1,
        per_device_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        activation_checkpointing=training.activation_checkpointing,
        sync_each_batch=is_zero3,
        gpu="CPU" if gpu is None else gpu.name,
        peak_flops_per_device=training.peak_flops_per_device,
        gpu_memory=gpu and gpu.total_memory,
        mfu=training.expected_mfu,
        trainable_parameters=trainer.trainable_parameters,
        num_rows=num_rows,
    )
    print(budget, flush=True)


def sequence_parallel_size() -> int:
    """The number of processes that share a sequence, as `accelerate launch` sets it."""
    return int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))


def checkpoint_to_resume(training: RunArguments) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` names, None for a new run, whose folder must not have any.

    `last` is the last whole checkpoint; a faulty one after it is renamed, not deleted.
    """
    wanted, output_dir = training.resume_from_checkpoint, Path(training.output_dir)
    if wanted is None:
        if output_dir.is_dir() and (found := get_last_checkpoint(output_dir)) is not None:
            raise FileExistsError(f"{found} exists: give --resume_from_checkpoint last, or another --output_dir.")
        return None
    if wanted != "last":
        if (Path(wanted) / FILES).exists() and (reason := fault(Path(wanted))):  # Trainer would do without a lost file
            raise ValueError(f"{wanted} cannot be resumed: {reason}. Name another checkpoint, or last.")
        return wanted
    with training.main_process_first(local=False, desc="looking for the last checkpoint"):
        whole, faulty = last_whole_checkpoint(output_dir) if output_dir.is_dir() else (None, {})
        for checkpoint, reason in faulty.items():
            logger.warning(f"{checkpoint} is skipped: {reason}. It is kept as {set_aside(checkpoint).name}.")
    if whole is None:
        raise FileNotFoundError(f"{output_dir} has no whole checkpoint: start without --resume_from_checkpoint.")
    logger.warning(f"Resuming from {whole}.")
    return str(whole)


def fit(trainer: RunTrainer, resume_from_checkpoint: str | None, name: str = "model") -> None:
    """Trains, then saves `model/` (or another `name`) with the tokenizer in the output folder.

    On SIGTERM or Ctrl-C it saves a checkpoint, prints how to resume, and exits with 128 + the number of the signal.
    """
    output_dir, stop = Path(trainer.args.output_dir), StopOnSignal()
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(Bar)
    trainer.add_callback(SpikeWarning)
    trainer.add_callback(stop)
    with stop.listening():
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        if trainer.is_world_process_zero():
            trainer.save_state()
        if not stop.stopped_by:  # still within `listening`: a signal must not interrupt the save
            trainer.save_whole_model(output_dir / name)
    if stop.stopped_by:
        if trainer.is_world_process_zero():
            print(
                f"Stopped after step {trainer.state.global_step:,} of {trainer.state.max_steps:,} with a checkpoint. "
                "Resume with the same command and --resume_from_checkpoint last"
            )
        sys.exit(128 + stop.stopped_by)
    if trainer.is_world_process_zero():
        print(f"{name.capitalize():<9}{output_dir / name}")

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Fine-tuning on mathematics, shared by both stages: rows -> tokens -> budget -> TRL's SFTTrainer -> model/.

The loss is computed on the answers alone, and with `--use_peft` a LoRA adapter is trained and merged into the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from ..folders import whole_folder
from ..text_data import load_table
from . import smoke
from .architectures import load, load_config, loading_options, whole_models
from .math_data import MathArguments, Messages, tokenize_messages
from .run_arguments import RunOptions
from .runs import checkpoint_to_resume, fit, print_budget, sequence_parallel_size, set_batch
from .trainer import RunTrainer


@dataclass
class MathRunArguments(RunOptions, SFTConfig):  # type: ignore[misc]  # the type of an option
    """TRL's SFTConfig with the options of every run."""


ARGUMENTS = (MathArguments, ModelConfig, MathRunArguments)


class MathTrainer(RunTrainer, SFTTrainer):
    """TRL's `SFTTrainer` with the additions of `RunTrainer`."""


def run_stage(
    data: MathArguments,
    chosen_model: ModelConfig,
    training: MathRunArguments,
    columns: set[str],
    to_messages: Callable[[dict[str, Any]], Messages | str],
) -> None:
    """`columns` are those that the rows need, `to_messages` reads a row."""
    if sequence_parallel_size() > 1:
        raise ValueError(
            f"Got a sequence parallel size of {sequence_parallel_size()}, which TRL's packed rows do not support. "
            "Sequences of 16K fit on one GPU: launch with recipes/accelerate/fsdp2.yaml or zero3.yaml."
        )
    resume = checkpoint_to_resume(training)
    set_seed(training.seed)
    smoke.write_inputs(training, data, chosen_model)

    # 1. Model
    path, revision = chosen_model.model_name_or_path, chosen_model.model_revision
    config = load_config(path, revision, max_length=training.max_length)
    quantization = get_quantization_config(chosen_model)
    how = {} if quantization is None else {"quantization_config": quantization}
    model, tokenizer = load(path, config, **loading_options(chosen_model), **how)

    # 2. Data
    with training.main_process_first(desc="tokenizing the rows"):
        rows, left_out = tokenize_messages(
            load_table(data.dataset, data.dataset_config, data.dataset_split, columns),
            to_messages,
            tokenizer,
            training.max_length,
            training.dataset_num_proc,
        )
    if training.process_index == 0:
        print(
            f"Rows     {len(rows):,} to train on", *(f"{n:,} left out: {why}" for why, n in left_out.items()), sep=", "
        )
    train, validation = rows, None
    if data.validation_rows:
        train, validation = rows.train_test_split(data.validation_rows, seed=training.seed).values()

    # 3. Trainer, which makes the adapter
    set_batch(training, training.max_length)
    trainer = MathTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=get_peft_config(chosen_model),
    )
    model.generation_config.eos_token_id = end_marks(rows[0], tokenizer)

    # 4. Budget, training
    trainable = trainer.get_num_trainable_parameters() if chosen_model.use_peft else None
    print_budget(config, training, training.max_length, len(trainer.train_dataset), trainable)
    fit(trainer, resume, "adapter" if chosen_model.use_peft else "model")
    if chosen_model.use_peft and trainer.is_world_process_zero():
        merge(path, revision, Path(training.output_dir), model.generation_config)


def end_marks(row: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a generation: the end of text, and the special token that ends an answer in the template."""
    marks = [i for i, learnt in zip(row["input_ids"], row["completion_mask"], strict=True) if learnt]
    marks = [i for i in marks if i in tokenizer.all_special_ids][-1:]
    return list(dict.fromkeys([tokenizer.eos_token_id, *marks]))


def merge(base: str, revision: str, output_dir: Path, generation_config: GenerationConfig) -> None:
    """Merges the adapter into the model it was trained on: `adapter/` -> `model/`.

    Both are read from disk, so that the result does not depend on how the training was distributed.
    """
    with whole_models():
        model, tokenizer = load(base, load_config(base, revision), dtype="auto", revision=revision)
    model.generation_config = generation_config
    merged = PeftModel.from_pretrained(model, output_dir / "adapter").merge_and_unload()
    with whole_folder(output_dir / "model", size=0, overwrite=True) as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"Merged   {output_dir / 'model'}")

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Pretrains DIFF, or one of its twins, from scratch on a corpus of text (Tables 9 and 10, arXiv:2410.05258).

accelerate launch -m diff_transformer.training.pretrain --config recipes/pretrain/config.yaml
"""

from collections.abc import Sequence

from datasets import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from trl import ModelConfig

from . import smoke
from .architectures import (
    NewModelArguments,
    check_all_is_trained,
    load,
    load_config,
    loading_options,
    new_config,
    new_tokenizer,
)
from .corpus import CorpusArguments
from .data import CausalCollator, ReportPasses, load_rows
from .loss import use_linear_cross_entropy
from .run_arguments import RunArguments
from .runs import checkpoint_to_resume, fit, parse, print_budget, sequence_parallel_size, set_batch
from .trainer import RunTrainer
from .ulysses import enable_ulysses

ARGUMENTS = (NewModelArguments, CorpusArguments, ModelConfig, RunArguments)


def main(argv: list[str] | None = None) -> None:
    new_model, corpus, chosen_model, training = parse(ARGUMENTS, "pretrain", argv)
    if chosen_model.model_name_or_path is not None:
        raise ValueError(
            f"model_name_or_path={chosen_model.model_name_or_path} was given, but this stage starts from scratch. "
            "Leave it out, or continue the training of a checkpoint with diff_transformer.training.upcycle."
        )
    train_on_corpus(new_model, corpus, chosen_model, training)


def train_on_corpus(
    new_model: NewModelArguments | None, corpus: CorpusArguments, chosen_model: ModelConfig, training: RunArguments
) -> None:
    """Trains a new model, or without one the checkpoint that `chosen_model` names."""
    check_all_is_trained(chosen_model)
    resume = checkpoint_to_resume(training)
    set_seed(training.seed)
    smoke.write_inputs(training, corpus, chosen_model)

    # 1. Model, the same weights on every process
    if new_model is None:
        path = chosen_model.model_name_or_path
        config = load_config(path, chosen_model.model_revision, sequence_length=corpus.sequence_length)
        model, tokenizer = load(path, config, **loading_options(chosen_model))
    else:
        tokenizer = new_tokenizer(new_model, corpus.sequence_length)
        config = new_config(new_model, tokenizer, corpus.sequence_length)
        how = {"dtype": chosen_model.dtype, "attn_implementation": chosen_model.attn_implementation}
        model = AutoModelForCausalLM.from_config(config, **how)

    # 2. Data
    with training.main_process_first(desc="packing the corpus"):
        train, validation = load_rows(corpus, tokenizer, seed=training.seed)

    # 3. Budget, training
    callbacks = [ReportPasses(corpus.dataset)] if corpus.streaming else []
    train_on_rows(model, tokenizer, train, validation, training, corpus.sequence_length, resume, callbacks)


def train_on_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset | IterableDataset,
    validation: Dataset | None,
    training: RunArguments,
    sequence_length: int,
    resume: str | None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Prints the budget, trains on packed rows, and saves the model."""
    use_linear_cross_entropy(model)
    if sequence_parallel_size() > 1:
        enable_ulysses(model)
    set_batch(training, sequence_length)
    print_budget(model.config, training, sequence_length, len(train) if isinstance(train, Dataset) else None)
    trainer = RunTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=CausalCollator(tokenizer.eos_token_id, sequence_length, sequence_parallel_size() > 1),
        callbacks=list(callbacks),
    )
    fit(trainer, resume)


if __name__ == "__main__":
    main()

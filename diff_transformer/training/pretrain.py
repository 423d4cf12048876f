# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Pretrains DIFF, or one of its twins, from scratch on a corpus of text (Tables 9 and 10, arXiv:2410.05258).

accelerate launch -m diff_transformer.training.pretrain --config recipes/pretrain/config.yaml
"""

from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig

from .architectures import NewModelArguments, load, load_config, new_config, scale_output_projections
from .corpus import CorpusArguments
from .data import CausalCollator, ReportPasses, load_rows
from .loss import use_linear_cross_entropy
from .run_arguments import RunArguments
from .runs import begin, exit_on_mistakes, fit, parse, print_budget, sequence_parallel_size
from .trainer import RunTrainer
from .ulysses import enable_ulysses

ARGUMENTS = (NewModelArguments, CorpusArguments, ModelConfig, RunArguments)


def main(argv: list[str] | None = None) -> None:
    new_model, corpus, chosen_model, training = parse(ARGUMENTS, "pretrain", argv)
    if chosen_model.model_name_or_path is not None:
        raise ValueError(
            "model_name_or_path was given, but this stage starts from scratch: training.upcycle takes it."
        )
    if chosen_model.dtype == "auto":
        raise ValueError("dtype=auto is the type of a checkpoint, and this stage starts from scratch: omit it.")
    train_on_corpus(new_model, corpus, chosen_model, training)


def train_on_corpus(
    new_model: NewModelArguments | None, corpus: CorpusArguments, chosen_model: ModelConfig, training: RunArguments
) -> None:
    """Trains a new model, or without one the checkpoint that `chosen_model` names."""
    resume = begin(training, corpus, chosen_model, corpus.sequence_length)

    # 1. Model, the same weights on every process
    if new_model is None:
        config = load_config(chosen_model, sequence_length=corpus.sequence_length)
        model, tokenizer = load(chosen_model, config)
    else:
        config, tokenizer = new_config(new_model, corpus.sequence_length)
        how = {"dtype": chosen_model.dtype, "attn_implementation": chosen_model.attn_implementation}
        model = AutoModelForCausalLM.from_config(config, **how)
        scale_output_projections(model, new_model.o_proj_init_scale)

    # 2. Data
    with training.main_process_first(desc="packing the corpus"):
        seed = training.seed if training.data_seed is None else training.data_seed
        train, validation = load_rows(corpus, tokenizer, seed=seed)

    # 3. Training
    train_on_rows(model, tokenizer, train, validation, training, corpus, resume)


def train_on_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset | IterableDataset,
    validation: Dataset | None,
    training: RunArguments,
    corpus: CorpusArguments,
    resume: str | None,
) -> None:
    """Prints the budget, trains on packed rows, and saves the model."""
    use_linear_cross_entropy(model)
    if sequence_parallel_size() > 1:
        enable_ulysses(model)
    collator = CausalCollator(tokenizer.eos_token_id, corpus.sequence_length, sequence_parallel_size() > 1)
    trainer = RunTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator,
        callbacks=[ReportPasses(corpus.dataset)] if isinstance(train, IterableDataset) else [],
    )
    print_budget(trainer, corpus.sequence_length)
    fit(trainer, resume)


if __name__ == "__main__":
    with exit_on_mistakes():
        main()

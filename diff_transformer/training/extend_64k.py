# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Extends the context of a checkpoint, in the paper from 4K to 64K (arXiv:2410.05258; data as in arXiv:2402.10171).

    accelerate launch -m diff_transformer.training.extend_64k --config recipes/extend_64k/config.yaml

Up-samples the long documents of a corpus, trains, and saves model/.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, load_from_disk
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, set_seed
from trl import ModelConfig

from ..arguments import option
from . import smoke
from .architectures import check_all_is_trained, load, load_config, loading_options
from .corpus import CorpusArguments
from .data import hold_out, tokenize
from .pretrain import train_on_rows
from .run_arguments import RunArguments
from .runs import checkpoint_to_resume, parse
from .upsampling import SLIMPAJAMA_SHARES, upsample_lengths


@dataclass
class ExtensionArguments:
    """How positions are encoded after the extension, and which documents are trained on."""

    rope_theta: float = option(640_000.0, "The base of the rotary embedding after the extension: 640000 in the paper.")
    long_from: int = option(4096, "Keep all documents of at least this many tokens.")
    shares: dict | str | None = option(
        "corpus",
        "Tokens of each source, as JSON or slimpajama; corpus keeps the shares of the corpus, which are unknown for "
        "a stream.",
    )
    keep_short: float = option(0.1, "The probability with which shorter documents are kept.")

    def __post_init__(self):
        if isinstance(self.shares, str):  # from the command line
            named = {"corpus": None, "slimpajama": SLIMPAJAMA_SHARES}
            self.shares = named[self.shares] if self.shares in named else json.loads(self.shares)


ARGUMENTS = (ExtensionArguments, CorpusArguments, ModelConfig, RunArguments)


def extended_config(config: PreTrainedConfig, sequence_length: int, rope_theta: float) -> PreTrainedConfig:
    """The configuration of a checkpoint, extended to `sequence_length` tokens.

    Raises ValueError if length or rope_theta do not grow, or if a rope type has already extended the checkpoint.
    """
    rope, old_length = dict(config.rope_parameters), config.max_position_embeddings
    if sequence_length <= old_length or rope_theta <= rope["rope_theta"]:
        raise ValueError(
            f"sequence_length={sequence_length:,} and rope_theta={rope_theta:g} were given, but the checkpoint has "
            f"{old_length:,} and {rope['rope_theta']:g} already. An extension needs a longer and a larger one."
        )
    if rope["rope_type"] != "default":
        raise ValueError(
            f"The checkpoint's rope_type is {rope['rope_type']!r}: it was already extended, from "
            f"{rope.get('original_max_position_embeddings', 'an unknown number of')} tokens. Extend the original."
        )
    rope["rope_theta"] = rope_theta
    return type(config).from_dict(
        config.to_dict() | {"max_position_embeddings": sequence_length, "rope_parameters": rope}
    )


def long_rows(
    corpus: CorpusArguments,
    extension: ExtensionArguments,
    tokenizer: PreTrainedTokenizerBase,
    training: RunArguments,
    folder: Path,
) -> Dataset:
    """The corpus with long documents up-sampled; written to `folder`, or read from it if it exists."""
    if folder.exists():
        return load_from_disk(str(folder))
    if corpus.source_column is None:
        raise ValueError(
            "source_column is missing: long documents are up-sampled within each source. Name it with --source_column."
        )
    options = {"max_document_characters": corpus.max_document_characters, "num_proc": corpus.num_proc}
    documents = tokenize(corpus.load_documents(), tokenizer, **options)
    rows, report = upsample_lengths(
        documents,
        folder,
        token_budget=int(training.total_tokens) + corpus.validation_rows * corpus.sequence_length,
        sequence_length=corpus.sequence_length,
        eos_token_id=tokenizer.eos_token_id,
        shares=extension.shares,  # type: ignore[arg-type]
        long_from=extension.long_from,
        keep_short=extension.keep_short,
        seed=training.seed,
    )
    print(report, flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    extension, corpus, chosen_model, training = parse(ARGUMENTS, "extend_64k", argv)
    check_all_is_trained(chosen_model)
    resume = checkpoint_to_resume(training)
    set_seed(training.seed)
    smoke.write_inputs(training, corpus, chosen_model)

    # 1. Model
    path = chosen_model.model_name_or_path
    config = load_config(path, revision=chosen_model.model_revision)
    config = extended_config(config, corpus.sequence_length, extension.rope_theta)
    model, tokenizer = load(path, config, **loading_options(chosen_model))
    tokenizer.model_max_length = corpus.sequence_length

    # 2. Data
    if training.total_tokens is None:
        raise ValueError("total_tokens is missing: it is the size of the up-sampled corpus (1.5e9 in the paper).")
    # All machines share the output folder: one process writes for all of them
    with training.main_process_first(local=False, desc="up-sampling long documents"):
        rows = long_rows(corpus, extension, tokenizer, training, Path(training.output_dir) / "corpus")
    train, validation = hold_out(rows, corpus.validation_rows)

    # 3. Budget, training
    train_on_rows(model, tokenizer, train, validation, training, corpus.sequence_length, resume)


if __name__ == "__main__":
    main()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Rows for pretraining: documents one after another, an end-of-text token after each, cut to length.

Tokens and rows of a map-style corpus are Arrow files in the datasets cache; a stream is packed as it is read. What is
exact when a run is resumed: docs/training_data.md.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, Sequence, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging

from ..text_data import fault_of
from .corpus import CorpusArguments

logger = logging.get_logger(__name__)

_CACHE_VERSION = 1  # raise it when the same documents give other tokens or rows: the cache does not see our code
_DOCUMENTS_AT_ONCE = 256
_HOPELESS = 10_000  # documents: a stream that begins with this many unusable documents has the wrong column


class ReportPasses(TrainerCallback):
    """Warns when a stream has ended and is read again, which `Trainer` does in silence, until `max_steps`."""

    def __init__(self, name: str):
        self.name, self._passes = name, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._passes = 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._passes += 1
        if self._passes > 1 and state.is_world_process_zero:
            logger.warning(
                f"Step {state.global_step}: the stream of {self.name} has ended and begins again: pass "
                f"{self._passes}. Its documents are trained on once more. For a single pass use a larger corpus, or "
                "fewer total_tokens (or max_steps)."
            )


def tokenize(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_document_characters: int | None = None,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Tokenizes documents and puts an end-of-text token at the end of each.

    Special tokens that are written in a text become the tokens of their characters: a corpus cannot end a document.

    Args:
        documents: Rows of `text`; other columns are kept.
        num_proc: Processes for a map-style dataset. The result, which the datasets cache keeps for the next call, does
            not depend on it.

    Returns:
        Rows of `input_ids`, int32, and `fault`, the reason why `input_ids` is empty, or None. A stream gives a stream.
    """
    _check_end_of_text(tokenizer)
    options = {"tokenizer": tokenizer, "max_characters": max_document_characters}
    batches: dict[str, Any] = {"batched": True, "batch_size": _DOCUMENTS_AT_ONCE, "fn_kwargs": options}
    if isinstance(documents, IterableDataset):
        return documents.map(_encode, **batches, remove_columns=["text"])
    kept = {name: feature for name, feature in documents.features.items() if name not in ("text", "fault")}
    features = Features({"input_ids": Sequence(Value("int32")), "fault": Value("string"), **kept})
    key = Hasher.hash((documents._fingerprint, options, _CACHE_VERSION))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "diff_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    return documents.map(
        _encode,
        **batches,
        writer_batch_size=_DOCUMENTS_AT_ONCE,
        remove_columns=[name for name in documents.column_names if name not in kept],
        features=features,
        num_proc=num_proc,
        cache_file_name=str(folder / f"tokens-{key}.arrow"),
        new_fingerprint=key,
        desc="Tokenizing",
    )


def _encode(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_characters: int | None) -> dict[str, list]:
    texts = batch["text"]
    faults = batch.get("fault", [None] * len(texts))
    faults = [fault or fault_of(text, max_characters) for text, fault in zip(texts, faults, strict=True)]
    usable = [text for text, fault in zip(texts, faults, strict=True) if fault is None]
    # verbose: a document longer than the model's context is not an error here
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    encoded = iter(tokenizer(usable, return_attention_mask=False, **options)["input_ids"] if usable else ())
    eos = tokenizer.eos_token_id
    return {"input_ids": [[] if fault else [*next(encoded), eos] for fault in faults], "fault": faults}


def _check_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-text token to put between documents: set tokenizer.eos_token.")


def pack(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    max_document_characters: int | None = None,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Documents one after another, an end-of-text after each, cut into rows of `sequence_length` tokens.

    No token is lost or repeated. Only the last row of a map-style dataset, or of each shard of a stream, may be
    shorter; `CausalCollator` pads these. A warning says how many documents were skipped: at once for a map-style
    dataset, after each shard of a stream.

    Args:
        documents: Rows of `text`, as `text_data.load_documents` returns them.
        max_document_characters, num_proc: As in `tokenize`.

    Returns:
        Rows of `input_ids`, int32; map-style ones have `row`, their position in the corpus.

    Raises ValueError if no document is usable; for a stream, none of the first 10,000 of a shard.
    """
    if sequence_length < 1:
        raise ValueError(f"Got sequence_length={sequence_length}; it must be at least 1.")
    if isinstance(documents, IterableDataset):
        return _pack_stream(documents, tokenizer, sequence_length, max_document_characters)
    tokens = tokenize(documents, tokenizer, max_document_characters=max_document_characters, num_proc=num_proc)
    faults = Counter({x["values"]: x["counts"] for x in pc.value_counts(tokens.data.column("fault")).to_pylist()})
    _raise_if_nothing_used(faults)
    _warn_of_skipped(faults, "the corpus")
    features = Features({"row": Value("int64"), "input_ids": Sequence(Value("int32"))})
    options = {"tokens": tokens, "sequence_length": sequence_length, "version": _CACHE_VERSION}
    return Dataset.from_generator(_numbered_rows, features, gen_kwargs=options)


def _summary(faults: Counter[str | None]) -> str:
    """`faults` counts documents by the reason to skip them; None for those that are used."""
    skipped = {reason: count for reason, count in faults.items() if reason is not None}
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    return f"{faults[None]:,} documents used, {sum(skipped.values()):,} skipped" + (f" ({why})" if why else "")


def _warn_of_skipped(faults: Counter[str | None], name: str) -> None:
    if faults.total() > faults[None]:
        logger.warning(f"In {name}: {_summary(faults)}.")


def _raise_if_nothing_used(faults: Counter[str | None]) -> None:
    if faults[None] == 0 and faults.total():
        raise ValueError(
            f"None of the first {faults.total():,} documents can be trained on: {_summary(faults)}. Name another "
            "text_column, or raise max_document_characters if they are too long."
        )


def _cut(batches: Iterable[list[np.ndarray]], sequence_length: int) -> Iterator[np.ndarray]:
    """The tokens of all documents as one line, cut into rows; the last one may be shorter."""
    line = np.empty(0, np.int32)
    for documents in batches:
        line = np.concatenate([line, *documents])
        whole = len(line) // sequence_length * sequence_length
        for begin in range(0, whole, sequence_length):
            yield line[begin : begin + sequence_length].copy()  # a view would keep all of `line`
        line = line[whole:]
    if len(line):
        yield line


def _numbered_rows(tokens: Dataset, sequence_length: int, version: int) -> Iterator[dict[str, Any]]:
    batches = tokens.with_format("arrow").iter(_DOCUMENTS_AT_ONCE)
    lines = ([pc.list_flatten(batch["input_ids"]).to_numpy()] for batch in batches)
    yield from ({"row": i, "input_ids": row} for i, row in enumerate(_cut(lines, sequence_length)))


def _pack_stream(
    documents: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    max_characters: int | None,
    validation_rows: int = 0,
    validation: bool = False,
) -> IterableDataset:
    """The rows of a stream without those held out, the first of each shard, or these alone.

    `skip` of datasets would hold out other rows in every number of workers.
    """
    _check_end_of_text(tokenizer)
    shards = list(range(documents.num_shards))
    # Two lists of the same length: datasets gives their items to workers, and shuffles them, together
    held_out = [validation_rows // len(shards) + (i < validation_rows % len(shards)) for i in shards]
    options = {"shards": shards, "held_out": held_out, "documents": documents, "num_shards": len(shards)}
    options |= {"validation": validation, "tokenizer": tokenizer}
    options |= {"max_characters": max_characters, "sequence_length": sequence_length}
    return IterableDataset.from_generator(_stream_rows, gen_kwargs=options)


def _stream_rows(
    shards: list[int],
    held_out: list[int],
    documents: IterableDataset,
    num_shards: int,
    validation: bool,
    tokenizer: PreTrainedTokenizerBase,
    max_characters: int | None,
    sequence_length: int,
) -> Iterator[dict[str, np.ndarray]]:
    for shard, num_held_out in zip(shards, held_out, strict=True):
        name, faults = f"shard {shard} of {num_shards} of the corpus", Counter()  # type: str, Counter[str | None]
        tokens = _tokens_of_stream(documents.shard(num_shards, shard), tokenizer, max_characters, faults)
        rows = _cut(tokens, sequence_length)
        try:
            for row in islice(rows, num_held_out) if validation else islice(rows, num_held_out, None):
                yield {"input_ids": row}
        except Exception:
            logger.error(f"The error is in {name}.")
            raise
        if not validation:
            _warn_of_skipped(faults, name)


def _tokens_of_stream(
    documents: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_characters: int | None,
    faults: Counter[str | None],
) -> Iterator[list[np.ndarray]]:
    # `iter(batch_size)` and not `for`: inside a DataLoader worker the latter would split the shard once more
    for batch in documents.iter(batch_size=_DOCUMENTS_AT_ONCE):
        tokens = _encode(batch, tokenizer, max_characters)
        faults.update(tokens["fault"])
        if faults.total() >= _HOPELESS:
            _raise_if_nothing_used(faults)
        yield [np.array(ids, np.int32) for ids in tokens["input_ids"]]


def load_rows(
    args: CorpusArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0
) -> tuple[Dataset | IterableDataset, Dataset | None]:
    """Rows for `Trainer`: those to train on (`input_ids`, without `streaming` also `row`), and those held out, if any.

    seed is for the order of a stream; `Trainer` shuffles map-style rows by its own seed (`data_seed`).
    """
    documents, limit = args.load_documents(), args.max_document_characters
    if "input_ids" in (documents.column_names or ()):
        return hold_out(_already_packed(documents, args, tokenizer), args.validation_rows)
    if isinstance(documents, Dataset):
        options = {"max_document_characters": limit, "num_proc": args.num_proc}
        return hold_out(pack(documents, tokenizer, args.sequence_length, **options), args.validation_rows)
    rows_of = partial(_pack_stream, documents, tokenizer, args.sequence_length, limit, args.validation_rows)
    train, validation = rows_of(), None
    if args.validation_rows:
        validation = Dataset.from_list(list(rows_of(validation=True)))
        if len(validation) < args.validation_rows:
            raise ValueError(
                f"Got validation_rows={args.validation_rows}; the stream gives {len(validation)}, the first rows "
                f"of each of its {documents.num_shards} shards. Hold out fewer, or use a larger corpus."
            )
    if next(iter(train), None) is None:
        raise ValueError(
            f"{args.dataset} has no row to train on; warnings say what was skipped. Name another text_column, or use "
            "a larger corpus."
        )
    if args.shuffle_buffer:
        train = train.shuffle(seed=seed, buffer_size=args.shuffle_buffer)
    return train, validation


def hold_out(rows: Dataset, validation_rows: int) -> tuple[Dataset, Dataset | None]:
    """The rows to train on, and those held out, which are evenly spread."""
    if validation_rows == 0:
        return rows, None
    if not 0 < validation_rows < len(rows):
        raise ValueError(
            f"Got validation_rows={validation_rows} of a corpus of {len(rows)} rows; it must be at least 0, and leave "
            "rows to train on: hold out fewer, or use a larger corpus."
        )
    held_out = (2 * np.arange(validation_rows) + 1) * len(rows) // (2 * validation_rows)
    return rows.select(np.setdiff1d(np.arange(len(rows)), held_out)), rows.select(held_out)


def _already_packed(
    rows: Dataset | IterableDataset, args: CorpusArguments, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    if isinstance(rows, IterableDataset):
        raise ValueError(f"{args.dataset} holds rows that are packed already: read it with --streaming false.")
    ids = rows[0]["input_ids"] if len(rows) else []
    if len(ids) != args.sequence_length or max(ids) >= len(tokenizer):
        raise ValueError(
            f"{args.dataset} holds {len(rows)} packed rows of {len(ids)} tokens with ids up to {max(ids, default=0)}; "
            f"sequence_length is {args.sequence_length} and the tokenizer has {len(tokenizer)} tokens. Set the two "
            "with which the rows were packed, or pack the text again."
        )
    return rows if "row" in rows.column_names else rows.add_column("row", np.arange(len(rows)))


@dataclass
class CausalCollator:
    """Collates packed rows: `input_ids` and `labels`, (rows, tokens), and `row`, (rows,), if the rows have it.

    The labels are the tokens themselves, unless the rows have `labels` of their own (-100: nothing is learnt there).
    Shorter rows are padded on the right with labels of -100. There is no attention mask, so the kernels take their
    faster path: with causal attention no token sees what is to its right.

    Args:
        pad_token_id: Any id of the vocabulary; nothing is learnt from it.
        pad_to_multiple_of: Rounds the length up. A stream on several processes needs the sequence length here, since
            accelerate concatenates batches, which must be equally long.
        sequence_parallel: The batches are split along their tokens: `position_ids`, (rows, tokens), instead of `row`.

    Raises ValueError for a row whose labels differ in number from its tokens.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    sequence_parallel: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        multiple = self.pad_to_multiple_of or 1
        length = -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
        input_ids = torch.full((len(rows), length), self.pad_token_id)
        labels = torch.full((len(rows), length), -100)
        for i, row in enumerate(rows):
            ids = torch.as_tensor(row["input_ids"], dtype=torch.int64)
            own = torch.as_tensor(row.get("labels", ids), dtype=torch.int64)
            if own.shape != ids.shape:
                raise ValueError(
                    f"Row {row.get('row', i)} has {len(ids)} input_ids and {len(own)} labels; it needs a label for "
                    "every token, -100 where nothing is learnt."
                )
            input_ids[i, : len(ids)], labels[i, : len(ids)] = ids, own
        batch = {"input_ids": input_ids, "labels": labels}
        if self.sequence_parallel:
            batch["position_ids"] = torch.arange(length).repeat(len(rows), 1)
        elif "row" in rows[0]:
            batch["row"] = torch.tensor([row["row"] for row in rows])
        return batch

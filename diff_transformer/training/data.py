# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Rows for pretraining: documents one after another, an end-of-text token after each, cut to length.

Tokens and rows of a map-style corpus are Arrow files in the datasets cache; a stream is packed as it is read. What is
exact when a run is resumed: docs/training_data.md.
"""

import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, Sequence, Value
from datasets.fingerprint import Hasher
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging

from ..text_data import fault_of
from .corpus import CorpusArguments

logger = logging.get_logger(__name__)

_CACHE_VERSION = 1  # raise it when the same documents give other tokens or rows: the cache does not see our code
_DOCUMENTS_AT_ONCE = 256
_HOPELESS = 10_000  # documents: a stream that begins with this many unusable documents has the wrong column
# Errors of a broken file; a lost connection is not among them
_UNREADABLE = (pa.ArrowInvalid, UnicodeDecodeError, EOFError, zlib.error, lzma.LZMAError)


class Skipped:
    """Counts of the documents that were used, and by reason of those that were not. DataLoader workers share them."""

    REASONS = ("empty", "no text", "too long", "invalid Unicode", "unreadable")
    _NAMES = ("used", *REASONS, "shards ended")
    _SLOTS = 256  # one per worker: two workers that add to the same number would lose counts

    def __init__(self) -> None:
        self._counts = torch.zeros(self._SLOTS, len(self._NAMES), dtype=torch.int64).share_memory_()

    def __deepcopy__(self, memo: dict) -> "Skipped":
        return self  # a copy would count separately

    def add(self, name: str, count: int = 1) -> None:
        worker = get_worker_info()
        slot = 0 if worker is None else 1 + worker.id % (self._SLOTS - 1)
        self._counts[slot, self._NAMES.index(name)] += count

    def __getitem__(self, name: str) -> int:
        return int(self._counts[:, self._NAMES.index(name)].sum())

    @property
    def total(self) -> int:
        return sum(self[reason] for reason in self.REASONS)

    def __str__(self) -> str:
        why = ", ".join(f"{self[reason]:,} {reason}" for reason in self.REASONS if self[reason])
        return f"{self['used']:,} documents used, {self.total:,} skipped" + (f" ({why})" if why else "")

    def raise_if_nothing_used(self, documents_needed: int = 1) -> None:
        if self["used"] == 0 and self.total >= documents_needed:
            raise ValueError(
                f"None of the first {self.total:,} documents can be trained on: {self}. Name another text_column, or "
                "raise max_document_characters if they are too long."
            )


class ReportSkipped(TrainerCallback):
    """Logs at every checkpoint and at the end how many documents of a stream were skipped, if more than before."""

    def __init__(self, skipped: Skipped):
        self.skipped, self._reported = skipped, 0

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.skipped.total > self._reported:
            self._reported = self.skipped.total
            logger.warning(f"Step {state.global_step}: {self.skipped}.")

    on_train_end = on_save


class ReportPasses(TrainerCallback):
    """Warns when a stream has ended and is read again, which `Trainer` does in silence, until `max_steps`."""

    def __init__(self, name: str):
        self.name, self._passes, self._first_step = name, 0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._passes, self._first_step = 0, state.global_step

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._passes += 1
        if self._passes == 1 or not state.is_world_process_zero:
            return
        message = (
            f"Step {state.global_step}: the stream of {self.name} has ended and begins again: pass {self._passes}. "
            "Its documents are trained on once more. For a single pass use a larger corpus, or fewer total_tokens "
            "(or max_steps)."
        )
        if 0 < state.global_step == self._first_step:
            message += " The run was resumed after the first pass; this one starts at its beginning."
        logger.warning(message)


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
    return documents.map(
        _encode,
        **batches,
        writer_batch_size=_DOCUMENTS_AT_ONCE,
        remove_columns=[name for name in documents.column_names if name not in kept],
        features=features,
        num_proc=num_proc,
        cache_file_name=str(_cache_dir() / f"tokens-{key}.arrow"),
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


def _cache_dir() -> Path:
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "diff_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pack(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    max_document_characters: int | None = None,
    num_proc: int | None = None,
    skipped: Skipped | None = None,
) -> Dataset | IterableDataset:
    """Documents one after another, an end-of-text after each, cut into rows of `sequence_length` tokens.

    No token is lost or repeated. Only the last row of a map-style dataset, or of each shard of a stream, may be
    shorter; `CausalCollator` pads these.

    Args:
        documents: Rows of `text`, as `text_data.load_documents` returns them.
        max_document_characters, num_proc: As in `tokenize`.
        skipped: Counts the documents, immediately for a map-style dataset, while it is read for a stream.

    Returns:
        Rows of `input_ids`, int32; map-style ones have `row`, their position in the corpus.

    Raises ValueError if no document is usable (in a stream: none of the first 10,000, or of all).
    """
    if sequence_length < 1:
        raise ValueError(f"Got sequence_length={sequence_length}; it must be at least 1.")
    skipped = Skipped() if skipped is None else skipped
    if isinstance(documents, IterableDataset):
        return _pack_stream(documents, tokenizer, sequence_length, max_document_characters, skipped)
    tokens = tokenize(documents, tokenizer, max_document_characters=max_document_characters, num_proc=num_proc)
    for fault in pc.value_counts(tokens.data.column("fault")).to_pylist():
        skipped.add(fault["values"] or "used", fault["counts"])
    skipped.raise_if_nothing_used()
    features = Features({"row": Value("int64"), "input_ids": Sequence(Value("int32"))})
    options = {"tokens": tokens, "sequence_length": sequence_length, "version": _CACHE_VERSION}
    return Dataset.from_generator(_numbered_rows, features, gen_kwargs=options)


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
    max_document_characters: int | None,
    skipped: Skipped,
    validation_rows: int = 0,
    validation: bool = False,
) -> IterableDataset:
    """The rows of a stream without those held out, the first of each shard, or these alone."""
    _check_end_of_text(tokenizer)
    shards = list(range(documents.num_shards))
    # Two lists of the same length: datasets gives their items to workers, and shuffles them, together
    held_out = [validation_rows // len(shards) + (i < validation_rows % len(shards)) for i in shards]
    options = {"shards": shards, "held_out": held_out, "documents": documents, "num_shards": len(shards)}
    options |= {"validation": validation, "skipped": skipped, "tokenizer": tokenizer}
    options |= {"max_characters": max_document_characters, "sequence_length": sequence_length}
    return IterableDataset.from_generator(_stream_rows, gen_kwargs=options)


def _stream_rows(
    shards: list[int],
    held_out: list[int],
    documents: IterableDataset,
    num_shards: int,
    validation: bool,
    skipped: Skipped,
    **options: Any,
) -> Iterator[dict[str, np.ndarray]]:
    for shard, num_held_out in zip(shards, held_out, strict=True):
        rows = _rows_of_shard(documents.shard(num_shards, shard), f"shard {shard} of {num_shards}", skipped, **options)
        yield from islice(rows, num_held_out) if validation else islice(rows, num_held_out, None)
        if not validation:
            skipped.add("shards ended")
            if skipped["shards ended"] >= num_shards:
                skipped.raise_if_nothing_used()


def _rows_of_shard(
    documents: IterableDataset,
    name: str,
    skipped: Skipped,
    tokenizer: PreTrainedTokenizerBase,
    max_characters: int | None,
    sequence_length: int,
) -> Iterator[dict[str, np.ndarray]]:
    def encoded() -> Iterator[list[np.ndarray]]:
        # `iter(batch_size)` and not `for`: inside a DataLoader worker the latter would split the shard once more
        batches = documents.iter(batch_size=_DOCUMENTS_AT_ONCE)
        try:
            for batch in batches:
                tokens = _encode(batch, tokenizer, max_characters)
                for fault, count in Counter(tokens["fault"]).items():
                    skipped.add(fault or "used", count)
                skipped.raise_if_nothing_used(_HOPELESS)
                yield [np.array(ids, np.int32) for ids in tokens["input_ids"]]
        except _UNREADABLE as error:
            skipped.add("unreadable")
            logger.warning(f"The rest of {name} of the corpus cannot be read and is left out: {error!r}")

    yield from ({"input_ids": row} for row in _cut(encoded(), sequence_length))


def load_rows(
    args: CorpusArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0
) -> tuple[Dataset | IterableDataset, Dataset | None, Skipped]:
    """Rows for `Trainer`: those to train on (`input_ids`, without `streaming` also `row`), those held out if any, and
    what was skipped, which for a stream is counted during training (`ReportSkipped`).

    seed is for the order of a stream; `Trainer` shuffles map-style rows by its own seed (`data_seed`).
    """
    documents, skipped = args.load_documents(), Skipped()
    limit = args.max_document_characters
    if "input_ids" in (documents.column_names or ()):
        return *hold_out(_already_packed(documents, args, tokenizer), args.validation_rows), skipped
    if isinstance(documents, Dataset):
        options = {"max_document_characters": limit, "num_proc": args.num_proc, "skipped": skipped}
        rows = pack(documents, tokenizer, args.sequence_length, **options)
        if skipped.total:
            logger.warning(f"{args.dataset}: {skipped}.")
        return *hold_out(rows, args.validation_rows), skipped
    rows_of = partial(_pack_stream, documents, tokenizer, args.sequence_length, limit)
    train, validation = rows_of(skipped, args.validation_rows), None
    if args.validation_rows:
        counted = Skipped()  # separate: the training stream reads the same documents again
        validation = Dataset.from_list(list(rows_of(counted, args.validation_rows, validation=True)))
        counted.raise_if_nothing_used()
        if len(validation) < args.validation_rows:
            raise ValueError(
                f"Got validation_rows={args.validation_rows}; the stream gives {len(validation)}, the first rows "
                f"of each of its {documents.num_shards} shards. Hold out fewer, or use a larger corpus."
            )
    if args.shuffle_buffer:
        train = train.shuffle(seed=seed, buffer_size=args.shuffle_buffer)
    return train, validation, skipped


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

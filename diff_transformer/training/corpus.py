# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Corpora of text: where documents come from, and which of them cannot be used."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value

_LOADERS = {".jsonl": None, ".txt": None, ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # None: `_read_files`
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_CACHE_VERSION = 1  # raise it when the same files give other documents: the cache does not see our code


@dataclass
class CorpusArguments:
    """Which text, and how it becomes rows."""

    dataset: str = field(
        default="",
        metadata={
            "help": "Hub id, or a local path: a file or folder of .jsonl, .json, .txt (a document a file) or .csv, "
            "also as .gz, .bz2, .xz or .zst, or of .parquet; or a folder that save_to_disk wrote. With a column "
            "input_ids and, if it likes, labels it is taken as rows that are packed already."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    dataset_split: str = field(
        default="train", metadata={"help": "Its split; a slice such as train[:1%%] where nothing is streamed."}
    )
    text_column: str = field(default="text", metadata={"help": "The column of the text."})
    source_column: str | None = field(
        default=None,
        metadata={"help": "The column that names a document's source; dots go inside, as in meta.redpajama_set_name."},
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read while training instead of tokenizing first: no disk, no wait, and max_steps is needed. "
            "Resuming then reads everything up to the step again."
        },
    )
    sequence_length: int = field(default=4096, metadata={"help": "Tokens of a row, the context that is trained."})
    max_document_characters: int | None = field(
        default=10_000_000,
        metadata={"help": "Longer documents are skipped and counted (a book has about a million characters)."},
    )
    num_proc: int | None = field(
        default=None, metadata={"help": "Processes that tokenize and pack; the rows do not depend on their number."}
    )
    validation_rows: int = field(
        default=0,
        metadata={
            "help": "Rows held out for the validation loss: spread evenly over the corpus, or the first of each shard "
            "of a stream."
        },
    )
    validation_dataset: str | None = field(
        default=None,
        metadata={"help": "Instead of that: a corpus of its own, of the same kinds and columns as the dataset."},
    )
    shuffle_buffer: int = field(
        default=1000,
        metadata={
            "help": "Streaming: rows held in memory (4 bytes a token, in every worker), of which a random one comes "
            "next; 0 leaves the order as it is. Without streaming Trainer shuffles all rows."
        },
    )


def load_documents(args: CorpusArguments) -> Dataset | IterableDataset:
    """Opens the corpus.

    Returns:
        Rows of `text` and, with `source_column`, `source`. Files of .jsonl and .txt have a third column `fault`: why a
        line or file has no text although it is there, or None. Rows of `input_ids` without a text are returned as they
        are: they are packed already.

    Raises:
        ValueError: the corpus is not there, or not that configuration, split or column; the message lists what is.
    """
    if not args.dataset:
        raise ValueError("Got no dataset; name one on the Hub, or a file or folder: --dataset PATH.")
    path = Path(args.dataset).expanduser()
    if not path.exists() or args.dataset_config is not None:
        return _pick_columns(_from_hub(args), args)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _pick_columns(_from_disk(path, args), args)
    return _from_files(path, args)


def _from_hub(args: CorpusArguments) -> Dataset | IterableDataset:
    options = {} if args.streaming else {"num_proc": args.num_proc}
    try:
        return datasets.load_dataset(
            args.dataset, args.dataset_config, split=args.dataset_split, streaming=args.streaming, **options
        )
    except (ValueError, FileNotFoundError, ConnectionError) as error:  # datasets names what there is
        raise ValueError(
            f"{args.dataset!r}, configuration {args.dataset_config!r}, split {args.dataset_split!r} cannot be opened, "
            f"neither as a path of this machine nor from the Hub: {error}"
        ) from error


def _from_disk(path: Path, args: CorpusArguments) -> Dataset | IterableDataset:
    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        if args.dataset_split not in dataset:
            raise ValueError(f"{path} has no split {args.dataset_split!r}; it has {', '.join(map(repr, dataset))}.")
        dataset = dataset[args.dataset_split]
    return dataset.to_iterable_dataset(max(1, len(dataset.cache_files))) if args.streaming else dataset


def _kind(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in _COMPRESSIONS else file.suffix


def _from_files(path: Path, args: CorpusArguments) -> Dataset | IterableDataset:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    hidden = {file for file in files if any(part.startswith(".") for part in file.relative_to(path).parts)}
    files = [file for file in files if _kind(file) in _LOADERS and file not in hidden]
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) != 1:
        raise ValueError(
            f"Got {path}, which holds {' and '.join(kinds) or 'nothing'} to read a corpus from; it needs files of one "
            f"kind, {', '.join(_LOADERS)}. Name the file or subfolder that is the corpus."
        )
    if args.dataset_split != "train":
        raise ValueError(f"Got split {args.dataset_split!r} of the files in {path}, whose one split is 'train'.")
    if any(file.suffix == ".zst" for file in files) and find_spec("zstandard") is None:
        raise ValueError(f"{path} holds .zst files, which need one more package: pip install zstandard.")
    loader = _LOADERS[kinds[0]]
    if loader is not None:
        names = [str(file) for file in files]
        dataset = datasets.load_dataset(loader, data_files=names, split="train", streaming=args.streaming)
        return _pick_columns(dataset, args)
    if kinds[0] == ".jsonl":
        _check_columns(args, _columns_of_lines(files[0]))
    elif args.source_column is not None:
        raise ValueError(f"{path} is plain text, which has no source_column {args.source_column!r}: leave it out.")
    # large: a thousand books in one chunk are more than 32-bit offsets reach
    features = Features({name: Value("large_string") for name in [*_names(args).values(), "fault"]})
    options = {
        # Size and time are part of the cache's key: a file that was replaced is read again
        "files": [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "text_column": args.text_column,
        "source_column": args.source_column,
        "version": _CACHE_VERSION,
    }
    if args.streaming:
        return IterableDataset.from_generator(_read_files, features=features, gen_kwargs=options)
    num_proc = min(args.num_proc or 1, len(files))
    return Dataset.from_generator(
        _read_files, features=features, gen_kwargs=options, num_proc=num_proc if num_proc > 1 else None
    )


def _read_files(
    files: list[tuple[str, int, int]], text_column: str, source_column: str | None, version: int
) -> Iterator[dict[str, str | None]]:
    """JSON line by line, text file by file, so that a broken one takes no other with it.

    Arrow cannot hold what is no Unicode: `fault` stands in its place.
    """
    for name, *_ in files:
        with fsspec.open(name, "rb", compression="infer") as file:
            if _kind(Path(name)) == ".txt":
                try:
                    text, fault = file.read().decode("utf-8-sig"), None
                except UnicodeDecodeError:
                    text, fault = None, "invalid Unicode"
                yield {"text": text, "fault": fault}
                continue
            for line in file:
                if line.isspace():
                    continue
                row = _row_of(line)
                text = _inside(row, text_column)
                fault = "unreadable" if row is None else fault_of(text)
                document = {"text": None if fault else text, "fault": fault}
                if source_column is not None:
                    source = _inside(row, source_column)
                    document["source"] = None if source is None else str(source)
                yield document


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _columns_of_lines(file: Path) -> set[str]:
    with fsspec.open(str(file), "rb", compression="infer") as lines:
        return {column for line in islice(lines, 100) for column in _dotted(_row_of(line) or {})}


def _inside(row: Any, column: str) -> Any:
    """row["a.b"] if it has such a column, else row["a"]["b"]; None where there is none."""
    if isinstance(row, dict) and column in row:
        return row[column]
    for name in column.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _dotted(columns: dict[str, Any]) -> set[str]:
    inner = {f"{name}.{key}" for name, value in columns.items() if isinstance(value, dict) for key in _dotted(value)}
    return set(columns) | inner


def _check_columns(args: CorpusArguments, columns: set[str]) -> None:
    for option in ("text_column", "source_column"):
        column = getattr(args, option)
        if column is not None and column not in columns:
            raise ValueError(
                f"{args.dataset} has no column {column!r}; it has {', '.join(sorted(columns)) or 'none'}. Name one "
                f"with --{option}."
            )


def _pick_columns(dataset: Dataset | IterableDataset, args: CorpusArguments) -> Dataset | IterableDataset:
    """The columns that were asked for, under our names. Of a map-style dataset nothing is copied."""
    columns = dataset.features if dataset.features is not None else next(iter(dataset), {})
    if "input_ids" in columns and args.text_column not in columns:
        return dataset
    _check_columns(args, _dotted(columns))
    names = _names(args)
    if isinstance(dataset, IterableDataset):
        return dataset.map(_rename, fn_kwargs={"names": names}).select_columns(list(names.values()))
    outer = dict.fromkeys(name if name in columns else name.split(".")[0] for name in names)
    dataset = dataset.select_columns(list(outer))
    if list(outer) != list(names):
        dataset = dataset.flatten()
    return dataset.select_columns(list(names)).rename_columns(names)


def _names(args: CorpusArguments) -> dict[str, str]:
    """Their name -> ours, the text first."""
    return {args.text_column: "text"} | ({} if args.source_column is None else {args.source_column: "source"})


def _rename(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {ours: _inside(row, theirs) for theirs, ours in names.items()}


def fault_of(text: Any, max_characters: int | None = None) -> str | None:
    """Why a text cannot be used, if so."""
    if not isinstance(text, str):
        return "no text"
    if not text or text.isspace():
        return "empty"
    if max_characters is not None and len(text) > max_characters:
        return "too long"
    try:
        text.encode()  # half of a surrogate pair, as cut JSON strings have it; tokenizers refuse it
    except UnicodeEncodeError:
        return "invalid Unicode"
    return None

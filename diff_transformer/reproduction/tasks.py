# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The training data of a study: Python sources of this machine, and synthetic tasks whose answers are known.

A task writes a folder with `train` and `validation`, which `diff_transformer.training.pretrain` reads, and
`manifest.json`, a description with a digest. The same arguments and tokenizer give the same folder, byte for byte.
"""

import hashlib
import json
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import distributions
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass
from tqdm.auto import tqdm, trange
from transformers import PreTrainedTokenizerBase

from ..evaluation.protocols.needle.haystack import WORDINGS, haystack_tokens, needle_prompt
from ..evaluation.protocols.recall import keys_and_values, recall_row
from ..evaluation.text import text_ids
from ..folders import whole_folder
from ..text_data import standard_library_sources

_NOT_TEXT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages"}
_NOT_PROSE = {"encodings", "pydoc_data"}  # generated tables that hardly differ from one another
_LARGEST_FILE = 1_000_000  # bytes; larger files are generated


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Text:
    """Python sources, one document per file.

    source: `stdlib`, the Python standard library, or `packages`, all other installed distributions.
    held_out: about one file in this many, at most 256, is held out for validation. A hash of its path decides.
    max_megabytes: the size at which a random selection of the files ends; all files by default.
    """

    source: Literal["stdlib", "packages"] = "stdlib"
    held_out: int = 20
    max_megabytes: float | None = None

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        texts, manifest = python_sources(self.source, self.held_out, self.max_megabytes)
        for split, rows in texts.items():
            _write_lines(folder / f"{split}.jsonl", rows)
        return manifest


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recall:
    """Rows of multi-query associative recall (`evaluation.protocols.recall`).

    pairs: the number of pairs of each row is drawn from these.
    vocabularies: the number of tokens that a row's keys and values are taken from is drawn from these, among those
        with enough keys. Small vocabularies are learnt first and help to learn large ones.
    in_order: the share of the training rows that repeat their pairs in the same order, so that every token can be
        predicted. Models learn to look up sooner with them. Evaluations have none.
    """

    rows: int
    pairs: list[int]
    vocabularies: list[int]
    in_order: float = 0.0
    validation_rows: int = 200

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        pools = [keys_and_values(tokenizer, vocabulary) for vocabulary in sorted(self.vocabularies)]

        def row(split: str, rng: random.Random) -> tuple[list[int], int]:
            pairs = rng.choice(self.pairs)
            # If no pool has enough keys, recall_row raises an error
            keys, values = rng.choice([pool for pool in pools if len(pool[0]) >= pairs] or pools[-1:])
            input_ids = recall_row(keys, values, pairs, sequence_length, rng).input_ids
            if split == "train" and rng.random() < self.in_order:
                input_ids = list(islice(cycle(input_ids[: 2 * pairs]), len(input_ids)))
            return input_ids, 0

        return _write_rows(folder, self.rows, self.validation_rows, row)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Needles:
    """Needles in filler text (`protocols.needle`, wording `plain`), followed by questions with their answers.

    Every needle is queried once in random order, then again. The loss is on the questions and answers, not on the
    filler. The filler of validation comes from files that are held out of training.

    needles, queries: the numbers of needles and questions of each row are drawn from these.
    in_order: as for `Recall`; the order is that of the text.
    source, held_out, max_megabytes: the filler, as for `Text`.
    """

    rows: int
    needles: list[int]
    queries: Annotated[list[PositiveInt], Field(min_length=1)]
    in_order: float = 0.0
    source: Literal["stdlib", "packages"] = "stdlib"
    held_out: int = 20
    max_megabytes: float | None = None
    validation_rows: int = 200

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        texts, manifest = python_sources(self.source, self.held_out, self.max_megabytes)
        haystacks = {s: haystack_tokens((row["text"] for row in rows), tokenizer) for s, rows in texts.items()}
        _write_lines(folder / "haystack.jsonl", texts["validation"])  # evaluations hide needles in it
        wording, ids = WORDINGS["plain"], cache(partial(text_ids, tokenizer))  # of only a few hundred texts

        def row(split: str, rng: random.Random) -> tuple[list[int], int]:
            needles, queries = rng.choice(self.needles), rng.choice(self.queries)
            question, answer = len(ids(wording.question("A"))), 1  # tokens; the same for all names and numbers
            room = sequence_length - queries * (question + answer) + question
            prompt = needle_prompt(tokenizer, wording, haystacks[split], room, needles, 1, rng.randint(0, 100), rng)
            ((first, number),) = prompt.wanted.items()
            names = list(prompt.spans)  # in the order of the text
            begin = names.index(first)
            others = names[begin + 1 :] + names[:begin]
            if split == "train" and rng.random() < self.in_order:
                asked = islice(cycle([*others, first]), queries - 1)
            else:
                rng.shuffle(others)
                asked = islice([*others, *rng.choices(names, k=max(0, queries - needles))], queries - 1)
            input_ids = prompt.input_ids + ids(number)
            for name in asked:
                input_ids += ids(wording.question(name)) + ids(prompt.numbers[name])
            return input_ids, prompt.context[1]

        return {**manifest, **_write_rows(folder, self.rows, self.validation_rows, row)}


def python_sources(
    source: str, held_out: int, max_megabytes: float | None = None
) -> tuple[dict[str, list[dict[str, str]]], dict[str, Any]]:
    """Rows of `text` and `source` (the package or module) for `train` and `validation`, and their manifest.

    A file stays in its split when other files are added or removed. Of identical files only the first is kept.

    Raises FileNotFoundError if a split would be empty.
    """
    texts: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    digest, size, seen = hashlib.sha256(), 0, set()
    files = sorted((hashlib.sha256(name.encode()).digest(), name, *rest) for name, *rest in _files(source))
    for chance, name, package, file in tqdm(files, desc=f"Python sources: {source}", unit="file"):
        if max_megabytes is not None and size >= 1e6 * max_megabytes:
            break
        content = file.read_bytes()
        same = hashlib.sha256(content).digest()
        if len(content) > _LARGEST_FILE or same in seen:
            continue
        seen.add(same)
        text = content.decode("utf-8", errors="replace")
        texts["validation" if chance[-1] * held_out < 256 else "train"].append({"text": text, "source": package})
        digest.update(name.encode() + same)
        size += len(content)
    if not (texts["train"] and texts["validation"]):
        raise FileNotFoundError(
            f"Found {len(seen)} Python source files ({source}) on this machine, too few for training and validation. "
            "Some systems ship Python without its sources: install them, or use data of your own with --study."
        )
    packages = sorted({row["source"] for rows in texts.values() for row in rows})
    manifest: dict[str, Any] = {"source": source, "python": platform.python_version(), "packages": packages}
    manifest |= {"files": {split: len(rows) for split, rows in texts.items()}, "bytes": size}
    return texts, {**manifest, "sha256": digest.hexdigest()}


def _files(source: str) -> Iterator[tuple[str, str, Path]]:
    """The name, the package or module, and the path of each file, without tests and without this package."""
    if source == "stdlib":
        for name, file in standard_library_sources(_NOT_TEXT | _NOT_PROSE):
            yield name, name.split("/")[0].removesuffix(".py"), file
        return
    found = {f"{d.metadata['Name']} {d.version}": d for d in distributions() if d.metadata["Name"]}
    for package in sorted(name for name in found if not name.startswith("diff_transformer ")):
        for path in sorted(found[package].files or [], key=str):
            file = Path(str(path.locate()))
            if path.suffix == ".py" and not _NOT_TEXT & set(path.parts) and file.is_file():
                yield f"{package}/{path.as_posix()}", package, file


def _write_lines(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_rows(
    folder: Path, train: int, validation: int, make_row: Callable[[str, random.Random], tuple[list[int], int]]
) -> dict[str, Any]:
    """Writes rows that are packed already. Each is drawn with its own random number generator.

    make_row: gives the tokens of a row, and the position of the first one that counts in the loss.
    """
    numbers, digest = {"train": train, "validation": validation}, hashlib.sha256()
    for split, number in numbers.items():
        drawn = (make_row(split, random.Random(f"{split}|{i}")) for i in trange(number, desc=split, unit="row"))
        input_ids, begins = (np.array(x, np.int32) for x in zip(*drawn, strict=True))
        labels = np.where(np.arange(input_ids.shape[1]) < begins[:, None], -100, input_ids)
        columns = {"input_ids": input_ids, "labels": labels.astype(np.int32)}
        digest.update(b"".join(values.tobytes() for values in columns.values()))
        arrays = {k: pa.FixedSizeListArray.from_arrays(v.ravel(), v.shape[1]) for k, v in columns.items()}
        schema = pa.schema({name: pa.list_(pa.int32()) for name in columns})
        Dataset(pa.table(arrays).cast(schema)).save_to_disk(str(folder / split))
    return {"rows": numbers, "sha256": digest.hexdigest()}


def write_task(
    arguments: Mapping[str, Any], folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Writes `train`, `validation` and manifest.json. The folder appears complete or not at all."""
    task = TASKS[arguments["kind"]](**{name: value for name, value in arguments.items() if name != "kind"})
    with whole_folder(folder, size=0, overwrite=True) as part:
        manifest = task.write(part, tokenizer, sequence_length)
        content = {"task": dict(arguments), "sequence_length": sequence_length, **manifest}
        (part / "manifest.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


TASKS: dict[str, type[Text] | type[Recall] | type[Needles]] = {"text": Text, "recall": Recall, "needles": Needles}

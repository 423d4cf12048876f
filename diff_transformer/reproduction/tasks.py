# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What the models of a study are trained on: text of this machine, and tasks whose every answer is known.

A task writes a folder with `train` and `validation`, which `diff_transformer.training.pretrain` reads, and
`manifest.json`: what is in it, with a digest. The same arguments and tokenizer make the same folder, byte for byte.
"""

import hashlib
import json
import platform
import random
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distributions
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from tqdm.auto import tqdm, trange
from transformers import PreTrainedTokenizerBase

from ..evaluation.needle_prompts import WORDINGS, haystack_tokens, needle_prompt
from ..evaluation.recall import keys_and_values, recall_row
from ..evaluation.tokens import text_ids
from ..folders import whole_folder

_NOT_TEXT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages"}
_NOT_PROSE = {"encodings", "pydoc_data"}  # generated tables that are near copies of one another
_LARGEST_FILE = 1_000_000  # bytes; larger ones are generated


@dataclass(frozen=True)
class Text:
    """Python sources, a document each; about one file in `held_out`, at least in 256, is for validation, by a hash of
    its path.

    source: `stdlib`, the Python standard library, or `packages`, all that is installed beside it. max_megabytes: of so
    many files at most, a random part.
    """

    source: str = "stdlib"
    held_out: int = 20
    max_megabytes: float | None = None

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        texts, manifest = python_sources(self.source, self.held_out, self.max_megabytes)
        for split, rows in texts.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        return manifest


@dataclass(frozen=True)
class Recall:
    """Rows of multi-query associative recall (`evaluation.recall`).

    pairs: numbers of pairs, drawn for every row. vocabularies: how many tokens the keys and values of a row are taken
    from, drawn among those with keys enough: few keys are learnt first, and help to learn many. in_order: the share of
    rows that repeat their pairs in the same order, so that every token can be predicted; models learn to look up
    sooner with them. Evaluations have none.
    """

    rows: int
    pairs: list[int]
    vocabularies: list[int]
    in_order: float = 0.0
    validation_rows: int = 200

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        pools = [keys_and_values(tokenizer, vocabulary) for vocabulary in sorted(self.vocabularies)]

        def row(split: str, rng: random.Random) -> list[int]:
            pairs = rng.choice(self.pairs)
            # No pool has keys enough: recall_row says so
            keys, values = rng.choice([pool for pool in pools if len(pool[0]) >= pairs] or pools[-1:])
            input_ids = recall_row(keys, values, pairs, sequence_length, rng).input_ids
            if split == "train" and rng.random() < self.in_order:
                return list(islice(cycle(input_ids[: 2 * pairs]), len(input_ids)))
            return input_ids

        rows = {"train": self.rows, "validation": self.validation_rows}
        return _write_rows(folder, rows, lambda split, rng: (row(split, rng), 0))


@dataclass(frozen=True)
class Needles:
    """Needles in filler text (`evaluation.needle_prompts`, wording `plain`), then questions with their answers: each
    needle once in any order, then again.

    needles, queries: their numbers, drawn for every row. in_order: as for `Recall`, here in the order of the text. The
    questions and answers are learnt, not the filler, which for validation is of files that are not trained on.
    """

    rows: int
    needles: list[int]
    queries: list[int]
    in_order: float = 0.0
    source: str = "stdlib"
    held_out: int = 20
    max_megabytes: float | None = None
    validation_rows: int = 200

    def __post_init__(self):
        if min(self.queries, default=0) < 1:
            raise ValueError(f"Got queries={self.queries}; a row of needles needs at least one question.")

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Any]:
        texts, manifest = python_sources(self.source, self.held_out, self.max_megabytes)
        haystacks = {s: haystack_tokens((row["text"] for row in rows), tokenizer) for s, rows in texts.items()}
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in texts["validation"])
        (folder / "haystack.jsonl").write_text("".join(lines), encoding="utf-8")  # that evaluations hide needles in
        wording = WORDINGS["plain"]
        ids = cache(partial(text_ids, tokenizer))  # a few hundred texts, over and over

        def row(split: str, rng: random.Random) -> tuple[list[int], int]:
            needles, queries = rng.choice(self.needles), rng.choice(self.queries)
            question, answer = len(ids(wording.question("A"))), 1  # tokens, of all names and numbers of this wording
            room = sequence_length - queries * (question + answer) + question
            prompt = needle_prompt(tokenizer, wording, haystacks[split], room, needles, 1, rng.randint(0, 100), rng)
            ((first, number),) = prompt.wanted.items()
            names = list(prompt.spans)  # in the order of the text
            begin = names.index(first)
            others = names[begin + 1 :] + names[:begin]
            if split == "train" and rng.random() < self.in_order:
                asked = list(islice(cycle([first, *others]), queries))
            else:
                rng.shuffle(others)
                asked = [first, *others, *rng.choices(names, k=max(0, queries - needles))][:queries]
            input_ids = prompt.input_ids + ids(number)
            for name in asked[1:]:
                input_ids += ids(wording.question(name)) + ids(prompt.numbers[name])
            assert len(input_ids) == sequence_length
            return input_ids, prompt.context[1]

        return {**manifest, **_write_rows(folder, {"train": self.rows, "validation": self.validation_rows}, row)}


def python_sources(
    source: str, held_out: int, max_megabytes: float | None = None
) -> tuple[dict[str, list[dict[str, str]]], dict[str, Any]]:
    """Rows of `text` and `source` (the package or module) for `train` and `validation`, and what they are.

    A file stays on its side whatever other files come or go; of two that are the same the first is kept.

    Raises ValueError for an unknown source, FileNotFoundError if there is next to nothing.
    """
    if source not in _SOURCES:
        raise ValueError(f"Got the source {source!r}; there are {', '.join(_SOURCES)}.")
    texts: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    digest, size, seen = hashlib.sha256(), 0, set()
    files = sorted((hashlib.sha256(name.encode()).digest(), name, *rest) for name, *rest in _SOURCES[source]())
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
            f"The Python sources of this machine ({source}) are {len(seen)} files: too few to train on and to hold "
            "some out. Some systems ship Python without them; name a study of your own with --study."
        )
    packages = sorted({row["source"] for rows in texts.values() for row in rows})
    manifest = {
        "source": source,
        "python": platform.python_version(),
        "packages": packages,
        "files": {split: len(rows) for split, rows in texts.items()},
        "bytes": size,
        "sha256": digest.hexdigest(),
    }
    return texts, manifest


def _stdlib() -> Iterator[tuple[str, str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if not (_NOT_TEXT | _NOT_PROSE) & set(path.parts):
            yield path.as_posix(), path.parts[0].removesuffix(".py"), file


def _packages() -> Iterator[tuple[str, str, Path]]:
    """The sources of every distribution, this one and its tests left out."""
    found = {f"{d.metadata['Name']} {d.version}": d for d in distributions() if d.metadata["Name"]}
    for package in sorted(found):
        if package.startswith("diff_transformer "):
            continue
        for path in sorted(found[package].files or [], key=str):
            file = Path(str(path.locate()))
            if path.suffix == ".py" and not _NOT_TEXT & set(path.parts) and file.is_file():
                yield f"{package}/{path.as_posix()}", package, file


_SOURCES: dict[str, Callable[[], Iterator[tuple[str, str, Path]]]] = {"stdlib": _stdlib, "packages": _packages}


def _write_rows(
    folder: Path, numbers: Mapping[str, int], make_row: Callable[[str, random.Random], tuple[list[int], int]]
) -> dict[str, Any]:
    """Rows that are packed already, each from a random number generator of its own: its tokens, and from which on they
    are learnt."""
    digest = hashlib.sha256()
    for split, number in numbers.items():
        drawn = (make_row(split, random.Random(f"{split}|{i}")) for i in trange(number, desc=split, unit="row"))
        input_ids, begins = (np.array(x, np.int32) for x in zip(*drawn, strict=True))
        labels = np.where(np.arange(input_ids.shape[1]) < begins[:, None], -100, input_ids)
        columns = {"input_ids": input_ids, "labels": labels.astype(np.int32)}
        digest.update(b"".join(values.tobytes() for values in columns.values()))
        arrays = {k: pa.FixedSizeListArray.from_arrays(v.ravel(), v.shape[1]) for k, v in columns.items()}
        schema = pa.schema({name: pa.list_(pa.int32()) for name in columns})
        Dataset(pa.table(arrays).cast(schema)).save_to_disk(str(folder / split))
    return {"rows": dict(numbers), "sha256": digest.hexdigest()}


def write_task(
    arguments: Mapping[str, Any], folder: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Writes `train`, `validation` and manifest.json; the folder appears whole or not at all."""
    task = TASKS[arguments["kind"]](**{name: value for name, value in arguments.items() if name != "kind"})
    with whole_folder(folder, size=0, overwrite=True) as part:
        manifest = task.write(part, tokenizer, sequence_length)
        content = {"task": dict(arguments), "sequence_length": sequence_length, **manifest}
        (part / "manifest.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


TASKS: dict[str, type[Text] | type[Recall] | type[Needles]] = {"text": Text, "recall": Recall, "needles": Needles}

__all__ = ["TASKS", "Needles", "Recall", "Text", "python_sources", "write_task"]

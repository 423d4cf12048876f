# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The tasks of a study: looking up values by their keys, where every answer is known, and text.

Rows are `input_ids` and `labels`, two int64 arrays (rows, tokens); labels are -100 where nothing is asked, and not
shifted. The same arguments, seed and text give the same rows.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from tqdm.auto import tqdm

from ..folders import whole_file
from ..text_data import standard_library_sources
from ..tokenization_cl100k import cl100k_tokenizer

IGNORED = -100
STRICT = ConfigDict(extra="forbid")
_NOT_TEXT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages"}
_NOT_PROSE = {"encodings", "pydoc_data"}  # generated tables that hardly differ from one another
_LARGEST_FILE = 1_000_000  # bytes; larger files are generated

Split = Literal["train", "validation"]


class Examples(NamedTuple):
    input_ids: np.ndarray
    labels: np.ndarray


class Floor(NamedTuple):
    """What a model scores that has not learnt the task. A model has learnt it if its metric is better."""

    metric: Literal["accuracy", "loss"]
    value: float


@dataclass(frozen=True, config=STRICT)
class Text:
    """Python sources of this machine, as tokens.

    source: `stdlib`, the Python standard library, or `packages`, all other installed distributions.
    ranks: merge ranks of cl100k_base.
    held_out: about one file in this many is held out for validation. A hash of its path decides.
    max_megabytes: the size at which a random selection of the files ends; all files by default.
    """

    source: Literal["stdlib", "packages"] = "stdlib"
    ranks: PositiveInt = 1024
    held_out: Annotated[int, Field(gt=0, le=256)] = 20
    max_megabytes: PositiveFloat | None = None

    @cached_property
    def vocabulary(self) -> int:
        return len(cl100k_tokenizer(vocab_size=self.ranks))

    def load(self, folder: Path) -> "Tokens":
        """The tokens of this machine's text. The file of them in `folder` is written if it is missing."""
        name = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        file = folder / f"{self.source}-{name}.npz"
        if not file.exists():
            with whole_file(file) as part, part.open("wb") as stream:
                np.savez(stream, **_tokens(self)._asdict())
        with np.load(file) as arrays:  # without pickle
            return Tokens(arrays["train"], arrays["validation"])


class Tokens(NamedTuple):
    """The documents of each split one after another, each followed by an end-of-text token."""

    train: np.ndarray
    validation: np.ndarray

    def unigram_loss(self) -> float:
        """Nats per token of the validation text, with the frequencies of the training text."""
        counts = np.bincount(self.train, minlength=int(self.validation.max()) + 1) + 1
        return float(-np.log(counts / counts.sum())[self.validation].mean())

    def digest(self) -> str:
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, config=STRICT)
class KeyValue:
    """Which value stands with this key? A context of pairs and filler, then each key in random order, followed by its
    value. The loss is on the values that are asked for.

    fused: a pair is one token, so that one layer can look it up. Otherwise it is two tokens, a key and then its value:
        multi-query associative recall (Zoology, arXiv:2312.04927), which takes two layers.
    context: tokens before the questions, with filler around the pairs; by default the pairs alone, with one token of
        filler if an odd number of tokens would be left for the questions.
    pairs: the number of pairs of a row is drawn from these. Rows with fewer ask for some keys again.
    decoys: the number of decoys is drawn from these: fused tokens whose keys are not asked for.
    filler: this many noise tokens, or text.
    """

    pairs: Annotated[list[PositiveInt], Field(min_length=1)]
    context: PositiveInt | None = None
    fused: bool = False
    keys: PositiveInt = 16
    values: PositiveInt = 8
    decoys: Annotated[list[NonNegativeInt], Field(min_length=1)] = Field(default_factory=lambda: [0])
    filler: PositiveInt | Text = 64
    kind: Literal["key_value"] = "key_value"

    def __post_init__(self):
        most, width = max(self.pairs), 1 if self.fused else 2
        places = most if self.context is None else self.context // width
        if most > self.keys or most + max(self.decoys) > places:
            raise ValueError(
                f"got up to {most} pairs and {max(self.decoys)} decoys; there are {self.keys} keys, and the context "
                f"has room for {places} of both"
            )
        if max(self.decoys) and not (self.fused and most < self.keys):
            raise ValueError(
                f"got decoys={self.decoys}; they need fused pairs, and more keys than the {most} of pairs"
            )

    @property
    def text(self) -> Text | None:
        return self.filler if isinstance(self.filler, Text) else None

    @property
    def length(self) -> int:
        most = max(self.pairs)
        return 2 * most + ((most if self.fused else 2 * most) if self.context is None else self.context)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first ids of filler, fused tokens, keys and values, and the size of the vocabulary."""
        filler = self.filler.vocabulary if isinstance(self.filler, Text) else self.filler
        fused = self.keys * self.values if self.fused else 0
        return tuple(int(x) for x in np.cumsum((0, filler, fused, self.keys, self.values)))

    @property
    def vocabulary(self) -> int:
        return self._firsts[-1]

    def _context(self, pairs: int) -> int:
        """The number of tokens before the questions in a row with this many pairs."""
        if self.context is not None:
            return self.context
        tokens = pairs if self.fused else 2 * pairs
        return tokens + (self.length - tokens) % 2

    @property
    def conditions(self) -> dict[str, dict[str, int]]:
        """The kinds of rows that are measured apart, each by its arguments of `rows`."""
        found = {f"{n} pairs": {"pairs": n} for n in self.pairs if len(self.pairs) > 1}
        return found | {f"{n} decoys": {"decoys": n} for n in self.decoys if len(self.decoys) > 1}

    def rows(
        self,
        split: Split,
        seed: int,
        number: int,
        tokens: Tokens | None = None,
        pairs: int | None = None,
        decoys: int | None = None,
    ) -> Examples:
        """pairs, decoys: fixed numbers instead of random ones. Raises ValueError if the text is shorter than a row."""
        rng = np.random.default_rng((seed, ("train", "validation").index(split)))
        input_ids = np.empty((number, self.length), np.int64)
        text = None if tokens is None else getattr(tokens, split)
        if text is not None and len(text) < self.length:
            raise ValueError(
                f"The {split} text has {len(text):,} tokens, fewer than the {self.length} of a row. Choose more text: "
                "another source or a larger max_megabytes."
            )
        labels = np.full_like(input_ids, IGNORED)
        for row, answers in zip(input_ids, labels, strict=True):
            n = rng.choice(self.pairs) if pairs is None else pairs
            questions = self._fill(row, rng, n, rng.choice(self.decoys) if decoys is None else decoys, text)
            answers[questions + 1 :: 2] = row[questions + 1 :: 2]
        return Examples(input_ids, labels)

    def _fill(
        self, row: np.ndarray, rng: np.random.Generator, pairs: int, decoys: int, text: np.ndarray | None
    ) -> int:
        """Returns where the questions begin."""
        filler, fused, first_key, first_value, _ = self._firsts
        width, context = 1 if self.fused else 2, self._context(pairs)
        if text is None:
            row[:context] = rng.integers(filler, fused, context)
        else:
            begin = rng.integers(len(text) - context)
            row[:context] = text[begin : begin + context]
        keys, others = np.split(rng.permutation(self.keys), [pairs])
        values = rng.integers(self.values, size=pairs)
        places = width * rng.permutation(context // width)[: pairs + decoys]
        if self.fused:
            row[places[:pairs]] = fused + keys * self.values + values
            others = rng.choice(others, decoys) if decoys else others[:0]
            row[places[pairs:]] = fused + others * self.values + rng.integers(self.values, size=decoys)
        else:
            row[places], row[places + 1] = first_key + keys, first_value + values
        asked = np.concatenate([rng.permutation(pairs), rng.integers(pairs, size=(len(row) - context) // 2 - pairs)])
        row[context::2], row[context + 1 :: 2] = first_key + keys[asked], first_value + values[asked]
        return context

    def floor(self, unigram_loss: float | None = None) -> Floor:
        """A model that answers with the value of any pair that was not asked for yet, which takes no look at the key.
        When a key is asked for again, of any pair."""
        pairs_left = []  # at each question
        for n in self.pairs:
            questions = (self.length - self._context(n)) // 2
            pairs_left += [*range(n, 0, -1), *[n] * (questions - n)]
        return Floor("accuracy", float(np.mean([1 / n + (1 - 1 / n) / self.values for n in pairs_left])))


@dataclass(frozen=True, config=STRICT)
class NextToken:
    """The next token of a text, in rows of `length` tokens."""

    length: PositiveInt
    text: Text
    kind: Literal["text"] = "text"

    conditions = {}  # type: ignore[var-annotated]  # noqa: RUF012

    @property
    def vocabulary(self) -> int:
        return self.text.vocabulary

    def rows(self, split: Split, seed: int, number: int, tokens: Tokens | None = None) -> Examples:
        """Different rows in random order. Raises ValueError if there are fewer."""
        assert tokens is not None
        text = getattr(tokens, split)
        found = len(text) // self.length
        if number > found:
            raise ValueError(
                f"The {split} text has {found:,} rows of {self.length} tokens, and {number:,} are needed. Choose "
                "fewer steps, or more text: another source or a larger max_megabytes."
            )
        rows = text[: found * self.length].reshape(found, self.length)
        chosen = rows[np.random.default_rng(seed).permutation(found)[:number]].astype(np.int64)
        return Examples(chosen, chosen)

    def floor(self, unigram_loss: float | None = None) -> Floor:
        """A model that knows how frequent each token is in the training text, and nothing else."""
        assert unigram_loss is not None
        return Floor("loss", unigram_loss)


def _tokens(text: Text) -> Tokens:
    tokenizer = cl100k_tokenizer(vocab_size=text.ranks)
    found: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    sources = python_sources(text)
    while documents := list(islice(sources, 256)):  # at once, so that the tokenizer uses all processors
        splits, texts = zip(*documents, strict=True)
        for split, ids in zip(splits, tokenizer(list(texts)).input_ids, strict=True):
            found[split].append(np.array([*ids, tokenizer.eos_token_id], np.uint32))
    if not all(found.values()):
        raise FileNotFoundError(
            f"Found {sum(map(len, found.values()))} Python source files ({text.source}) on this machine, too few for "
            "training and validation. Some systems ship Python without its sources: install them, or use a task "
            "without text, in a study of your own."
        )
    return Tokens(*(np.concatenate(arrays) for arrays in found.values()))


def python_sources(text: Text) -> Iterator[tuple[Split, str]]:
    """The documents and their splits, in random order.

    A file stays in its split when other files are added or removed. Of identical files only the first is kept.
    """
    size, seen = 0, set()
    files = sorted((hashlib.sha256(name.encode()).digest(), name, file) for name, file in _files(text.source))
    for chance, _, file in tqdm(files, desc=f"Python sources: {text.source}", unit="file"):
        if text.max_megabytes is not None and size >= 1e6 * text.max_megabytes:
            break
        content = file.read_bytes()
        same = hashlib.sha256(content).digest()
        if len(content) > _LARGEST_FILE or same in seen:
            continue
        seen.add(same)
        size += len(content)
        split: Split = "validation" if chance[-1] * text.held_out < 256 else "train"
        yield split, content.decode("utf-8", errors="replace")


def _files(source: str) -> Iterator[tuple[str, Path]]:
    """The name and the path of each file, without tests and without this package."""
    if source == "stdlib":
        yield from standard_library_sources(_NOT_TEXT | _NOT_PROSE)
        return
    found = {f"{d.metadata['Name']} {d.version}": d for d in distributions() if d.metadata["Name"]}
    for package in sorted(name for name in found if not name.startswith("diff_transformer ")):
        for path in sorted(found[package].files or [], key=str):
            file = Path(str(path.locate()))
            if path.suffix == ".py" and not _NOT_TEXT & set(path.parts) and file.is_file():
                yield f"{package}/{path.as_posix()}", file

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Length up-sampling to extend a context (Fu et al., arXiv:2402.10171): more long documents, the same mix of sources.

From every source all documents of at least `long_from` tokens are kept, and each shorter one with probability
`keep_short`, until the source has reached its share of the tokens. A row has documents of one source, and the sources
are interleaved row by row.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, load_from_disk
from datasets.table import InMemoryTable
from tqdm import tqdm
from transformers.utils import logging

from ..folders import whole_folder

logger = logging.get_logger(__name__)

# Tokens by source in SlimPajama, under its names (`meta.redpajama_set_name`)
SLIMPAJAMA_SHARES = {
    "RedPajamaC4": 0.2661,
    "RedPajamaCommonCrawl": 0.53375,
    "RedPajamaStackExchange": 0.0317,
    "RedPajamaWikipedia": 0.03402,
    "RedPajamaGithub": 0.05005,
    "RedPajamaArXiv": 0.0429,
    "RedPajamaBook": 0.04148,
}

BUCKETS = ("<1K", "1-2K", "2-4K", "4-8K", "8-16K", "16-32K", "32-64K", ">=64K")
_EDGES = 1024 * 2 ** np.arange(len(BUCKETS) - 1)


@dataclass
class Lengths:
    """Documents and their tokens, by source and length: arrays of one number per bucket (`BUCKETS`, 1K = 1,024)."""

    documents: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, source: str, lengths: Any, tokens: Any = None) -> None:
        """lengths: tokens of whole documents, which choose the bucket. tokens: those that count, all by default."""
        lengths = np.atleast_1d(lengths)
        buckets = np.searchsorted(_EDGES, lengths, side="right")
        for table, weights in ((self.documents, None), (self.tokens, lengths if tokens is None else tokens)):
            counts = np.bincount(buckets, weights, minlength=len(BUCKETS)).astype(np.int64)
            table[source] = table.get(source, 0) + counts

    @classmethod
    def of(cls, documents: Dataset) -> "Lengths":
        """The lengths of tokenized documents with the columns `input_ids` and `source`."""
        columns = documents.with_format("arrow")[:]
        lengths = pc.list_value_length(columns["input_ids"]).to_numpy()
        sources = np.array([str(name) for name in columns["source"].to_pylist()])
        measured = cls()
        for source in np.unique(sources):
            own = lengths[sources == source]
            measured.add(str(source), own[own > 0])
        return measured

    def shares(self) -> dict[str, float]:
        """The share of all tokens that each source has; a source of empty documents has none and is left out."""
        totals = {source: int(tokens.sum()) for source, tokens in self.tokens.items() if tokens.any()}
        return {source: tokens / sum(totals.values()) for source, tokens in totals.items()}


@dataclass
class UpsamplingReport:
    """Length distribution and mix of sources before and after; `str` gives two tables.

    Attributes:
        before: All documents of the corpus; for a stream, those that were read until every source had its tokens.
        after: The documents in the rows. A document that the end of its source's last row truncates counts once, with
            the tokens in the row.
        shares: The requested mix; sums to 1.
        tokens_wanted: The token budget.
        exhausted: The source that ran out and reduced the budgets of all sources, or None.
        skipped: Documents without tokens that were read, by reason.
    """

    before: Lengths
    after: Lengths
    shares: dict[str, float]
    tokens_wanted: int
    exhausted: str | None = None
    skipped: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        lengths = {
            name: {
                source: {"documents": counts.documents[source].tolist(), "tokens": counts.tokens[source].tolist()}
                for source in sorted(counts.documents)
            }
            for name, counts in (("before", self.before), ("after", self.after))
        }
        rest = {"tokens_wanted": self.tokens_wanted, "exhausted": self.exhausted, "skipped": self.skipped}
        return {"buckets": list(BUCKETS), **lengths, "shares": self.shares, **rest}

    def __str__(self) -> str:
        lines = [f"{'length':<24}{'documents':>16}{'->':>16}{'tokens':>12}{'->':>10}"]
        before, after = (self._by_bucket(counts) for counts in (self.before, self.after))
        for bucket, was, now in zip(BUCKETS, before, after, strict=True):
            lines.append(f"{bucket:<24}{was[0]:>16,}{now[0]:>16,}{was[1]:>12.2%}{now[1]:>10.2%}")
        lines.append(f"{'source':<24}{'tokens':>16}{'->':>16}{'share':>12}{'->':>10}{'wanted':>10}")
        before_shares, after_shares = self.before.shares(), self.after.shares()
        for source in sorted({*self.before.tokens, *self.shares}):
            there, kept = (int(np.sum(counts.tokens.get(source, 0))) for counts in (self.before, self.after))
            lines.append(
                f"{source:<24}{there:>16,}{kept:>16,}{before_shares.get(source, 0):>12.2%}"
                f"{after_shares.get(source, 0):>10.2%}{self.shares.get(source, 0):>10.2%}"
            )
        if self.exhausted is not None:
            total = int(sum(tokens.sum() for tokens in self.after.tokens.values()))
            lines.append(f"{self.exhausted} ran out: {total:,} of {self.tokens_wanted:,} tokens, in the requested mix")
        if self.skipped:
            lines.append("skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items()))
        return "\n".join(lines)

    @staticmethod
    def _by_bucket(counts: Lengths) -> list[tuple[int, float]]:
        documents, tokens = (
            np.sum([np.zeros(len(BUCKETS), np.int64), *table.values()], axis=0)
            for table in (counts.documents, counts.tokens)
        )
        return [(int(d), float(t / max(1, tokens.sum()))) for d, t in zip(documents, tokens, strict=True)]


@dataclass
class _Source:
    """What is kept of a source: its tokens in a file, its documents' lengths, its random number generator."""

    name: str
    file: Path
    tokens_wanted: int
    seed: int
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # From seed and name alone: neither other sources nor their order change what is drawn
        name = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")
        self.random = np.random.default_rng([self.seed, name])
        self.opened = open(self.file, "wb")  # noqa: SIM115 (closed by `upsample_lengths`)

    def offer(self, ids: np.ndarray, long_from: int, keep_short: float) -> int:
        """Keeps or drops the document; returns how many tokens of the budget it fills."""
        if self.tokens >= self.tokens_wanted:
            return 0
        drawn = self.random.random()  # for long documents too, so that `long_from` does not change later draws
        if len(ids) < long_from and drawn >= keep_short:
            return 0
        before = self.tokens
        self.opened.write(ids.tobytes())
        self.lengths.append(len(ids))
        self.tokens += len(ids)
        return min(self.tokens, self.tokens_wanted) - before

    def rows(self, sequence_length: int) -> np.ndarray:
        """(rows, tokens), a view of the file."""
        self.opened.close()
        num_rows = self.tokens // sequence_length
        if num_rows == 0:
            return np.empty((0, sequence_length), np.int32)
        return np.memmap(self.file, np.int32, "r", shape=(num_rows, sequence_length))

    def count(self, after: Lengths, num_tokens: int) -> None:
        """Adds the documents in the first `num_tokens` tokens of the source to `after`."""
        lengths = np.array(self.lengths, np.int64)
        inside = np.clip(num_tokens - (np.cumsum(lengths) - lengths), 0, lengths)
        after.add(self.name, lengths[inside > 0], inside[inside > 0])


def upsample_lengths(
    documents: Dataset | IterableDataset,
    output_dir: str | Path,
    *,
    token_budget: int,
    sequence_length: int,
    eos_token_id: int,
    shares: Mapping[str, float] | None = None,
    long_from: int = 4096,
    keep_short: float = 0.1,
    seed: int = 0,
) -> tuple[Dataset, UpsamplingReport]:
    """Writes packed rows with more long documents and the same mix of sources, and a report.

    The corpus is read once, in order, until every source has its tokens. A source that runs out earlier reduces all
    budgets by the same factor: the mix stays, no document is used twice, and the report names it.

    Args:
        documents: Rows of `input_ids` and `source`, as `data.tokenize` returns them; rows without tokens are skipped
            and counted by `fault`, if there is such a column.
        output_dir: Folder for the rows (`datasets.load_from_disk`) and report.json; appears whole or not at all. While
            it is written, twice its size is needed: 8 bytes per token.
        token_budget: Tokens in total, rounded down to whole rows.
        eos_token_id: Appended to a document that does not end with it. It counts as a token of the document.
        shares: Source -> its share of the tokens, or numbers in that ratio; documents of other sources are left out.
            None: as in `documents`, which must not be a stream.
        long_from, keep_short: All documents of at least this many tokens are kept, shorter ones with this probability.
        seed: Each source draws from (seed, its name).

    Returns:
        The rows, each from one source: `input_ids`, int32, of exactly `sequence_length`, `source`, and `row`, the
        position. The mix matches `shares` to within a row per source. And the report.

    Raises:
        ValueError: Sources without documents, numbers out of range, a stream without shares.
        FileExistsError: `output_dir` exists.
    """
    if sequence_length < 1 or token_budget < sequence_length or not 0 <= keep_short <= 1:
        raise ValueError(
            f"Got token_budget={token_budget}, sequence_length={sequence_length} and keep_short={keep_short}; the "
            "budget must be at least one row of at least one token, and the probability between 0 and 1."
        )
    before = Lengths() if isinstance(documents, IterableDataset) else Lengths.of(documents)
    if shares is None and isinstance(documents, IterableDataset):
        raise ValueError(
            "The mix of a stream is unknown before its end: give shares, such as SLIMPAJAMA_SHARES, or a Dataset."
        )
    shares = _normalized(before.shares() if shares is None else shares)
    rows_wanted = _apportion(token_budget // sequence_length, shares)

    with whole_folder(output_dir, 8 * token_budget, overwrite=False) as folder:
        scratch = folder / "tokens"
        scratch.mkdir()
        sources = {
            name: _Source(name, scratch / str(i), rows_wanted[name] * sequence_length, seed)
            for i, name in enumerate(sorted(shares))
        }
        try:
            skipped = _read(documents, sources, before, eos_token_id, long_from, keep_short)
            kept = {name: source.rows(sequence_length) for name, source in sources.items()}
        finally:
            for source in sources.values():
                source.opened.close()
        num_rows, exhausted = _whole_mix(rows_wanted, {name: len(rows) for name, rows in kept.items()}, shares)

        report = UpsamplingReport(before, Lengths(), dict(shares), token_budget, exhausted, skipped)
        for name, source in sources.items():
            source.count(report.after, num_rows[name] * sequence_length)
        if exhausted is not None:
            logger.warning(
                f"{exhausted!r} ran out: {sum(num_rows.values()):,} of {sum(rows_wanted.values()):,} rows are "
                "written, in the requested mix. For more, give a larger corpus, a smaller share to this source, a "
                "lower long_from or a higher keep_short."
            )
        order = _interleaved(num_rows)
        _table(kept, order).save_to_disk(str(folder))
        (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        shutil.rmtree(scratch)
    return load_from_disk(str(output_dir)), report


def _normalized(shares: Mapping[str, float]) -> dict[str, float]:
    total = sum(shares.values())
    if not shares or min(shares.values()) <= 0:
        raise ValueError(
            f"Got shares {dict(shares)}; there must be a source, and every share must be above 0. If they were "
            "measured, the corpus has no document with tokens."
        )
    return {name: share / total for name, share in sorted(shares.items())}


def _apportion(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """`total` rows as whole numbers, each within one of its share: the largest remainders are rounded up."""
    counts = {name: int(total * share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (counts[name] - total * shares[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _ids_and_sources(documents: Dataset | IterableDataset) -> Iterator[tuple[np.ndarray, str, str]]:
    """Yields tokens, source, and the reason if there are no tokens."""
    if isinstance(documents, IterableDataset):
        for document in documents:
            yield np.array(document["input_ids"], np.int32), str(document["source"]), document.get("fault") or "empty"
        return
    for table in documents.with_format("arrow").iter(1000):  # Python numbers would take several times as long
        ids = pc.list_flatten(table["input_ids"]).to_numpy().astype(np.int32)
        ends = np.cumsum(pc.list_value_length(table["input_ids"]).to_numpy())
        faults = table["fault"].to_pylist() if "fault" in table.column_names else [None] * len(table)
        for i, (source, fault) in enumerate(zip(table["source"].to_pylist(), faults, strict=True)):
            yield ids[ends[i - 1] if i else 0 : ends[i]], str(source), fault or "empty"


def _read(
    documents: Dataset | IterableDataset,
    sources: dict[str, _Source],
    before: Lengths,
    eos_token_id: int,
    long_from: int,
    keep_short: float,
) -> dict[str, int]:
    """Offers every document to its source until all have enough; returns how many had no tokens, by reason."""
    skipped: Counter[str] = Counter()
    measure = isinstance(documents, IterableDataset)
    missing = {name for name, source in sources.items() if source.tokens_wanted}
    total = sum(source.tokens_wanted for source in sources.values())
    with tqdm(total=total, unit=" tokens", unit_scale=True, desc="Up-sampling") as bar:
        for ids, name, fault in _ids_and_sources(documents):
            if len(ids) == 0:
                skipped[fault] += 1
                continue
            if ids[-1] != eos_token_id:
                ids = np.append(ids, np.int32(eos_token_id))
            if measure:
                before.add(name, len(ids))
            if name not in sources:
                continue
            bar.update(sources[name].offer(ids, long_from, keep_short))
            if name in missing and sources[name].tokens >= sources[name].tokens_wanted:
                missing.remove(name)
                bar.set_postfix_str(f"{len(missing)} of {len(sources)} sources open")
                if not missing:
                    break
    empty = sorted(name for name in missing if not sources[name].tokens)
    if empty:
        raise ValueError(
            f"No document was kept of {', '.join(map(repr, empty))}; the corpus has the sources "
            f"{', '.join(map(repr, sorted(before.tokens))) or 'none'}. Remove it from shares, or correct its name."
        )
    return dict(skipped)


def _whole_mix(
    wanted: dict[str, int], there: dict[str, int], shares: Mapping[str, float]
) -> tuple[dict[str, int], str | None]:
    """The most rows in the mix of `shares` that the sources can give, and the source that limits them, if any."""
    total, rows, exhausted = sum(wanted.values()), wanted, None
    while lacking := [name for name in rows if rows[name] > there[name]]:
        exhausted = min(lacking, key=lambda name: there[name] / shares[name])
        total = min(total - 1, int((there[exhausted] + 1) / shares[exhausted]))
        rows = _apportion(total, shares)
    if exhausted is not None and not any(rows.values()):
        raise ValueError(
            f"{exhausted!r} has {there[exhausted]} rows to give, so that none can be made in the requested mix: give "
            "a larger corpus, shorter rows, or remove this source from shares."
        )
    return rows, exhausted


def _interleaved(num_rows: dict[str, int]) -> list[tuple[str, int]]:
    """(source, index of its row), so that every source is spread evenly over the whole."""
    places = [((2 * i + 1) / (2 * count), name, i) for name, count in num_rows.items() for i in range(count)]
    return [(name, i) for _, name, i in sorted(places)]


def _table(kept: dict[str, np.ndarray], order: list[tuple[str, int]]) -> Dataset:
    """One chunk per row, each a view of its source's file: nothing is in memory before it is written."""
    offsets = pa.array([0, next(iter(kept.values())).shape[1]], pa.int32())
    chunks = [pa.ListArray.from_arrays(offsets, pa.array(kept[name][i])) for name, i in order]
    columns = {
        "input_ids": pa.chunked_array(chunks),
        "source": pa.array([name for name, _ in order]),
        "row": pa.array(np.arange(len(order))),
    }
    return Dataset(InMemoryTable(pa.table(columns)))

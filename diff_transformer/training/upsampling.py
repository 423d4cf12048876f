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
from collections.abc import Mapping
from dataclasses import dataclass
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


class Lengths(dict[str, np.ndarray]):
    """Source -> its documents, and their tokens, by length: (2, len(BUCKETS)). 1K is 1,024 tokens."""

    def add(self, source: str, lengths: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """lengths: tokens of whole documents, which choose the bucket. tokens: those that count, all by default."""
        buckets = np.searchsorted(_EDGES, lengths, side="right")
        weights = (None, lengths if tokens is None else tokens)
        counts = np.array([np.bincount(buckets, weight, len(BUCKETS)) for weight in weights]).astype(np.int64)
        self[source] = self.get(source, 0) + counts

    @classmethod
    def of(cls, documents: Dataset) -> "Lengths":
        """The lengths of tokenized documents with the columns `input_ids` and `source`."""
        columns, measured = documents.with_format("arrow")[:], cls()
        lengths = pc.list_value_length(columns["input_ids"]).to_numpy()
        sources = np.array([str(name) for name in columns["source"].to_pylist()])
        for source in np.unique(sources):
            measured.add(str(source), lengths[(sources == source) & (lengths > 0)])
        return measured

    def total(self) -> np.ndarray:
        """Documents and tokens of all sources, (2, len(BUCKETS))."""
        return sum(self.values(), np.zeros((2, len(BUCKETS)), np.int64))

    def shares(self) -> dict[str, float]:
        """The share of all tokens that each source has; a source of empty documents has none and is left out."""
        return {source: tokens.sum() / self.total()[1].sum() for source, (_, tokens) in self.items() if tokens.any()}


@dataclass
class UpsamplingReport:
    """Length distribution and mix of sources before and after; `str` gives their shares of the tokens.

    Attributes:
        before: All documents of the corpus; for a stream, those that were read.
        after: The documents in the rows; a truncated one counts with its tokens in the row.
        shares: The requested mix; sums to 1.
        tokens_wanted: The token budget.
        exhausted: The source that ran out and reduced the budgets of all sources, or None.
        skipped: Documents without tokens that were read, by reason.
    """

    before: Lengths
    after: Lengths
    shares: dict[str, float]
    tokens_wanted: int
    exhausted: str | None
    skipped: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        lengths = {
            name: {
                source: {"documents": documents.tolist(), "tokens": tokens.tolist()}
                for source, (documents, tokens) in sorted(counts.items())
            }
            for name, counts in (("before", self.before), ("after", self.after))
        }
        return {"buckets": list(BUCKETS), **vars(self), **lengths}

    def __str__(self) -> str:
        total = int(self.after.total()[1].sum())
        tokens = (counts.total()[1] for counts in (self.before, self.after))
        lengths = zip(BUCKETS, *(counts / max(1, counts.sum()) for counts in tokens), strict=True)
        mixes = (self.before.shares(), self.after.shares(), self.shares)
        sources = sorted({*self.before, *self.shares})
        rows: list[tuple] = [("tokens by length", "before", "after"), *lengths]
        rows += [("tokens by source", "before", "after", "wanted")]
        rows += [(source, *(mix.get(source, 0.0) for mix in mixes)) for source in sources]
        lines = [
            f"{name:<24}" + "".join(f"{x:>10}" if isinstance(x, str) else f"{x:>10.2%}" for x in row)
            for name, *row in rows
        ]
        if self.exhausted is not None:
            lines.append(f"{self.exhausted} ran out: {total:,} of {self.tokens_wanted:,} tokens, in the requested mix")
        if self.skipped:
            lines.append("skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items()))
        return "\n".join(lines)


class _Source:
    """What is kept of a source: its tokens in a file, and its documents' lengths."""

    def __init__(self, name: str, file: Path, tokens_wanted: int, seed: int):
        # From seed and name alone: neither other sources nor their order change what is drawn
        digest = hashlib.sha256(name.encode()).digest()
        self.random = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
        self.file, self.missing = file, tokens_wanted
        self.tokens, self.lengths = 0, []  # type: int, list[int]

    def offer(self, ids: np.ndarray, long_from: int, keep_short: float) -> int:
        """Keeps or drops the document; returns how many tokens of the budget it fills."""
        if not self.missing:
            return 0
        drawn = self.random.random()  # for long documents too, so that `long_from` does not change later draws
        if len(ids) < long_from and drawn >= keep_short:
            return 0
        self.lengths.append(len(ids))
        ids = ids[: self.missing]
        with self.file.open("ab") as file:
            file.write(ids.tobytes())
        self.tokens, self.missing = self.tokens + len(ids), self.missing - len(ids)
        return len(ids)


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
    shares = before.shares() if shares is None else shares
    if not shares or min(shares.values()) <= 0:
        raise ValueError(
            f"Got shares {dict(shares)}; there must be a source, and every share must be above 0. If they were "
            "measured, the corpus has no document with tokens."
        )
    shares = {name: share / sum(shares.values()) for name, share in sorted(shares.items())}
    rows_wanted = _apportion(token_budget // sequence_length, shares)

    with whole_folder(output_dir, 8 * token_budget, overwrite=False) as folder:
        scratch = folder / "tokens"
        scratch.mkdir()
        sources = {
            name: _Source(name, scratch / str(i), rows_wanted[name] * sequence_length, seed)
            for i, name in enumerate(shares)
        }
        skipped = _read(documents, sources, before, eos_token_id, long_from, keep_short)
        there = {name: source.tokens // sequence_length for name, source in sources.items()}
        num_rows, exhausted = _whole_mix(rows_wanted, there, shares)

        report = UpsamplingReport(before, Lengths(), shares, token_budget, exhausted, skipped)
        for name, source in sources.items():
            lengths = np.array(source.lengths, np.int64)
            inside = np.clip(num_rows[name] * sequence_length - (np.cumsum(lengths) - lengths), 0, lengths)
            report.after.add(name, lengths[inside > 0], inside[inside > 0])
        if exhausted is not None:
            logger.warning(
                f"{exhausted!r} ran out: {sum(num_rows.values()):,} of {sum(rows_wanted.values()):,} rows are "
                "written, in the requested mix. For more, give a larger corpus, a smaller share to this source, a "
                "lower long_from or a higher keep_short."
            )
        # Every source is spread evenly over the whole
        order = sorted(((2 * i + 1) / (2 * count), name, i) for name, count in num_rows.items() for i in range(count))
        # One chunk per row, each a view of its source's file: nothing is in memory before it is written
        kept = {
            name: np.memmap(sources[name].file, np.int32, "r", shape=(count, sequence_length))
            for name, count in num_rows.items()
            if count
        }
        offsets = pa.array([0, sequence_length], pa.int32())
        chunks = [pa.ListArray.from_arrays(offsets, pa.array(kept[name][i])) for _, name, i in order]
        columns = {"input_ids": pa.chunked_array(chunks), "source": [name for _, name, _ in order]}
        table = pa.table(columns | {"row": np.arange(len(order))})
        Dataset(InMemoryTable(table)).save_to_disk(str(folder))
        (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        shutil.rmtree(scratch)
    return load_from_disk(str(output_dir)), report


def _apportion(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """`total` rows as whole numbers, each within one of its share."""
    edges = np.floor(total * np.cumsum([0.0, *shares.values()]) + 0.5).astype(int)
    return dict(zip(shares, np.diff(edges).tolist(), strict=True))


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
    is_stream = isinstance(documents, IterableDataset)
    if not is_stream:  # Python numbers would take several times as long
        documents = documents.with_format("numpy", ["input_ids"], output_all_columns=True)
    total = sum(source.missing for source in sources.values())
    with tqdm(total=total, unit=" tokens", unit_scale=True, desc="Up-sampling") as bar:
        for document in documents:
            ids, name = np.asarray(document["input_ids"], np.int32), str(document["source"])
            if len(ids) == 0:
                skipped[document.get("fault") or "empty"] += 1
                continue
            if ids[-1] != eos_token_id:
                ids = np.append(ids, np.int32(eos_token_id))
            if is_stream:
                before.add(name, np.array([len(ids)]))
            if name in sources:
                bar.update(sources[name].offer(ids, long_from, keep_short))
            if bar.n == total:
                break
    if empty := [name for name, source in sources.items() if source.missing and not source.tokens]:
        raise ValueError(
            f"No document was kept of {', '.join(map(repr, empty))}; the corpus has the sources "
            f"{', '.join(map(repr, sorted(before))) or 'none'}. Remove it from shares, or correct its name."
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

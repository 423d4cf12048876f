# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The page of a study, which answers first: the findings, then what they rest on. From the digest alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..evaluation.report.content import PAPER_DIFF, PAPER_TRANSFORMER, Section, Table
from ..evaluation.report.pages import Opening, markdown_table, write_pages
from ..evaluation.results import Results
from .evidence import sections
from .findings import LOSES, NOT_IN_PAPER, NOT_SHOWN, OPPOSITE, SAME, UNDECIDED, WINS, Finding, findings
from .reading import Reading, readings
from .terms import again

NOT_MEASURED, NOT_RUN = "not measured", "not yet run"


def write_report(digest: Results, folder: str | Path) -> list[Path]:
    """Writes report.html (one self-contained page), report.md and figures/; returns the paths of the two pages."""
    return write_pages(Path(folder), digest.label, found(digest), opening(digest))


def found(digest: Results) -> list[tuple[Section, list[Results]]]:
    """What the findings rest on, as `evaluation.report.pages` takes it."""
    return [(section, []) for section in [*sections(digest), again(digest)]]


def opening(digest: Results) -> Opening:
    """The answer, what it can say, and the findings."""
    rows = findings(digest)
    pair, ablations = ([row for row in rows if row.is_ablation is x] for x in (False, True))
    parts: list[str | Table] = [answer(pair)]
    for verdict in (WINS, LOSES, NOT_SHOWN, UNDECIDED):
        names = [f"{row.what} ({row.experiment})" for row in pair if row.verdict == verdict]
        if names:
            parts.append(f"{verdict[0].upper()}{verdict[1:]}, {len(names)} of {len(pair)}: {'; '.join(names)}.")
    parts += [scope(readings(digest)), _table_of_pair(pair)]
    if ablations:
        parts += [
            "Ablations: a variant of DIFF beside DIFF, one of the Transformer beside the Transformer, of the seeds "
            "that both have; in nats a token, lower is better.",
            _table_of_ablations(ablations),
        ]
    return parts


def answer(rows: Sequence[Finding]) -> str:
    verdicts, directions = Counter(row.verdict for row in rows), Counter(row.direction for row in rows)
    of_paper = len(rows) - directions[NOT_IN_PAPER]
    both_lose = sum(row.direction == SAME and row.verdict == LOSES for row in rows)
    return (
        f"Of {len(rows)} comparisons with its Transformer on equal data, DIFF wins {verdicts[WINS]}, loses "
        f"{verdicts[LOSES]}, and {verdicts[NOT_SHOWN] + verdicts[UNDECIDED]} show no difference that the seeds bear. "
        f"The paper has {of_paper} of them: {directions[SAME]} in the same direction ({both_lose} where DIFF loses "
        f"there, too), {directions[OPPOSITE]} in the opposite one, "
        f"{of_paper - directions[SAME] - directions[OPPOSITE]} undecided here or equal there."
    )


def scope(found: Iterable[Reading]) -> str:
    """What models so small, trained so short, can and cannot say."""
    parameters, tokens, seeds = [], [], set()
    for reading in found:
        for label in reading.labels:
            parameters += [cell["parameters"] for cell in reading.select(label, "run")]
            for seed in reading.seeds(label):
                tokens += [point.tokens for point in reading.curve(label, seed)[-1:]]
                seeds.add(seed)
    return (
        f"What this can say: whether an effect is there in models of {_range(parameters)} million parameters after "
        f"{_range(tokens)} million tokens, on these data. What it cannot: whether it is there, or as large, in the "
        "paper's models, of 0.83 to 13.1 billion parameters and 10 billion to 1 trillion tokens; and a difference "
        "that is not shown here is not shown to be absent. Differences are DIFF - Transformer between models of one "
        f"seed, which had the same data in the same order ({len(seeds)} seed{'s' if len(seeds) > 1 else ''}); in "
        "brackets is the 95 % interval of Student's t, and ± is the standard error over seeds. Of twenty rows "
        "without any difference one is expected outside its interval, and rows of one experiment are of the same "
        "models, hence not independent."
    )


def readme_text(digests: Mapping[str, Results | None]) -> str:
    """The answer of each scale and the main findings in Markdown, a column for each; None is one that was not run."""
    by_scale = {scale: None if digest is None else findings(digest) for scale, digest in digests.items()}
    answers = [
        f"{scale}: {answer([row for row in found if not row.is_ablation])}"
        for scale, found in by_scale.items()
        if found is not None
    ]
    rows: list[list] = []
    for row in _README:
        chosen = {scale: None if rows is None else row.choose(rows) for scale, rows in by_scale.items()}
        papers = {_paper(finding) for finding in chosen.values() if finding is not None and finding.paper is not None}
        cells = [NOT_RUN if by_scale[scale] is None else row.text(finding) for scale, finding in chosen.items()]
        rows.append([row.name, "; ".join(sorted(papers)) or NOT_IN_PAPER, *cells])
    columns = ["Transformer → DIFF", "paper", *(f"{scale}: difference [95 %], verdict" for scale in digests)]
    return "\n\n".join([*answers, markdown_table(Table("Main findings", columns, rows))])


@dataclass(frozen=True)
class _Row:
    """A line of the README: the finding of this protocol, metric and key with the largest number of `most`."""

    name: str
    protocol: str
    metric: str
    key: Mapping[str, Any] = field(default_factory=dict)
    most: str | None = None  # a part of the key
    only_of_paper: bool = True

    def choose(self, rows: Sequence[Finding]) -> Finding | None:
        fitting = [
            row
            for row in rows
            if (row.protocol, row.metric, row.is_ablation) == (self.protocol, self.metric, False)
            and self.key.items() <= row.key.items()
            and (row.paper is not None or not self.only_of_paper)
        ]
        return max(
            fitting, key=lambda row: row.key[self.most] if self.most else 0, default=None
        )  # the first of equals

    def text(self, finding: Finding | None) -> str:
        if finding is None:
            return NOT_MEASURED
        of = "" if self.most is None else f"{finding.key[self.most]:,} {self.most}: "
        first, second = (number(value.value, _digits(finding)) for value in finding.values)
        return f"{of}{first} → {second}: {difference(finding)}, {finding.verdict}"


_README = (
    _Row("text: validation loss, equal tokens", "training", "validation_loss", {"at": "tokens"}),
    _Row("text: loss of AR-Hit tokens", "fine_grained_loss", "ar_hit"),
    _Row("recall, most pairs", "recall", "accuracy", most="pairs", only_of_paper=False),
    _Row("needles, most of them", "needle", "accuracy", most="needles", only_of_paper=False),
    _Row("attention noise", "attention_allocation", "noise"),
    _Row("largest attention logit", "outliers", "top_1", {"activation": "attention_logits"}),
    _Row("largest hidden state", "outliers", "top_1", {"activation": "hidden_states"}),
    _Row("loss added by 4-bit logits", "logit_quantization", "nll", {"bits": 4, "granularity": "tensor"}),
)


def difference(finding: Finding) -> str:
    """With its interval, if there is one: `-0.0250 [-0.0301, -0.0199]`."""
    mean, half, digits = finding.difference, finding.half_width, _digits(finding, more=1)
    interval = "" if half is None else f" [{number(mean - half, digits)}, {number(mean + half, digits)}]"
    return f"{number(mean, digits)}{interval}"


def number(value: float, digits: int) -> str:
    """Without a minus before what is rounded to 0."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text


def _digits(finding: Finding, more: int = 0) -> int:
    largest = max(abs(value.value) for value in finding.values)
    if largest >= 1000:
        return 0
    return more + (1 if largest >= 10 else 3 if largest >= 0.01 else 5)


def _table_of_pair(rows: Sequence[Finding]) -> Table:
    columns = ["experiment", "what", "better", "in the paper", PAPER_TRANSFORMER, PAPER_DIFF, "Transformer", "DIFF"]
    columns += ["DIFF - Transformer [95 %]", "seeds for DIFF", "verdict", "against the paper"]
    return Table("Findings", columns, [_cells(row, row.what) for row in rows])


def _table_of_ablations(rows: Sequence[Finding]) -> Table:
    columns = ["experiment", "variant", "better", "in the paper", "paper: of the pair", "paper: variant"]
    columns += ["of the pair", "variant", "variant - of the pair [95 %]", "seeds for the variant", "verdict"]
    names = [f"{row.labels[1]}, beside {row.labels[0]}: {row.what}" for row in rows]
    cells = [_cells(row, name) for row, name in zip(rows, names, strict=True)]
    return Table("Ablations", [*columns, "against the paper"], cells)


def _cells(row: Finding, what: str) -> list:
    paper = row.paper
    papers = [None, None] if paper is None else [_printed(value) for value in paper.values]
    where = NOT_IN_PAPER if paper is None else paper.where
    ours = []
    for value in row.values:
        error = "" if value.stderr is None else f" ± {number(value.stderr, _digits(row))}"
        ours.append(f"{number(value.value, _digits(row))}{error}")
    seeds = f"{row.seeds_won} of {len(row.pairs)}"
    return [
        row.experiment,
        what,
        row.better,
        where,
        *papers,
        *ours,
        difference(row),
        seeds,
        row.verdict,
        row.direction,
    ]


def _paper(finding: Finding) -> str:
    assert finding.paper is not None
    first, second = (_printed(value) or "–" for value in finding.paper.values)
    return f"{first} → {second} ({finding.paper.where})"


def _printed(value: float | str | None) -> str | None:
    """Three digits after the point, of large numbers one or none; means over depths are ours."""
    if value is None or isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def _range(values: Sequence[float]) -> str:
    """In millions."""
    return " to ".join(dict.fromkeys(f"{f(values) / 1e6:,.3g}" for f in (min, max))) if values else "unknown"


__all__ = ["difference", "found", "opening", "readme_text", "write_report"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Draws the pages of the studies from the results beside this script.

    diff-transformer reproduce --scale cpu --out docs/results/cpu    # adds results, and can be resumed anywhere
    python docs/results/update.py

SCALE/study.yaml and SCALE/results.jsonl give SCALE/report.md, SCALE/figures/ and what stands between
`<!-- results -->` and `<!-- /results -->` in README.md."""

from collections.abc import Sequence
from pathlib import Path

from diff_transformer.evaluation.render import markdown_page
from diff_transformer.folders import whole_file
from diff_transformer.reproduction import SCALES
from diff_transformer.reproduction.findings import BETTER, NOT_LEARNT, NOT_SHOWN, WORSE
from diff_transformer.reproduction.jobs import STUDY
from diff_transformer.reproduction.report import Report
from diff_transformer.reproduction.results import RESULTS, load
from diff_transformer.reproduction.study import load_study

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
_VERDICTS = {BETTER: "better", WORSE: "worse", NOT_SHOWN: "not shown to differ", NOT_LEARNT: "not comparable"}
# Contrasts of the studies in braces
_SENTENCES = (
    "With {seeds} seeds an arm and equal data, parameters and initial matrices, DIFF is {design}, compared with the "
    "Transformer.",
    "Of its parts, wide heads alone are {wide_heads}; the head norm and its factor on top of them are {head_norm}; "
    "the subtraction on top of all three is {subtraction}.",
    "DIFF V2, which subtracts but has neither wide heads nor a head norm, is {v2}, compared with the Transformer.",
)
_KEY = (
    "Right of the line the second model is better. Green and red are decided, black is undecided, and grey only "
    "describes. The bars are 95 % intervals."
)


def reports(root: Path = ROOT) -> dict[Path, Report]:
    """By the folder of the study, of those that are finished."""
    folders = [root / "docs/results" / scale for scale in SCALES]
    found = {x: Report(load_study(x / STUDY), load(x / RESULTS)) for x in folders if (x / RESULTS).exists()}
    return {folder: report for folder, report in found.items() if not report.missing()}


def texts(root: Path = ROOT, found: dict[Path, Report] | None = None) -> dict[Path, str]:
    """The new texts of README.md and of each study's page. Raises ValueError if no study is finished, or if
    README.md lacks the two markers."""
    found = reports(root) if found is None else found
    others = (root / "docs/replications.md").read_text(encoding="utf-8").split("\n\n")[1]
    pages = {
        folder / "report.md": markdown_page(report.study.title, report.sections(), report.opening())
        + f"\n## What others have found\n\n{others} [The sources, one by one](../../replications.md).\n"
        for folder, report in found.items()
    }
    if not found:
        raise ValueError(f"There is no finished study in {root / 'docs/results'}.")
    readme = root / "README.md"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no place for the results: it needs the line {BEGIN.strip()} and later {END}.")
    return {**pages, readme: f"{before}{begin}\n{readme_text(found, root)}\n\n{end}{after}"}


def readme_text(found: dict[Path, Report], root: Path) -> str:
    """Three sentences on all studies, the figure of each, and its key."""
    sentences = " ".join(x.format(**_verdicts(list(found.values()))) for x in _SENTENCES)
    figures = [f"![{x.study.title}]({(path / 'figures/forest.png').relative_to(root)})" for path, x in found.items()]
    return "\n\n".join([sentences, *figures, _KEY])


def _verdicts(found: Sequence[Report]) -> dict[str, str]:
    """For each contrast: `better on retrieval, worse on recall and needles, but not shown to differ on text`."""
    rows = [row for report in found for row in report.findings]
    words = {"seeds": " or ".join(map(str, sorted({row.seeds for row in rows})))}
    for name in dict.fromkeys(row.name for row in rows):
        told = []
        for verdict, word in _VERDICTS.items():
            where = [row.experiment for row in rows if (row.name, row.verdict) == (name, verdict)]
            told += [f"{word} on {_listed(where)}"] if where else []
        words[name] = _listed(told, ", but ")
    return words


def _listed(parts: Sequence[str], before_last: str = " and ") -> str:
    *others, last = parts
    return f"{', '.join(others)}{before_last}{last}" if others else last


def update(root: Path = ROOT) -> list[Path]:
    """Writes the pages and their figures; returns the paths of the pages."""
    found = reports(root)
    pages = texts(root, found)
    for folder, report in found.items():
        report.write(folder)
    for path, text in pages.items():
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    return list(pages)


if __name__ == "__main__":
    print(*update(), sep="\n")

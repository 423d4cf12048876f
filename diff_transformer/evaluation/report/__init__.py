# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The report: one page from a folder of results, and from nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from .. import PROTOCOLS
from ..results import Results, load_results
from .content import Section
from .pages import write_pages

ORDER = (*PROTOCOLS, "throughput")
OTHER_VOCABULARIES = (
    "The models have different tokenizers: nats a token are not comparable, and as many tokens are not the same text."
)


def sections(by_protocol: dict[str, list[Results]]) -> list[tuple[Section, list[Results]]]:
    """The sections of the protocols that have results, in the order of the paper.

    Raises ValueError for a protocol that this version does not know, and for results of different settings.
    """
    unknown = sorted(set(by_protocol) - set(ORDER))
    if unknown:
        raise ValueError(f"There are results of {', '.join(unknown)}, which this version does not know.")
    found = []
    for protocol in ORDER:
        results = [r for r in by_protocol.get(protocol, []) if r.cells]
        if results:
            _check_comparable(protocol, results)
            section = import_module(f"{__name__}.{protocol}").section(results)
            if len({r.model.get("vocabulary") for r in results}) > 1:
                section = replace(section, notes=[*section.notes, OTHER_VOCABULARIES])
            found.append((section, results))
    return found


def write_report(folder: str | Path, title: str = "Differential Transformer: results") -> list[Path]:
    """Writes report.html (one self-contained page), report.md and figures/ into a folder of results.

    Returns the paths of the two pages. Raises ValueError if the folder holds no results.
    """
    folder = Path(folder)
    return write_pages(folder, title, sections(load_results(folder)))


def _check_comparable(protocol: str, results: Sequence[Results]) -> None:
    """Side by side means of the same settings."""
    first = results[0]
    for other in results[1:]:
        differing = [k for k in {**first.settings, **other.settings} if first.settings.get(k) != other.settings.get(k)]
        if first.seed != other.seed:
            differing.append("seed")
        if differing:
            raise ValueError(
                f"{protocol}: {first.path} and {other.path} were measured with different {', '.join(differing)}, so "
                "they cannot stand side by side. Evaluate one of them again, or keep them in two folders."
            )


__all__ = ["sections", "write_report"]

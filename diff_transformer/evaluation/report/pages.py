# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Sections as a page of HTML, self-contained, and as Markdown."""

import base64
import shutil
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..results import Results
from .content import Section, Table

Found = Sequence[tuple[Section, list[Results]]]
Opening = Sequence[str | Table]  # paragraphs and tables

_PIXELS_PER_INCH = 110  # of a figure on the page

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --rule: #d5d5d5; --soft: #666; --stripe: #f6f6f6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181b; --rule: #3a3d42; --soft: #a0a0a0; --stripe: #1e2125 }
}
* { box-sizing: border-box }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem } h2 { margin: 3rem 0 .25rem }
.where { color: var(--soft); margin: 0 0 1rem } .scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem }
caption { text-align: left; font-weight: 600; padding: .75rem 0 .4rem }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
.text { text-align: left } .words { text-align: left; white-space: normal; min-width: 15rem }
tbody tr:nth-child(even) { background: var(--stripe) }
figure { margin: 1.5rem 0 } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
figcaption { color: var(--soft); font-size: .92rem } code { font-size: .85em; overflow-wrap: anywhere }
details { margin: .8rem 0; color: var(--soft); font-size: .9rem } nav ul { columns: 2; padding-left: 1.2rem }
"""


def write_pages(folder: Path, title: str, found: Found, opening: Opening | None = None) -> list[Path]:
    """Writes report.html (one self-contained page), report.md and figures/, and returns the paths of the two pages."""
    figures = folder / "figures"
    write_figures(figures, found)
    pages = {
        folder / "report.html": html_page(title, found, figures, opening),
        folder / "report.md": markdown_page(title, found, opening),
    }
    for path, text in pages.items():
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return list(pages)


def write_figures(folder: Path, found: Found) -> None:
    """As PNG files; what the folder had is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for section, _ in found:
        for figure in section.figures:
            (folder / f"{figure.name}.png").write_bytes(figure.png())


def html_page(title: str, found: Found, figures: Path, opening: Opening | None = None) -> str:
    """figures: where the section's figures are as PNG files; they become part of the page.
    opening: what comes before the sections; a table of the models by default."""
    contents = "".join(f'<li><a href="#s{i}">{escape(section.title)}</a></li>' for i, (section, _) in enumerate(found))
    body = [f"<h1>{escape(title)}</h1>"]
    for part in [models_table(found)] if opening is None else opening:
        body.append(_html_table(part) if isinstance(part, Table) else f"<p>{escape(part)}</p>")
    body.append(f"<nav><ul>{contents}</ul></nav>")
    for i, (section, results) in enumerate(found):
        body.append(f'<section id="s{i}"><h2>{escape(section.title)}</h2>')
        body.append(f'<p class="where">{escape(section.source)}</p><p>{escape(section.text)}</p>')
        body += [_html_table(table) for table in section.tables]
        for figure in section.figures:
            data = base64.b64encode((figures / f"{figure.name}.png").read_bytes()).decode()
            caption = escape(figure.caption)
            body.append(
                f'<figure><img alt="{caption}" width="{round(_PIXELS_PER_INCH * figure.size[0])}" '
                f'src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
            )
        if section.notes:
            body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in section.notes) + "</ul>")
        if results:
            lines = "<br>".join(escape(line) for line in provenance(results))
            body.append(f"<details><summary>How it was measured</summary><code>{lines}</code></details>")
        body[-1] += "</section>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def markdown_page(title: str, found: Found, opening: Opening | None = None, figures: str = "figures") -> str:
    """figures: the folder in which links find NAME.png; opening: as of `html_page`."""
    parts = [f"# {title}"]
    for part in [models_table(found)] if opening is None else opening:
        parts.append(markdown_table(part) if isinstance(part, Table) else part)
    for section, results in found:
        parts += [f"## {section.title}", f"*{section.source}*", section.text]
        parts += [f"**{table.caption}**\n\n{markdown_table(table)}" for table in section.tables]
        parts += [
            f"![{figure.caption}]({figures}/{figure.name}.png)\n\n{figure.caption}" for figure in section.figures
        ]
        parts += ["\n".join(f"- {note}" for note in section.notes)] if section.notes else []
        parts += ["```\n" + "\n".join(provenance(results)) + "\n```"] if results else []
    return "\n\n".join(parts) + "\n"


def models_table(found: Found) -> Table:
    """The models of all results: what the columns of the other tables are."""
    models = {tuple(sorted(r.model.items(), key=str)): r.model for _, results in found for r in results}
    columns = ["label", "name", "model_type", "parameters", "dtype", "attn_implementation", "revision"]
    rows = [[model.get(column) for column in columns] for model in models.values()]
    return Table("Models", columns, rows)


def provenance(results: Sequence[Results]) -> list[str]:
    """Of every file: what was run, where, on what."""
    lines = []
    for r in results:
        lines.append(f"{r.path.parent.name}/{r.path.name}: seed {r.seed}, {r.settings}")
        for run in r.runs:
            packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items())
            lines.append(f"  {run['date']} on {run['hardware']} ({packages}): {run['command']}")
    return lines


def markdown_table(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *([table.text(x) for x in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines)


def _html_table(table: Table) -> str:
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
    classes = [_html_class(value for value in column if isinstance(value, str)) for column in columns]
    head = "".join(f"<th{c}>{escape(column)}</th>" for c, column in zip(classes, table.columns, strict=True))
    rows = ""
    for row in table.rows:
        cells = (f"<td{c}>{escape(table.text(value))}</td>" for c, value in zip(classes, row, strict=True))
        rows += f"<tr>{''.join(cells)}</tr>"
    return (
        f'<div class="scroll"><table><caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _html_class(texts: Iterable[str]) -> str:
    """Of a column: numbers are on the right, words on the left, and sentences may be broken."""
    longest = max(map(len, texts), default=0)
    return "" if longest == 0 else ' class="text"' if longest <= 24 else ' class="words"'


__all__ = [
    "Opening",
    "html_page",
    "markdown_page",
    "markdown_table",
    "models_table",
    "provenance",
    "write_figures",
    "write_pages",
]

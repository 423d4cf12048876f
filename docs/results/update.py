# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The pages of the reproduction, from the files of results beside this one.

    python docs/results/update.py cpu RUN_FOLDER    # takes over what `diff-transformer reproduce --scale cpu` left
    python docs/results/update.py                   # draws the pages and the table of the README again

Of SCALE.json it draws SCALE.md and SCALE_figures/, and the table between `<!-- results -->` and `<!-- /results -->` in
README.md.
"""

import argparse
import shutil
from pathlib import Path

from diff_transformer.evaluation.report.pages import markdown_page, write_figures
from diff_transformer.evaluation.results import Results
from diff_transformer.reproduction.digest import DIGEST
from diff_transformer.reproduction.report import found, opening, readme_text

ROOT = Path(__file__).parents[2]
SCALES = {"cpu": "CPU", "gpu": "GPU"}
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"


def take_over(scale: str, run: Path, root: Path = ROOT) -> None:
    """Copies the digest of a run. Raises ValueError if there is none, or if it is no digest."""
    digest = run / DIGEST
    if not digest.is_file():
        raise ValueError(f"{run} has no {DIGEST}: `diff-transformer reproduce` writes it after its last piece.")
    Results.load(digest)
    shutil.copyfile(digest, root / "docs/results" / f"{scale}.json")


def load_digests(root: Path = ROOT) -> dict[str, Results | None]:
    """By scale; None if there is no file."""
    files = {scale: root / "docs/results" / f"{scale}.json" for scale in SCALES}
    return {scale: Results.load(file) if file.exists() else None for scale, file in files.items()}


def texts(root: Path = ROOT) -> dict[Path, str]:
    """What README.md and the page of each digest are to be; nothing if there are no digests.

    Raises ValueError if README.md has not the two markers.
    """
    digests = load_digests(root)
    pages = {
        root / "docs/results" / f"{scale}.md": markdown_page(
            digest.label, found(digest), opening(digest), f"{scale}_figures"
        )
        for scale, digest in digests.items()
        if digest is not None
    }
    if pages:
        results = readme_text({name: digests[scale] for scale, name in SCALES.items()})
        readme = root / "README.md"
        pages[readme] = _with_results(readme.read_text(encoding="utf-8"), results)
    return pages


def draw(root: Path = ROOT) -> list[Path]:
    """Writes them, with the figures of the pages; returns their paths."""
    pages = texts(root)
    for scale, digest in load_digests(root).items():
        if digest is not None:
            write_figures(root / "docs/results" / f"{scale}_figures", found(digest))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return list(pages)


def _with_results(text: str, results: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"README.md has no place for the table of results: it needs a line {BEGIN.strip()} and, after it, {END}."
        )
    return f"{before}{begin}\n{results}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scale", nargs="?", choices=SCALES, help="of the run that is taken over")
    parser.add_argument("run", nargs="?", type=Path, help="its folder")
    options = parser.parse_args()
    if (options.scale is None) != (options.run is None):
        parser.error("a scale and a folder, or neither")
    if options.run is not None:
        take_over(options.scale, options.run)
    for path in draw():
        print(path)


if __name__ == "__main__":
    main()

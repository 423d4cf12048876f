# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What all benchmarks report: the hardware, the versions and the reasons of failures; and their result files."""

import argparse
import csv
import functools
import importlib
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from diff_transformer.folders import whole_file


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def hardware(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    interpreted = ", Triton interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return f"CPU {platform.machine()}{interpreted}: figures mean only that it runs"


@functools.cache
def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.import_module(package).__version__
        except ImportError:
            found[package] = "not installed"
    return found


def argument_parser(description: str | None, results: str = "file") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    extensions = "its extension" if results == "file" else "their extensions"
    parser.add_argument("--out", type=Path, help=f"path of the result {results}, without {extensions}")
    return parser


def write(out: Path | None, rows: list[dict], page: str | None = None) -> None:
    """Writes `out`.csv and, if there is a page, `out`.md; nothing without `out`."""
    if out is None:
        return
    if rows:
        with whole_file(out.with_suffix(".csv")) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if page is not None:
        with whole_file(out.with_suffix(".md")) as part:
            part.write_text(page)


def resident_peak() -> int:
    """The largest resident memory of this process, in bytes, since it began or since `reset_peak`."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def reset_peak() -> int:
    """Resets the peak to the current resident memory, in bytes, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def measure_apart(module: str, *arguments) -> str:
    """The last line that `python -m MODULE --measure ARGUMENTS` prints in a process of its own."""
    command = [sys.executable, "-m", module, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def processor() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


def first_line(error: BaseException, noted: Iterable[warnings.WarningMessage] = ()) -> str:
    """An error in one line, with torch's warnings just before it, which say why no kernel accepted the call."""
    text = str(error).strip().split("\n")[0]
    warned = dict.fromkeys(str(note.message).split(" (Triggered")[0].strip() for note in noted)
    warned = [line for line in warned if "ttention" in line and not line.endswith("because:")]
    return " - ".join([f"{type(error).__name__}: {text}"[:200], *warned[:2]])

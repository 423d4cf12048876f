# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What all benchmarks report: the hardware, the versions and the reasons of failures; and their result files."""

import csv
import functools
import importlib
import io
import os
import platform
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch


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


def write(path: Path, text: str) -> None:
    """Writes the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def as_csv(rows: list[dict]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def first_line(error: BaseException, noted: Iterable[warnings.WarningMessage] = ()) -> str:
    """An error in one line, with torch's warnings just before it, which say why no kernel accepted the call."""
    text = str(error).strip().split("\n")[0]
    warned = dict.fromkeys(str(note.message).split(" (Triggered")[0].strip() for note in noted)
    warned = [line for line in warned if "ttention" in line and not line.endswith("because:")]
    return " - ".join([f"{type(error).__name__}: {text}"[:200], *warned[:2]])

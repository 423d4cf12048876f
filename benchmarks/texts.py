# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Text that every machine has: Python sources."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def python_sources(*folders: Path) -> Iterator[str]:
    """The Python files under each folder in the order of their paths, without packages installed inside it."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not {"site-packages", "dist-packages"} & set(path.relative_to(folder).parts):
                yield path.read_bytes().decode("utf-8", errors="replace")

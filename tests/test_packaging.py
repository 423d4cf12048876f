# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The source distribution holds what the tests and the README need."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares the archive with the repository")
def test_source_distribution_is_the_repository(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not set(listed.stdout.splitlines()) - packed, "these files lack a line in MANIFEST.in"
    assert not [name for name in packed if "__pycache__" in name]

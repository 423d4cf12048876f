# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What is published: the files of both distributions, the checks before a release, and the workflows that run them."""

import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.release_check import git

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with the files of the repository")


def setup(*commands: str | Path) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", *commands], cwd=ROOT, check=True, capture_output=True)


@needs_git
@pytest.mark.process
def test_source_distribution_is_the_repository(tmp_path):
    setup("egg_info", "-e", tmp_path, "sdist", "-d", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    assert not set(git(ROOT, "ls-files")) - packed, "these files lack a line in MANIFEST.in"
    assert not [name for name in packed if "__pycache__" in name]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name, job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].items():
        called = {
            word
            for step in job["steps"]
            for line in re.findall(r"^make (.*)", step.get("run", ""), re.MULTILINE)
            for word in shlex.split(line)
            if "=" not in word
        }
        assert called <= targets, f"{name} runs targets that the Makefile lacks"


def test_pre_commit_runs_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    pinned = re.search(r"^ruff==.*", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert [hook["additional_dependencies"] for hook in hooks] == [[pinned]] * len(hooks)

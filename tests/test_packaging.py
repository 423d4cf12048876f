# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What is published: the files of both distributions, the checks before a release, and the workflows that run them."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from diff_transformer.__main__ import COMMANDS
from tests import release_check
from tests.release_check import METADATA_FILES, NotReady, git, package_files

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


@needs_git
@pytest.mark.process
def test_wheel_has_the_modules_and_the_listed_data(tmp_path):
    """setup.py lists data files by patterns; DATA_FILES, which the release is compared with, one by one."""
    setup("egg_info", "-e", tmp_path, "build", "-b", tmp_path / "build")
    files = {path for path in (tmp_path / "build/lib").rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "build/lib").as_posix() for path in files} == package_files(ROOT)


@pytest.fixture
def release(tmp_path):
    """A repository whose version can be released."""
    root = tmp_path / "repository"
    (root / "diff_transformer").mkdir(parents=True)
    (root / "diff_transformer/__init__.py").write_text('__version__ = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-11-24)\n\n- New\n\n## 1.2.2 (2026-11-01)\n")
    (root / "CITATION.cff").write_text("version: 1.2.3\ndate-released: 2026-11-24\n")
    git(root, "init", "-q")
    git(root, "config", "user.name", "tests")
    git(root, "config", "user.email", "tests@localhost")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Release")
    return root


def test_version_that_can_be_released(release):
    assert release_check.released_version(release) == "1.2.3"
    git(release, "tag", "v1.2.3")
    assert release_check.released_version(release) == "1.2.3"
    git(release, "tag", "v1.2.4")
    with pytest.raises(NotReady, match=r"the tags \['v1.2.3', 'v1.2.4'\]"):
        release_check.released_version(release)


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        ("new.py", "", "x = 1", r"not committed.*\n\?\? new.py"),
        ("CHANGELOG.md", " (2026-11-24)", " - unreleased", r"'## 1.2.3 - unreleased'.*must be '## 1.2.3 \(2"),
        ("CHANGELOG.md", "2026-11-24", "2026-11-31", "first section"),
        ("CHANGELOG.md", "1.2.3", "1.2.4", "first section"),
        ("CHANGELOG.md", "## 1.2.3", "## Next\n\n## 1.2.3", "'## Next'"),
        ("diff_transformer/__init__.py", "1.2.3", "1.2.2", "first section"),
        ("CITATION.cff", "1.2.3", "1.2.2", "CITATION.cff has version 1.2.2"),
        ("CITATION.cff", "2026-11-24", "2026-11-23", "of 2026-11-23; CHANGELOG.md has 1.2.3 of 2026-11-24"),
    ],
)
def test_version_that_cannot_be_released(release, file, old, new, message):
    path = release / file
    if path.exists():
        path.write_text(path.read_text().replace(old, new))
        git(release, "commit", "-q", "-a", "-m", "Change")
    else:
        path.write_text(new)
    with pytest.raises(NotReady, match=message):
        release_check.released_version(release)


def make_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    metadata = {f"diff_transformer-1.2.3.dist-info/{name}": b"" for name in METADATA_FILES}
    with zipfile.ZipFile(folder / "diff_transformer-1.2.3-py3-none-any.whl", "w") as archive:
        for name, data in (metadata | files).items():
            archive.writestr(name, data)
    return Path(archive.filename)


FILES = {"diff_transformer/__init__.py": b"", "diff_transformer/py.typed": b""}


def test_wheel_with_its_files_passes(tmp_path):
    release_check.check_wheel(make_wheel(tmp_path, FILES), set(FILES))


@pytest.mark.parametrize(
    "expected, files, message",
    [
        (set(FILES), FILES | {"tests/test_x.py": b""}, r"no list names: \['tests/test_x.py'\]"),
        (set(FILES), FILES | {"docs/results/x.md": b""}, "no list names"),
        (set(FILES) | {"diff_transformer/x.yaml"}, FILES, r"lacks \['diff_transformer/x.yaml'\]"),
        (set(FILES), FILES | {"diff_transformer/py.typed": bytes(3 * 2**20)}, "the limit is 3,145,728"),
    ],
)
def test_wheel_with_other_files_is_rejected(tmp_path, expected, files, message):
    with pytest.raises(NotReady, match=message):
        release_check.check_wheel(make_wheel(tmp_path, files), expected)


@pytest.mark.parametrize("change", [{"diff_transformer/py.typed": b"\n"}, {"diff_transformer/new.py": b""}])
def test_wheels_that_differ_are_rejected(tmp_path, change):
    wheel = make_wheel(tmp_path / "a", FILES)
    release_check.check_equal(wheel, wheel)
    with pytest.raises(NotReady, match=next(iter(change))):
        release_check.check_equal(wheel, make_wheel(tmp_path / "b", FILES | change))


def test_release_check_runs_every_command():
    assert set(release_check.COMMANDS) == set(COMMANDS)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name, job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].items():
        called = {
            word
            for step in job["steps"]
            for line in re.findall(r"^make (.*)", step.get("run", ""), re.MULTILINE)
            for word in line.split()
            if "=" not in word
        }
        assert called <= targets, f"{name} runs targets that the Makefile lacks"


def test_pre_commit_runs_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    pinned = re.search(r"^ruff==.*", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert [hook["additional_dependencies"] for hook in hooks] == [[pinned]] * len(hooks)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Everything that must hold before a version is published: `make release-check`.

Builds the sdist and the wheel of the commit into dist/, and installs the wheel from an index on the loopback device,
as users will, into an environment that has the packages of this one but not this project.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from email.parser import Parser
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import yaml

from diff_transformer.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = "diff_transformer"
METADATA_FILES = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
MAX_WHEEL_BYTES = 3 * 2**20  # no figure or result fits under it by mistake
# flash-attn comes as source only, which needs CUDA's compiler even to say what it depends on
UNRESOLVED_EXTRAS = {"flash-attn"}

# Stands in for the model of `make demo`, which the README's first code loads
SMALL_MODEL = """
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, cl100k_tokenizer
tokenizer = cl100k_tokenizer(vocab_size=300)
config = DiffTransformerConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
)
DiffTransformerForCausalLM(config).save_pretrained("demo/out/model")
tokenizer.save_pretrained("demo/out/model")
"""


class NotReady(Exception):
    """What stands in the way of the release, and what to do about it."""


def output_of(*command: str | Path, **kwargs) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)
    if result.returncode:
        raise NotReady(f"`{' '.join(map(str, command))}` failed:\n{result.stdout}")
    return result.stdout


def git(root: Path, *arguments: str) -> list[str]:
    return output_of("git", *arguments, cwd=root).splitlines()


def released_version(root: Path) -> str:
    """The version, which `__init__.py` sets and all other places must agree with.

    Raises:
        NotReady: if the tree is dirty, or if CHANGELOG.md, CITATION.cff or the commit's tag disagree.
    """
    if changes := git(root, "status", "--porcelain"):
        raise NotReady("These files are not committed; commit or remove them:\n" + "\n".join(changes))
    source = (root / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]

    heading = re.search(r"^## .*", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    dated = re.fullmatch(rf"## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", heading)
    try:
        day = date.fromisoformat(dated[1])
    except (TypeError, ValueError):
        raise NotReady(
            f"The first section of CHANGELOG.md is {heading!r}; for this release it must be "
            f"'## {version} ({date.today()})', with the day of the release."
        ) from None
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if (cited := (str(citation["version"]), citation["date-released"])) != (version, day):
        raise NotReady(f"CITATION.cff has version {cited[0]} of {cited[1]}; CHANGELOG.md has {version} of {day}.")
    tags = git(root, "tag", "--points-at", "HEAD", "--list", "v*")
    if tags and tags != [f"v{version}"]:
        raise NotReady(f"The commit has the tags {tags}, but diff_transformer/__init__.py says {version}.")
    return version


def package_files(root: Path) -> set[str]:
    """The files that the wheel must hold, from the root of the wheel, without its metadata."""
    return set(git(root, "ls-files", PACKAGE))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def check_wheel(wheel: Path, expected: set[str]) -> None:
    """
    Raises:
        NotReady: if the wheel has other files than `expected` and its metadata, or is larger than the limit.
    """
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    expected = expected | {f"{info}/{name}" for name in METADATA_FILES}
    present = set(contents(wheel))
    if unexpected := present - expected:
        raise NotReady(
            f"{wheel.name} has files that are not in the repository: {sorted(unexpected)}. Add them to it, or take "
            "them out of setup.py."
        )
    if missing := expected - present:
        raise NotReady(f"{wheel.name} lacks {sorted(missing)}; setup.py must name them in package_data.")
    if (size := wheel.stat().st_size) > MAX_WHEEL_BYTES:
        raise NotReady(f"{wheel.name} has {size:,} bytes; the limit is {MAX_WHEEL_BYTES:,}.")


def check_equal(first: Path, second: Path) -> None:
    """
    Raises:
        NotReady: if the two wheels differ in the names or contents of their files.
    """
    a, b = contents(first), contents(second)
    if different := sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)):
        raise NotReady(
            f"The wheel that is built from the sdist differs from that of the commit in {different}. "
            "MANIFEST.in must include what setup.py reads."
        )


def build(root: Path, work: Path) -> tuple[Path, Path, Path]:
    """The sdist, the wheel that is built from it, and the wheel of the commit.

    From a copy of the commit: setuptools would take deleted modules over from a build/ that an earlier build left.
    """
    tree = work / "tree"
    git(root, "archive", "--output", str(work / "tree.tar"), "HEAD")
    shutil.unpack_archive(work / "tree.tar", tree)
    output_of(sys.executable, "-m", "build", "--outdir", work / "dist", tree)
    output_of(sys.executable, "-m", "build", "--wheel", "--outdir", work / "commit", tree)
    (sdist,), (wheel,) = (work / "dist").glob("*.tar.gz"), (work / "dist").glob("*.whl")
    (commit_wheel,) = (work / "commit").glob("*.whl")
    return sdist, wheel, commit_wheel


@contextmanager
def loopback_index(folder: Path) -> Iterator[str]:
    """The address of a package index that has the files of `folder` and nothing else."""
    import pypiserver  # which imports the deprecated cgi: an error where warnings are errors

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_):
            pass

    application = pypiserver.app(roots=[folder], disable_fallback=True)
    with make_server("127.0.0.1", 0, application, Server, Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


def fresh_environment(folder: Path) -> Path:
    """The Python of a new environment that has the packages of this one, this project excepted."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for path in Path(yaml.__file__).parents[1].iterdir():
        if PACKAGE not in path.name:  # nor the files of an editable installation
            (packages / path.name).symlink_to(path)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    (site_packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return python


def check_installation(wheel: Path, version: str, readme: str, work: Path) -> None:
    """Installs the wheel from an index, resolves its extras, and runs the README's first code and all commands.

    Raises:
        NotReady: if one of these fails, with its output.
    """
    python = fresh_environment(work / "fresh")
    # Neither the repository nor another index
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    place = work / "place"
    place.mkdir()

    def run(*command: str | Path) -> str:
        return output_of(*command, cwd=place, env=environment)

    metadata = Parser().parsestr(contents(wheel)[f"{PACKAGE}-{version}.dist-info/METADATA"].decode())
    extras = sorted(set(metadata.get_all("Provides-Extra")) - UNRESOLVED_EXTRAS)
    with loopback_index(wheel.parent) as index:
        pip = (python, "-m", "pip", "install", "--index-url", index)
        run(*pip, "--dry-run", f"diff-transformer[{','.join(extras)}]")
        run(*pip, "diff-transformer")
    step("the README's first code")
    location = run(python, "-c", f"import {PACKAGE}\nprint({PACKAGE}.__file__, {PACKAGE}.__version__)").split()
    if work not in Path(location[-2]).parents or location[-1] != version:
        raise NotReady(f"The environment imports {location}, not the wheel of {version} that was installed.")
    run(python, "-c", SMALL_MODEL)
    if not run(python, "-c", re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]).strip():
        raise NotReady("The README's first code prints nothing.")
    step("--help of the commands")
    script = python.with_name("diff-transformer")
    running = {
        command: subprocess.Popen(
            [script, command, "--help"], cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in COMMANDS
    }
    for command, process in running.items():
        printed = process.communicate()[0].decode()
        if process.returncode or "usage" not in printed.lower():
            raise NotReady(f"`diff-transformer {command} --help` failed:\n{printed}")


def step(name: str) -> None:
    print(f"release-check: {name}", flush=True)


def main() -> None:
    step("clean tree and version")
    version = released_version(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        step(f"build {version}")
        sdist, wheel, commit_wheel = build(ROOT, work)
        output_of(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        check_wheel(commit_wheel, package_files(ROOT))
        check_equal(wheel, commit_wheel)
        step("install from a loopback index")
        check_installation(wheel, version, (ROOT / "README.md").read_text(encoding="utf-8"), work)
        if (ROOT / "dist").exists():
            shutil.rmtree(ROOT / "dist")
        shutil.copytree(wheel.parent, ROOT / "dist")
    step(f"{version} is ready: dist/{sdist.name} and dist/{wheel.name}")


if __name__ == "__main__":
    try:
        main()
    except NotReady as error:
        sys.exit(f"release-check: {error}")

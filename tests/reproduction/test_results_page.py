# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The pages of docs/results and the table of the README are what the files of results there say."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from made_up_study import make_study

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs/results/update.py"

spec = spec_from_file_location("update_results", SCRIPT)
update = module_from_spec(spec)
spec.loader.exec_module(update)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# A\n\n<!-- results -->\nold\n<!-- /results -->\n\nmore\n")
    make_study(tmp_path / "run/results.json").save()
    return tmp_path


def test_what_is_committed_is_what_would_be_drawn():
    assert {ROOT / "README.md", ROOT / "docs/results/cpu.md"} <= set(update.texts())
    for path, text in update.texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python docs/results/update.py`"
    for page in (ROOT / "docs/results").glob("*.md"):
        for figure in re.findall(r"\((\w+_figures/.+?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / figure).is_file()


@pytest.mark.slow
def test_a_run_is_taken_over(root):
    update.copy_results("cpu", root / "run", root)
    readme, page = root / "README.md", root / "docs/results/cpu.md"
    assert sorted(update.update(root)) == sorted([page, readme])
    assert (root / "docs/results/cpu.json").read_bytes() == (root / "run/results.json").read_bytes()
    assert page.read_text().startswith("# Made up\n\nOf 23 comparisons")
    figures = re.findall(r"\((cpu_figures/.+?)\)", page.read_text())
    assert figures and all((page.parent / figure).is_file() for figure in figures)
    text = readme.read_text()
    assert text.startswith("# A\n\n<!-- results -->\n\nCPU: Of 23 comparisons") and "old" not in text
    assert text.endswith("|\n\n<!-- /results -->\n\nmore\n") and text.count("not yet run") == 8
    assert all(path.read_text() == content for path, content in update.texts(root).items()), "drawn again it differs"
    assert "(figures/" not in page.read_text()
    page.write_text("by hand")
    assert update.texts(root)[page] != "by hand"
    update.update(root)
    assert page.read_text().startswith("# Made up")


@pytest.mark.slow
def test_both_scales(root):
    for scale in ("cpu", "gpu"):
        update.copy_results(scale, root / "run", root)
    assert len(update.update(root)) == 3 and "not yet run" not in (root / "README.md").read_text()


def test_without_results_nothing_is_written(root):
    assert update.update(root) == [] and "old" in (root / "README.md").read_text()


@pytest.mark.parametrize("text", ["# A\n", "<!-- results -->\n", "<!-- /results -->\n<!-- results -->\n"])
def test_a_readme_without_the_place(root, text):
    update.copy_results("cpu", root / "run", root)
    (root / "README.md").write_text(text)
    with pytest.raises(ValueError, match="README.md has no place"):
        update.update(root)
    assert (root / "README.md").read_text() == text and not (root / "docs/results/cpu.md").exists()


def test_a_run_without_results(root):
    with pytest.raises(ValueError, match="has no results.json"):
        update.copy_results("cpu", root, root)
    (root / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        update.copy_results("cpu", root, root)
    assert not (root / "docs/results/cpu.json").exists()


@pytest.mark.process
def test_the_command_wants_both_or_neither():
    result = subprocess.run([sys.executable, SCRIPT, "cpu"], capture_output=True, text=True)
    assert result.returncode == 2 and "both a scale and a folder" in result.stderr


def test_the_table_of_the_readme():
    first, empty, *lines = update.readme_text({"CPU": make_study(), "GPU": None}).splitlines()
    assert first.startswith("CPU: Of 23 comparisons with its Transformer on equal data, DIFF wins 12 and")
    scales = "CPU: difference [95 %], verdict | GPU: difference [95 %], verdict"
    assert lines[0] == f"| Transformer → DIFF | paper | {scales} |"
    assert (
        "| text: validation loss, equal tokens | 3.087 → 3.062 (Table 6) "
        "| 3.500 → 3.400: -0.1000 [-0.1000, -0.1000], DIFF wins | not yet run |"
    ) in lines
    (recall,) = [line for line in lines if line.startswith("| recall")]
    assert "| not in the paper | 64 pairs: 0.500 → 0.600: 0.1000 [-0.1484, 0.3484], no difference shown |" in recall
    (needles,) = [line for line in lines if line.startswith("| needles")]
    assert "| 0.948 → 0.996 (Figure 5: 1 of 8, 8K tokens) | 8 needles: 0.500 → 0.600" in needles
    (bits,) = [line for line in lines if "4-bit" in line]
    assert "| 29.5 points of HellaSwag → 7.4 points (Figure 8, read off) | 1.000 → 0.200" in bits
    assert len(lines) == 10
    study = make_study()
    study.cells = study.select(protocol="recall")
    assert "not measured" in update.readme_text({"CPU": study})

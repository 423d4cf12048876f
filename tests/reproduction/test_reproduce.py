# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer reproduce`, end to end with the study of two minutes, which is killed once; and its errors."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from made_up_study import changed

from diff_transformer.reproduction import command
from diff_transformer.reproduction.__main__ import main
from diff_transformer.reproduction.command import UNFINISHED, check_texts, claim_folder
from diff_transformer.reproduction.findings import findings
from diff_transformer.reproduction.jobs import CHECKPOINTS, STUDY, jobs_of
from diff_transformer.reproduction.results import RESULTS, append, load
from diff_transformer.reproduction.run import JobError
from diff_transformer.reproduction.study import STUDIES, load_study

ROOT = Path(__file__).parents[2]
CI = STUDIES / "ci.yaml"


def kill_while_training(folder: Path, log: Path) -> None:
    """Starts the command, and kills it and its jobs when some runs have finished."""
    arguments = [sys.executable, "-m", "diff_transformer", "reproduce", "--scale", "ci", "--out", str(folder)]
    with log.open("w") as output:
        process = psutil.Popen(
            arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=subprocess.STDOUT
        )
    while len(load(folder / RESULTS)) < 3:
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    jobs = process.children()
    for each in (process, *jobs):
        each.kill()
    process.wait()
    psutil.wait_procs(jobs, 60)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the study: killed, then stopped by its minutes, then finished."""
    place = tmp_path_factory.mktemp("reproduce")
    folder = place / "out"
    kill_while_training(folder, place / "log.txt")
    after_kill = load(folder / RESULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        assert main(["--scale", "ci", "--out", str(folder), "--minutes", "0.02"]) == UNFINISHED
        assert "The study is not finished (recall: " in (folder / "report.md").read_text()
        assert main(["--scale", "ci", "--out", str(folder), "--minutes", "0"]) == 0
    assert load(folder / RESULTS)[: len(after_kill)] == after_kill and len(after_kill) < 36
    shutil.copy(place / "log.txt", folder)
    return folder


@pytest.mark.slow
@pytest.mark.process
def test_all_runs_are_there_and_each_once(finished):
    study, results = load_study(CI), load(finished / RESULTS)
    planned = [run for job in jobs_of(study) for run in job.runs(study, results)]
    assert len(planned) == 36 and sorted(x.run for x in results) == sorted(planned)
    assert list((finished / CHECKPOINTS).iterdir()) == []
    for x in results:
        assert len(x.curve) == 2 or x.accuracy >= 0.5
        assert (x.data is None) == (x.unigram_loss is None) == (x.experiment == "recall") and x.packages["torch"]
        assert bool(x.conditions) == (x.experiment == "recall" and not x.tuning)
        assert bool(x.lambdas) == x.arm.startswith("diff")


@pytest.mark.slow
@pytest.mark.process
def test_the_page_has_every_finding(finished):
    """`findings` checks that all arms had the same batches and matrices, although one job was killed."""
    page, rows = (finished / "report.md").read_text(), findings(load_study(CI), load(finished / RESULTS))
    assert [(x.experiment, x.name) for x in rows] == [
        *[("recall", name) for name in ("design", "subtraction", "subtraction_alone", "factor")],
        ("text", "design"),
    ]
    for x in rows:
        assert f"| {x.experiment} | {' → '.join(x.contrast.arms)} | 2 |" in page
    assert "not finished" not in page and (finished / "report.html").stat().st_size > 50_000


@pytest.mark.slow
@pytest.mark.process
def test_budget_and_arms_are_printed_first(finished):
    log = (finished / "log.txt").read_text()
    assert "Runs     36; 0 are done\nBudget   about 2 minutes on 2 CPU cores" in log
    assert log.index("Budget") < log.index("FLOPs per token") < log.index("Runs:"), "printed after the training"


@pytest.mark.slow
@pytest.mark.process
def test_finished_runs_are_not_run_again(finished, monkeypatch, capfd):
    monkeypatch.setattr("diff_transformer.reproduction.run._start", None)
    before = (finished / RESULTS).read_bytes()
    assert main(["--scale", "ci", "--out", str(finished)]) == 0
    assert (finished / RESULTS).read_bytes() == before
    printed = capfd.readouterr().out
    assert "36; 36 are done" in printed and printed.endswith(
        f"{finished / RESULTS}\n{finished / 'report.html'}\n{finished / 'report.md'}\n"
    )


@pytest.mark.slow
@pytest.mark.process
def test_results_with_another_text_are_an_error(finished, tmp_path):
    study, folder = load_study(CI), tmp_path / "copy"
    shutil.copytree(finished / "data", folder / "data")
    results = load(finished / RESULTS)
    for x in changed(results, {"experiment": "text", "arm": "diff", "seed": 11}, data="other"):
        append(folder / RESULTS, x)
    with pytest.raises(
        ValueError, match="text: the results in .* were made with the text other, and this machine has"
    ):
        check_texts(study, folder)
    check_texts(study, finished)


@pytest.mark.parametrize("scale", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_a_dry_run_leaves_nothing(tmp_path, capsys, scale):
    assert main(["--scale", scale, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    printed, study = capsys.readouterr().out, load_study(STUDIES / f"{scale}.yaml")
    assert printed.startswith(f"Study    {study.title}\nRuns     ") and not (tmp_path / "out").exists()
    for name, experiment in study.experiments.items():
        for arm in experiment.arms:
            assert f"\n{name:<14}{arm:<24}{len(experiment.seeds):>5}" in printed


def test_a_folder_belongs_to_one_study(tmp_path):
    folder, other = tmp_path / "out", tmp_path / "other.yaml"
    claim_folder(CI, folder)
    assert (folder / STUDY).read_bytes() == CI.read_bytes()
    other.write_text(f"# Other comments\n{CI.read_text()}")
    claim_folder(other, folder)
    other.write_text(CI.read_text().replace("max_steps: 20", "max_steps: 30"))
    with pytest.raises(ValueError, match="belongs to another study, or to an earlier version of this one: .*--study"):
        claim_folder(other, folder)
    assert (folder / STUDY).read_bytes() == CI.read_bytes()


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").touch()
    assert main(["--scale", "ci", "--out", str(tmp_path)]) == 1
    assert f"error: {tmp_path} has files, but no study." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_whose_claim_was_interrupted_can_be_claimed(tmp_path):
    (tmp_path / f".{STUDY}.part").touch()
    claim_folder(CI, tmp_path)


def test_unequal_arms_are_rejected_before_anything_is_trained(tmp_path, capsys):
    study = tmp_path / "study.yaml"
    study.write_text(CI.read_text().replace("intermediate_size: 1024", "intermediate_size: 64"))
    assert main(["--study", str(study), "--out", str(tmp_path / "out")]) == 1
    assert "recall: norm has " in (error := capsys.readouterr().err) and "which differ by more than 0.1%" in error
    assert not (tmp_path / "out").exists()


def test_a_study_that_is_not_there(tmp_path, capsys):
    assert main(["--study", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml does not exist. Name a file, or use --scale" in capsys.readouterr().err


def test_a_job_that_fails_is_printed(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise JobError("recall, seed 10 ended with exit status 1")

    monkeypatch.setattr(command, "run_jobs", fail)
    monkeypatch.setattr(command, "check_texts", lambda *_: None)
    assert main(["--scale", "ci", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.endswith("error: recall, seed 10 ended with exit status 1\n")


@pytest.mark.parametrize(
    ("given", "in_study", "passed"), [([], 8.5, 8.5), (["--minutes", "3"], 8.5, 3), (["--minutes", "0"], 8.5, None)]
)
def test_the_minutes_of_a_call(tmp_path, monkeypatch, given, in_study, passed):
    calls = []
    monkeypatch.setattr(command, "run_jobs", lambda study, folder, minutes: calls.append(minutes))
    monkeypatch.setattr(command, "check_texts", lambda *_: None)
    monkeypatch.setattr(command, "write_report", lambda *_: [])
    study = tmp_path / "study.yaml"
    study.write_text(f"minutes_per_call: {in_study}\n{CI.read_text()}")
    assert main(["--study", str(study), "--out", str(tmp_path / "out"), *given]) == 0
    assert calls == [passed]


def test_a_missing_package_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("diff_transformer.extras.find_spec", lambda name: None if name == "scipy" else 1)
    with pytest.raises(ModuleNotFoundError) as error:
        main(["--scale", "ci", "--out", str(tmp_path / "out")])
    assert error.value.name == "scipy" and not (tmp_path / "out").exists()

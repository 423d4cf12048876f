# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer reproduce`, end to end: the study of two minutes, stopped in the middle of a training."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from diff_transformer.evaluation.results import Results
from diff_transformer.reproduction.__main__ import TO_BE_CONTINUED, main
from diff_transformer.reproduction.digest import ParityError, check_parity, write_digest
from diff_transformer.reproduction.findings import findings
from diff_transformer.reproduction.pieces import pieces_of
from diff_transformer.reproduction.study import PAIR, STUDIES, load_study

ROOT = Path(__file__).parents[2]
STUDY = STUDIES / "ci.yaml"
RECALL = "runs/recall/diff/seed0"


def start(*arguments: str, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "diff_transformer", "reproduce", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def steps(run: Path) -> list[str]:
    file = run / "batches.txt"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the study, which was told to stop while models were trained, and gone on with."""
    place = tmp_path_factory.mktemp("reproduce")
    folder, log = place / "out", place / "log.txt"
    arguments = ("--scale", "ci", "--out", str(folder))
    process = start(*arguments, log=log)
    runs = [folder / f"runs/text/{label}/seed0" for label in PAIR]
    while not any(len(steps(run)) >= 3 for run in runs) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == TO_BE_CONTINUED, log.read_text()
    assert "Stopped by a signal. What is done is kept: the same command goes on." in log.read_text()
    assert any(run.glob("checkpoint-*") for run in runs), "no training left a checkpoint"
    process = start(*arguments, log=log)
    assert process.wait(900) == 0, log.read_text()
    (place / "out/said.txt").write_text(log.read_text())
    return folder


def test_budget_and_parity_are_printed_first(finished):
    said = (finished / "said.txt").read_text()
    assert "Budget   about 2 minutes" in said and f"Pieces   {len(pieces_of(load_study(STUDY)))}," in said
    assert said.index("FLOPs per token") < said.index("Pieces:"), "printed after the training"


def test_every_model_had_the_same_batches_though_one_was_stopped(finished):
    study = load_study(STUDY)
    for name, experiment in study.experiments.items():
        files = [steps(finished / f"runs/{name}/{label}/seed0") for label in experiment.variants]
        assert len(files[0]) == experiment.training["max_steps"] and all(file == files[0] for file in files)
        assert len(set(files[0])) == len(files[0]), "the same batch twice"


def test_the_digest_has_everything_in_the_schema_of_results(finished):
    study, digest = load_study(STUDY), Results.load(finished / "results.json")
    for name, experiment in study.experiments.items():
        assert digest.select(experiment=name, protocol="data")[0].data["sha256"]
        for label, variant in experiment.variants.items():
            (run,) = digest.select(experiment=name, protocol="run", model=label)
            assert run.data["steps"] == experiment.training["max_steps"] and run["tokens_per_second"] > 0
            of_text = digest.select(experiment=name, protocol="lambda", model=label)
            assert len(of_text) == (experiment.config["num_hidden_layers"] if variant.architecture == "diff" else 0)
            curve = digest.select(experiment=name, protocol="training", model=label)
            assert curve[-1].key["tokens"] == 40 * 8 * experiment.sequence_length
            for protocol in experiment.evaluations:
                there = bool(digest.select(experiment=name, protocol=protocol, model=label))
                assert there == (label in PAIR or protocol not in experiment.of_pair), f"{label}: {protocol}"
    positions = [cell.key["position"] for cell in digest.select(protocol="nll_by_position")]
    assert max(positions) >= study.experiments["text"].sequence_length, "not beyond the length of the training"


def test_the_digest_counts_the_parameters_of_the_files(finished):
    from transformers import AutoModelForCausalLM

    for cell in Results.load(finished / "results.json").select(experiment="text", protocol="run"):
        model = AutoModelForCausalLM.from_pretrained(finished / f"runs/text/{cell.key['model']}/seed0/model")
        assert cell["parameters"] == model.num_parameters()


def test_the_report_has_every_finding(finished):
    page = (finished / "report.md").read_text()
    rows = findings(Results.load(finished / "results.json"))
    assert {"fine_grained_loss", "outliers", "recall", "needle", "attention_allocation"} <= {x.protocol for x in rows}
    assert all(row.what in page for row in rows) and "nan" not in page.lower().split()
    assert (finished / "report.html").stat().st_size > 50_000


def test_what_is_finished_is_not_run_again(finished, capfd):
    before = {file: file.stat().st_mtime_ns for file in finished.glob("runs/**/*") if file.is_file()}
    assert main(["--scale", "ci", "--out", str(finished)]) == 0
    after = {file: file.stat().st_mtime_ns for file in finished.glob("runs/**/*") if file.is_file()}
    changed = {file.name for file, when in after.items() if when != before.get(file)}
    assert changed <= {"config.yaml", "extended.yaml"}
    pieces = len(pieces_of(load_study(STUDY)))
    assert f"{pieces} are done" in capfd.readouterr().out


def test_another_study_does_not_get_the_folder(finished, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(STUDY.read_text().replace("max_steps: 40", "max_steps: 41"))
    assert main(["--study", str(other), "--out", str(finished)]) == 1
    assert "has the runs of another study" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    assert main(["--study", str(other), "--out", str(tmp_path / "mine")]) == 1
    assert "has files, but no study" in capsys.readouterr().err and len(list((tmp_path / "mine").iterdir())) == 1


def test_other_batches_or_parameters_are_no_matched_pair(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("cache"))
    file = folder / "runs/recall/diff/seed0/batches.txt"
    file.write_text(file.read_text().replace("a", "b", 1))
    with pytest.raises(ParityError, match="recall, seed 0: the models were not trained on the same batches"):
        write_digest(load_study(STUDY), folder)
    digest = Results.load(finished / "results.json")
    for cell in digest.select(experiment="needles", protocol="run", model="diff"):
        measure = cell.measures["parameters"]
        cell.measures["parameters"] = type(measure)(measure.value * 1.002, 1)
    with pytest.raises(ParityError, match="needles, seed 0: DIFF has .* more than 0.1% apart"):
        check_parity(digest)

    file = folder / "runs/text/diff/seed0/extended/batches.txt"
    (folder / "runs/recall/diff/seed0/batches.txt").write_text("\n".join([*steps(finished / RECALL), ""]))
    file.write_text(file.read_text().replace("a", "b", 1))
    with pytest.raises(ParityError, match="text, seed 0: .* Delete runs/text/<the model>/seed0 and results"):
        write_digest(load_study(STUDY), folder)


def test_a_window_of_the_log_that_was_interrupted_does_not_count(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("cache"))
    file = folder / RECALL / "trainer_state.json"
    state = json.loads(file.read_text())
    entries = [entry for entry in state["log_history"] if "loss" in entry]
    for entry, speed in zip(entries, (10.0, 900.0, 1000.0, 1100.0, 40_000.0), strict=True):
        entry["tokens_per_second"] = speed
    file.write_text(json.dumps(state))
    digest = write_digest(load_study(STUDY), folder)
    (run,) = digest.select(experiment="recall", protocol="run", model="diff")
    assert run["tokens_per_second"] == 1000.0
    for cell in digest.select(experiment="recall", protocol="training", model="diff"):
        assert cell.data["seconds"] == cell.key["tokens"] / 1000


def test_an_unequal_pair_is_refused_before_anything_is_trained(tmp_path, capsys):
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.read_text().replace("num_attention_heads: 4", "num_attention_heads: 1"))
    assert main(["--study", str(study), "--out", str(tmp_path / "out")]) == 1
    assert "more than 0.1% apart. Lambda and the head norms weigh less" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["training", "extension"])
def test_an_unknown_argument_of_a_stage_is_named_before_anything_runs(tmp_path, capsys, part):
    content = yaml.safe_load(STUDY.read_text())
    text = content["experiments"]["text"]
    text[part] = {**text[part], "learning_rat": 1}  # the anchors of the file share the original
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(content))
    assert main(["--study", str(study), "--out", str(tmp_path / "out")]) == 1
    assert "text: there is no argument learning_rat. `python -m diff_transformer.training." in capsys.readouterr().err


def test_a_dry_run_leaves_nothing(tmp_path, capsys):
    assert main(["--scale", "gpu", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "lambda_init_0.8" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_missing_package_is_missed_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("diff_transformer.reproduction.__main__.find_spec", lambda name: None if name == "trl" else 1)
    assert main(["--scale", "ci", "--out", str(tmp_path / "out")]) == 1
    assert "Not installed: trl. Two extras have them: pip install -e '.[train,eval]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The training of one run: what it records, that it can be repeated, and that a stop changes nothing."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from diff_transformer.reproduction import train
from diff_transformer.reproduction.findings import check_parity
from diff_transformer.reproduction.jobs import CHECKPOINTS, STUDY, endpoint
from diff_transformer.reproduction.results import RESULTS, Run, load
from diff_transformer.reproduction.study import Endpoint, Experiment, load_study
from diff_transformer.reproduction.tasks import IGNORED
from diff_transformer.reproduction.train import Trainings

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ARMS = ["transformer", "wide_norm", "diff", "diff_v2"]
CONTENT = {
    "title": "A test",
    "machine": "any",
    "minutes": 1,
    "experiments": {
        "recall": {
            "task": {"kind": "key_value", "fused": True, "context": 12, "pairs": [1, 2], "keys": 4, "decoys": [0, 2]},
            "config": {
                "hidden_size": 32,
                "intermediate_size": 1024,  # the other arms have as many parameters within 0.1 %
                "num_hidden_layers": 2,
                "num_attention_heads": 1,
                "initializer_range": 0.06,
            },
            "arms": ARMS,
            "endpoint": {"kind": "loss"},
            "seeds": [10, 11],
            "tuning_seeds": [0],
            "learning_rates": [3.0e-3],
            "training": {
                "max_steps": 6,
                "eval_steps": 2,
                "per_device_train_batch_size": 4,
                "lr_scheduler_type": "constant",
                "weight_decay": 0.1,
            },
            "validation_rows": 16,
        }
    },
    "contrasts": {"design": {"question": "Is it better?", "arms": ["transformer", "diff"]}},
}
TOKENS_PER_STEP = 4 * 16


def claim(folder: Path, **experiment) -> Experiment:
    """Writes a study into the folder; returns its only experiment."""
    content = {**CONTENT, "experiments": {"recall": {**CONTENT["experiments"]["recall"], **experiment}}}
    (folder / STUDY).write_text(yaml.safe_dump(content))
    return load_study(folder / STUDY).experiments["recall"]


def run_of(arm: str, seed: int = 10, rate: float = 3e-3, tuning: bool = False) -> Run:
    return Run("recall", arm, seed, rate, tuning)


def without_time(result):
    return replace(result, seconds=0.0, date="")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return Trainings(claim(folder), folder, 10)


@pytest.fixture(scope="module")
def results(trainings):
    return {arm: trainings.train(run_of(arm)) for arm in ARMS}


def test_a_run_can_be_repeated(trainings, results):
    again = Trainings(trainings.experiment, trainings.folder, 10).train(run_of("diff_v2"))
    assert without_time(again) == without_time(results["diff_v2"])
    assert again.seconds > 0 and again.date
    assert not list((trainings.folder / CHECKPOINTS).iterdir()), "the folder of a finished run is left"


def test_other_seeds_have_other_batches_and_matrices(trainings, results):
    other = Trainings(trainings.experiment, trainings.folder, 11)
    assert (other.validation.rows.input_ids == trainings.validation.rows.input_ids).all()
    result, first = other.train(run_of("transformer", 11)), results["transformer"]
    assert result.matrices != first.matrices and not set(result.batches) & set(first.batches)
    assert result.map is None, "of the first seed only"


def test_the_arms_are_trained_under_equal_conditions(results):
    check_parity("recall", {arm: [result] for arm, result in results.items()})
    assert len({tuple(x.batches) for x in results.values()}) == 1
    assert len({x.loss for x in results.values()}) == len(ARMS)
    assert len(set(results["diff"].batches)) == 3


def test_what_a_run_records(results):
    for arm, result in results.items():
        assert result.run == run_of(arm) and result.data is result.unigram_loss is None
        assert [point[0] for point in result.curve] == [n * TOKENS_PER_STEP for n in (2, 4, 6)]
        assert result.loss == result.curve[-1][1] < result.curve[0][1] and 0 <= result.accuracy <= 1
        init = {"wide_norm": [0.2, 0.35551], "diff": [0.2, 0.35551]}.get(arm, [])
        assert result.lambda_init == pytest.approx(init, abs=1e-5)
        lambdas = result.lambdas if arm.startswith("diff") else [[2], [4], [6]]
        assert [entry[0] for entry in lambdas] == [2, 4, 6] and result.lambdas == lambdas[: len(result.lambdas)]
        for entry in lambdas:
            assert entry[1:] == pytest.approx({"diff": [0.2, 0.356], "diff_v2": [0.5, 0.5]}.get(arm, []), abs=0.1)


def test_the_conditions_are_those_of_the_task(trainings, results):
    for result in results.values():
        assert list(result.conditions) == ["1 pairs", "2 pairs", "0 decoys", "2 decoys"]
        for values in result.conditions.values():
            assert set(values) == {"loss", "accuracy"} and 0 < values["loss"] < 10
    assert len({x["loss"] for x in results["diff"].conditions.values()}) == 4


def test_the_map_is_that_of_the_first_question(trainings, results):
    task = trainings.task
    row, labels = (x[0] for x in trainings._validation(**list(task.conditions.values())[-1]).rows)
    question = 12
    assert (labels[: question + 1] == IGNORED).all() and labels[question + 1] != IGNORED
    first_pair, keys = task.filler, task.filler + task.keys * task.values
    key, value = row[question] - keys, row[question + 1] - keys - task.keys
    for arm, result in results.items():
        layers, answer = result.map["layers"], result.map["answer"]
        assert row[answer] == first_pair + key * task.values + value
        assert [len(heads) for heads in layers] == [2 if arm in ("transformer", "diff_v2") else 1] * 2
        assert all(len(head) == question + 1 for heads in layers for head in heads)
        sums = [sum(head) for heads in layers for head in heads]
        if arm == "diff":
            assert sums == pytest.approx([1 - x for x in result.lambdas[-1][1:]], abs=1e-3)
        elif arm == "diff_v2":  # lambda is a sigmoid, by token and head
            assert all(0 < x < 1 for x in sums)
        else:
            assert sums == pytest.approx([1.0] * len(sums), abs=1e-3)
            assert min(x for heads in layers for head in heads for x in head) >= 0
        assert type(result.map["solved"]) is bool


def test_tuning_runs_are_shorter_and_measure_less(tmp_path):
    trainings = Trainings(claim(tmp_path, tuning_steps=4, learning_rates=[1e-3, 2e-3]), tmp_path, 0)
    result = trainings.train(run_of("diff", 0, 1e-3, tuning=True))
    assert [point[0] for point in result.curve] == [2 * TOKENS_PER_STEP, 4 * TOKENS_PER_STEP]
    assert result.tuning and result.conditions == {} and result.map is None
    assert len(trainings.train(run_of("diff", 0, 1e-3)).curve) == 3


def test_a_run_ends_at_the_first_evaluation_that_reaches_the_accuracy(tmp_path, trainings, results):
    """The accuracies of all evaluations of an undisturbed run are known: the threshold lies just above the first."""
    full = results["diff"]
    accuracies = [point[2] for point in full.curve]
    reached = next(i for i, x in enumerate(accuracies) if x > accuracies[0])  # at the first or the second step after
    threshold = accuracies[reached]
    stopping = replace(trainings.experiment, endpoint=Endpoint("tokens", threshold))
    result = Trainings(stopping, tmp_path, 10).train(run_of("diff"))
    assert result.curve == full.curve[: reached + 1] and result.batches == full.batches[: reached + 1]
    check_parity("recall", {"transformer": [results["transformer"]], "diff": [result]})
    never = replace(trainings.experiment, endpoint=Endpoint("tokens", 1.0))
    assert Trainings(never, tmp_path, 10).train(run_of("diff")).curve == full.curve


@pytest.mark.parametrize("tuning", [True, False])
@pytest.mark.parametrize("steps", [{}, {"eval_steps": 1}, {"eval_steps": 1, "max_steps": 1}])
def test_a_run_whose_loss_is_not_finite_has_a_result(tmp_path, trainings, steps, tuning):
    """Whether a batch, an evaluation or the last evaluation is the first with NaN."""
    changed = replace(trainings.experiment, training={**trainings.experiment.training, **steps})
    result = Trainings(changed, tmp_path, 10).train(run_of("diff", rate=1e30, tuning=tuning))
    assert result.diverged and endpoint(trainings.experiment, result) == math.inf
    assert result.conditions == {} and result.map is None and len(result.batches) == len(result.curve)
    json.dumps(vars(result), allow_nan=False)


@pytest.mark.parametrize("arm", ["diff", "diff_v2"])
def test_lambda_has_its_own_learning_rate(trainings, monkeypatch, arm):
    rates = []

    class Trainer(train.RunTrainer):
        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            names = {id(x): name for name, x in self.model.named_parameters()}
            for group in optimizer.param_groups:
                rates.extend(("lambda_" in names[id(x)], group["lr"]) for x in group["params"])
            return optimizer

    monkeypatch.setattr(train, "RunTrainer", Trainer)
    trainings.train(run_of(arm))
    assert {(is_lambda, round(lr, 9)) for is_lambda, lr in rates} == {(True, 3e-4), (False, 3e-3)}


def test_a_frozen_lambda_stays(trainings):
    frozen = Trainings(replace(trainings.experiment, lambda_lr_multiplier=0.0), trainings.folder, 10)
    first, *others = frozen.train(run_of("diff")).lambdas
    assert all(entry[1:] == first[1:] for entry in others)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a study in which `train.main` is called, after which no signal is caught any more."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    assert signal.getsignal(signal.SIGTERM) is before


def signal_in_step(monkeypatch, step: int) -> None:
    class Trainer(train.RunTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == step - 1:
                signal.raise_signal(signal.SIGTERM)
            return super().training_step(*args, **kwargs)

    monkeypatch.setattr(train, "RunTrainer", Trainer)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_training_that_is_stopped_and_resumed_gives_the_same_result(folder, monkeypatch, results, step):
    """Before, at and after an evaluation; of DIFF V2 the log has the mean lambda since its last entry."""
    claim(folder, arms=["transformer", "diff"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        signal_in_step(patch, step)
        train.main(["recall", "10"])
    assert stopped.value.code == 128 + signal.SIGTERM and load(folder / RESULTS) == []
    assert [x.name for x in (folder / CHECKPOINTS).rglob("checkpoint-*")] == [f"checkpoint-{step}"]
    taken = []
    with monkeypatch.context() as patch:
        step_of = train.RunTrainer.training_step
        patch.setattr(train.RunTrainer, "training_step", lambda *args: taken.append(args) or step_of(*args))
        train.main(["recall", "10"])
    assert len(taken) == (6 - step) + 6, "it started over"
    found = {x.arm: without_time(x) for x in load(folder / RESULTS)}
    assert found == {arm: without_time(results[arm]) for arm in ("transformer", "diff")}


def test_a_stop_in_the_step_that_reaches_the_accuracy_does_not_train_on(folder, monkeypatch):
    """That run is finished, and the next one stops."""
    claim(folder, arms=["transformer", "diff"], endpoint={"kind": "tokens", "accuracy": 0.95}, learning_rates=[1e-2])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_in_step(patch, 2)
        patch.setattr(train, "accuracy", lambda prediction: {"accuracy": 0.95})
        train.main(["recall", "10"])
    (result,) = load(folder / RESULTS)
    assert len(result.curve) == 1 and result.arm == "transformer"
    assert [x.name for x in (folder / CHECKPOINTS).rglob("checkpoint-*")] == ["checkpoint-1"]


def test_a_stop_that_comes_after_the_last_step_stops_the_next_run(folder, monkeypatch):
    def conditions(self, trainer):
        signal.raise_signal(signal.SIGTERM)
        return {}

    claim(folder, arms=["transformer", "diff"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(Trainings, "_conditions", conditions)
        train.main(["recall", "10"])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [x.arm for x in load(folder / RESULTS)] == ["transformer"], "a finished run is lost, or one more was begun"


def test_a_killed_run_starts_again(folder, results):
    """Its batches are recorded, and it has no checkpoint, or half of one."""
    claim(folder, arms=["transformer", "diff"])
    run = folder / CHECKPOINTS / "-".join(map(str, run_of("transformer")))
    (run / "checkpoint-2").mkdir(parents=True)
    (run / "batches.txt").write_text("old\nold\n")
    train.main(["recall", "10"])
    assert without_time(load(folder / RESULTS)[0]) == without_time(results["transformer"])


def test_finished_runs_are_not_trained_again(folder, monkeypatch):
    claim(folder, arms=["transformer", "diff"])
    train.main(["recall", "10"])
    before = (folder / RESULTS).read_text()
    monkeypatch.setattr(Trainings, "train", None)
    train.main(["recall", "10"])
    assert (folder / RESULTS).read_text() == before


@pytest.mark.process
def test_sigterm_in_a_process_of_its_own(folder):
    """Stopped in the middle of a long training, and resumed: the result is that of an undisturbed run."""
    training = {**CONTENT["experiments"]["recall"]["training"], "max_steps": 90, "eval_steps": 30}
    experiment = claim(folder, arms=["diff", "transformer"], training=training)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "diff_transformer.reproduction.train", "recall", "10"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    record = folder / CHECKPOINTS / "-".join(map(str, run_of("diff"))) / "batches.txt"
    deadline = time.monotonic() + 120
    while not (record.exists() and len(record.read_text().splitlines()) > 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, (folder / "log.txt").read_text()
    (checkpoint,) = record.parent.glob("checkpoint-*")
    assert 2 < int(checkpoint.name.partition("-")[2]) < 90 and load(folder / RESULTS) == []
    train.main(["recall", "10"])
    resumed, other = load(folder / RESULTS)
    assert (resumed.arm, other.arm) == ("diff", "transformer")
    undisturbed = Trainings(experiment, folder, 10).train(run_of("diff"))
    assert without_time(resumed) == without_time(undisturbed)

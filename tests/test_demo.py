# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""demo/run.py: the smoke run as a process, again in this process, and the parts that a short run does not reach."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from diff_transformer import DiffTransformerForCausalLM

DEMO = Path(__file__).parents[1] / "demo"
MODULES = ("run", "muon", "pictures")


@pytest.fixture(scope="module")
def demo():
    """The scripts as modules of this process."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # both are set by the import, and taken back here
        monkeypatch.syspath_prepend(DEMO)
        for name in MODULES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        import run

        yield run
        for name in MODULES:
            del sys.modules[name]


def complete(model: Path, prompt: str) -> str:
    """What demo/complete.py prints, without a process."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(output):
        monkeypatch.setattr(sys, "argv", ["complete.py", str(model), prompt])
        try:
            runpy.run_path(str(DEMO / "complete.py"), run_name="__main__")
        finally:
            logging.enable_progress_bar()
    return output.getvalue()


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory):
    """Two smoke runs into one folder, in a process and in this one: the folder, their outputs and their logs."""
    folder = tmp_path_factory.mktemp("demo")
    out, arguments = folder / "out", ["--smoke", "--out", str(folder / "out")]
    # one thread, as here: the arithmetic is tiny, and threads that wait for one another are slow on a busy machine
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DEMO / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, f"the smoke run failed:\n{done.stderr[-4000:]}"
    logs = [json.loads((out / "log.json").read_text())]

    def without_process(command, **kwargs):
        return subprocess.CompletedProcess(command, 0, complete(*command[2:]))

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a process they are no errors either
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        monkeypatch.setattr(demo.subprocess, "run", without_process)
        monkeypatch.chdir(folder)
        try:
            demo.main()
        finally:
            logging.enable_progress_bar()
    logs.append(json.loads((out / "log.json").read_text()))
    return out, [done.stdout, output.getvalue()], logs


@pytest.mark.process
def test_run_leaves_nothing_but_its_results(runs):
    out, _, _ = runs
    found = {path.name for path in out.iterdir()}
    assert found == {".diff_transformer_demo", "model", "loss.png", "maps.png", "log.json"}
    assert {path.name for path in out.parent.iterdir()} == {"out"}, "the demo wrote outside its folder"


@pytest.mark.process
def test_run_lowers_the_loss_the_same_way_every_time(runs):
    _, _, (log, second) = runs
    losses = [entry["eval_loss"] for entry in log["history"] if "eval_loss" in entry]
    assert log["validation_loss"] == losses[-1] < losses[0] - 1.0
    assert 4.0 < log["unigram_entropy"] < 7.0
    rates = [entry["learning_rate"] for entry in log["history"] if "learning_rate" in entry]
    assert rates[-1] < 0.05 * max(rates), "the learning rate does not decay to zero"
    assert log["validation_loss"] == second["validation_loss"] and log["completion"] == second["completion"]


@pytest.mark.process
def test_run_prints_budget_and_summary(runs):
    out, outputs, (log, _) = runs
    for output in outputs:
        for name in ("Data", "Model", "Budget", "Validation", "Training", "Pictures", "Log"):
            assert f"{name}  " in output, f"no line {name!r} in the output"
        for path in ("model", "loss.png", "maps.png", "log.json"):
            assert str(out / path) in output
        places = [output.index(x) for x in ("Budget", "--- prompt", "--- completion", "Validation")]
        assert places == sorted(places)
        assert log["completion"].strip() in output
        assert "lambda = " in output


@pytest.mark.process
def test_run_saves_a_complete_model(runs):
    out, _, _ = runs
    found = {path.name for path in (out / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= found
    model = DiffTransformerForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.eos_token_id == model.config.eos_token_id
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert model.generation_config.eos_token_id == ends, "chat after fine-tuning would not stop"
    assert model.config.use_cache, "the trainer's use_cache=False was saved"
    assert len(tokenizer) <= model.config.vocab_size


@pytest.mark.process
def test_complete_needs_nothing_but_the_folder(demo, runs, tmp_path):
    out, _, (log, _) = runs
    moved = tmp_path / "moved"
    (out / "model").rename(moved)
    try:
        assert complete(moved, demo.PROMPT) == log["completion"]
    finally:
        moved.rename(out / "model")


@pytest.mark.process
@pytest.mark.parametrize("name", ["loss.png", "maps.png"])
def test_pictures_show_something(runs, name):
    image = pytest.importorskip("matplotlib.image")
    out, _, _ = runs
    pixels = image.imread(out / name)
    assert (out / name).stat().st_size < 150_000
    assert pixels.shape[0] >= 400 and pixels.shape[1] >= 700
    assert len(np.unique((pixels[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)) > 50, "an empty picture"


def test_run_rejects_a_folder_that_is_not_its_own(demo, monkeypatch, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["run.py", "--smoke", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="was not made by this demo"):
        demo.main()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_run_rejects_sources_that_it_cannot_use(demo, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("pass")
    monkeypatch.setattr(sys, "argv", ["run.py", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="gives 0 tokens of Python for training .* --source"):
        demo.main()
    (tmp_path / "folder.py").mkdir()  # not readable as a file, even for root
    with pytest.raises(SystemExit, match="folder.py cannot be read .* --source"):
        demo.main()


@pytest.mark.parametrize("seconds_per_step", [0.1, 1.0, 2.0, 5.0])
def test_clock_ends_in_time_with_a_complete_decay(demo, monkeypatch, seconds_per_step):
    now = [1000.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    control, clock = type("Control", (), {"should_training_stop": False})(), demo.Clock(steps=600, minutes=10)
    clock.on_train_begin(None, None, control)
    rates = []
    while len(rates) < 600 and not control.should_training_stop:
        rates.append(clock.learning_rate(len(rates)))
        now[0] += seconds_per_step
        clock.on_step_end(None, None, control)
    assert now[0] - 1000.0 <= 600 + seconds_per_step
    assert rates[-1] < 0.02, "training ended before the learning rate had decayed"
    if seconds_per_step <= 1.0:
        assert rates == [min(1.0, (step + 1) / 30) * (1.0 - step / 600) for step in range(600)], "the clock interfered"


def test_attention_maps_are_those_of_the_model(demo, tiny_config):
    import pictures

    model = DiffTransformerForCausalLM(tiny_config(num_key_value_heads=4, attn_implementation="eager")).eval()
    maps = pictures.attention_maps(model, torch.randint(0, 199, (1, 9)))  # checks the difference by itself
    assert len(maps) == 2
    for map1, map2, _ in maps:
        assert map1.shape == map2.shape == (4, 9, 9)
        torch.testing.assert_close(map1.sum(-1), torch.ones(4, 9))
        assert (map1 - map2).abs().max() > 0.05, "both maps are the same"


def test_muon_agrees_with_torch(demo):
    from muon import MuonAdamW

    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    start = {name: torch.randn(48, 16) for name in ("tall", "tall2")}
    start |= {"wide": torch.randn(16, 64), "vector": torch.randn(16)}
    ours, theirs = ({name: p.clone().requires_grad_() for name, p in start.items()} for _ in range(2))
    matrices = ("tall", "tall2", "wide")
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    optimizers = [
        MuonAdamW([{"params": [ours[m] for m in matrices], **settings}, {"params": [ours["vector"]]}], lr=1e-3),
        torch.optim.Muon([theirs[m] for m in matrices], **settings),
        torch.optim.AdamW([theirs["vector"]], lr=1e-3),
    ]
    for _ in range(4):
        for name, p in start.items():
            ours[name].grad = torch.randn_like(p)
            theirs[name].grad = ours[name].grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours["vector"], theirs["vector"], rtol=0, atol=0)
    for name in matrices:
        moved, difference = theirs[name] - start[name], ours[name] - theirs[name]
        assert difference.norm() < 0.03 * moved.norm(), "further apart than torch's products in bfloat16 explain"

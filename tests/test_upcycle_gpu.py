# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The branches of a pretrained Llama, which a GPU trains in calls of minutes: the whole path on a CPU, with a toy."""

import importlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from diff_transformer.training.callbacks import StopOnSignal

ROOT = Path(__file__).parents[1]
BRANCHES = ["transformer", "more_heads", "upcycled_redrawn"]


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_call_goes_on(tmp_path, monkeypatch, capsys):
    gguf_files = pytest.importorskip("gguf_files", reason="needs gguf")
    monkeypatch.syspath_prepend(str(ROOT))
    upcycle_gpu = importlib.import_module("benchmarks.upcycle_gpu")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    gguf_files.write_chat_model(tmp_path / "toy.gguf")
    whole, parts, out = (tmp_path / "toy.gguf").read_bytes(), [tmp_path / "1", tmp_path / "2"], tmp_path / "out"
    for part, content in zip(parts, (whole[:100_000], whole[100_000:]), strict=True):
        part.write_bytes(content)
    command = ["--model", *map(str, parts), "--out", str(out), "--branch", *BRANCHES, "--length", "1024"]
    command += ["--rows", "1", "--tokens", str(10 * 4 * 1024), "--samples", "1", "--megabytes", "3"]

    def is_over(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, "on_step_begin", is_over)
        assert upcycle_gpu.main(command) == 75
    first = json.loads((out / "losses.json").read_text())["branches"]
    assert list(first) == ["transformer"] and list(first["transformer"]["loss"]) == list("0123456")
    assert not (out / "transformer" / "model").exists() and "to go on" in capsys.readouterr().out

    clock = iter([0.0, 1e9])
    with monkeypatch.context() as patch:
        patch.setattr(upcycle_gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert upcycle_gpu.main(command) == 75, "the time was over when the model was saved"
    assert not (out / "report").exists()
    assert upcycle_gpu.main(command) == 0
    found = json.loads((out / "losses.json").read_text())["branches"]
    assert list(found) == BRANCHES
    for branch, one in found.items():
        assert [int(step) for step in one["loss"]] == list(range(11)) and one["loss"]["10"] < one["loss"]["0"] - 0.1
        assert one["tokens_per_second"] > 0
        assert sorted(x.name for x in (out / branch).iterdir()) == ["model", "trainer_state.json"], "checkpoints stay"
    transformer, more_heads, redrawn = (found[branch]["loss"]["0"] for branch in BRANCHES)
    assert more_heads == pytest.approx(transformer, abs=1e-5), "it does not begin with the same function"
    assert abs(redrawn - transformer) > 1e-3
    assert {step: first["transformer"]["loss"][step] for step in "0123456"}.items() <= found["transformer"][
        "loss"
    ].items()
    for protocol in ("nll_by_position", "needle", "outliers"):
        cells = {file.stem: json.loads(file.read_text()) for file in (out / "report" / protocol).glob("*.json")}
        assert set(cells) == set(BRANCHES), protocol

    with pytest.raises(SystemExit, match="Choose another --out, or the same options"):
        upcycle_gpu.main([*command, "--learning-rate", "1"])
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert upcycle_gpu.main(command) == 0
    assert files == {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}, "it was done already"

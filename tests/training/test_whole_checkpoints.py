# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Which checkpoints are whole."""

import json

import pytest

from diff_transformer.training.whole_checkpoints import FILES, fault, last_whole_checkpoint, seal, set_aside


@pytest.fixture
def run(tmp_path):
    """A folder with the sealed checkpoints 5, 10 and 100."""
    for step in (5, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights" * step)
        (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"shard" * step)
        seal(folder)
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model_fsdp_0/__0_0.distcp", FILES])
def test_last_whole_checkpoint_is_the_last_undamaged_one(run, name):
    assert last_whole_checkpoint(run) == (run / "checkpoint-100", {}) and fault(run / "checkpoint-100") is None
    file = run / "checkpoint-100" / name
    file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoint-10" / name).unlink()
    whole, faulty = last_whole_checkpoint(run)
    assert whole == run / "checkpoint-5" and list(faulty) == [run / "checkpoint-100", run / "checkpoint-10"]
    assert ("damaged" if name == FILES else f"changed {name}") in faulty[run / "checkpoint-100"]
    assert ("interrupted" if name == FILES else f"lost or changed {name}") in faulty[run / "checkpoint-10"]
    (run / "checkpoint-5" / name).unlink()
    whole, faulty = last_whole_checkpoint(run)
    assert whole is None and len(faulty) == 3


def test_sealing_again_takes_new_files_in(run):
    (run / "checkpoint-5" / "later.bin").write_bytes(b"123")
    seal(run / "checkpoint-5")
    sizes = json.loads((run / "checkpoint-5" / FILES).read_text())
    assert sizes["later.bin"] == 3 and FILES not in sizes


def test_set_aside_keeps_the_files_and_never_overwrites(run):
    aside = set_aside(run / "checkpoint-100")
    assert (aside / "model.safetensors").is_file() and not (run / "checkpoint-100").exists()
    (run / "checkpoint-10").rename(run / "checkpoint-100")
    assert set_aside(run / "checkpoint-100") not in (aside, run / "checkpoint-100")
    assert last_whole_checkpoint(run)[0] == run / "checkpoint-5"

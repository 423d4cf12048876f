# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Checkpoints of other code bases are converted into ours and back."""

import copy
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import tiktoken
import torch
from diffllama_twin import to_diffllama
from golden import GOLDEN_NAMES, Golden, GoldenV2, relative_error, run_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_tokenization_cl100k import own_cl100k
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DiffLlamaForCausalLM, LlamaConfig, PreTrainedModel

from diff_transformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerV2Config,
    cl100k_tokenizer,
)
from diff_transformer.conversion import (
    VerificationError,
    compare,
    convert,
    open_checkpoint,
    yoco_tokenizer,
)
from diff_transformer.conversion.__main__ import main
from diff_transformer.conversion.layouts import LAYOUTS, Layout
from diff_transformer.conversion.verification import Inputs, hidden_states, logits

IDS = torch.arange(30).view(2, 15) % 96


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


def make_model(config_class=DiffTransformerConfig, **changes) -> PreTrainedModel:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "eos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "subln" in name:
                parameter.normal_(1.0, 0.2)
    return model


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def out(folder, to, destination, **options):
    """From our folder into another layout."""
    convert(open_checkpoint(folder, LAYOUTS[to].ours), destination, to, **options)
    return destination


def logits_of(checkpoint):
    return logits(checkpoint, *hidden_states(checkpoint, [Inputs(IDS)]))


def state_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# ---------------------------------------------------------------------- round trips and parity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layout", "config_class"),
    [("unilm", DiffTransformerConfig), ("yoco", DiffTransformerConfig), ("unilm_v2", DiffTransformerV2Config)],
)
def test_round_trip_is_exact(tmp_path, layout, config_class, dtype):
    ours = save(make_model(config_class).to(dtype), tmp_path / "ours")
    theirs = out(ours, layout, tmp_path / "theirs")
    convert(open_checkpoint(theirs, layout, flash_semantics=True), tmp_path / "back")
    assert_equal_states(state_of(ours), state_of(tmp_path / "back"))
    out(tmp_path / "back", layout, tmp_path / "again")
    assert_equal_states(state_of(theirs), state_of(tmp_path / "again"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_of_a_diffllama_is_exact(tmp_path, dtype):
    theirs = save(to_diffllama(make_model()).to(dtype), tmp_path / "theirs")
    convert(open_checkpoint(theirs, "diffllama"), tmp_path / "ours")
    out(tmp_path / "ours", "diffllama", tmp_path / "back")
    assert_equal_states(state_of(theirs), state_of(tmp_path / "back"))


@pytest.mark.oldest
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_diffllama_has_the_same_logits(tmp_path, kv_heads, tied):
    model = make_model(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    folder = out(save(model, tmp_path / "ours"), "diffllama", tmp_path / "theirs")
    twin = DiffLlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert relative_error(twin(IDS).logits, model(IDS).logits) < 1e-5
    convert(open_checkpoint(folder, "diffllama"), tmp_path / "back")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.tie_word_embeddings == tied
    with torch.no_grad():
        assert relative_error(back(IDS).logits, twin(IDS).logits) < 1e-5


def test_rope_scaling_of_an_old_diffllama_is_kept(tmp_path):
    theirs = save(to_diffllama(make_model()), tmp_path / "theirs")
    stated = json.loads((theirs / "config.json").read_text())
    del stated["rope_parameters"]
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stated |= {"rope_theta": 50.0, "rope_scaling": scaling | {"original_max_position_embeddings": 16}}
    (theirs / "config.json").write_text(json.dumps(stated))
    convert(open_checkpoint(theirs, "diffllama"), tmp_path / "ours")
    models = (
        DiffLlamaForCausalLM.from_pretrained(theirs),
        DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours"),
    )
    with torch.no_grad():
        assert relative_error(*(model.eval()(IDS).logits for model in models)) < 1e-5


@pytest.mark.parametrize(("golden_class", "layout"), [(Golden, "unilm"), (GoldenV2, "unilm_v2")])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_file_through_the_converter(tmp_path, name, golden_class, layout):
    """The authors' attention weights in a whole decoder: after conversion our attention gives the authors' output."""
    golden = golden_class(name)
    layer = golden.layer_idx
    config = copy.deepcopy(golden.config)
    config.vocab_size, config.num_hidden_layers, config.intermediate_size = 96, layer + 1, 72
    config.eos_token_id = None
    folder = out(save(AutoModelForCausalLM.from_config(config), tmp_path / "ours"), layout, tmp_path / "theirs")
    state = state_of(folder)
    state |= {f"model.layers.{layer}.self_attn.{key}": x for key, x in golden.theirs("weights.").items()}
    save_file(state, folder / "model.safetensors")
    convert(open_checkpoint(folder, layout, flash_semantics=True), tmp_path / "back")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "back").model.layers[layer].self_attn
    output = run_attention(golden.config, layer, converted.state_dict(), golden.input, "eager")[0]
    assert relative_error(output, golden.output) <= 2e-6


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(["unilm", "yoco", "diffllama"]),
    heads=st.integers(1, 3),
    groups=st.integers(1, 2),
    d=st.sampled_from([2, 6, 8]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
)
def test_any_shape_comes_back(tmp_path_factory, layout, heads, groups, d, layers, tied):
    folder = tmp_path_factory.mktemp("shape")
    model = make_model(
        hidden_size=20,
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        head_dim=2 * d,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
    )
    theirs = out(save(model, folder / "ours"), layout, folder / "theirs")
    convert(open_checkpoint(theirs, layout, flash_semantics=True), folder / "back")
    back = DiffTransformerForCausalLM.from_pretrained(folder / "back").eval()
    with torch.no_grad():
        assert relative_error(back(IDS).logits, model(IDS).logits) < 1e-5


def test_other_naming_schemes(tmp_path):
    model = make_model()
    yoco = out(save(model, tmp_path / "ours"), "yoco", tmp_path / "yoco")
    state = state_of(yoco)
    for short, name in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "out_proj")):
        state = {key.replace(f"attention.{short}.", f"attention.{name}."): x for key, x in state.items()}
    save_file(state, yoco / "model.safetensors")
    source = open_checkpoint(yoco, "yoco", flash_semantics=True)
    convert(source, tmp_path / "from_yoco")
    assert_equal_states(state_of(tmp_path / "ours"), state_of(tmp_path / "from_yoco"))

    unilm = out(tmp_path / "ours", "unilm", tmp_path / "unilm")
    state = {key.replace("model.layers", "decoder.blocks"): x for key, x in state_of(unilm).items()}
    save_file(state, unilm / "model.safetensors")
    arguments = ["convert", str(unilm), str(tmp_path / "from_unilm"), "--from", "unilm", "--flash-semantics"]
    assert main([*arguments, "--rename", "model.layers", "decoder.blocks"]) == 0
    assert_equal_states(state_of(tmp_path / "ours"), state_of(tmp_path / "from_unilm"))


def test_torch_files_and_arguments(tmp_path, capsys):
    model = make_model(rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    yoco = out(save(model, tmp_path / "ours"), "yoco", tmp_path / "yoco", max_shard_size="40KB")
    torch.save({"model": state_of(yoco), "step": 7}, tmp_path / "checkpoint.pt")
    arguments = ["convert", str(tmp_path / "checkpoint.pt"), str(tmp_path / "back"), "--from", "yoco"]
    arguments += ["--state-key", "model", "--flash-semantics", "--rope-theta", "500", "--norm-eps", "1e-6"]
    arguments += ["--max-positions", "512", "--heads", "4", "--head-dim", "16", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("2 layers of 64, 4 heads and 2 key heads of 2d = 16", "float32", "Plan", "next token", "ok"):
        assert text in printed
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16 and back.config.max_position_embeddings == 512
    assert back.config.rope_parameters["rope_theta"] == 500.0 and back.config.rms_norm_eps == 1e-6
    lambdas = state_of(tmp_path / "back")["model.layers.0.self_attn.lambda_q1"]
    assert lambdas.dtype == torch.float32, "lambda vectors keep their type"


def test_sharded_torch_files_beside_those_of_a_trainer(tmp_path):
    ours = save(make_model(), tmp_path / "ours")
    state = state_of(out(ours, "yoco", tmp_path / "yoco"))
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(state)
    weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(Malicious(), folder / "training_args.bin")
    for i in range(2):
        convert(open_checkpoint(folder, "yoco", flash_semantics=True), tmp_path / f"back{i}")
        assert_equal_states(state_of(ours), state_of(tmp_path / f"back{i}"))
        (folder / "pytorch_model.bin.index.json").unlink(missing_ok=True)


def test_ablations_and_biases(tmp_path):
    model = make_model(use_subln=False)
    theirs = out(save(model, tmp_path / "ours"), "yoco", tmp_path / "yoco")
    convert(open_checkpoint(theirs, "yoco", flash_semantics=True), tmp_path / "back")
    assert_equal_states(state_of(tmp_path / "ours"), state_of(tmp_path / "back"))
    with pytest.raises(ValueError, match="use_subln=False, which diffllama cannot represent"):
        out(tmp_path / "ours", "diffllama", tmp_path / "none")
    unscaled = save(make_model(use_head_scale=False), tmp_path / "unscaled")
    for layout in ("diffllama", "yoco"):
        with pytest.raises(ValueError, match=f"use_head_scale=False, which {layout} cannot represent"):
            out(unscaled, layout, tmp_path / "none")

    with pytest.raises(ValueError, match="mlp_bias=True, .*which diffllama cannot represent"):
        out(save(make_model(mlp_bias=True), tmp_path / "mlp_biased"), "diffllama", tmp_path / "none")

    biased = make_model(attention_bias=True)
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    theirs = out(save(biased, tmp_path / "biased"), "diffllama", tmp_path / "biased_diffllama")
    convert(open_checkpoint(theirs, "diffllama"), tmp_path / "biased_back")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "biased_back").eval()
    with torch.no_grad():
        assert relative_error(back(IDS).logits, biased(IDS).logits) < 1e-5


# ---------------------------------------------------------------------- verification


@pytest.mark.parametrize(
    ("layout", "config_class"),
    [("unilm", DiffTransformerConfig), ("diffllama", DiffTransformerConfig), ("unilm_v2", DiffTransformerV2Config)],
)
def test_verification_computes_what_models_compute(tmp_path, layout, config_class):
    """The golden files tie the reference for the authors' layouts to their code, in a test above."""
    model = make_model(config_class)
    theirs = out(save(model, tmp_path / "ours"), layout, tmp_path / "theirs")
    with torch.no_grad():
        expected = model(IDS).logits
    for folder, name in ((tmp_path / "ours", LAYOUTS[layout].ours), (theirs, layout)):
        assert relative_error(logits_of(open_checkpoint(folder, name, flash_semantics=True)), expected) < 1e-5


@pytest.mark.parametrize(
    ("layout", "config_class"),
    [("yoco", DiffTransformerConfig), ("diffllama", DiffTransformerConfig), ("unilm_v2", DiffTransformerV2Config)],
)
def test_a_wrong_permutation_fails_by_orders_of_magnitude(tmp_path, monkeypatch, layout, config_class):
    theirs = out(save(make_model(config_class), tmp_path / "ours"), layout, tmp_path / "theirs")
    source = open_checkpoint(theirs, layout, flash_semantics=True)
    right = compare(source, open_checkpoint(tmp_path / "ours", LAYOUTS[layout].ours), 1e-4)
    assert all(verdict.passed for verdict in right)
    wrong = replace(source.layout, interleaved_rotary=False, heads_in_blocks=False)
    into_ours = Layout.into_ours
    monkeypatch.setattr(Layout, "into_ours", lambda _, *rest: into_ours(wrong, *rest))
    with pytest.raises(VerificationError, match="WRONG"):
        convert(source, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"], "a failed check left something"
    convert(source, tmp_path / "back", verify=False)
    verdicts = compare(source, open_checkpoint(tmp_path / "back", LAYOUTS[layout].ours), 1e-4)
    assert min(verdict.max_difference for verdict in verdicts) > 1e3 * max(verdict.max_difference for verdict in right)


def test_verify_command(tmp_path, capsys):
    ours = save(make_model(), tmp_path / "ours")
    theirs = out(ours, "yoco", tmp_path / "theirs")
    arguments = ["verify", str(theirs), str(ours), "--from", "yoco", "--flash-semantics"]
    assert main(arguments) == 0
    assert main([*arguments, "--rope-theta", "9000"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_layout_that_contradicts_the_configuration_is_rejected(tmp_path, capsys):
    """A DiffLlama has the names and shapes of ours without head norms: read as ours it computes something else."""
    ours = save(make_model(), tmp_path / "ours")
    theirs = out(ours, "diffllama", tmp_path / "theirs")
    assert main(["verify", str(ours), str(theirs)]) == 1
    assert "states diffllama, but diff_transformer was requested" in capsys.readouterr().err
    assert main(["verify", str(ours), str(theirs), "--to", "diffllama"]) == 0


# ---------------------------------------------------------------------- strictness


def damaged(tmp_path, change):
    """A yoco folder whose tensors `change` has modified."""
    folder = out(save(make_model(), tmp_path / "ours"), "yoco", tmp_path / "theirs")
    state = state_of(folder)
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def test_all_faults_are_listed_at_once(tmp_path, capsys):
    def change(state):
        del state["layers.0.ffn_norm.weight"], state["layers.1.attention.wv.weight"]
        state["layers.1.feed_forward.w2.weight"] = torch.zeros(64, 71)
        state["layers.0.attention.rope.freqs"] = torch.zeros(3)
        state["norm.weight"] = torch.zeros(64, dtype=torch.int64)

    folder = damaged(tmp_path, change)
    arguments = ["convert", str(folder), str(tmp_path / "back"), "--from", "yoco", "--flash-semantics"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    for fault in (
        "missing: layers.0.ffn_norm.weight (64,)",
        "missing: layers.1.attention.wv.weight (32, 64)",
        "unknown: layers.0.attention.rope.freqs (3,)",
        "wrong shape: layers.1.feed_forward.w2.weight is (64, 71), not (64, 72)",
        "wrong type: norm.weight is torch.int64",
    ):
        assert fault in error
    assert not (tmp_path / "back").exists()


def test_tensors_are_left_out_only_if_named(tmp_path):
    folder = damaged(tmp_path, lambda state: state.update({"rope.freqs": torch.zeros(3)}))
    with pytest.raises(ValueError, match="unknown: rope.freqs"):
        open_checkpoint(folder, "yoco", flash_semantics=True)
    source = open_checkpoint(folder, "yoco", flash_semantics=True, ignore=(r"rope\..*",))
    convert(source, tmp_path / "back")
    assert_equal_states(state_of(tmp_path / "ours"), state_of(tmp_path / "back"))


def test_a_name_in_two_files_is_an_error(tmp_path):
    folder = out(save(make_model(), tmp_path / "ours"), "yoco", tmp_path / "theirs")
    save_file({"norm.weight": torch.zeros(64)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"more than once.*\n  norm.weight: model.safetensors, other.safetensors"):
        open_checkpoint(folder, "yoco")


def test_contradictions_show_the_arithmetic(tmp_path):
    v2 = out(save(make_model(DiffTransformerV2Config), tmp_path / "v2"), "unilm_v2", tmp_path / "theirs_v2")
    (three := tmp_path / "three").mkdir()
    lambda_proj = {"model.layers.0.self_attn.lambda_proj.weight": torch.zeros(3, 64)}
    save_file(state_of(v2) | lambda_proj, three / "model.safetensors")
    folder = out(save(make_model(), tmp_path / "ours"), "yoco", tmp_path / "theirs")
    odd = damaged(tmp_path / "odd", lambda state: state.update({"layers.0.attention.wk.weight": torch.zeros(40, 64)}))
    flat = damaged(tmp_path / "flat", lambda state: state.update({"tok_embeddings.weight": torch.zeros(96)}))
    (bare := tmp_path / "bare").mkdir()
    save_file(state_of(folder), bare / "model.safetensors")
    for place, layout, sizes, message in (
        (folder, "yoco", {"num_attention_heads": 8}, r"num_attention_heads=8 was given.*imply 4.*64 rows = 4 x 16"),
        (folder, "yoco", {"head_dim": 8}, "head_dim=8 was given"),
        (folder, "unilm", {}, "config.json states yoco, but unilm was requested"),
        (bare, "unilm", {}, "no 'model.embed_tokens.weight', by which a unilm checkpoint is recognized"),
        (bare, "diffllama", {}, "config.json does not exist"),
        (v2, "unilm_v2", {"num_attention_heads": 2}, "num_attention_heads=2 was given.*128 rows = 4 x 32"),
        (three, "unilm_v2", {}, r"o_proj has 64 columns.*64 / 3 = 21.333 is not a whole number"),
        (odd, "yoco", {}, r"k_proj has 40 rows.*40 / 16 = 2.500 is not a whole number"),
        (flat, "yoco", {}, r"has the shape \(96,\); it must have 2 dimensions"),
        (tmp_path / "ours", "diff_transformer", {"rope_theta": 5.0}, "states this in its own config.json"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_checkpoint(place, layout, **sizes)


def test_grouped_queries_need_a_confirmation(tmp_path):
    folder = out(save(make_model(), tmp_path / "ours"), "unilm", tmp_path / "theirs")
    with pytest.raises(ValueError, match="--flash-semantics"):
        open_checkpoint(folder, "unilm")
    folder = out(save(make_model(num_key_value_heads=4), tmp_path / "mha"), "unilm", tmp_path / "theirs_mha")
    open_checkpoint(folder, "unilm")


def test_one_side_is_ours_and_no_side_both(tmp_path):
    folder = save(make_model(), tmp_path / "ours")
    with pytest.raises(ValueError, match="is the source itself"):
        out(folder, "yoco", folder, overwrite=True)
    with pytest.raises(ValueError, match="exactly one of the two"):
        out(folder, "diff_transformer", tmp_path / "copy")


# ---------------------------------------------------------------------- files


def test_no_pickle_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/model.pt").write_bytes(pickle.dumps(Malicious()))
    for name in ("model.pt", "model.bin"):
        torch.save({"norm.weight": Malicious()}, tmp_path / name)
    for place in ("model.pt", "model.bin", "plain"):
        with pytest.raises(ValueError, match="cannot be read as tensors alone"):
            open_checkpoint(tmp_path / place, "yoco")
    assert not (tmp_path / "executed").exists()


def test_damaged_and_missing_files(tmp_path):
    ours = save(make_model(), tmp_path / "ours")
    whole = out(ours, "yoco", tmp_path / "whole") / "model.safetensors"
    for name, content in (("cut", whole.read_bytes()[:-100]), ("zeros", b"\x00" * 64)):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    shards = out(ours, "yoco", tmp_path / "shards", max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    min(shards.glob("*.safetensors")).unlink()
    for name, index in (("no json", "{"), ("no map", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    (tmp_path / "empty").mkdir()
    torch.save({"weights": {}, "step": 3}, tmp_path / "deep.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    for place, options, error, message in (
        ("cut.safetensors", {}, ValueError, "not a complete safetensors file"),
        ("zeros.safetensors", {}, ValueError, "not a complete safetensors file"),
        ("no json", {}, ValueError, "is not an index of weight files"),
        ("no map", {}, ValueError, "is not an index of weight files"),
        ("shards", {}, FileNotFoundError, "names files that do not exist: model-00001"),
        ("empty", {}, FileNotFoundError, "holds no checkpoint"),
        ("nowhere", {}, FileNotFoundError, "does not exist"),
        ("deep.pt", {}, ValueError, "'weights', 'step' are something else"),
        ("deep.pt", {"state_key": "model"}, ValueError, "has no 'model'; its top-level keys are 'weights', 'step'"),
        ("list.pt", {}, ValueError, "holds a list, not a dict of tensors"),
    ):
        with pytest.raises(error, match=message):
            open_checkpoint(tmp_path / place, "yoco", **options)


def test_nothing_is_overwritten_without_overwrite(tmp_path):
    ours = save(make_model(), tmp_path / "ours")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/precious").write_text("kept")
    with pytest.raises(FileExistsError, match="--overwrite"):
        out(ours, "yoco", tmp_path / "there")
    assert (tmp_path / "there/precious").read_text() == "kept"
    out(ours, "yoco", tmp_path / "there", overwrite=True)
    assert not (tmp_path / "there/precious").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "there"]


def test_the_disk_is_checked_first(tmp_path, monkeypatch):
    ours = save(make_model(), tmp_path / "ours")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20})())
    with pytest.raises(OSError, match="MiB are needed"):
        out(ours, "yoco", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, capsys):
    """A limit on the size of files makes the write fail in the middle, as on a full disk."""
    ours = save(make_model(), tmp_path / "ours")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        code = main(["convert", str(ours), str(tmp_path / "theirs"), "--to", "yoco"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert code == 1 and "File too large" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_interrupted_conversion_cleans_up(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt  # not by SIGINT, which the background jobs of a shell ignore

    ours = save(make_model(), tmp_path / "ours")
    monkeypatch.setattr(tqdm, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(["convert", str(ours), str(tmp_path / "theirs"), "--to", "yoco"])
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


KILLED = """
import os, signal, sys
from tqdm import tqdm
from diff_transformer.conversion.__main__ import main
tqdm.update = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("config_class", "layouts"), [(DiffTransformerConfig, "--to yoco"), (LlamaConfig, "--from llama")]
)
def test_a_killed_conversion_leaves_no_folder(tmp_path, config_class, layouts):
    ours = save(make_model(config_class), tmp_path / "ours")
    arguments = ["convert", str(ours), str(tmp_path / "theirs"), *layouts.split(), "--max-shard-size", "40KB"]
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments]).returncode == -signal.SIGKILL
    assert not (tmp_path / "theirs").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "ours")
    assert left.name.startswith(".theirs.") and left.name.endswith(".part"), "what is left must not look whole"
    assert main(arguments) == 0, "the next attempt succeeds"
    assert (tmp_path / "theirs/model.safetensors.index.json").is_file()


# ---------------------------------------------------------------------- tokenizers


@pytest.mark.slow
def test_yoco_tokenizer_has_the_authors_ids(tmp_path):
    specials = {"<fim_prefix>": 100264, "<jupyter_code>": 100276, "<commit_after>": 100281, "<|endoftext|>": 100257}
    base = tiktoken.Encoding(**own_cl100k() | {"name": "cl100k_im", "special_tokens": specials})
    text = "def f(x):\n    return x ** 2  # naïve 中文 🎉\n<fim_prefix><jupyter_code><commit_after><|endoftext|>12345"
    expected = [i + 4 for i in base.encode(text, allowed_special="all")]
    built = yoco_tokenizer()
    built.save_pretrained(tmp_path)
    for tokenizer in (built, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer(text).input_ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text
        ids = tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"])
        assert ids == [0, 1, 2, 3] == [getattr(tokenizer, f"{n}_token_id") for n in ("bos", "pad", "eos", "unk")]
        assert len(tokenizer) == 100_286
        assert tokenizer("<s>a</s>").input_ids == [0, base.encode("a")[0] + 4, 2]


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = cl100k_tokenizer(vocab_size=256)
    model = make_model(vocab_size=len(tokenizer))
    ours = save(model, tmp_path / "ours")
    theirs = out(ours, "yoco", tmp_path / "theirs")
    tokenizer.save_pretrained(theirs)
    convert(open_checkpoint(theirs, "yoco", flash_semantics=True), tmp_path / "back")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config.eos_token_id == tokenizer.eos_token_id == back.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("Hi").input_ids == tokenizer("Hi").input_ids
    with pytest.raises(ValueError, match="do not belong together"):
        convert(open_checkpoint(theirs, "yoco", flash_semantics=True), tmp_path / "none", tokenizer="cl100k")


@pytest.mark.oldest
def test_remote_code_and_index_are_written(tmp_path):
    theirs = out(save(make_model(), tmp_path / "ours"), "yoco", tmp_path / "theirs")
    convert(open_checkpoint(theirs, "yoco", flash_semantics=True), tmp_path / "back", max_shard_size="40KB")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"config.json", "generation_config.json", "modeling_diff.py", "model.safetensors.index.json"} <= names
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state_of(tmp_path / "ours"))
    assert json.loads((tmp_path / "back/config.json").read_text())["architectures"] == ["DiffTransformerForCausalLM"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Llama with DIFF's head norm: its formula, and the way from `training.pretrain` to `diff-transformer evaluate`."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tolerances import assert_same_computation
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from diff_transformer.evaluation.__main__ import main as evaluate
from diff_transformer.evaluation.results import Results
from diff_transformer.llama_head_norm import LlamaHeadNormForCausalLM
from diff_transformer.training import pretrain
from diff_transformer.training.architectures import head_norm_twin, transformer_twin


@pytest.mark.oldest
@torch.no_grad()
@pytest.mark.parametrize(("use_head_scale", "scales"), [(True, [0.75, 0.4]), (False, [1.0, 1.0])])
def test_every_head_is_normalized_and_scaled(tiny_config, tmp_path, use_head_scale, scales):
    config = head_norm_twin(tiny_config(lambda_init=[0.25, 0.6], use_head_scale=use_head_scale))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(model, LlamaHeadNormForCausalLM) and config.num_attention_heads == 8
    for layer, scale in zip(model.model.layers, scales, strict=True):
        projection = layer.self_attn.o_proj
        torch.nn.init.uniform_(projection.norm.weight, 0.5, 1.5)

        def formula(heads, dtype, projection=projection, scale=scale):
            heads = heads.to(dtype).unflatten(-1, (8, 8))
            heads = heads / (heads.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            return (scale * projection.norm.weight * heads).flatten(-2) @ projection.weight.T.to(dtype)

        def check(module, inputs, output, formula=formula):
            assert_same_computation(output, *(formula(*inputs, dtype) for dtype in (torch.float32, torch.float64)))
            checked.append(module)

        projection.register_forward_hook(check)
    checked = []
    model(torch.randint(0, 199, (2, 19)))
    assert len(checked) == 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks for it by its old name
@torch.no_grad()
def test_lora_merges_to_the_same_function_and_leaves_the_projection_alone(tiny_config):
    model = AutoModelForCausalLM.from_config(head_norm_twin(tiny_config())).eval()
    tokens = torch.randint(0, 199, (2, 19))
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, target_modules="all-linear")
    adapted = get_peft_model(model, lora).double().eval()
    expected = adapted(tokens).logits
    assert not [name for name, _ in adapted.named_parameters() if "o_proj" in name and "lora" in name]
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, expected)


def test_begins_with_the_matrices_of_the_transformer_from_the_same_seed(tiny_config):
    models = []
    for config in (head_norm_twin(tiny_config()), transformer_twin(tiny_config())):
        torch.manual_seed(3)
        models.append(AutoModelForCausalLM.from_config(config))
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert type(models[1]) is LlamaForCausalLM and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    norms = {f"model.layers.{i}.self_attn.o_proj.norm.weight" for i in range(2)}
    assert ours.keys() - theirs.keys() == norms and all(ours[name].eq(1).all() for name in norms)


@pytest.mark.slow
def test_pretrained_checkpoint_is_evaluated(tmp_path):
    """The loss of a row is that of the loaded model, whose head norm was trained."""
    overrides = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = ["--architecture", "transformer_head_norm", "--config_overrides", json.dumps(overrides)]
    pretrain.main(["--smoke", *options, "--max_steps", "3", "--output_dir", str(tmp_path / "run")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    weights = [layer.self_attn.o_proj.norm.weight for layer in model.model.layers]
    assert (model.config.num_attention_heads, model.config.head_dim) == (4, 16)
    assert all((weight - 1).abs().max() > 1e-4 for weight in weights), "the head norm was not trained"

    text = "the ship left the port " * 60
    (tmp_path / "text.txt").write_text(text)
    out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    data = ["--dataset", str(tmp_path / "text.txt"), "--length", "64", "--documents", "1"]
    assert evaluate(["evaluate", "fine_grained_loss", "--model", f"GN={tmp_path / 'run/model'}", *data, *out]) == 0
    results = Results.load(tmp_path / "out/fine_grained_loss/GN.json")
    (cell,) = results.cells
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "run/model")(text)["input_ids"][:64]])
    assert results.model["model_type"] == "llama_head_norm"
    assert cell["all"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_scale_for_each_layer(tiny_config):
    config = head_norm_twin(tiny_config())
    config.head_scales = []
    with pytest.raises(ValueError, match=r"head_scales=\[\] was given for num_hidden_layers=2"):
        LlamaHeadNormForCausalLM(config)

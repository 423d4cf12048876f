# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The arms differ in what their names say, and in nothing else."""

import math

import pytest
import torch
from tolerances import assert_same_computation
from torch.nn.functional import cross_entropy, silu
from transformers import LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerV2Config
from diff_transformer.reproduction.arms import ARMS, layer_lambda_init, matrices_digest, new_model
from diff_transformer.reproduction.findings import check_parameters
from diff_transformer.reproduction.study import STUDIES, load_study
from diff_transformer.training.architectures import transformer_twin


def small_config(**kwargs) -> DiffTransformerConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return DiffTransformerConfig(**{"vocab_size": 61, "eos_token_id": None, **sizes, **kwargs})


def random_ids(config) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 19))


def formula(config: LlamaConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor, init=None) -> torch.Tensor:
    """The logits of a Llama whose heads are normalized and scaled, where it has weights for that. init: lambda_init,
    by default exponential."""
    n, width = ids.shape[1], config.head_dim

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rotate(x: torch.Tensor) -> torch.Tensor:  # (B, heads, T, width)
        frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=x.dtype) / width)
        turns = torch.outer(torch.arange(n, dtype=x.dtype), frequencies)
        a, b = x.chunk(2, -1)
        return torch.cat((a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()), -1)

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        y = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (y @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / math.sqrt(width)
        maps = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        heads = (maps @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2)
        if "self_attn.o_proj.norm.weight" in own:
            lambda_init = 0.8 - 0.6 * math.exp(-0.3 * i) if init is None else init
            heads = (1 - lambda_init) * norm(heads, prefix + "self_attn.o_proj.norm.weight")
        x = x + heads.flatten(2) @ own["self_attn.o_proj.weight"].T
        y = norm(x, prefix + "post_attention_layernorm.weight")
        hidden = silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + hidden @ own["mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def formula_and_gradients(model, ids: torch.Tensor, dtype: torch.dtype, init) -> dict[str, torch.Tensor]:
    weights = {name: x.detach().to(dtype).requires_grad_() for name, x in model.named_parameters()}
    logits = formula(model.config, weights, ids, init)
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {"logits": logits, **{name: x.grad for name, x in weights.items()}}


# ----------------------------------------------------------------------------------------- Llama with the head norm


@pytest.mark.oldest
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("arm", "groups", "init"), [("norm", 2, 0.8), ("norm", 1, None), ("wide_norm", 1, None)])
def test_head_norm_equals_its_formula(arm, groups, init, attention):
    sizes = {"hidden_size": 48, "head_dim": 32, "num_key_value_heads": groups, "initializer_range": 0.2}
    config = small_config(**sizes, lambda_init=init or "exponential")
    model = new_model(arm, config, 3, attn_implementation=attention)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    ids = random_ids(config)
    output = model(ids, labels=ids)
    output.loss.backward()
    ours = {"logits": output.logits, **{name: x.grad for name, x in model.named_parameters()}}
    reference, exact = (formula_and_gradients(model, ids, dtype, init) for dtype in (torch.float32, torch.float64))
    assert sum("o_proj.norm" in name for name in ours) == 2
    for name in ours:
        assert_same_computation(ours[name], reference[name], exact[name])


@torch.no_grad()
def test_diff_without_subtraction_is_a_transformer_with_wide_heads_and_the_norm():
    """With lambda = 0, q2 and k2 do not count. The wide head has q1 and k1 in the pairs of channels that turn as fast,
    and nothing in the others."""
    d, theta = 8, 100.0
    config = DiffTransformerConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=2 * d, rope_parameters={"rope_type": "default", "rope_theta": theta},
        initializer_range=0.2,
    )  # fmt: skip
    diff = DiffTransformerForCausalLM(config)
    faster = {"rope_type": "default", "rope_theta": theta**2}
    wide = new_model("wide_norm", DiffTransformerConfig.from_dict({**config.to_dict(), "rope_parameters": faster}), 0)
    weights = {name.replace("subln", "o_proj.norm"): x for name, x in diff.state_dict().items()}
    for i, layer in enumerate(diff.model.layers):
        attention = layer.self_attn
        for vector in (attention.lambda_q1, attention.lambda_k1, attention.lambda_q2, attention.lambda_k2):
            vector.zero_()
        attention.lambda_q2[0], attention.lambda_k2[0] = 1.0, math.log(1 + config.layer_lambda_init(i))
        assert attention.get_lambda().item() == pytest.approx(0.0, abs=1e-6)
        for name, scale in (("q_proj", math.sqrt(2)), ("k_proj", 1.0)):
            ours = getattr(attention, name).weight.unflatten(0, (-1, 4, d // 2))
            moved = torch.zeros_like(ours)
            moved[:, 0], moved[:, 2] = scale * ours[:, 0], scale * ours[:, 1]
            weights[f"model.layers.{i}.self_attn.{name}.weight"] = moved.flatten(0, 2)
    wide.load_state_dict({name: x for name, x in weights.items() if "lambda" not in name})
    ids = random_ids(config)
    exact = formula(wide.config, {name: x.double() for name, x in wide.named_parameters()}, ids)
    assert_same_computation(diff(ids).logits, wide(ids).logits, exact)


# ----------------------------------------------------------------------------------------------------------- all arms


@pytest.fixture
def config() -> DiffTransformerConfig:
    return small_config(num_key_value_heads=1)


def test_arms_are_what_their_names_say():
    config = small_config(num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    of = {arm: make(config) for arm, (_, make) in ARMS.items()}
    heads = {arm: (x.num_attention_heads, x.num_key_value_heads, x.head_dim) for arm, x in of.items()}
    narrow, wide = (4, 2, 8), (2, 1, 16)
    norms = {"diff_no_norm": (False, True), "diff_no_norm_no_factor": (False, False), "diff": (True, True)}
    assert heads == {
        "transformer": narrow, "norm": narrow, "wide": wide, "wide_norm": wide, **dict.fromkeys(norms, wide),
        "diff_v2": (8, 2, 8),
    }  # fmt: skip
    assert {arm: (of[arm].use_subln, of[arm].use_head_scale) for arm in norms} == norms
    assert {arm for arm, x in of.items() if type(x) is LlamaConfig} == {"transformer", "norm", "wide", "wide_norm"}
    assert "norm" not in str(new_model("transformer", config, 0).model.layers[0].self_attn)
    same = ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "initializer_range"]
    for arm, arms_config in of.items():
        assert all(getattr(arms_config, name) == getattr(config, name) for name in same), arm
        assert arms_config.rope_parameters["rope_theta"] == 77.0
        assert (arms_config.intermediate_size == 96) == (arm != "diff_v2")


@pytest.mark.parametrize("arm", ARMS)
def test_new_model_has_the_matrices_of_the_transformer(arm, config):
    model = new_model(arm, config, seed=5)
    torch.manual_seed(5)
    twin = dict(LlamaForCausalLM(transformer_twin(config)).named_parameters())
    copied = 0
    for name, weight in model.named_parameters():
        if name in twin and weight.ndim == 2:
            theirs = twin[name]
            if isinstance(model.config, DiffTransformerV2Config):
                theirs = theirs[: weight.shape[0], : weight.shape[1]]
                if "q_proj" in name:  # a query of 8, and one of its own
                    weight, theirs = weight.view(-1, 16, 32)[:, :8], twin[name].view(-1, 8, 32)
            assert torch.equal(weight, theirs), name
            copied += 1
        elif "norm" in name or "subln" in name:
            assert (weight == 1).all(), name
        else:
            assert "lambda" in name, name
    assert copied == 2 + 2 * 7


@torch.no_grad()
def test_new_model_of_v2_has_the_first_queries_of_the_transformer():
    """If the second queries equal the first ones and lambda is 1/2, half of the attention remains."""
    config = small_config(initializer_range=0.2)
    model, twin = new_model("diff_v2", config, 5), new_model("transformer", config, 5)
    width = model.config.intermediate_size
    for layer, theirs in zip(model.model.layers, twin.model.layers, strict=True):
        queries = layer.self_attn.q_proj.weight.view(-1, 2, 8, 32)
        queries[:, 1] = queries[:, 0]
        layer.self_attn.lambda_proj.weight.zero_()
        theirs.self_attn.o_proj.weight.div_(2)
        theirs.mlp.down_proj.weight[:, width:] = 0
    ids = random_ids(config)
    exact = formula(twin.config, {name: x.double() for name, x in twin.named_parameters()}, ids)
    assert_same_computation(model(ids).logits, twin(ids).logits, exact)


def test_matrices_digest_is_that_of_the_seed(config):
    digests = {matrices_digest(new_model(arm, config, seed=0)) for arm in ARMS}
    assert len(digests) == 1
    model = new_model("diff", config, seed=1)
    assert matrices_digest(model) not in digests
    before = matrices_digest(model)
    model.model.layers[1].self_attn.o_proj.weight.data[0, 0] += 1
    assert matrices_digest(model) != before


def test_lambda_init_is_that_of_diff():
    exponential, constant = small_config(), small_config(lambda_init=0.7)
    for arm in ARMS:
        has_one = arm not in ("transformer", "wide", "diff_v2")
        assert layer_lambda_init(arm, constant) == ([0.7, 0.7] if has_one else []), arm
        assert layer_lambda_init(arm, exponential) == pytest.approx([0.2, 0.355509] if has_one else []), arm


@pytest.mark.oldest
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_arms_have_equal_parameters_on_the_meta_device(path):
    for name, experiment in load_study(path).experiments.items():
        parameters = {}
        for arm in ARMS:  # whichever the study trains
            with torch.device("meta"):
                model = new_model(arm, experiment.make_config(), seed=0)
            assert model.device.type == "meta"
            parameters[arm] = model.num_parameters()
        check_parameters(name, parameters)

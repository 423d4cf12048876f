# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The budget's arithmetic against the models themselves, numbers worked out by hand, and docs/scale.md."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from diff_transformer import PAPER_SIZES, DiffTransformerConfig
from diff_transformer.flash_diff import _forward_op
from diff_transformer.training.architectures import diff_v2_twin, transformer_twin
from diff_transformer.training.budget import Budget, count_parameters, model_flops_per_token, peak_flops

DOCS = Path(__file__).parents[2] / "docs/scale.md"
LENGTH = 37


def twins(config: DiffTransformerConfig) -> list[PreTrainedConfig]:
    return [config, transformer_twin(config), diff_v2_twin(config)]


@pytest.fixture(params=["diff", "transformer", "diff_v2"])
def config(request, tiny_config) -> PreTrainedConfig:
    return dict(zip(("diff", "transformer", "diff_v2"), twins(tiny_config()), strict=True))[request.param]


def build(config: PreTrainedConfig, attn_implementation: str = "eager", **kwargs) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, **kwargs)


# ------------------------------------------------------------------------------------------------ parameters and FLOPs


def check_parameters(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = build(config)
    counted = count_parameters(config)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.layer == layer
    without = counted.total - counted.embeddings
    assert without == config.num_hidden_layers * layer + config.hidden_size, "embeddings were counted"


def test_parameters_of_the_paper_sizes():
    for size in PAPER_SIZES:
        for config in twins(DiffTransformerConfig.from_paper_size(size)):
            check_parameters(config)


def test_parameters_of_other_configurations(tiny_config):
    alone = [{"tie_word_embeddings": tied} for tied in (True, False)] + [{"num_key_value_heads": 1}, {"head_dim": 24}]
    poly_norm = {"hidden_act": "poly_norm"}
    for changes in (*alone, {"attention_bias": True, "mlp_bias": True}, {"use_subln": False}, poly_norm):
        config = tiny_config(**changes)
        check_parameters(config)
        if not {"attention_bias", "use_subln", "hidden_act"} & set(changes):  # the Transformer has none of them
            check_parameters(transformer_twin(config))
        for own in ({}, {"use_qk_norm": True}, {"attention_output_bias": not config.attention_bias}):
            check_parameters(diff_v2_twin(config, **own))


def counted_flops(model: torch.nn.Module, backward: bool = True) -> float:
    """FLOPs per token of the matrix products that torch runs."""
    ids = torch.randint(0, 199, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    # Before transformers 5.23, Llama computes the angles of its rotary embedding by a matrix product
    rotary = [counts for name, counts in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return (counter.get_total_flops() - sum(sum(counts.values()) for counts in rotary)) / LENGTH


def eager_flops(config: PreTrainedConfig, trainable_parameters: int | None = None) -> float:
    """Eager attention computes the full square, which is causal attention to twice as many tokens."""
    return model_flops_per_token(config, 2 * LENGTH, trainable_parameters)


def test_training_flops_are_three_forwards_as_torch_counts_them(config):
    # The oracle of V2 subtracts the maps before their product with the values: no implementation of size does that
    model = build(config, "sdpa" if config.model_type == "diff_transformer_v2" else "eager")
    with sdpa_kernel(SDPBackend.MATH):
        assert counted_flops(model) == 3 * counted_flops(model, backward=False) == eager_flops(config)


@pytest.mark.filterwarnings(  # peft asks by the old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning:transformers.modeling_utils"
)
def test_lora_flops_leave_out_the_gradients_of_frozen_weights(config):
    model = get_peft_model(
        build(config, "sdpa" if config.model_type == "diff_transformer_v2" else "eager"),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"]),
    )
    model.enable_input_require_grads()  # as checkpointing does, so that the first layer is like the others
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        assert counted_flops(model) == eager_flops(config, trainable)


def test_twins_cost_the_same():
    config = DiffTransformerConfig.from_paper_size("3B", num_key_value_heads=4)
    assert model_flops_per_token(config, 4096) == model_flops_per_token(transformer_twin(config), 4096)


def test_peak_flops_by_device_name():
    for device, expected in {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
        "NVIDIA RTX A1000": None,
        "NVIDIA GeForce RTX 4090": None,
        "": None,
    }.items():
        assert peak_flops(device) == expected, device


# -------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(config: PreTrainedConfig, attn_implementation: str, dtype: torch.dtype) -> float:
    """What autograd keeps of one layer for one token, weights left out, under autocast if the weights are float32."""
    model = build(config, attn_implementation, dtype=dtype).train()
    ids = torch.randint(0, 199, (1, LENGTH))
    totals = []
    for model.config.num_hidden_layers in (1, 2):
        kept = {}

        def keep(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            if LENGTH in tensor.shape:  # neither weights nor their copies in bfloat16
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            model.model(ids, use_cache=False)
        totals.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return (totals[1] - totals[0]) / LENGTH


def kernel_bytes(config: DiffTransformerConfig, fused_norm: bool) -> float:
    """What the Triton kernel keeps for one token beside its inputs."""
    shape = (1, LENGTH, config.num_attention_heads, config.head_dim)
    query, norm = torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.empty(config.head_dim, device="meta")
    call = (None, None, None, None, None, LENGTH, LENGTH, 1.0, True, 1e-5, 1.0)
    key = query[:, :, : config.num_key_value_heads]
    out, *kept = _forward_op(query, key, key, norm[0], norm if fused_norm else None, True, *call)
    kept += [] if fused_norm else [out]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) / LENGTH


@pytest.fixture
def wide(tiny_config):
    """Wide enough that the norms' statistics, a few numbers for a token, do not count."""

    def make(**kwargs) -> DiffTransformerConfig:
        return tiny_config(hidden_size=512, intermediate_size=768, num_attention_heads=4, **kwargs)

    return make


SHARDED = {"data_parallel": 2, "shard": 2}


def make_budget(config: PreTrainedConfig, length: int = 4096, tokens: float = 1e12, **kwargs) -> Budget:
    return Budget(config, length, tokens, **kwargs)


def test_activations_are_those_autograd_keeps(wide):
    twins = {"Transformer": transformer_twin(wide()), "V2": diff_v2_twin(wide())}
    twins["V2 with norms"] = diff_v2_twin(wide(), use_qk_norm=True)
    for (name, twin), (layout, dtype) in product(twins.items(), ((SHARDED, torch.bfloat16), ({}, torch.float32))):
        expected = make_budget(twin, **layout).activation_bytes_per_token
        assert saved_bytes(twin, "sdpa", dtype) == pytest.approx(expected, rel=0.005), f"{name}, {dtype}"


def test_activations_of_the_kernels(wide):
    """The CPU's kernel keeps its inputs alone. Without a head norm the model around it is what is left when the kernel
    computes the norm too."""
    for layout, fused_norm in ((SHARDED, True), ({"sequence_parallel": 2, "shard": 2}, False)):
        around = saved_bytes(wide(use_subln=not fused_norm), "flash_diff", torch.bfloat16)
        expected = make_budget(wide(), **layout).activation_bytes_per_token
        assert around + kernel_bytes(wide(), fused_norm) == pytest.approx(expected, rel=0.005)


def test_memory_of_the_3b_by_hand():
    config = DiffTransformerConfig.from_paper_size("3B")
    budget = make_budget(config, data_parallel=16, shard=8, per_device_batch_size=2)
    memory = budget.memory
    parameters, layer, embedding = 3_479_175_168, 113_253_120, 308_084_736
    # E = Q = K = 3072, F = 8192, 24 maps: 16 E + 8 Q + 4 K + 4 per map + 8 F bytes per layer and token
    kept = 28 * 3072 + 4 * 24 + 8 * 8192
    assert memory.weights == memory.gradients == memory.optimizer / 2 == parameters / 8 * 4
    assert memory.copies == 4 * (2 * layer + embedding)
    assert memory.activations == 8192 * (28 * kept + 6 * 8192 + 18 * 3072)
    assert memory.loss == 10 * 100_288 * 1024 + 10 * embedding
    assert sum(memory) == pytest.approx(48.85e9, rel=1e-3)

    checkpointed = replace(budget, activation_checkpointing=True).memory
    assert checkpointed.activations == 8192 * (28 * 2 * 3072 + kept + 6 * 8192 + 18 * 3072)

    ddp = replace(budget, shard=1).memory
    assert ddp.weights + ddp.gradients + ddp.optimizer == 16 * parameters
    assert ddp.copies == 6 * parameters, "weights in bf16 and the buckets that gradients are sent in"
    assert make_budget(config).memory.copies == 2 * parameters, "one GPU sends nothing"


def test_memory_of_parallel_sequences():
    config = DiffTransformerConfig.from_paper_size("3B")
    one = make_budget(config, 65536, data_parallel=8, shard=8)
    split = replace(one, data_parallel=2, sequence_parallel=4)
    per_token = split.activation_bytes_per_token - one.activation_bytes_per_token
    a, b = one.memory, split.memory
    assert b.activations - 16384 * 28 * per_token == pytest.approx(a.activations / 4)
    assert (a.weights, a.optimizer, a.copies) == (b.weights, b.optimizer, b.copies)


def test_memory_of_accumulated_gradients():
    """FSDP2 keeps those of the whole model, in bf16, from one backward to the next."""
    config = DiffTransformerConfig.from_paper_size("3B")
    budget = make_budget(config, data_parallel=8, shard=8, gradient_accumulation_steps=4)
    late, early = (replace(budget, sync_each_batch=sync).memory for sync in (False, True))
    assert late.copies - early.copies == 2 * count_parameters(config).total
    assert replace(budget, gradient_accumulation_steps=1).memory == early


def test_memory_of_lora():
    config, adapters = DiffTransformerConfig.from_paper_size("3B"), 10_000_000
    memory = make_budget(config, trainable_parameters=adapters).memory
    assert memory.weights == 4 * (count_parameters(config).total + adapters)
    assert (memory.gradients, memory.optimizer) == (4 * adapters, 8 * adapters)
    assert memory.loss == 10 * config.vocab_size * 1024, "a frozen head has no gradient"


# ---------------------------------------------------------------------------------------------------------- the budget


@pytest.fixture
def budget() -> Budget:
    config = DiffTransformerConfig.from_paper_size("3B")
    layout = {"data_parallel": 64, "shard": 64, "per_device_batch_size": 4, "gradient_accumulation_steps": 4}
    hardware = {"gpu": "H100", "peak_flops_per_device": 989e12, "gpu_memory": 80e9}
    return make_budget(config, **layout, **hardware, mfu=0.5)


def test_steps_and_hours_by_hand(budget):
    assert budget.tokens_per_step == 4_194_304
    assert budget.steps == 238_419, "1e12 / 4,194,304 is 238,418.6"
    flops = 3 * (2 * 28 * (4 * 3072**2 + 3 * 3072 * 8192) + 2 * 28 * 2048 * 2 * 3072 + 2 * 100_288 * 3072)
    assert budget.flops_per_token == flops
    assert budget.tokens_per_second == pytest.approx(0.5 * 64 * 989e12 / flops)
    assert budget.hours == pytest.approx(238_419 * 4_194_304 * flops / (0.5 * 64 * 989e12) / 3600)
    assumed = replace(budget, mfu=None)
    assert assumed.hours == pytest.approx(budget.hours * 0.5 / 0.4)
    assert "at 40% MFU, assumed, not measured" in str(assumed)


def test_printed_lines(budget):
    lines = dict(line.split(maxsplit=1) for line in str(budget).splitlines())
    assert list(lines) == ["Model", "Data", "Layout", "Compute", "Memory", "Time"]
    assert lines["Model"] == "3.48 B parameters (3.17 B without embeddings)"
    assert lines["Data"] == "1.00 T tokens = 238,419 steps of 4.19 M tokens"
    again = str(replace(budget, num_rows=150_000_000)).splitlines()[1]
    assert again == f"Data     {lines['Data']}, 1.63 passes over 150,000,000 sequences", "238,419 x 1,024 / 150 M"
    assert lines["Layout"].startswith("64 GPUs, sharded over 64, batch 4 x 4, no checkpointing")
    assert lines["Memory"].endswith("DOES NOT FIT into 90% of 80 GB")
    assert f"{budget.hours:,.1f} hours on 64 x H100" in lines["Time"] and "50% MFU" in lines["Time"]
    assert "fits into 90% of 141 GB" in str(replace(budget, gpu_memory=141e9))


def test_printed_lines_without_hardware(budget):
    text = str(make_budget(budget.config, gpu="CPU"))
    assert "unknown without the peak FLOP/s of CPU: --peak_tflops" in text
    assert "1 GPU, batch 1 x 1" in text and "fit" not in text.lower()
    assert "frozen; 10.0 M are trained" in str(replace(budget, trainable_parameters=10_000_000))


def test_budget_rejects(budget):
    with pytest.raises(ValueError, match="model type 'gpt2'.*diff_transformer, diff_transformer_v2, llama"):
        count_parameters(GPT2Config())
    for name, value in (("mfu", 0.0), ("mfu", 40), ("tokens", 0), ("peak_flops_per_device", -1.0)):
        with pytest.raises(ValueError, match=f"{name}={value} was given; it "):
            replace(budget, **{name: value})


def test_docs_show_what_is_printed():
    config = DiffTransformerConfig.from_paper_size("3B")
    layout = {"data_parallel": 64, "shard": 64, "activation_checkpointing": True}
    hardware = {"gpu": "H100", "peak_flops_per_device": 989e12, "gpu_memory": 80e9}
    printed = str(make_budget(config, 65536, 1.5e9, **layout, **hardware, mfu=0.22))
    assert f"```\n{printed}\n```" in DOCS.read_text(), f"docs/scale.md has drifted:\n{printed}"

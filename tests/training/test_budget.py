# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The budget's arithmetic against the models themselves, numbers worked out by hand, and docs/scale.md."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from diff_transformer import PAPER_SIZES, DiffTransformerConfig
from diff_transformer.flash_diff import _forward_op
from diff_transformer.training.budget import (
    GPUS,
    USABLE_MEMORY,
    UTILISATION,
    Budget,
    Layout,
    activation_bytes_per_token,
    count_parameters,
    executed_flops_per_token,
    flops_per_token,
    main,
    memory_per_gpu,
    mfu,
    model_flops_per_token,
    peak_flops,
    recommend_layout,
    smallest_tokens_per_step,
)
from diff_transformer.training.models import transformer_twin

DOCS = Path(__file__).parents[2] / "docs/scale.md"
LENGTH = 37


def twins(config: DiffTransformerConfig) -> list[PreTrainedConfig]:
    return [config, transformer_twin(config)]


@pytest.fixture(params=["diff", "twin"])
def config(request, tiny_config) -> PreTrainedConfig:
    return twins(tiny_config())[request.param == "twin"]


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
    assert counted.non_embedding == config.num_hidden_layers * layer + config.hidden_size, "embeddings were counted"


@pytest.mark.parametrize("size", PAPER_SIZES)
def test_parameters_of_the_paper_sizes(size):
    for config in twins(DiffTransformerConfig.from_paper_size(size)):
        check_parameters(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 1},
        {"head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"use_subln": False},
    ],
)
def test_parameters_of_other_configurations(changes, tiny_config):
    config = tiny_config(**changes)
    check_parameters(config)
    if not {"attention_bias", "use_subln"} & set(changes):  # a twin has neither
        check_parameters(transformer_twin(config))


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="model type 'gpt2'.*diff_transformer and its twin, llama"):
        count_parameters(GPT2Config())


def counted_flops(model: torch.nn.Module, backward: bool = True, length: int = LENGTH) -> float:
    """For one token, as torch counts the matrix products that it runs."""
    ids = torch.randint(0, 199, (1, length))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    # Before transformers 5.23, Llama computes the angles of its rotary embedding by a matrix product
    rotary = [counts for name, counts in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return (counter.get_total_flops() - sum(sum(counts.values()) for counts in rotary)) / length


def eager_flops(config: PreTrainedConfig) -> float:
    return flops_per_token(config, LENGTH, causal=False).total  # eager attention computes the full square


def test_forward_flops_are_those_torch_counts(config):
    assert counted_flops(build(config), backward=False) == eager_flops(config)


def test_training_flops_are_three_forwards(config):
    assert counted_flops(build(config)) == 3 * eager_flops(config)
    assert model_flops_per_token(config, LENGTH) == 3 * flops_per_token(config, LENGTH).total


def test_checkpointing_adds_a_forward_of_the_layers(config):
    model = build(config).train()
    without = counted_flops(model)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # transformers < 5.23
        model.gradient_checkpointing_enable()
    with set_checkpoint_early_stop(False):  # torch leaves a layer's last product out of the second forward
        added = counted_flops(model) - without
    forward = flops_per_token(config, LENGTH, causal=False)
    assert added == forward.layers + forward.attention


@pytest.mark.filterwarnings(  # peft asks by the old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning:transformers.modeling_utils"
)
def test_lora_flops_leave_out_the_gradients_of_frozen_weights(config):
    model = get_peft_model(
        build(config), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    )
    model.enable_input_require_grads()  # as checkpointing does, so that the first layer is like the others
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    full_square = flops_per_token(config, LENGTH, causal=False).attention
    expected = model_flops_per_token(config, LENGTH, trainable) + 3 * full_square / 2
    assert counted_flops(model) == expected


def test_causal_attention_is_half_the_square(config):
    causal, full = (flops_per_token(config, LENGTH, causal=c) for c in (True, False))
    assert 2 * causal.attention == full.attention
    assert (causal.layers, causal.head) == (full.layers, full.head)


def test_twins_cost_the_same():
    config = DiffTransformerConfig.from_paper_size("3B", num_key_value_heads=4)
    assert flops_per_token(config, 4096) == flops_per_token(transformer_twin(config), 4096)


def test_executed_flops_of_the_kernels():
    """docs/how_it_works.md: in units of which the model needs 4 + 8 for forward and backward, our kernels take 6 + 14;
    flash kernels of standard attention take 4 + 10."""
    diff, twin = twins(DiffTransformerConfig.from_paper_size("3B"))
    model = flops_per_token(diff, 65536)
    for config, units in ((diff, 6 + 14), (twin, 4 + 10)):
        executed = executed_flops_per_token(config, 65536)
        assert executed == pytest.approx(3 * model.layers + 3 * model.head + units / 4 * model.attention)
    checkpointed = executed_flops_per_token(diff, 65536, activation_checkpointing=True)
    assert checkpointed - executed_flops_per_token(diff, 65536) == pytest.approx(
        model.layers + 6 / 4 * model.attention
    )


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_peak_flops_by_device_name(device, expected):
    assert peak_flops(device) == expected


def test_mfu_by_hand(config):
    flops = model_flops_per_token(config, 128)
    assert mfu(1000, config, 128, num_gpus=4, peak_flops_per_device=1e9) == pytest.approx(1000 * flops / 4e9)


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


def test_activations_are_those_autograd_keeps(wide):
    sharded, replicated = Layout(data_parallel=2, shard=2), Layout()
    twin = transformer_twin(wide())
    expected = activation_bytes_per_token(twin, sharded)
    assert saved_bytes(twin, "sdpa", torch.bfloat16) == pytest.approx(expected, rel=0.005)
    expected = activation_bytes_per_token(twin, replicated)
    assert saved_bytes(twin, "sdpa", torch.float32) == pytest.approx(expected, rel=0.005), "under autocast"


def test_activations_of_the_kernels(wide):
    """The CPU's kernel keeps its inputs alone. Without a head norm the model around it is what is left when the kernel
    computes the norm too."""
    fused, split = Layout(data_parallel=2, shard=2), Layout(sequence_parallel=2, shard=2)
    for layout, fused_norm in ((fused, True), (split, False)):
        around = saved_bytes(wide(use_subln=not fused_norm), "flash_diff", torch.bfloat16)
        expected = activation_bytes_per_token(wide(), layout)
        assert around + kernel_bytes(wide(), fused_norm) == pytest.approx(expected, rel=0.005)


def test_memory_of_the_3b_by_hand():
    config = DiffTransformerConfig.from_paper_size("3B")
    layout = Layout(data_parallel=16, shard=8, per_device_batch_size=2)
    memory = memory_per_gpu(config, 4096, layout, loss_chunk=1024)
    parameters, layer, embedding = 3_479_175_168, 113_253_120, 308_084_736
    # E = Q = K = 3072, F = 8192, 24 maps: 16 E + 8 Q + 4 K + 4 M + 8 F bytes of a layer for a token
    kept = 28 * 3072 + 4 * 24 + 8 * 8192
    assert memory.weights == memory.gradients == memory.optimizer / 2 == parameters / 8 * 4
    assert memory.copies == 4 * (2 * layer + embedding)
    assert memory.activations == 8192 * (28 * kept + 6 * 8192 + 18 * 3072)
    assert memory.loss == 10 * 100_288 * 1024 + 10 * embedding
    assert memory.total == sum(memory) == pytest.approx(48.85e9, rel=1e-3)

    checkpointed = memory_per_gpu(config, 4096, replace(layout, activation_checkpointing=True), loss_chunk=None)
    assert checkpointed.activations == 8192 * (28 * 2 * 3072 + kept + 6 * 8192 + 18 * 3072)
    assert checkpointed.loss == 10 * 100_288 * 8192 + 10 * embedding

    ddp = memory_per_gpu(config, 4096, replace(layout, shard=1))
    assert ddp.weights + ddp.gradients + ddp.optimizer == 16 * parameters
    assert ddp.copies == 6 * parameters, "weights in bf16 and the buckets that gradients are sent in"
    assert memory_per_gpu(config, 4096, Layout()).copies == 2 * parameters, "one GPU sends nothing"


def test_memory_of_parallel_sequences_and_tensors():
    config = DiffTransformerConfig.from_paper_size("3B")
    one = Layout(data_parallel=8, shard=8)
    split = replace(one, data_parallel=2, sequence_parallel=4)
    per_token = activation_bytes_per_token(config, split) - activation_bytes_per_token(config, one)
    a, b = (memory_per_gpu(config, 65536, layout) for layout in (one, split))
    assert b.activations - 16384 * 28 * per_token == pytest.approx(a.activations / 4)
    assert (a.weights, a.optimizer, a.copies) == (b.weights, b.optimizer, b.copies)
    halved = memory_per_gpu(config, 65536, replace(one, tensor_parallel=2))
    assert halved.weights == a.weights / 2 and a.activations / 2 < halved.activations < a.activations


def test_memory_of_accumulated_gradients():
    """FSDP2 keeps those of the whole model, in bf16, from one backward to the next."""
    config = DiffTransformerConfig.from_paper_size("3B")
    layout = Layout(data_parallel=8, shard=8, gradient_accumulation_steps=4)
    late, early = (memory_per_gpu(config, 4096, replace(layout, sync_each_batch=s)) for s in (False, True))
    assert late.copies - early.copies == 2 * count_parameters(config).total
    assert memory_per_gpu(config, 4096, replace(layout, gradient_accumulation_steps=1)) == early


def test_memory_of_lora():
    config, adapters = DiffTransformerConfig.from_paper_size("3B"), 10_000_000
    memory = memory_per_gpu(config, 4096, Layout(), trainable_parameters=adapters)
    assert memory.weights == 4 * (count_parameters(config).total + adapters)
    assert (memory.gradients, memory.optimizer) == (4 * adapters, 8 * adapters)
    assert memory.loss == 10 * config.vocab_size * 1024, "a frozen head has no gradient"


# ---------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("gpu", ["H100", "H200"])
@pytest.mark.parametrize("num_gpus", [8, 64, 512])
@pytest.mark.parametrize("length", [4096, 65536])
@pytest.mark.parametrize("size", ["3B", "13.1B"])
def test_recommended_layouts_fit_and_keep_the_batch(size, length, num_gpus, gpu):
    config = DiffTransformerConfig.from_paper_size(size)
    target = max(2**22, smallest_tokens_per_step(config, length, num_gpus))
    layout = recommend_layout(config, length, num_gpus, GPUS[gpu].memory, target)
    memory = memory_per_gpu(config, length, layout)
    assert layout.num_gpus == num_gpus
    assert layout.tokens_per_step(length) == target == (2**23 if (num_gpus, length) == (512, 65536) else 2**22)
    assert memory.total <= USABLE_MEMORY * GPUS[gpu].memory
    assert config.num_attention_heads % layout.sequence_parallel == 0, "Ulysses needs whole heads"
    assert (layout.recipe == "ulysses.yaml") == (layout.sequence_parallel > 1)


def test_layouts_prefer_what_costs_less():
    small, large = (DiffTransformerConfig.from_paper_size(size) for size in ("830M", "13.1B"))
    assert recommend_layout(small, 2048, 8, 80e9, 2**18).recipe == "ddp.yaml"
    assert recommend_layout(small, 2048, 64, 80e9, 2**18).shard == 8, "beyond a node, gradients are sent in shards"
    layout = recommend_layout(large, 4096, 8, 80e9)
    assert (layout.shard, layout.activation_checkpointing, layout.sequence_parallel) == (8, True, 1)
    assert recommend_layout(large, 65536, 8, 80e9).sequence_parallel == 2, "a sequence does not fit on a GPU"
    assert recommend_layout(large, 65536, 64, 80e9).sequence_parallel == 1, "smaller shards make room for it"


def test_steps_are_rounded_to_whole_sequences():
    config = DiffTransformerConfig.from_paper_size("830M")
    layout = recommend_layout(config, 4096, 24, 80e9)  # 1024 sequences over 24 GPUs: 42.67 each
    assert layout.per_device_batch_size * layout.gradient_accumulation_steps == 43


def test_what_does_not_fit_is_refused_with_the_numbers():
    config = DiffTransformerConfig.from_paper_size("13.1B")
    with pytest.raises(ValueError, match=r"13\.1 B parameters .* do not fit on 1 GPUs of 80 GB.*needs 2\d\d\.\d GB"):
        recommend_layout(config, 4096, 1, 80e9)
    with pytest.raises(ValueError, match=r"at least 8,388,608 tokens.*over 4 GPUs at most.*divisor of 512 and the 20"):
        recommend_layout(config, 65536, 512, 80e9)


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="shard=3 was given.*4 x 2.*Choose a divisor of 8"):
        Layout(data_parallel=4, sequence_parallel=2, shard=3)
    with pytest.raises(ValueError, match="per_device_batch_size=0 was given; it must be at least 1"):
        Layout(per_device_batch_size=0)


# ---------------------------------------------------------------------------------------------------------- the budget


@pytest.fixture
def budget() -> Budget:
    config = DiffTransformerConfig.from_paper_size("3B")
    layout = Layout(data_parallel=64, shard=64, per_device_batch_size=4, gradient_accumulation_steps=4)
    return Budget(config, 4096, 1e12, layout, "H100", 989e12, 80e9, mfu=0.5)


def test_steps_and_hours_by_hand(budget):
    assert budget.tokens_per_step == 4_194_304
    assert budget.steps == 238_419, "1e12 / 4,194,304 is 238,418.6"
    flops = 3 * (2 * 28 * (4 * 3072**2 + 3 * 3072 * 8192) + 2 * 28 * 2048 * 2 * 3072 + 2 * 100_288 * 3072)
    assert budget.flops_per_token == flops
    assert budget.tokens_per_second == pytest.approx(0.5 * 64 * 989e12 / flops)
    assert budget.hours == pytest.approx(238_419 * 4_194_304 * flops / (0.5 * 64 * 989e12) / 3600)
    given = mfu(budget.tokens_per_second, budget.config, 4096, 64, 989e12)
    assert given == pytest.approx(0.5), "mfu and tokens_per_second are one another's inverse"


def test_without_an_mfu_the_utilisation_of_executed_flops_is_assumed(budget):
    assumed = replace(budget, mfu=None)
    executed = executed_flops_per_token(budget.config, 4096)
    assert assumed.tokens_per_second == pytest.approx(UTILISATION * 64 * 989e12 / executed)
    assert assumed.expected_mfu < UTILISATION
    assert "38% MFU (40% of the peak with all that is executed): assumed, not measured" in str(assumed)


def test_printed_lines(budget):
    lines = dict(line.split(maxsplit=1) for line in str(budget).splitlines())
    assert list(lines) == ["Model", "Data", "Layout", "Compute", "Memory", "Time"]
    assert lines["Model"] == "3.48 B parameters (3.17 B without embeddings)"
    assert lines["Data"] == "1.00 T tokens = 238,419 steps of 4.19 M tokens"
    assert lines["Layout"].startswith("64 GPUs, fsdp2.yaml, shards over 64, batch 4 x 4, no checkpointing")
    assert lines["Memory"].endswith("DOES NOT FIT into 90% of 80 GB")
    assert f"{budget.hours:,.1f} hours on 64 x H100" in lines["Time"] and "50% MFU" in lines["Time"]
    assert "fits into 90% of 141 GB" in str(replace(budget, gpu_memory=141e9))


def test_printed_lines_without_hardware(budget):
    text = str(replace(budget, gpu="CPU", peak_flops_per_device=None, gpu_memory=None, layout=Layout()))
    assert "unknown without the peak FLOP/s of CPU (peak_flops_per_device)" in text
    assert "1 GPU, batch 1 x 1" in text and "fit" not in text.lower()
    assert "frozen; 10.0 M are trained" in str(replace(budget, trainable_parameters=10_000_000))


def test_an_impossible_mfu_is_called_so(budget):
    far = replace(budget, sequence_length=65536, mfu=0.7, layout=replace(budget.layout, activation_checkpointing=True))
    assert "IMPOSSIBLE" in str(far) and "IMPOSSIBLE" not in str(budget)


@pytest.mark.parametrize("wrong", [{"mfu": 0.0}, {"mfu": 40}, {"tokens": 0}, {"peak_flops_per_device": -1.0}])
def test_wrong_numbers_are_refused(budget, wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value} was given; it "):
        replace(budget, **wrong)


# ------------------------------------------------------------------------------------------------ the command and docs


def test_docs_have_the_tables_of_the_command(capsys):
    main([])
    for block in capsys.readouterr().out.split("\n\n"):
        if block.startswith("|"):
            assert block.strip() in DOCS.read_text(), "docs/scale.md has drifted from `-m ...training.budget`"


def test_docs_examples_are_what_the_commands_print(capsys):
    blocks = [block for block in DOCS.read_text().split("```")[1::2] if "training.budget --" in block]
    assert blocks, "docs/scale.md shows no budget"
    for block in blocks:
        command, printed = block.split("$ ", 1)[1].split("\n", 1)
        main(shlex.split(command.partition("training.budget")[2]))
        assert capsys.readouterr().out == printed, f"docs/scale.md has drifted: {command}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--size 3B --gpu L4", "give --peak-tflops and --memory-gb"),
        ("--size 13.1B --gpus 2", "do not fit"),
        ("--size 3B --mfu 40", "share of the peak"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_the_command_on_other_hardware(capsys):
    main(shlex.split("--size 830M --sequence-length 2048 --gpus 1 --gpu L40S --peak-tflops 362 --memory-gb 48"))
    out = capsys.readouterr().out
    assert "1 x L40S" in out and "fits into 90% of 48 GB" in out

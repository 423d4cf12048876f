# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a run costs, before it is launched: parameters, FLOPs, memory and hours. Arithmetic alone, nothing is measured.

    python -m diff_transformer.training.budget --size 3B --sequence-length 65536 --gpus 64 --gpu H100 --tokens 1.5e9

recommends a layout and prints its budget; without arguments, the tables of docs/scale.md.

Everything holds for DIFF and for its twin, Llama with 2h heads of d. Letters in the formulas, all for one layer:

| letter | is |
| --- | --- |
| E, F | `hidden_size`, `intermediate_size` |
| Q | width of all queries: 2d for each of h differential heads, or d for each of 2h heads |
| K | width of all keys, and of all values |
| M | softmax maps, 2h |
| L, V, T | layers, `vocab_size`, tokens of a sequence |

Units: bytes, GB are 10^9 bytes; a multiply-add is 2 FLOPs.
"""

import argparse
import itertools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from ..configuration_diff import PAPER_SIZES, DiffTransformerConfig

# Share of the peak that is reached in the FLOPs that are executed: an assumption, not a measurement
UTILISATION = 0.4
LOSS_CHUNK = 1024  # tokens whose logits are held at a time
TOKENS_PER_STEP = 2**22  # the paper's "4M" (Table 9)
USABLE_MEMORY = 0.9  # the rest is for the CUDA context, communication buffers and fragmentation
GPUS_PER_NODE = 8
SHOWN = ("H100", "H200")  # in docs/scale.md


class Gpu(NamedTuple):
    """Of the vendor's datasheet: bf16 FLOP/s without sparsity, and bytes of memory."""

    peak_flops: float
    memory: float


# The first word names the SXM form where there are several
GPUS = {
    "A100": Gpu(312e12, 80e9),
    "H100": Gpu(989e12, 80e9),
    "H100 PCIe": Gpu(756e12, 80e9),
    "H100 NVL": Gpu(835e12, 94e9),
    "H200": Gpu(989e12, 141e9),
    "H200 NVL": Gpu(835e12, 141e9),
    "GH200": Gpu(989e12, 96e9),
    "B200": Gpu(2250e12, 180e9),
    "GB200": Gpu(2500e12, 186e9),
}


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s of a GPU by its `torch.cuda.get_device_name()`; None if it is not in `GPUS`, or a MIG slice."""
    words = set(re.findall(r"\w+", device_name.upper()))
    fitting = [name for name in GPUS if set(name.upper().split()) <= words]
    if not fitting or "MIG" in words:
        return None
    return GPUS[max(fitting, key=len)].peak_flops


# ------------------------------------------------------------------------------------------------ parameters and FLOPs


class _Shape(NamedTuple):
    """The letters of the formulas."""

    E: int
    F: int
    Q: int
    K: int
    M: int
    L: int
    V: int
    is_diff: bool


def _shape(config: PreTrainedConfig) -> _Shape:
    is_diff = config.model_type == DiffTransformerConfig.model_type
    if not is_diff and config.model_type != "llama":
        raise ValueError(
            f"Got a configuration of the model type {config.model_type!r}; the budget knows diff_transformer and its "
            "twin, llama."
        )
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    return _Shape(
        E=config.hidden_size,
        F=config.intermediate_size,
        Q=heads * config.head_dim,
        K=key_heads * config.head_dim,
        M=2 * heads if is_diff else heads,
        L=config.num_hidden_layers,
        V=config.vocab_size,
        is_diff=is_diff,
    )


class Parameters(NamedTuple):
    """layer: of one layer; embeddings: V x E, twice if the output has its own."""

    total: int
    layer: int
    embeddings: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embeddings


def count_parameters(config: PreTrainedConfig) -> Parameters:
    """Exactly those of the model: `2 E Q + 2 E K + 3 E F + 2 E` a layer, for DIFF with lambda's 4d and the head norm's
    2d, biases where the configuration has them; `L` layers, a norm and the embeddings."""
    E, F, Q, K, _, L, V, is_diff = _shape(config)
    layer = 2 * E * Q + 2 * E * K + 3 * E * F + 2 * E
    if is_diff:
        layer += 4 * config.diff_head_dim + config.head_dim * config.use_subln
    layer += config.attention_bias * (Q + 2 * K + E) + config.mlp_bias * (2 * F + E)
    embeddings = V * E * (1 if config.tie_word_embeddings else 2)
    return Parameters(L * layer + E + embeddings, layer, embeddings)


class Flops(NamedTuple):
    """Of a forward, for one token: matrix products of the layers' weights, attention, LM head."""

    layers: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum(self)


def flops_per_token(config: PreTrainedConfig, sequence_length: int, causal: bool = True) -> Flops:
    """FLOPs of the forward for one token of a sequence. Matrix products alone; norms, softmax and rotary are left out.

    Layers `2 L (2 E Q + 2 E K + 3 E F)`, head `2 V E`, attention `2 L (T/2) (Q + Q)`: T/2 keys on average, times the
    queries of all maps (2 maps x d x h = Q), times the values (2d x h = Q), which the difference of the two maps meets
    once. So DIFF counts what its twin counts. `causal=False` takes T keys. Documents packed into a sequence count as
    one.
    """
    E, F, Q, K, _, L, V, _ = _shape(config)
    keys = sequence_length / 2 if causal else sequence_length
    return Flops(layers=2 * L * (2 * E * Q + 2 * E * K + 3 * E * F), attention=2 * L * keys * (Q + Q), head=2 * V * E)


def model_flops_per_token(
    config: PreTrainedConfig, sequence_length: int, trainable_parameters: int | None = None
) -> float:
    """FLOPs of training on one token, as MFU counts them: the forward and twice that for the backward; neither what
    checkpointing nor what a kernel computes again (`executed_flops_per_token`).

    With adapters (LoRA) of `trainable_parameters`, the frozen weights have no gradient: twice their forward, three
    times that of attention, and 6 for every parameter of the adapters.
    """
    forward = flops_per_token(config, sequence_length)
    if trainable_parameters is None:
        return 3 * forward.total
    return 2 * (forward.layers + forward.head) + 3 * forward.attention + 6 * trainable_parameters


def executed_flops_per_token(
    config: PreTrainedConfig,
    sequence_length: int,
    activation_checkpointing: bool = False,
    trainable_parameters: int | None = None,
) -> float:
    """FLOPs that training on one token takes: those of the model and what is computed again.

    Checkpointing adds a forward of the layers. Attention takes, in forwards of the model (forward + backward): 1 + 2.5
    in flash kernels of standard attention, whose backward computes the scores again; 1.5 + 3.5 in ours, where each map
    meets the values, and the two kernels of the backward compute the scores and dP each.
    """
    forward = flops_per_token(config, sequence_length)
    once, backward = (1.5, 3.5) if _shape(config).is_diff else (1.0, 2.5)
    flops = model_flops_per_token(config, sequence_length, trainable_parameters)
    flops += (once + backward - 3) * forward.attention
    return flops + activation_checkpointing * (forward.layers + once * forward.attention)


def mfu(
    tokens_per_second: float,
    config: PreTrainedConfig,
    sequence_length: int,
    num_gpus: int,
    peak_flops_per_device: float,
    trainable_parameters: int | None = None,
) -> float:
    """Model FLOPs utilisation, the FLOPs of the model over those the devices could do; tokens of all devices."""
    flops = model_flops_per_token(config, sequence_length, trainable_parameters)
    return tokens_per_second * flops / (num_gpus * peak_flops_per_device)


# --------------------------------------------------------------------------------------------------- layout and memory


@dataclass(frozen=True)
class Layout:
    """How a run is spread over `data_parallel x sequence_parallel x tensor_parallel` GPUs.

    Args:
        data_parallel: Groups that train on different sequences.
        sequence_parallel: GPUs that share a sequence (Ulysses).
        tensor_parallel: GPUs that share every matrix.
        shard: GPUs that share one copy of weights, gradients and optimizer states (FSDP2, ZeRO-3); 1 is plain DDP.
            A divisor of `data_parallel x sequence_parallel`.
        per_device_batch_size: Sequences of a data-parallel group at a time.
        gradient_accumulation_steps: Times that, for an optimizer step.
        activation_checkpointing: Keep the input of a layer, and compute the rest again in the backward.
        sync_each_batch: Reduce gradients after every backward. DeepSpeed always does; `Trainer` does not unless told
            by `accelerator_config`, and then FSDP2 accumulates those of the *whole* model on every GPU.
    """

    data_parallel: int = 1
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    shard: int = 1
    per_device_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool = False
    sync_each_batch: bool = False

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1 and not isinstance(value, bool):
                raise ValueError(f"{name}={value} was given; it must be at least 1.")
        if self.data_parallel * self.sequence_parallel % self.shard:
            raise ValueError(
                f"shard={self.shard} was given, but data_parallel x sequence_parallel is {self.data_parallel} x "
                f"{self.sequence_parallel}, and the shards must divide that. Choose a divisor of "
                f"{self.data_parallel * self.sequence_parallel}."
            )

    @property
    def num_gpus(self) -> int:
        return self.data_parallel * self.sequence_parallel * self.tensor_parallel

    @property
    def recipe(self) -> str:
        """The file in recipes/accelerate."""
        if self.sequence_parallel > 1:
            return "ulysses.yaml"
        return "fsdp2.yaml" if self.shard > 1 else "ddp.yaml"

    def tokens_per_step(self, sequence_length: int) -> int:
        sequences = self.per_device_batch_size * self.gradient_accumulation_steps * self.data_parallel
        return sequences * sequence_length


class Memory(NamedTuple):
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return sum(self)


def activation_bytes_per_token(config: PreTrainedConfig, layout: Layout) -> float:
    """What autograd keeps of one layer for one token, in bf16 with a flash-style kernel; without checkpointing.

    - two norms and the inputs of the matrices after them: 16 E, or 26 E under DDP, where autocast leaves the stream
      between the layers in float32;
    - SwiGLU: gate, silu(gate), up, their product: 8 F;
    - attention: queries and output 4 Q, keys and values 4 K, log-sums 4 M; for DIFF also the heads before their norm
      and the second map's output, 4 Q, and with sequence parallelism, where the norm is not part of the kernel, 6 Q
      more.
    """
    E, F, Q, K, M, _, _, is_diff = _shape(config)
    queries = (4 if not is_diff else 14 if layout.sequence_parallel > 1 else 8) * Q
    norms = (16 if layout.shard > 1 else 26) * E
    return norms + (queries + 4 * K + 4 * M + 8 * F) / layout.tensor_parallel


def memory_per_gpu(
    config: PreTrainedConfig,
    sequence_length: int,
    layout: Layout,
    trainable_parameters: int | None = None,
    loss_chunk: int | None = LOSS_CHUNK,
) -> Memory:
    """Bytes on one GPU in bf16 mixed precision with AdamW. A sum of peaks that do not all coincide.

    Of P parameters: weights 4 P, gradients 4 P, moments 8 P, over `shard` GPUs. ZeRO-3 arrives at the same 16 P: bf16
    weights and gradients, float32 weights and moments. With adapters of `trainable_parameters` only these have
    gradients and moments.

    Copies: an unsharded GPU holds its weights in bf16 too, 2 P, and under DDP its gradients once more to send them,
    4 P; with shards, a GPU gathers weights and gradients of two layers and of the embeddings, in bf16.

    Activations, for the tokens of this GPU: `activation_bytes_per_token` for L layers, or for one with checkpointing
    and the inputs of all; the gradients in flight, 6 F + 6 E; the last norm and its gradient, 12 E.

    Loss: 10 V for a token (logits in bf16, log-probabilities and gradient in float32), for `loss_chunk` tokens, or for
    all with None. The gradient of the head, 10 V E: its sum in float32, a chunk's part and two more in bf16.
    """
    E, F, _, _, _, L, V, _ = _shape(config)
    parameters = count_parameters(config)
    frozen = trainable_parameters is not None
    trained = parameters.total if trainable_parameters is None else trainable_parameters
    held = parameters.total + (trained if frozen else 0)
    tensor_parallel, parts = layout.tensor_parallel, layout.shard * layout.tensor_parallel

    if layout.shard == 1:
        copies = (2 * held + (4 * trained if layout.data_parallel > 1 else 0)) / tensor_parallel
    else:
        copies = (2 if frozen else 4) * (2 * parameters.layer + parameters.embeddings) / tensor_parallel
        if layout.gradient_accumulation_steps > 1 and not layout.sync_each_batch:
            copies += 2 * trained / tensor_parallel

    tokens = layout.per_device_batch_size * sequence_length / layout.sequence_parallel
    stream = 2 if layout.shard > 1 else 4
    layer = activation_bytes_per_token(config, layout)
    kept = L * stream * E + layer if layout.activation_checkpointing else L * layer
    in_flight = 6 * F / tensor_parallel + 6 * E + 12 * E

    logits = 10 * V * (tokens if loss_chunk is None else min(tokens, loss_chunk))
    return Memory(
        weights=4 * held / parts,
        gradients=4 * trained / parts,
        optimizer=8 * trained / parts,
        copies=copies,
        activations=tokens * (kept + in_flight),
        loss=logits + (0 if frozen else 10 * V * E),
    )


# ---------------------------------------------------------------------------------------------------------- the choice


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _sequence_parallel_sizes(config: PreTrainedConfig, sequence_length: int, num_gpus: int) -> list[int]:
    """Ulysses gives every GPU an equal part of the sequence and of the heads, and whole key/value heads."""
    common = _divisors(math.gcd(config.num_attention_heads, sequence_length, num_gpus))
    return [
        size for size in common if config.num_key_value_heads % size == 0 or size % config.num_key_value_heads == 0
    ]


def smallest_tokens_per_step(config: PreTrainedConfig, sequence_length: int, num_gpus: int) -> int:
    """One sequence for each of the fewest data-parallel groups that `num_gpus` can form."""
    return num_gpus // _sequence_parallel_sizes(config, sequence_length, num_gpus)[-1] * sequence_length


def recommend_layout(
    config: PreTrainedConfig,
    sequence_length: int,
    num_gpus: int,
    gpu_memory: float,
    tokens_per_step: float = TOKENS_PER_STEP,
    trainable_parameters: int | None = None,
    loss_chunk: int | None = LOSS_CHUNK,
) -> Layout:
    """The first layout that fits into `USABLE_MEMORY` of `gpu_memory` bytes, in the order of what costs least.

    Sequence parallelism only where there are more GPUs than sequences or one GPU cannot hold a sequence; no
    checkpointing before checkpointing (a third more FLOPs); DDP within a node, then shards of one node, which the fast
    links join, then of more; the largest batch at a time. Accumulation does the rest: a step comes as close to
    `tokens_per_step` as whole sequences for every group allow.

    Raises ValueError, with the numbers, if the smallest step is larger than that or if nothing fits.
    """
    smallest = smallest_tokens_per_step(config, sequence_length, num_gpus)
    sizes = _sequence_parallel_sizes(config, sequence_length, num_gpus)
    if smallest > tokens_per_step:
        raise ValueError(
            f"{num_gpus} GPUs were given with sequences of {sequence_length:,} tokens, which take at least "
            f"{smallest:,} tokens a step: Ulysses splits a sequence over {sizes[-1]} GPUs at most here (a common "
            f"divisor of {num_gpus} and the {config.num_attention_heads} heads). "
            f"tokens_per_step={tokens_per_step:,.0f} needs fewer GPUs; or raise it to {smallest:,}."
        )
    tried = {}
    for sequence_parallel in sizes:
        data_parallel = num_gpus // sequence_parallel
        if data_parallel * sequence_length > tokens_per_step:
            continue
        rows = round(tokens_per_step / sequence_length / data_parallel)
        shards, batch_sizes = _shards(num_gpus, sequence_parallel), _divisors(rows)[::-1]
        for checkpointing, shard, batch_size in itertools.product((False, True), shards, batch_sizes):
            layout = Layout(
                data_parallel=data_parallel,
                sequence_parallel=sequence_parallel,
                shard=shard,
                per_device_batch_size=batch_size,
                gradient_accumulation_steps=rows // batch_size,
                activation_checkpointing=checkpointing,
                sync_each_batch=True,
            )
            tried[layout] = memory_per_gpu(config, sequence_length, layout, trainable_parameters, loss_chunk)
            if tried[layout].total <= USABLE_MEMORY * gpu_memory:
                return layout
    layout, memory = min(tried.items(), key=lambda pair: pair[1].total)
    raise ValueError(
        f"{_short(count_parameters(config).total)} parameters with sequences of {sequence_length:,} tokens do not fit "
        f"on {num_gpus} GPUs of {gpu_memory / 1e9:.0f} GB, of which {USABLE_MEMORY:.0%} can be filled: the smallest "
        f"layout ({_describe(layout)}) needs {memory.total / 1e9:.1f} GB a GPU: {_parts(memory)}. Take more or larger "
        "GPUs, or shorter sequences."
    )


def _shards(num_gpus: int, sequence_parallel: int) -> list[int]:
    if sequence_parallel > 1:
        return [num_gpus]  # DeepSpeed's ZeRO-3 shards over all
    within_a_node = [1] if num_gpus <= GPUS_PER_NODE else []
    return within_a_node + [n for n in _divisors(num_gpus) if n > 1 and (n % GPUS_PER_NODE == 0 or n == num_gpus)]


# ---------------------------------------------------------------------------------------------------------- the budget


@dataclass(frozen=True)
class Budget:
    """What a run costs; `print` it before the first step.

    Args:
        config: Of DIFF or of its twin.
        sequence_length: Tokens of a training sequence.
        tokens: To train on; rounded up to whole optimizer steps.
        layout: As launched, or from `recommend_layout`.
        gpu: A name for the printed lines, such as "H100".
        peak_flops_per_device: FLOP/s; from `peak_flops`. None leaves the time out.
        gpu_memory: Bytes, to compare with what is needed. None does not compare.
        mfu: The share of the peak that is reached in FLOPs of the model, such as the log of a run says. None assumes
            `UTILISATION` of the peak for the FLOPs that are executed.
        trainable_parameters: Of the adapters, if the model is frozen (LoRA).
        loss_chunk: Tokens whose logits are held at a time; None for all, as plain `Trainer` does.
    """

    config: PreTrainedConfig
    sequence_length: int
    tokens: float
    layout: Layout = Layout()
    gpu: str = "GPU"
    peak_flops_per_device: float | None = None
    gpu_memory: float | None = None
    mfu: float | None = None
    trainable_parameters: int | None = None
    loss_chunk: int | None = LOSS_CHUNK

    def __post_init__(self):
        for name in ("sequence_length", "tokens", "peak_flops_per_device", "gpu_memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} was given; it must be more than 0.")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu} was given; it is a share of the peak, more than 0 and at most 1.")

    @property
    def tokens_per_step(self) -> int:
        return self.layout.tokens_per_step(self.sequence_length)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.tokens_per_step)

    @property
    def flops_per_token(self) -> float:
        """Of training, without recomputation."""
        return model_flops_per_token(self.config, self.sequence_length, self.trainable_parameters)

    @property
    def executed_flops_per_token(self) -> float:
        checkpointing = self.layout.activation_checkpointing
        return executed_flops_per_token(self.config, self.sequence_length, checkpointing, self.trainable_parameters)

    @property
    def expected_mfu(self) -> float:
        """`mfu`, or what the assumed utilisation of the peak leaves for the FLOPs of the model."""
        if self.mfu is not None:
            return self.mfu
        return UTILISATION * self.flops_per_token / self.executed_flops_per_token

    @property
    def memory(self) -> Memory:
        return memory_per_gpu(
            self.config, self.sequence_length, self.layout, self.trainable_parameters, self.loss_chunk
        )

    @property
    def fits(self) -> bool | None:
        """None where the memory of a GPU is not known."""
        return None if self.gpu_memory is None else self.memory.total <= USABLE_MEMORY * self.gpu_memory

    @property
    def tokens_per_second(self) -> float | None:
        """Of all GPUs together, at the expected MFU."""
        if self.peak_flops_per_device is None:
            return None
        return self.expected_mfu * self.peak_flops_per_device * self.layout.num_gpus / self.flops_per_token

    @property
    def hours(self) -> float | None:
        if self.tokens_per_second is None:
            return None
        return self.steps * self.tokens_per_step / self.tokens_per_second / 3600

    def table(self) -> str:
        """Six lines: model, data, layout, compute, memory, time."""
        parameters, total_tokens = count_parameters(self.config), self.steps * self.tokens_per_step
        executed = self.executed_flops_per_token / self.flops_per_token
        lines = {
            "Model": f"{_short(parameters.total)} parameters ({_short(parameters.non_embedding)} without embeddings)",
            "Data": f"{_short(self.tokens)} tokens = {self.steps:,} steps of {_short(self.tokens_per_step)} tokens",
            "Layout": f"{_describe(self.layout)}, {self.sequence_length:,} tokens a sequence",
            "Compute": f"{self.flops_per_token / 1e9:,.1f} GFLOPs a token, {self.flops_per_token * total_tokens:.2e} "
            f"FLOPs in all; {executed:.2f} times that is executed",
            "Memory": f"{self.memory.total / 1e9:.1f} GB a GPU: {_parts(self.memory)}",
            "Time": f"unknown without the peak FLOP/s of {self.gpu} (peak_flops_per_device)",
        }
        if self.trainable_parameters is not None:
            lines["Model"] += f", frozen; {_short(self.trainable_parameters)} are trained"
        if self.gpu_memory is not None:
            verdict = "fits" if self.fits else "DOES NOT FIT"
            lines["Memory"] += f"; {verdict} into {USABLE_MEMORY:.0%} of {self.gpu_memory / 1e9:.0f} GB"
        if self.tokens_per_second is not None and self.hours is not None:
            share = self.expected_mfu * executed
            lines["Time"] = (
                f"{self.hours:,.1f} hours on {self.layout.num_gpus} x {self.gpu}: {_short(self.tokens_per_second)} "
                f"tokens/s, {self.hours * self.layout.num_gpus:,.0f} GPU-hours, at {self.expected_mfu:.0%} MFU "
                f"({share:.0%} of the peak with all that is executed{', IMPOSSIBLE' if share > 1 else ''}): "
                f"{'assumed, not measured' if self.mfu is None else 'as given'}"
            )
        return "\n".join(f"{name:<9}{line}" for name, line in lines.items())

    __str__ = table


def _short(value: float) -> str:
    """3.48 B for 3,480,000,000: three digits."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {name}"
    return f"{value:.0f}"


def _parts(memory: Memory) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in memory._asdict().items())


def _describe(layout: Layout) -> str:
    parts = ["1 GPU"] if layout.num_gpus == 1 else [f"{layout.num_gpus} GPUs", layout.recipe]
    if layout.shard > 1:
        parts.append(f"shards over {layout.shard}")
    if layout.sequence_parallel > 1:
        parts.append(f"sequence parallel {layout.sequence_parallel}")
    if layout.tensor_parallel > 1:
        parts.append(f"tensor parallel {layout.tensor_parallel}")
    parts.append(f"batch {layout.per_device_batch_size} x {layout.gradient_accumulation_steps}")
    parts.append("checkpointing" if layout.activation_checkpointing else "no checkpointing")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ the command and docs


def recommended_budget(
    size: str,
    sequence_length: int,
    num_gpus: int,
    gpu: Gpu,
    name: str,
    tokens: float = 1e12,
    tokens_per_step: float | None = None,
    mfu: float | None = None,
) -> Budget:
    """For one of the paper's sizes (tied embeddings). Without `tokens_per_step` it is the paper's 4M, or the smallest
    step of so many GPUs where that is more."""
    config = DiffTransformerConfig.from_paper_size(size)
    if tokens_per_step is None:
        tokens_per_step = max(TOKENS_PER_STEP, smallest_tokens_per_step(config, sequence_length, num_gpus))
    layout = recommend_layout(config, sequence_length, num_gpus, gpu.memory, tokens_per_step)
    return Budget(config, sequence_length, tokens, layout, name, gpu.peak_flops, gpu.memory, mfu)


def scale_table(name: str) -> str:
    """Markdown: the recommended layouts of docs/scale.md on one kind of GPU."""
    head = "| model | length | GPUs | YAML | shards | SP | batch x acc. | ckpt. | tokens a step "
    head += "| GB a GPU: states + copies + activations + loss | MFU | tokens/s |"
    lines = [head, "| --- " * (head.count("|") - 1) + "|"]
    for size in ("3B", "13.1B"):
        for sequence_length in (4096, 65536):
            for num_gpus in (8, 64, 512):
                budget = recommended_budget(size, sequence_length, num_gpus, GPUS[name], name)
                layout, memory = budget.layout, budget.memory
                states = memory.weights + memory.gradients + memory.optimizer
                parts = (states, memory.copies, memory.activations, memory.loss)
                cells = (
                    size,
                    f"{sequence_length // 1024}K",
                    num_gpus,
                    layout.recipe.removesuffix(".yaml"),
                    layout.shard,
                    layout.sequence_parallel,
                    f"{layout.per_device_batch_size} x {layout.gradient_accumulation_steps}",
                    "yes" if layout.activation_checkpointing else "no",
                    f"{budget.tokens_per_step / 2**20:.0f}M",
                    f"{' + '.join(f'{part / 1e9:.1f}' for part in parts)} = {memory.total / 1e9:.1f}",
                    f"{budget.expected_mfu:.0%}",
                    _short(budget.tokens_per_second or 0),
                )
                lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m diff_transformer.training.budget",
        description="The budget of a run in its recommended layout; without arguments, the tables of docs/scale.md.",
    )
    parser.add_argument("--size", choices=PAPER_SIZES, help="one of the paper's models")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens; %(default)s by default")
    parser.add_argument("--gpus", type=int, default=GPUS_PER_NODE, help="how many; %(default)s by default")
    parser.add_argument("--gpu", default="H100", help=f"{', '.join(GPUS)}, or another with the next two arguments")
    parser.add_argument("--peak-tflops", type=float, help="of a GPU, in bf16 without sparsity")
    parser.add_argument("--memory-gb", type=float, help="of a GPU")
    parser.add_argument("--mfu", type=float, help=f"as a log says; {UTILISATION} of executed FLOPs by default")
    parser.add_argument("--tokens", type=float, default=1e12, help="to train on; 1e12 by default")
    parser.add_argument("--tokens-per-step", type=float, help="4194304 by default, more if the GPUs need it")
    options = parser.parse_args(argv)
    if options.size is None:
        print("\n\n".join(f"{name}, {GPUS[name].memory / 1e9:.0f} GB\n\n{scale_table(name)}" for name in SHOWN))
        return
    known = GPUS.get(options.gpu, Gpu(0, 0))
    gpu = Gpu((options.peak_tflops or 0) * 1e12 or known.peak_flops, (options.memory_gb or 0) * 1e9 or known.memory)
    if not gpu.peak_flops or not gpu.memory:
        parser.error(f"--gpu {options.gpu} is none of {', '.join(GPUS)}: give --peak-tflops and --memory-gb")
    try:
        budget = recommended_budget(
            options.size,
            options.sequence_length,
            options.gpus,
            gpu,
            options.gpu,
            options.tokens,
            options.tokens_per_step,
            options.mfu,
        )
    except ValueError as error:
        parser.error(str(error))
    print(budget)


__all__ = [
    "GPUS",
    "Budget",
    "Flops",
    "Gpu",
    "Layout",
    "Memory",
    "Parameters",
    "activation_bytes_per_token",
    "count_parameters",
    "executed_flops_per_token",
    "flops_per_token",
    "memory_per_gpu",
    "mfu",
    "model_flops_per_token",
    "peak_flops",
    "recommend_layout",
    "smallest_tokens_per_step",
]


if __name__ == "__main__":
    main()

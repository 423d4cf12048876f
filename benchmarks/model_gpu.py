# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Tokens per second of the paper's 3B on one GPU, against a Transformer of equal size (Table 7, arXiv:2410.05258).

The stage `model` of benchmarks.gpu_suite. DIFF is our model, Transformer is transformers' own Llama with 2h heads of
d. Both have the same widths, layers and vocabulary, and random weights. All configurations run in one process and
take turns. Every figure is the median wall-clock time over the rounds, including Python.

forward computes the logits of all tokens. forward+backward computes the loss and all gradients, without an optimizer.
decode generates tokens one by one after a context of the length, with transformers' default cache; its peak memory
includes the cache and the forward pass of the context.
Before anything is timed, the logits and the gradients of a DIFF model with two layers are compared with float32.
"""

import copy
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.report import hardware, versions
from benchmarks.timing import Step, Wrong, take_turns, wall_time
from diff_transformer import DiffTransformerConfig
from diff_transformer.training.architectures import transformer_twin
from tests.tolerances import allowed_error

TASKS = ("forward", "forward+backward", "decode")
DECODED = 16  # tokens that decode generates, at most as many as the context has
CONTESTANTS = {  # name -> model, attention
    "DIFF flash_diff": ("DIFF", "flash_diff"),
    "DIFF sdpa": ("DIFF", "sdpa"),
    "Transformer sdpa": ("Transformer", "sdpa"),
    "Transformer flash_attention_2": ("Transformer", "flash_attention_2"),
}
TINY = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


def build(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(p.nbytes for p in model.parameters())


def fault(config: DiffTransformerConfig, dtype: torch.dtype, device: str) -> str:
    """What is wrong with flash_diff in a model with two layers, over 256 tokens; "" if nothing.

    The logits and the gradients of the weight matrices are compared with eager in float32 (float64 for float32). The
    errors of eager in `dtype` say how large theirs may be: see `allowed_error`.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    ids = torch.randint(0, config.vocab_size, (1, min(256, config.max_position_embeddings)), device=device)
    low = build(config, dtype, device)
    exact = copy.deepcopy(low).to(torch.float64 if dtype == torch.float32 else torch.float32)

    def results(model: PreTrainedModel, attention: str) -> dict[str, torch.Tensor]:
        model.set_attn_implementation(attention)
        matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
        out = model(ids, labels=ids, use_cache=False)
        gradients = torch.autograd.grad(out.loss, list(matrices.values()), materialize_grads=True)
        return {"logits": out.logits.detach(), **dict(zip(matrices, gradients, strict=True))}

    expected, eager, ours = results(exact, "eager"), results(low, "eager"), results(low, "flash_diff")
    for name, right in expected.items():
        allowed, error = allowed_error(right, eager[name]), (ours[name] - right).abs().max()
        if not error <= allowed:  # NaN is at fault too
            return f"{name} is off by {error.item():.1e}, {allowed.item():.1e} are allowed"
    return ""


def build_pair(
    max_length: int, dtype: torch.dtype, device: str, layers: int | None = None, tiny: bool = False
) -> dict[str, PreTrainedModel]:
    """DIFF and its Transformer. Raises Wrong if flash_diff does not compute what eager does."""
    changes = {"max_position_embeddings": max_length, "eos_token_id": None} | (TINY if tiny else {})
    if layers is not None:
        changes["num_hidden_layers"] = layers
    config = DiffTransformerConfig.from_paper_size("3B", **changes)
    if device != "meta" and (wrong := fault(config, dtype, device)):
        raise Wrong(f"flash_diff is wrong: {wrong}")
    configs = {"DIFF": config, "Transformer": transformer_twin(config)}
    return {name: build(one, dtype, device) for name, one in configs.items()}


def step(task: str, model: PreTrainedModel, ids: torch.Tensor, decoded: int = 1) -> Step:
    """A task. decode generates `decoded` tokens after a context of ids, which its set-up runs through the model."""

    @torch.no_grad()
    def forward(_):
        model(ids, use_cache=False)

    def forward_backward(_):
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def context():
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def decode(past):
        token = ids[:, -1:]
        for _ in range(decoded):
            token = model(token, past_key_values=past, use_cache=True).logits.argmax(-1)

    tasks = {"forward": Step(forward), "forward+backward": Step(forward_backward), "decode": Step(decode, context)}
    return tasks[task]


def measure(
    task: str, length: int, models: dict[str, PreTrainedModel], tokens: int, rounds: int, device: str
) -> list[dict]:
    """The rows of a cell, one for each contestant."""
    batch, decoded = max(1, tokens // length), min(DECODED, length)
    config = models["DIFF"].config
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)

    def prepare(name: str) -> Step:
        model, attention = models[CONTESTANTS[name][0]], CONTESTANTS[name][1]
        one = step(task, model, ids, decoded)

        def set_up():
            for other in models.values():
                other.zero_grad(set_to_none=True)  # left by a backward that failed
            model.set_attn_implementation(attention)
            return one.set_up()

        return Step(one.timed, set_up)

    found = take_turns({name: partial(prepare, name) for name in CONTESTANTS}, wall_time, device, rounds)
    processed = batch * (decoded if task == "decode" else length)
    speed = {name: 1000 * processed / one["ms"] for name, one in found.items() if "ms" in one}
    best = max((value for name, value in speed.items() if name.startswith("Transformer")), default=None)
    rows = []
    for name, (model, _) in CONTESTANTS.items():
        row = {"task": task, "length": length, "batch": batch, "model": name, "status": found[name]["status"]}
        row |= dict.fromkeys(("tokens_per_second", "over_transformer", "peak_gib"))
        if name in speed:
            row["tokens_per_second"] = round(speed[name], 1)
            row["over_transformer"] = round(speed[name] / best, 3) if best else None
            # The weights of its model and what the run allocates, without the other model
            row["peak_gib"] = round((found[name]["peak"] + weight_bytes(models[model])) / 2**30, 2)
        row |= {"rounds": rounds, "layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
        row |= {"dtype": str(models[model].dtype).removeprefix("torch."), "reason": found[name].get("reason", "")}
        rows.append({**row, "hardware": hardware(device), **versions("torch", "triton", "transformers")})
    return rows

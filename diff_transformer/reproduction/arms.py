# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The arms of the study: models that differ in one part of the design, with equal parameters and initial matrices."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..configuration_diff import DiffTransformerConfig
from ..configuration_diff_v2 import DiffTransformerV2Config
from ..training.architectures import diff_v2_twin, transformer_twin


@strict
class HeadNormLlamaConfig(LlamaConfig):
    """The control: a Llama whose heads are normalized as DIFF's are and scaled by (1 - lambda_init).

    It is the row "+ GroupNorm" under the Transformer in the paper's Table 6. `lambda_init` is that of
    DiffTransformerConfig.
    """

    model_type = "head_norm_llama"

    lambda_init: str | float | list[float] = "exponential"

    def layer_lambda_init(self, layer_idx: int) -> float:
        schedule = DiffTransformerConfig(num_hidden_layers=self.num_hidden_layers, lambda_init=self.lambda_init)
        return schedule.layer_lambda_init(layer_idx)


class HeadNormProjection(nn.Linear):
    """o_proj, which sees the heads side by side: (..., heads * head_dim). It normalizes each of them first (Eq. 3)."""

    def __init__(self, projection: nn.Linear, head_dim: int, eps: float, scale: float):
        super().__init__(projection.in_features, projection.out_features, bias=projection.bias is not None)
        self.norm, self.head_dim, self.scale = LlamaRMSNorm(head_dim, eps), head_dim, scale

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        normed = self.norm(heads.unflatten(-1, (-1, self.head_dim))) * self.scale
        return super().forward(normed.flatten(-2))


class HeadNormLlamaForCausalLM(LlamaForCausalLM):
    config_class = HeadNormLlamaConfig

    def __init__(self, config: HeadNormLlamaConfig):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            attention, scale = layer.self_attn, 1 - config.layer_lambda_init(i)
            attention.o_proj = HeadNormProjection(attention.o_proj, attention.head_dim, config.rms_norm_eps, scale)
        self.post_init()


AutoConfig.register(HeadNormLlamaConfig.model_type, HeadNormLlamaConfig)
AutoModelForCausalLM.register(HeadNormLlamaConfig, HeadNormLlamaForCausalLM)


def _llama(config: DiffTransformerConfig, is_wide: bool, has_norm: bool) -> LlamaConfig:
    """The Transformer; if it is wide, with the heads of DIFF: half as many, twice as wide."""
    fields = transformer_twin(config).to_dict()
    if is_wide:
        fields |= {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    kind = HeadNormLlamaConfig if has_norm else LlamaConfig
    return kind.from_dict({**fields, "model_type": kind.model_type, "lambda_init": config.lambda_init})


def _diff(config: DiffTransformerConfig, **changes: Any) -> DiffTransformerConfig:
    return DiffTransformerConfig.from_dict({**config.to_dict(), **changes})


# name: what it is, and its configuration from DIFF's
ARMS: dict[str, tuple[str, Callable[[DiffTransformerConfig], PreTrainedConfig]]] = {
    "transformer": ("Llama with 2h heads of d", transformer_twin),
    "norm": ("Llama with DIFF's head norm and factor", partial(_llama, is_wide=False, has_norm=True)),
    "wide": ("Llama with h heads of 2d", partial(_llama, is_wide=True, has_norm=False)),
    "wide_norm": ("Llama with h heads of 2d, head norm and factor", partial(_llama, is_wide=True, has_norm=True)),
    "diff": ("DIFF with h heads of 2d", _diff),
    "diff_no_norm": ("DIFF without the head norm", partial(_diff, use_subln=False)),
    "diff_no_norm_no_factor": (
        "DIFF without the head norm and the factor (1 - lambda_init)",
        partial(_diff, use_subln=False, use_head_scale=False),
    ),
    "diff_v2": ("DIFF V2", diff_v2_twin),
}


@torch.no_grad()
def new_model(arm: str, config: DiffTransformerConfig, seed: int, **kwargs: Any) -> PreTrainedModel:
    """A new model of an arm, with the initial matrices of the Transformer of this seed. `config` is DIFF's.

    DIFF V2 has two queries for each of the Transformer's: the first takes the Transformer's, the second keeps its own.
    Its narrower feed-forward network takes the first units.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARMS[arm][1](config), **kwargs)
    torch.manual_seed(seed)
    theirs = dict(AutoModelForCausalLM.from_config(transformer_twin(config)).named_parameters())
    for name, matrix in model.named_parameters():
        if matrix.ndim < 2 or name not in theirs:  # norms, which all begin with ones, and what the twin lacks: lambda
            continue
        source = theirs[name]
        if name.endswith("q_proj.weight") and isinstance(model.config, DiffTransformerV2Config):
            d = model.config.head_dim
            matrix, source = matrix.unflatten(0, (-1, 2, d))[:, 0], source.unflatten(0, (-1, d))
        matrix.copy_(source[tuple(slice(size) for size in matrix.shape)])
    return model


def layer_lambda_init(config: PreTrainedConfig) -> list[float]:
    """lambda_init by layer, by which the heads of DIFF and of `wide_norm` are scaled; empty for the others."""
    has_one = isinstance(config, DiffTransformerConfig | HeadNormLlamaConfig)
    return [config.layer_lambda_init(i) for i in range(config.num_hidden_layers)] if has_one else []


def matrices_digest(model: PreTrainedModel) -> str:
    """A digest of the matrices that have the same shape in all arms."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]

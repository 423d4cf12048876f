# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The arms of the study: models that differ in one part of the design, with equal parameters and initial matrices."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..configuration_diff import DiffTransformerConfig
from ..configuration_diff_v2 import DiffTransformerV2Config
from ..training.architectures import diff_v2_twin, transformer_twin


def _wide(config: DiffTransformerConfig) -> LlamaConfig:
    """The Transformer with the heads of DIFF: half as many, twice as wide."""
    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    return LlamaConfig.from_dict({**transformer_twin(config).to_dict(), **heads})


def _diff(config: DiffTransformerConfig, **changes: Any) -> DiffTransformerConfig:
    return DiffTransformerConfig.from_dict({**config.to_dict(), **changes})


# name: what it is, and its configuration from DIFF's
ARMS: dict[str, tuple[str, Callable[[DiffTransformerConfig], PreTrainedConfig]]] = {
    "transformer": ("Llama with 2h heads of d", transformer_twin),
    "norm": ("Llama with DIFF's head norm and factor", transformer_twin),
    "wide": ("Llama with h heads of 2d", _wide),
    "wide_norm": ("Llama with h heads of 2d, head norm and factor", _wide),
    "diff": ("DIFF with h heads of 2d", _diff),
    "diff_no_norm": ("DIFF without the head norm", partial(_diff, use_subln=False)),
    "diff_no_norm_no_factor": (
        "DIFF without the head norm and the factor (1 - lambda_init)",
        partial(_diff, use_subln=False, use_head_scale=False),
    ),
    "diff_v2": ("DIFF V2", diff_v2_twin),
}


class HeadNormProjection(nn.Linear):
    """o_proj, which sees the heads side by side: (..., heads * head_dim). It normalizes each of them first and
    multiplies it by `scale` (Eq. 3), as in the row "+ GroupNorm" under the Transformer in the paper's Table 6."""

    def __init__(self, projection: nn.Linear, head_dim: int, eps: float, scale: float):
        super().__init__(projection.in_features, projection.out_features, bias=projection.bias is not None)
        self.norm, self.head_dim, self.scale = LlamaRMSNorm(head_dim, eps), head_dim, scale

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        normed = self.norm(heads.unflatten(-1, (-1, self.head_dim))) * self.scale
        return super().forward(normed.flatten(-2))


@torch.no_grad()
def new_model(arm: str, config: DiffTransformerConfig, seed: int, **kwargs: Any) -> PreTrainedModel:
    """A new model of an arm, with the initial matrices of the Transformer of this seed. `config` is DIFF's.

    DIFF V2 has two queries for each of the Transformer's: the first takes the Transformer's, the second keeps its own.
    Its narrower feed-forward network takes the first units.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARMS[arm][1](config), **kwargs)
    if arm in ("norm", "wide_norm"):
        for layer, lambda_init in zip(model.model.layers, layer_lambda_init(arm, config), strict=True):
            projection, width = layer.self_attn.o_proj, layer.self_attn.head_dim
            layer.self_attn.o_proj = HeadNormProjection(projection, width, config.rms_norm_eps, 1 - lambda_init)
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


def layer_lambda_init(arm: str, config: DiffTransformerConfig) -> list[float]:
    """lambda_init by layer, empty for arms without. `config` is DIFF's."""
    layers = range(0 if arm in ("transformer", "wide", "diff_v2") else config.num_hidden_layers)
    return [config.layer_lambda_init(i) for i in layers]


def matrices_digest(model: PreTrainedModel) -> str:
    """A digest of the matrices that have the same shape in all arms."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]

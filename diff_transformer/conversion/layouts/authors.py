# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The authors' code (microsoft/unilm): attention modules of V1 and V2 in any decoder, and the decoder YOCO."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...configuration_diff import DiffTransformerConfig
from ...configuration_diff_v2 import DiffTransformerV2Config
from .base import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    HEAD,
    LAMBDA_PROJ,
    LAMBDA_VECTORS,
    MLP,
    O_PROJ,
    SPECIAL_IDS,
    SUBLN,
    V1_WEIGHTS,
    Layout,
    OurConfig,
    same,
)


@dataclass(frozen=True)
class AuthorsLayout(Layout):
    """Their code has no configuration. A config.json that lies there may state what shapes do not determine, and the
    one that we write does."""

    has_config = False

    def to_ours(self, stated: dict[str, Any]) -> dict[str, Any]:
        names = ["max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act", "initializer_range"]
        names += SPECIAL_IDS
        names += ["lambda_init", "lambda_std_dev"] if self.config_class is DiffTransformerConfig else []
        values = {name: stated[name] for name in names if stated.get(name) is not None}
        if "rope_theta" in stated:
            values.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": stated["rope_theta"]})
        return values

    def to_theirs(self, config: OurConfig) -> dict[str, Any]:
        names = ["rms_norm_eps", "max_position_embeddings", "rope_parameters", "lambda_init", *SPECIAL_IDS]
        return {"layout": self.name} | {name: getattr(config, name) for name in names if hasattr(config, name)}

    def read_config(
        self,
        meta: dict[str, torch.Tensor],
        stated: dict[str, Any],
        *,
        rope_theta: float | None = None,
        **sizes: float | None,
    ) -> OurConfig:
        """Sizes come from shapes, with which head_dim and num_attention_heads must agree if they are given.

        What shapes do not determine comes from the arguments, else from config.json, else it is as in the authors'
        code (rope_theta 10000, rms_norm_eps 1e-5) and in the paper (max_position_embeddings 4096).
        """
        shapes, given = self._from_shapes(meta), {name: x for name, x in sizes.items() if x is not None}
        for name in given.keys() & shapes.keys():
            if given[name] != shapes[name]:
                heads, width = shapes["num_attention_heads"], shapes["head_dim"]
                raise ValueError(
                    f"{name}={given[name]} was given, but the shapes imply {shapes[name]}: "
                    f"q_proj has {heads * width} rows = {heads} x {width} (heads x head_dim)."
                )
        rope = {} if rope_theta is None else {"rope_parameters": {"rope_type": "default", "rope_theta": rope_theta}}
        eos = DiffTransformerConfig.eos_token_id  # of cl100k
        special_ids = {"eos_token_id": eos if shapes["vocab_size"] > eos else None}
        return self.config_class(**special_ids | self.to_ours(stated) | given | rope | shapes)

    def _from_shapes(self, meta: dict[str, torch.Tensor]) -> dict[str, Any]:
        def shape_of(ours: str, dims: int = 2) -> tuple[int, ...]:
            theirs = self.names[ours].replace("{i}", "0")
            if theirs not in meta:
                raise ValueError(
                    f"There is no {theirs!r}, by which a {self.name} checkpoint is recognized, but, for example, "
                    f"{', '.join(list(meta)[:5])}. Choose another --from, or give its names with --rename."
                )
            shape = tuple(meta[theirs].shape)
            if len(shape) != dims:
                raise ValueError(f"{theirs} has the shape {shape}; it must have {dims} dimensions.")
            return shape

        vocab_size, hidden_size = shape_of(EMBEDDING)
        own = {}
        if self.config_class is DiffTransformerConfig:
            (d,) = shape_of(ATTENTION + LAMBDA_VECTORS[0], dims=1)
            width, reason = 2 * d, f"the lambda vectors have d = {d} entries"
            own = {"use_subln": self.names[SUBLN].replace("{i}", "0") in meta}
        else:
            (_, columns), (h, _) = shape_of(O_PROJ), shape_of(LAMBDA_PROJ)
            reason = f"o_proj has {columns} columns and lambda_proj h = {h} rows"
            width = _divide(columns, h, reason)
        heads = {}
        for part in ("q_proj", "k_proj"):
            rows, _ = shape_of(f"{ATTENTION}{part}.weight")
            heads[part] = _divide(rows, width, f"{reason}, so head_dim is {width}, and {part} has {rows} rows")
        pattern = re.compile(re.escape(self.names[O_PROJ]).replace(re.escape("{i}"), r"(\d+)"))
        return own | {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": shape_of(MLP + "gate_proj.weight")[0],
            "num_hidden_layers": max(int(found[1]) for found in map(pattern.fullmatch, meta) if found) + 1,
            "num_attention_heads": heads["q_proj"],
            "num_key_value_heads": heads["k_proj"],
            "head_dim": width,
            "tie_word_embeddings": self.names[HEAD] not in meta,
        }


def _divide(number: int, by: int, reason: str) -> int:
    if number % by:
        raise ValueError(f"{reason}: {number} / {by} = {number / by:.3f} is not a whole number. Check these tensors.")
    return number // by


def _layout(name: str, names: list[str], config_class: type[OurConfig]) -> AuthorsLayout:
    return AuthorsLayout(name, same(names), config_class, model_type=name, interleaved_rotary=True)


# Their modules in a decoder named like Llama's (`with_names` for any other)
UNILM = _layout("unilm", V1_WEIGHTS, DiffTransformerConfig).with_names({"o_proj": "out_proj"})
UNILM_V2 = _layout("unilm_v2", [*DECODER, LAMBDA_PROJ], DiffTransformerV2Config)
_YOCO = {
    **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers"},
    **{"self_attn": "attention", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    **{"mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"},
    **{"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"},
}
YOCO = replace(
    _layout("yoco", V1_WEIGHTS, DiffTransformerConfig).with_names(_YOCO),
    variant={".wq.": ".q_proj.", ".wk.": ".k_proj.", ".wv.": ".v_proj.", ".wo.": ".out_proj."},
)

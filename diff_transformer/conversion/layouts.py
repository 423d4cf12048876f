# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""How other code bases lay out a Differential Transformer: a table of names for each, and three facts about its heads.

Every tensor has the same shape on both sides; only names and the order of rows differ:

| | rotary pairs | order of heads | weight of the head norm |
| --- | --- | --- | --- |
| ours | halves (0, d/2), ... | neighbours: q1, q2 of head 0, then of head 1, ... | yes |
| unilm, yoco (the authors' code) | neighbours (0, 1), ... | neighbours | yes |
| diffllama (transformers) | halves | blocks: q1 of all heads, then q2 of all; values of width d likewise | no |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..configuration_diff import DiffTransformerConfig

# Our names, by part; "{i}" is the layer
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION, MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
SUBLN = ATTENTION + "subln.weight"
Q_PROJ = ATTENTION + "q_proj.weight"


@dataclass(frozen=True)
class Layout:
    """names: our name -> theirs, with "{i}" for the layer; tensors that the layout cannot represent are missing."""

    name: str
    names: dict[str, str]
    interleaved_rotary: bool = False
    heads_in_blocks: bool = False
    has_subln: bool = True

    def with_names(self, changes: dict[str, str]) -> "Layout":
        """The layout of a decoder with other names: each part of a name in `changes` is replaced, in order."""
        names = dict(self.names)
        for old, new in changes.items():
            found = [ours for ours, theirs in names.items() if old in theirs]
            if not found:
                known = ", ".join(self.names.values())
                raise ValueError(f"No name of the layout {self.name!r} contains {old!r}; its names are {known}.")
            names |= {ours: names[ours].replace(old, new) for ours in found}
        return replace(self, names=names)


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_OTHERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
_WEIGHTS = [
    *(EMBEDDING, FINAL_NORM, HEAD),
    *(f"{ATTENTION}{name}.weight" for name in _PROJECTIONS),
    *(ATTENTION + name for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")),
    *(SUBLN, *(f"model.layers.{{i}}.{name}.weight" for name in _OTHERS)),
]
_ATTENTION_BIASES = [f"{ATTENTION}{name}.bias" for name in _PROJECTIONS]
_MLP_BIASES = [f"model.layers.{{i}}.{name}.bias" for name in _OTHERS if "mlp" in name]
_YOCO = {
    **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers"},
    **{"self_attn": "attention", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    **{"mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"},
}


def _same(names: list[str]) -> dict[str, str]:
    return {name: name for name in names}


OURS = Layout("diff_transformer", _same([*_WEIGHTS, *_ATTENTION_BIASES, *_MLP_BIASES]))
# The authors' attention module in a decoder named like Llama's (`with_names` for any other)
UNILM = Layout("unilm", _same(_WEIGHTS), interleaved_rotary=True).with_names({"o_proj": "out_proj"})
# The authors' decoder, with either family of projection names
_AUTHORS = Layout("yoco", _same(_WEIGHTS), interleaved_rotary=True).with_names(_YOCO)
YOCO = _AUTHORS.with_names({"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"})
YOCO_PROJ = _AUTHORS.with_names({"o_proj": "out_proj"})
_DIFFLLAMA = _same([name for name in (*_WEIGHTS, *_ATTENTION_BIASES) if name != SUBLN])
DIFFLLAMA = Layout("diffllama", _DIFFLLAMA, heads_in_blocks=True, has_subln=False)
LAYOUTS = {"diff_transformer": OURS, "unilm": UNILM, "yoco": YOCO, "diffllama": DIFFLLAMA}


@dataclass(frozen=True)
class Step:
    """One tensor to write: `make(*(read(name) for name in sources))`."""

    target: str
    sources: tuple[str, ...]
    make: Callable[..., torch.Tensor]


def layer_names(names: dict[str, str], config: DiffTransformerConfig) -> dict[str, str]:
    """Our name -> theirs for all layers; tied embeddings have no head, the ablation of Table 6 has no head norm."""
    left_out = {HEAD} if config.tie_word_embeddings else set()
    left_out |= set() if config.use_subln else {SUBLN}
    for part, has_bias in (("self_attn", config.attention_bias), ("mlp", config.mlp_bias)):
        left_out |= {name for name in names if part in name and name.endswith(".bias") and not has_bias}
    kept = {ours: theirs for ours, theirs in names.items() if ours not in left_out}
    return {
        ours.replace("{i}", str(i)): theirs.replace("{i}", str(i))
        for ours, theirs in kept.items()
        for i in (range(config.num_hidden_layers) if "{i}" in ours else (0,))
    }


def row_order(name: str, layout: Layout, config: DiffTransformerConfig) -> torch.Tensor | None:
    """Row r of their tensor is row `order[r]` of the tensor that we call `name`; `None` if the order is the same."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module not in ("q_proj", "k_proj", "v_proj"):
        return None
    heads = 2 * (config.num_attention_heads if module == "q_proj" else config.num_key_value_heads)
    rows = torch.arange(heads * config.diff_head_dim).view(heads, config.diff_head_dim)
    if layout.heads_in_blocks:
        rows = torch.cat((rows[0::2], rows[1::2]))
    if layout.interleaved_rotary and module != "v_proj":
        rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    return rows.flatten()


def into_ours(layout: Layout, config: DiffTransformerConfig, dtype: torch.dtype) -> Iterator[Step]:
    """The steps from their tensors to ours. A head norm without a weight gets a weight of ones, in `dtype`."""
    for ours, theirs in layer_names(layout.names, config).items():
        order = row_order(ours, layout, config)
        back = None if order is None else torch.argsort(order)
        yield Step(ours, (theirs,), lambda x, back=back: x if back is None else x[back])
    if config.use_subln and not layout.has_subln:
        for i in range(config.num_hidden_layers):
            yield Step(SUBLN.replace("{i}", str(i)), (), lambda: torch.ones(config.head_dim, dtype=dtype))


def out_of_ours(layout: Layout, config: DiffTransformerConfig) -> Iterator[Step]:
    """The steps from our tensors to theirs; if they have no head norm weight, ours is folded into `o_proj`."""
    folds = config.use_subln and not layout.has_subln

    def fold(o_proj: torch.Tensor, subln: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(o_proj.dtype, torch.float32)
        return (o_proj.to(dtype) * subln.to(dtype).repeat(config.num_attention_heads)).to(o_proj.dtype)

    for ours, theirs in layer_names(layout.names, config).items():
        order = row_order(ours, layout, config)
        if folds and ours.endswith("o_proj.weight"):
            yield Step(theirs, (ours, ours.replace("o_proj", "subln")), fold)
        else:
            yield Step(theirs, (ours,), lambda x, order=order: x if order is None else x[order])

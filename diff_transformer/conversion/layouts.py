# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""How other code bases lay out a Differential Transformer: a table of names for each, and three facts about its heads.

Every tensor has the same shape on both sides; only names and the order of rows differ:

| | rotary pairs | order of heads | weight of the head norm |
| --- | --- | --- | --- |
| ours | halves (0, d/2), ... | neighbours: q1, q2 of head 0, then of head 1, ... | yes |
| unilm, yoco (the authors' code) | neighbours (0, 1), ... | neighbours | yes |
| diffllama (transformers) | halves | blocks: q1 of all heads, then q2 of all; values of width d likewise | no |
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ..configuration_diff import DiffTransformerConfig

# Our names, by part; "{i}" is the layer
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION = "model.layers.{i}.self_attn."
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
SUBLN = ATTENTION + "subln.weight"
Q_PROJ = ATTENTION + "q_proj.weight"


@dataclass(frozen=True)
class Layout:
    """names: our name -> theirs, with "{i}" for the layer; tensors that the layout cannot represent are missing."""

    name: str
    names: dict[str, str]
    interleaved_rotary: bool
    heads_in_blocks: bool
    has_subln: bool

    def with_names(self, changes: dict[str, str]) -> "Layout":
        """The layout of a decoder with other names: each part of a name in `changes` is replaced, in order."""
        names = dict(self.names)
        for old, new in changes.items():
            found = [ours for ours, theirs in names.items() if old in theirs]
            if not found:
                raise ValueError(
                    f"No name of the layout {self.name!r} contains {old!r}; its names are "
                    f"{', '.join(self.names.values())}."
                )
            names |= {ours: names[ours].replace(old, new) for ours in found}
        return replace(self, names=names)


def _names(embedding: str, final_norm: str, head: str, layer: str, parts: dict[str, str]) -> dict[str, str]:
    names = {EMBEDDING: embedding, FINAL_NORM: final_norm, HEAD: head}
    return names | {f"model.layers.{{i}}.{ours}": layer + theirs for ours, theirs in parts.items()}


def _attention(prefix: str, projections: Iterable[str], subln: bool) -> dict[str, str]:
    ours = ("q_proj", "k_proj", "v_proj", "o_proj")
    parts = {f"self_attn.{a}.weight": f"{prefix}{b}.weight" for a, b in zip(ours, projections, strict=True)}
    parts |= {f"self_attn.{name}": prefix + name for name in LAMBDAS}
    return parts | ({"self_attn.subln.weight": f"{prefix}subln.weight"} if subln else {})


_YOCO_REST = {
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_LLAMA_REST = {name: name for name in _YOCO_REST}
_UNILM_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_ATTENTION_BIASES = [f"{ATTENTION}{name}.bias" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
_MLP_BIASES = [f"model.layers.{{i}}.mlp.{name}.bias" for name in ("gate_proj", "up_proj", "down_proj")]


def _yoco(projections: Iterable[str]) -> dict[str, str]:
    parts = _attention("attention.", projections, subln=True) | _YOCO_REST
    return _names("tok_embeddings.weight", "norm.weight", "output.weight", "layers.{i}.", parts)


def _llama(projections: Iterable[str], subln: bool) -> dict[str, str]:
    parts = _attention("self_attn.", projections, subln) | _LLAMA_REST
    return _names(EMBEDDING, FINAL_NORM, HEAD, "model.layers.{i}.", parts)


_OURS = {
    **_llama(("q_proj", "k_proj", "v_proj", "o_proj"), subln=True),
    **{name: name for name in (*_ATTENTION_BIASES, *_MLP_BIASES)},
}
_AUTHORS = {"interleaved_rotary": True, "heads_in_blocks": False, "has_subln": True}

OURS = Layout("diff_transformer", _OURS, interleaved_rotary=False, heads_in_blocks=False, has_subln=True)
# The authors' attention module in a decoder named like Llama's (`with_names` for any other)
UNILM = Layout("unilm", _llama(_UNILM_PROJECTIONS, subln=True), **_AUTHORS)
# The authors' decoder, with either family of projection names
YOCO = Layout("yoco", _yoco(("wq", "wk", "wv", "wo")), **_AUTHORS)
YOCO_PROJ = Layout("yoco", _yoco(_UNILM_PROJECTIONS), **_AUTHORS)
DIFFLLAMA = Layout(
    "diffllama",
    {name: name for name in _OURS if name != SUBLN and name not in _MLP_BIASES},
    interleaved_rotary=False,
    heads_in_blocks=True,
    has_subln=False,
)
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
    left_out |= {name for name in names if name.endswith(".bias") and not _has_bias(name, config)}
    kept = {ours: theirs for ours, theirs in names.items() if ours not in left_out}
    return {
        ours.replace("{i}", str(i)): theirs.replace("{i}", str(i))
        for ours, theirs in kept.items()
        for i in (range(config.num_hidden_layers) if "{i}" in ours else (0,))
    }


def _has_bias(name: str, config: DiffTransformerConfig) -> bool:
    return config.attention_bias if "self_attn" in name else config.mlp_bias


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
    table = layer_names(layout.names, config)
    for ours, theirs in table.items():
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


__all__ = ["LAYOUTS", "Layout", "Step", "into_ours", "layer_names", "out_of_ours", "row_order"]

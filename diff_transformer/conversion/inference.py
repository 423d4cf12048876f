# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A checkpoint's configuration, from the shapes of its tensors and what shapes cannot tell; strict about both."""

import json
import re
from pathlib import Path

import torch

from ..configuration_diff import DiffTransformerConfig
from ..modeling_diff import DiffTransformerForCausalLM
from .layouts import DIFFLLAMA, EMBEDDING, HEAD, LAYOUTS, OURS, SUBLN, Layout, layer_names

FIRST = {part: f"model.layers.{{i}}.{part}" for part in ("mlp.gate_proj.weight", "mlp.gate_proj.bias")}
FIRST |= {
    part: f"model.layers.{{i}}.self_attn.{part}"
    for part in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "lambda_q1")
}


class _Shapes:
    """Shapes of the first layer, by our names."""

    def __init__(self, layout: Layout, meta: dict[str, torch.Tensor], path: Path) -> None:
        self.layout, self.meta, self.path = layout, meta, path

    def get(self, ours: str) -> tuple[int, ...] | None:
        theirs = self.layout.names.get(ours, "").replace("{i}", "0")
        return tuple(self.meta[theirs].shape) if theirs in self.meta else None

    def need(self, ours: str, dims: int) -> tuple[int, ...]:
        shape, theirs = self.get(ours), self.layout.names[ours].replace("{i}", "0")
        if shape is None:
            raise ValueError(
                f"{self.path} has no {theirs!r}, by which a {self.layout.name} checkpoint is known. It holds, for "
                f"example, {', '.join(list(self.meta)[:5])}. Choose another --from, or say how its names differ with "
                "--rename."
            )
        if len(shape) != dims:
            raise ValueError(f"{theirs} in {self.path} has the shape {shape}; it must have {dims} dimensions.")
        return shape


def infer_config(
    layout: Layout,
    meta: dict[str, torch.Tensor],
    path: Path,
    *,
    head_dim: int | None = None,
    num_attention_heads: int | None = None,
    rope_theta: float | None = None,
    rms_norm_eps: float | None = None,
    max_position_embeddings: int | None = None,
) -> DiffTransformerConfig:
    """Sizes from shapes; head_dim (2d) and heads, if given, must agree with them.

    rope_theta, rms_norm_eps and max_position_embeddings are in no shape: the arguments, else the source's own
    `config.json`, else 10000, 1e-5 and 4096 as in the paper.
    """
    shapes = _Shapes(layout, meta, path)
    vocab_size, hidden_size = shapes.need(EMBEDDING, 2)
    (d,) = shapes.need(FIRST["lambda_q1"], 1)
    intermediate_size, _ = shapes.need(FIRST["mlp.gate_proj.weight"], 2)
    heads = {}
    for part in ("q_proj", "k_proj"):
        rows, _ = shapes.need(FIRST[f"{part}.weight"], 2)
        if rows % (2 * d):
            raise ValueError(
                f"{part} has {rows} rows in {path}, and the lambda vectors have d = {d} entries: {rows} / 2d = "
                f"{rows} / {2 * d} = {rows / (2 * d):.3f} is no number of heads. One of the two is not what it seems."
            )
        heads[part] = rows // (2 * d)
    given = {"head_dim": (head_dim, 2 * d), "num_attention_heads": (num_attention_heads, heads["q_proj"])}
    for name, (wanted, found) in given.items():
        if wanted is not None and wanted != found:
            raise ValueError(
                f"{name}={wanted} was given, but the shapes of {path} say {found}: the lambda vectors have d = {d} "
                f"entries, head_dim = 2d = {2 * d}, and q_proj has {heads['q_proj'] * 2 * d} rows = "
                f"{heads['q_proj']} x {2 * d}."
            )
    cl100k_eos = DiffTransformerConfig.eos_token_id
    said = {"eos_token_id": cl100k_eos if vocab_size > cl100k_eos else None} | _said_by_the_source(layout, path)
    pattern = re.compile(re.escape(layout.names[FIRST["lambda_q1"]]).replace(re.escape("{i}"), r"(\d+)"))
    layers = {int(found[1]) for found in map(pattern.fullmatch, meta) if found}
    changes = {
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": rms_norm_eps,
        "rope_parameters": None if rope_theta is None else {"rope_type": "default", "rope_theta": rope_theta},
    }
    return DiffTransformerConfig(
        **said
        | {name: value for name, value in changes.items() if value is not None}
        | {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": max(layers) + 1,
            "num_attention_heads": heads["q_proj"],
            "num_key_value_heads": heads["k_proj"],
            "head_dim": 2 * d,
            "tie_word_embeddings": shapes.get(HEAD) is None,
            "use_subln": not layout.has_subln or shapes.get(SUBLN) is not None,
            "attention_bias": shapes.get(FIRST["q_proj.bias"]) is not None,
            "mlp_bias": shapes.get(FIRST["mlp.gate_proj.bias"]) is not None,
        }
    )


def _said_by_the_source(layout: Layout, path: Path) -> dict:
    """What the source's own configuration knows beyond shapes."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text())
    told = config.get("layout", config.get("model_type"))  # DiffLlama's names and shapes are ours without head norms
    if told in LAYOUTS and told != layout.name:
        raise ValueError(f"{file} says {told}, and {layout.name} was asked for. Name the layout with --from or --to.")
    if layout.name == OURS.name:
        return DiffTransformerConfig.from_pretrained(file.parent).to_dict()
    names = ["max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act", "bos_token_id"]
    names += ["eos_token_id", "pad_token_id", "lambda_init", "lambda_std_dev", "initializer_range"]
    said = {name: config[name] for name in names if config.get(name) is not None}
    if "rope_parameters" not in said and "rope_theta" in config:
        said["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    said.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    if layout.name == DIFFLLAMA.name and said.get("lambda_init", "exponential") != "exponential":
        raise ValueError(f"{file} says lambda_init={said['lambda_init']}, which a DiffLlama does not know.")
    return said


def check_names_and_shapes(
    layout: Layout,
    config: DiffTransformerConfig,
    meta: dict[str, torch.Tensor],
    path: Path,
    ignore: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Every tensor that the configuration asks for, in its shape, and no other; all faults in one error.

    ignore: regular expressions of names that may stay behind. Returns the tensors that remain.
    """
    table = layer_names(layout.names, config)
    with torch.device("meta"):
        ours = DiffTransformerForCausalLM(config).state_dict()
    meta = {name: x for name, x in meta.items() if not any(re.fullmatch(pattern, name) for pattern in ignore)}
    expected = {theirs: tuple(ours[name].shape) for name, theirs in table.items()}
    faults = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in meta]
    faults += [f"unknown: {name} {tuple(x.shape)}" for name, x in meta.items() if name not in expected]
    faults += [
        f"wrong shape: {name} is {tuple(meta[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in meta and tuple(meta[name].shape) != shape
    ]
    faults += [f"wrong type: {name} is {x.dtype}" for name, x in meta.items() if not x.dtype.is_floating_point]
    if faults:
        raise ValueError(
            f"{path} is not the {layout.name} checkpoint of {config.num_hidden_layers} layers, "
            f"{config.num_attention_heads} heads of 2d = {config.head_dim} and {config.num_key_value_heads} key heads "
            "that it seems to be. Tensors that may stay behind are named with --ignore.\n  " + "\n  ".join(faults)
        )
    return meta


__all__ = ["check_names_and_shapes", "infer_config"]

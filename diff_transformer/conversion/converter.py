# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""One checkpoint in another layout: read, checked, planned, written, compared, and only then put in place."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DiffLlamaForCausalLM, PreTrainedTokenizerBase

from ..configuration_diff import DiffTransformerConfig
from ..folders import whole_folder
from ..modeling_diff import DiffTransformerForCausalLM
from .checkpoints import Checkpoint, write_shards
from .inference import check_names_and_shapes, infer_config
from .layouts import (
    ATTENTION,
    DIFFLLAMA,
    LAYOUTS,
    OURS,
    Q_PROJ,
    YOCO,
    YOCO_PROJ,
    Layout,
    Step,
    into_ours,
    out_of_ours,
)
from .tokenizers import tokenizer_by_name
from .verification import Source, Verdict, compare, diffllama_config

# Tolerances of the logits, relative to their largest; a head norm folded into o_proj is rounded in 16 bits
EXACT, FOLDED = 1e-4, 0.1


class VerificationError(ValueError):
    """The converted checkpoint does not compute what its source computes."""


def open_source(
    path: str | Path,
    layout_name: str,
    *,
    rename: dict[str, str] | None = None,
    ignore: tuple[str, ...] = (),
    state_key: str | None = None,
    flash_semantics: bool = False,
    **sizes,
) -> Source:
    """A checkpoint with its layout and configuration, names and shapes checked.

    Args:
        path: A folder or file of safetensors or torch tensors.
        layout_name: diff_transformer, unilm, yoco or diffllama.
        rename: Parts of the layout's names -> what this checkpoint says instead.
        ignore: Regular expressions of tensors that may stay behind.
        state_key: The key of the weights in a torch file that holds more.
        flash_semantics: Confirms that a grouped-query checkpoint of the authors' code was trained with their flash
            modules.
        sizes: head_dim, num_attention_heads, rope_theta, rms_norm_eps, max_position_embeddings, as in `infer_config`.

    Raises:
        ValueError: The checkpoint is not what it is said to be; all faults at once.
        FileNotFoundError: It is not there, or not whole.
    """
    checkpoint, layout = Checkpoint(path, state_key), LAYOUTS[layout_name]
    if layout is YOCO and YOCO.names[Q_PROJ].replace("{i}", "0") not in checkpoint.meta:
        layout = YOCO_PROJ
    layout = layout.with_names(rename or {})
    config = infer_config(layout, checkpoint.meta, checkpoint.path, **sizes)
    checkpoint.meta = check_names_and_shapes(layout, config, checkpoint.meta, checkpoint.path, ignore)
    grouped = config.num_key_value_heads < config.num_attention_heads
    if layout.interleaved_rotary and grouped and not flash_semantics:
        raise ValueError(
            f"{path} has {config.num_attention_heads} heads and {config.num_key_value_heads} key heads. The authors' "
            "naive module (multihead_diffattn.py) pairs them otherwise than their flash modules, and what it trained "
            "cannot be represented. If the checkpoint was trained with a flash module, say so: --flash-semantics."
        )
    return Source(checkpoint, layout, config)


def convert(
    source: Source,
    destination: str | Path,
    to: str = "diff_transformer",
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    max_shard_size: int | str = "200MB",
    verify: bool = True,
    overwrite: bool = False,
) -> list[Verdict]:
    """Write `source` in the layout `to` as the folder `destination`; one of the two layouts must be ours.

    Args:
        source: From `open_source`.
        destination: A folder; it appears whole, or not at all.
        to: diff_transformer, unilm, yoco or diffllama.
        dtype: Of the matrices and norms; as in the source unless given. lambda vectors keep theirs.
        tokenizer: `cl100k`, `yoco` or a folder; by default the source's, if it has one.
        max_shard_size: Of a weight file, and with it of the memory that is needed.
        verify: Compare the logits before the folder takes its place.
        overwrite: Replace what is at `destination`.

    Returns:
        The verdicts, empty without `verify`.

    Raises:
        VerificationError: The logits differ; nothing is left behind.
    """
    layout, config = LAYOUTS[to], source.config
    if OURS.name not in (layout.name, source.layout.name) or layout.name == source.layout.name:
        raise ValueError(
            f"From {source.layout.name} to {to}: exactly one of the two must be diff_transformer. Convert in two "
            "steps."
        )
    _check_layout_can(layout, config)
    if Path(destination).resolve() == source.checkpoint.path.resolve():
        raise ValueError(f"{destination} is the source itself. Choose another place for the result.")
    main_dtype = dtype or source.checkpoint.meta[source.layout.names[Q_PROJ].replace("{i}", "0")].dtype
    comes_in = layout.name == OURS.name
    steps = into_ours(source.layout, config, main_dtype) if comes_in else out_of_ours(layout, config)
    plan = {step.target: step for step in steps}
    meta = {target: _meta(step, source, dtype) for target, step in plan.items()}
    kept_tokenizer = _tokenizer(tokenizer, source)
    config = _with_special_ids(config, kept_tokenizer)

    def make(target: str) -> torch.Tensor:
        step = plan[target]
        return step.make(*map(source.checkpoint.read, step.sources)).to(meta[target].dtype)

    size = sum(x.nbytes for x in meta.values())
    verdicts: list[Verdict] = []
    with whole_folder(destination, int(size * 1.01) + 2**20, overwrite) as folder:
        _write_config(folder, layout, config, main_dtype)
        with tqdm(total=size, unit="B", unit_scale=True, desc="Converting") as bar:
            write_shards(folder, meta, make, max_shard_size, bar.update)
        if kept_tokenizer is not None:
            kept_tokenizer.save_pretrained(folder)
        if verify:
            folds = config.use_subln and not layout.has_subln
            low = torch.finfo(main_dtype).bits < 32
            written = Source(Checkpoint(folder), layout, config)
            verdicts = compare(replace(source, dtype=dtype), written, FOLDED if folds and low else EXACT)
            if not all(verdict.passed for verdict in verdicts):
                raise VerificationError(
                    "The converted checkpoint computes something else than its source; nothing was written.\n"
                    + "\n".join(map(str, verdicts))
                )
    return verdicts


def _meta(step: Step, source: Source, dtype: torch.dtype | None) -> torch.Tensor:
    if not step.sources:
        return torch.empty_like(step.make(), device="meta")
    like = source.checkpoint.meta[step.sources[0]]
    return like if dtype is None or "lambda_" in step.target else like.to(dtype)


def _check_layout_can(layout: Layout, config: DiffTransformerConfig) -> None:
    """What a layout has no place for would be lost in silence."""
    faults = []
    if layout.name == DIFFLLAMA.name:
        faults += ["lambda_init"] if config.lambda_init != "exponential" else []
        faults += ["use_subln"] if not config.use_subln else []
    biases = {"attention_bias": ATTENTION + "q_proj.bias", "mlp_bias": "model.layers.{i}.mlp.gate_proj.bias"}
    faults += [name for name, tensor in biases.items() if getattr(config, name) and tensor not in layout.names]
    if faults:
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in faults)
        raise ValueError(
            f"The configuration has {said}, for which {layout.name} has no place: there is no such checkpoint."
        )


def _tokenizer(name: str | None, source: Source) -> PreTrainedTokenizerBase | None:
    path = source.checkpoint.path
    if name is None and path.is_dir() and (path / "tokenizer_config.json").is_file():
        name = str(path)
    tokenizer = None if name is None else tokenizer_by_name(name)
    if tokenizer is not None and len(tokenizer) > source.config.vocab_size:
        raise ValueError(
            f"The tokenizer {name!r} has {len(tokenizer)} words, the model only {source.config.vocab_size}: they do "
            "not belong together. Choose another --tokenizer."
        )
    return tokenizer


def _with_special_ids(
    config: DiffTransformerConfig, tokenizer: PreTrainedTokenizerBase | None
) -> DiffTransformerConfig:
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if tokenizer is not None:
        ids = {name: getattr(tokenizer, name) for name in ids}
    return DiffTransformerConfig.from_dict(config.to_dict() | ids)


def _write_config(folder: Path, layout: Layout, config: DiffTransformerConfig, dtype: torch.dtype) -> None:
    """What `from_pretrained` reads beside weights and tokenizer; for the authors' layouts what shapes cannot tell."""
    if layout.name in (OURS.name, DIFFLLAMA.name):
        with torch.device("meta"):
            ours = layout.name == OURS.name
            model = DiffTransformerForCausalLM(config) if ours else DiffLlamaForCausalLM(diffllama_config(config))
        model.to(dtype).save_pretrained(folder, state_dict={})  # everything but the weights
        return
    names = ["rms_norm_eps", "max_position_embeddings", "rope_parameters", "lambda_init"]
    names += ["bos_token_id", "eos_token_id", "pad_token_id"]
    said = {"layout": layout.name} | {name: getattr(config, name) for name in names}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")


def describe(source: Source) -> str:
    """What was found, in a line or two."""
    config, meta = source.config, source.checkpoint.meta
    types = sorted({str(x.dtype).removeprefix("torch.") for x in meta.values()})
    size = sum(x.nbytes for x in meta.values())
    return (
        f"{source.layout.name} in {source.checkpoint.path}: {config.num_hidden_layers} layers of "
        f"{config.hidden_size}, {config.num_attention_heads} heads and {config.num_key_value_heads} key heads of "
        f"2d = {config.head_dim}, feed-forward {config.intermediate_size}, vocabulary {config.vocab_size}"
        f"{' (tied)' if config.tie_word_embeddings else ''}; {len(meta)} tensors, {size / 2**20:,.0f} MiB, "
        f"{', '.join(types)}\n        rope {config.rope_parameters}, norm eps {config.rms_norm_eps}, "
        f"{config.max_position_embeddings} positions"
    )


__all__ = ["VerificationError", "convert", "describe", "open_source"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Converts a checkpoint into another layout: written next to its destination, compared, and only then moved there."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, DiffLlamaForCausalLM, PreTrainedTokenizerBase

from ..configuration_diff import DiffTransformerConfig
from ..folders import whole_folder
from ..modeling_diff import DiffTransformerForCausalLM
from ..tokenization_cl100k import cl100k_tokenizer
from .checkpoint import OpenCheckpoint
from .checkpoint_files import CheckpointFiles, write_shards
from .layouts import ATTENTION, DIFFLLAMA, LAYOUTS, MLP, OURS, Q_PROJ, Layout, Step, into_ours, out_of_ours
from .tokenization_yoco import yoco_tokenizer
from .verification import Verdict, compare, diffllama_config

# Tolerances of the logits, relative to the largest; a head norm folded into o_proj is rounded in 16 bits
EXACT, FOLDED = 1e-4, 0.1
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class VerificationError(ValueError):
    """The converted checkpoint computes different logits than its source."""


def convert(
    source: OpenCheckpoint,
    destination: str | Path,
    to: str = "diff_transformer",
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    max_shard_size: int | str = "200MB",
    verify: bool = True,
    overwrite: bool = False,
) -> list[Verdict]:
    """Writes `source` in the layout `to` as the folder `destination`; one of the two layouts must be ours.

    Args:
        source: From `open_checkpoint`.
        destination: A folder; it appears whole, or not at all.
        to: diff_transformer, unilm, yoco or diffllama.
        dtype: Type of the matrices and norms, by default that of the source. lambda vectors keep theirs.
        tokenizer: `cl100k`, `yoco` or a folder; by default that of the source, if there is one.
        max_shard_size: Size of a weight file, which also determines the memory that is needed.
        verify: Compare the logits before the folder takes its place.
        overwrite: Replace an existing `destination`.

    Returns the verdicts, empty without `verify`. Raises VerificationError, and leaves nothing, if the logits differ.
    """
    layout, config, files = LAYOUTS[to], source.config, source.files
    if OURS.name not in (layout.name, source.layout.name) or layout.name == source.layout.name:
        needed = "exactly one of the two must be diff_transformer. Convert in two steps."
        raise ValueError(f"From {source.layout.name} to {to}: {needed}")
    _check_can_represent(layout, config)
    if Path(destination).resolve() == files.path.resolve():
        raise ValueError(f"{destination} is the source itself. Choose another destination.")
    main_dtype = dtype or files.meta[source.layout.names[Q_PROJ].replace("{i}", "0")].dtype
    is_import = layout.name == OURS.name
    steps = into_ours(source.layout, config, main_dtype) if is_import else out_of_ours(layout, config)
    plan = {step.target: step for step in steps}
    meta = {target: _meta(step, source, dtype) for target, step in plan.items()}
    saved_tokenizer = _tokenizer(tokenizer, source)
    special_ids = {name: getattr(saved_tokenizer or config, name) for name in SPECIAL_IDS}
    config = DiffTransformerConfig.from_dict(config.to_dict() | special_ids)

    def make(target: str) -> torch.Tensor:
        step = plan[target]
        return step.make(*map(files.read, step.sources)).to(meta[target].dtype)

    size = sum(x.nbytes for x in meta.values())
    verdicts: list[Verdict] = []
    with whole_folder(destination, int(size * 1.01) + 2**20, overwrite) as folder:
        _write_config(folder, layout, config, main_dtype)
        with tqdm(total=size, unit="B", unit_scale=True, desc="Converting") as bar:
            write_shards(folder, meta, make, max_shard_size, bar.update)
        if saved_tokenizer is not None:
            saved_tokenizer.save_pretrained(folder)
        if verify:
            folds = config.use_subln and not layout.has_subln
            low = torch.finfo(main_dtype).bits < 32
            written = OpenCheckpoint(CheckpointFiles(folder), layout, config)
            verdicts = compare(replace(source, dtype=dtype), written, FOLDED if folds and low else EXACT)
            if not all(verdict.passed for verdict in verdicts):
                wrong = "The converted checkpoint computes different logits than its source; nothing was written."
                raise VerificationError("\n".join([wrong, *map(str, verdicts)]))
    return verdicts


def _meta(step: Step, source: OpenCheckpoint, dtype: torch.dtype | None) -> torch.Tensor:
    if not step.sources:
        return torch.empty_like(step.make(), device="meta")
    like = source.files.meta[step.sources[0]]
    return like if dtype is None or "lambda_" in step.target else like.to(dtype)


def _check_can_represent(layout: Layout, config: DiffTransformerConfig) -> None:
    """Raises ValueError for what would be lost silently in this layout."""
    lost = []
    if layout.name == DIFFLLAMA.name:
        lost += ["lambda_init"] if config.lambda_init != "exponential" else []
        lost += ["use_subln"] if not config.use_subln else []
    biases = {"attention_bias": ATTENTION + "q_proj.bias", "mlp_bias": MLP + "gate_proj.bias"}
    lost += [name for name, tensor in biases.items() if getattr(config, name) and tensor not in layout.names]
    if lost:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ValueError(
            f"The configuration has {settings}, which {layout.name} cannot represent. Choose another --to."
        )


def _tokenizer(name: str | None, source: OpenCheckpoint) -> PreTrainedTokenizerBase | None:
    if name is None and (source.files.path / "tokenizer_config.json").is_file():
        name = str(source.files.path)
    if name is None:
        return None
    named = {"cl100k": cl100k_tokenizer, "yoco": yoco_tokenizer}
    tokenizer = named[name]() if name in named else AutoTokenizer.from_pretrained(name)
    if len(tokenizer) > source.config.vocab_size:
        raise ValueError(
            f"The tokenizer {name!r} has {len(tokenizer)} entries, but the model has only {source.config.vocab_size}: "
            "they do not belong together. Choose another --tokenizer."
        )
    return tokenizer


def _write_config(folder: Path, layout: Layout, config: DiffTransformerConfig, dtype: torch.dtype) -> None:
    """What `from_pretrained` needs besides weights and tokenizer, or what shapes do not determine."""
    if layout.name in (OURS.name, DIFFLLAMA.name):
        is_ours = layout.name == OURS.name
        with torch.device("meta"):
            model = DiffTransformerForCausalLM(config) if is_ours else DiffLlamaForCausalLM(diffllama_config(config))
        model.to(dtype).save_pretrained(folder, state_dict={})  # everything but the weights
        return
    names = ["rms_norm_eps", "max_position_embeddings", "rope_parameters", "lambda_init", *SPECIAL_IDS]
    content = {"layout": layout.name} | {name: getattr(config, name) for name in names}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")

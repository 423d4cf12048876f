# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer convert SOURCE DEST --from LAYOUT [--to LAYOUT]` and `diff-transformer verify A B`."""

import argparse
import sys

import torch
from huggingface_hub.errors import StrictDataclassError

from .checkpoint import OpenCheckpoint, open_checkpoint
from .converter import convert
from .layouts import LAYOUTS
from .origin import Origin, local_path
from .verification import compare

# Options of both commands that `open_checkpoint` takes by these names
OPENING = (
    *("head_dim", "num_attention_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings"),
    *("ignore", "state_key", "flash_semantics"),
)
CONVERTING = ("tokenizer", "max_shard_size", "verify", "overwrite", "noise_std", "seed")
OURS = "by default diff_transformer (V1), or diff_v2 if the other is one of V2's"
HUB = "or OWNER/NAME on the Hub"
NOISE = (
    "from llama and its like: add normal noise to the second query head of each pair, of this standard deviation "
    "relative to that of the weights; 0 by default, which keeps every logit bit by bit"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diff-transformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert", help="write a checkpoint in another layout")
    one.add_argument("source", metavar="SOURCE", help=f"folder or file of safetensors or torch tensors, {HUB}")
    one.add_argument("destination", metavar="DEST", help="folder to create; it appears whole, or not at all")
    types = ("bfloat16", "float16", "float32")
    one.add_argument("--dtype", choices=types, help="type of the result; by default that of the source")
    one.add_argument("--tokenizer", help="cl100k, yoco or a folder; by default that of the source")
    one.add_argument("--max-shard-size", default="200MB", help="size of a weight file")
    one.add_argument("--overwrite", action="store_true", help="replace DEST")
    one.add_argument("--noise-std", type=float, default=0.0, help=NOISE)
    one.add_argument("--seed", type=int, default=0, help="of the noise")
    one.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare the logits")
    other = commands.add_parser("verify", help="compare the logits of two checkpoints")
    other.add_argument("source", metavar="A", help=f"folder, file, {HUB}")
    other.add_argument("destination", metavar="B", help="likewise")
    tolerance = "of the logits, relative to the largest; by default 1e-4, or 0 between llama and its like and diff_v2"
    other.add_argument("--tolerance", type=float, help=tolerance)
    for add in (one.add_argument, other.add_argument):
        add("--from", dest="layout", choices=LAYOUTS, help=f"layout of SOURCE or A; {OURS}")
        add("--to", choices=LAYOUTS, help=f"layout of DEST or B; {OURS}")
        add("--revision", help="branch, tag or commit of SOURCE or A on the Hub")
        checked = "to be checked against the shapes"
        add("--head-dim", type=int, help=f"2d (V1) or d (V2) of the authors' layouts, {checked}")
        heads = f"differential heads (V1) or query heads (V2) of the authors' layouts, {checked}"
        add("--heads", type=int, dest="num_attention_heads", help=heads)
        add("--rope-theta", type=float, help="of the authors' layouts: 10000 by default, 640000 after the extension")
        add("--norm-eps", type=float, dest="rms_norm_eps", help="of the authors' layouts: 1e-5 by default")
        longest = "length of the training sequences of the authors' layouts, 4096 by default"
        add("--max-positions", type=int, dest="max_position_embeddings", help=longest)
        rename = "a part of the layout's names, and what this checkpoint has in its place"
        add("--rename", nargs=2, action="append", default=[], metavar=("PART", "THEIRS"), help=rename)
        ignore = "tensors, or fields of the config.json of motif, llama and its like, to leave out"
        add("--ignore", nargs="+", default=[], metavar="REGEX", help=ignore)
        add("--state-key", help="key of the weights in a torch file that holds more")
        add("--flash-semantics", action="store_true", help="the model was trained with the authors' flash modules")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 on success and 1 on failure; the reason is printed."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, OSError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    to = options.to or LAYOUTS[options.layout or "diff_transformer"].ours
    layout = options.layout or LAYOUTS[to].ours
    path, repo_id = local_path(options.source, options.revision)
    opening = {name: getattr(options, name) for name in OPENING}
    source = open_checkpoint(path, layout, rename=dict(options.rename), **opening)
    print(f"Found   {_summary(source)}")
    if options.command == "verify":
        other = open_checkpoint(local_path(options.destination)[0], to, flash_semantics=True)
        print(f"Found   {_summary(other)}")
        verdicts = compare(source, other, options.tolerance)
    else:
        print(f"Plan    {layout} -> {to}, into {options.destination}", flush=True)
        converting = {name: getattr(options, name) for name in CONVERTING}
        dtype = options.dtype and getattr(torch, options.dtype)
        verdicts = convert(source, options.destination, to, dtype=dtype, repo_id=repo_id, **converting)
    for verdict in verdicts:
        print(f"Verdict {verdict}")
    if options.command == "convert" and layout != source.layout.ours:
        known = Origin.of(source.files.folder, repo_id).license
        unknown = "none found in SOURCE; find out what its authors allow before you share DEST"
        print(f"License {f'{known}: it applies to DEST too' if known else unknown}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _summary(checkpoint: OpenCheckpoint) -> str:
    config, meta = checkpoint.config, checkpoint.files.meta
    types = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in meta.values()}))
    return (
        f"{checkpoint.layout.name} in {checkpoint.files.path}: {config.num_hidden_layers} layers of "
        f"{config.hidden_size}, {checkpoint.layout.describe_heads(config)}, feed-forward {config.intermediate_size}, "
        f"vocabulary {config.vocab_size}{' (tied)' if config.tie_word_embeddings else ''}; {len(meta)} tensors, "
        f"{sum(x.nbytes for x in meta.values()) / 2**20:,.0f} MiB, {types}\n        rope {config.rope_parameters}, "
        f"norm eps {config.rms_norm_eps}, {config.max_position_embeddings} positions"
    )


if __name__ == "__main__":
    sys.exit(main())

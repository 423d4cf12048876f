# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer convert SOURCE DEST [--from LAYOUT] [--to LAYOUT]` and `diff-transformer verify A B`."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from .checkpoint import find_layout, open_checkpoint, read_stated
from .converter import check_arguments, convert
from .layouts import LAYOUTS
from .origin import Origin, local_path
from .verification import compare, differing_fields

# What `open_checkpoint` and `convert` take by the names of the options
OPENING = ("rope_theta", "rms_norm_eps", "max_position_embeddings", "ignore", "state_key", "flash_semantics")
CONVERTING = ("tokenizer", "max_shard_size", "verify", "overwrite", "noise_std", "seed")
TYPES = ("bfloat16", "float16", "float32")


def _parser() -> argparse.ArgumentParser:
    reading = argparse.ArgumentParser(add_help=False)
    add = reading.add_argument
    add("--from", dest="layout", choices=LAYOUTS, help="layout of SOURCE or A, by default the one in its config.json")
    add("--revision", help="branch, tag or commit of SOURCE or A on the Hub")
    theirs = "of a checkpoint in the authors' layouts"
    theta = f"RoPE base {theirs} (default: 10000; 640000 after the extension to 64K)"
    add("--rope-theta", type=float, help=theta)
    add("--norm-eps", type=float, dest="rms_norm_eps", help=f"RMSNorm eps {theirs} (default: 1e-5)")
    longest = f"length of the training sequences {theirs} (default: 4096)"
    add("--max-positions", type=int, dest="max_position_embeddings", help=longest)
    rename = "a part of the layout's names, and what this checkpoint has in its place"
    add("--rename", nargs=2, action="append", default=[], metavar=("PART", "THEIRS"), help=rename)
    ignore = "tensors to leave out, or fields of config.json (Motif and Llama-family models)"
    add("--ignore", nargs="+", default=[], metavar="REGEX", help=ignore)
    add("--state-key", help="key of the weights in a torch file that holds more")
    semantics = "confirm that the authors' flash modules trained this grouped-query checkpoint"
    add("--flash-semantics", action="store_true", help=semantics)

    parser = argparse.ArgumentParser(prog="diff-transformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("convert", parents=[reading], help="write a checkpoint in another layout").add_argument
    source = "folder or file of safetensors or torch tensors, GGUF file, or Hub model ID"
    add("source", metavar="SOURCE", help=source)
    add("destination", metavar="DEST", help="output folder, which appears when it is complete")
    add("--to", choices=LAYOUTS, help="layout of DEST, by default diff_transformer (V1) or diff_v2")
    add("--dtype", choices=TYPES, help="type of DEST, by default that of SOURCE")
    add("--tokenizer", help="cl100k, yoco or a folder; by default that of SOURCE")
    add("--max-shard-size", default="5GB", help="size of a weight file")
    add("--overwrite", action="store_true", help="replace DEST if it is a checkpoint")
    noise = "for Llama-family models: standard deviation of noise in the second query heads, relative to the weights"
    add("--noise-std", type=float, default=0.0, help=noise)
    add("--seed", type=int, default=0, help="random seed of the noise")
    add("--no-verify", dest="verify", action="store_false", help="do not compare the logits")

    add = commands.add_parser("verify", parents=[reading], help="compare the logits of two checkpoints").add_argument
    add("source", metavar="A", help="folder, file or Hub model ID")
    add("destination", metavar="B", help="folder or file")
    add("--to", choices=LAYOUTS, help="layout of B, by default the one in its config.json")
    add("--dtype", choices=TYPES, help="round A to this type first, as `convert --dtype` does")
    tolerance = "of the logits, relative to the largest; by default 1e-4, or 0 between Llama-family models and diff_v2"
    add("--tolerance", type=float, help=tolerance)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 on success and 1 on failure; the reason is printed."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, OSError, StrictDataclassError, re.error) as error:  # re.error: in --ignore
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "convert":
        check_arguments(options.destination, options.overwrite, options.tokenizer)
    path, repo_id = local_path(options.source, options.revision, weights=False)
    if (config := path / "config.json").is_file():  # an error comes before a long download
        read_stated(find_layout(options.layout, config), config, options.ignore)
    path, _ = local_path(options.source, options.revision)
    opening = {name: getattr(options, name) for name in OPENING}
    source = open_checkpoint(path, options.layout, rename=dict(options.rename), **opening)
    print(f"Found   {source}")
    dtype = options.dtype and getattr(torch, options.dtype)
    if options.command == "verify":
        other = open_checkpoint(local_path(options.destination)[0], options.to, flash_semantics=True)
        print(f"Found   {other}")
        verdicts = compare(replace(source, dtype=dtype), other, options.tolerance)
    else:
        to = options.to or source.layout.ours
        print(f"Plan    {source.layout.name} -> {to}, into {options.destination}", flush=True)
        converting = {name: getattr(options, name) for name in CONVERTING}
        verdicts = convert(source, options.destination, to, dtype=dtype, repo_id=repo_id, **converting)
    for verdict in verdicts:
        print(f"Verdict {verdict}")
    differing = differing_fields(source, other) if options.command == "verify" else {}
    for name, (a, b) in differing.items():
        print(f"Verdict {name} differs: {a} and {b}   WRONG")
    if options.command == "convert":
        if not (Path(options.destination) / "tokenizer_config.json").is_file():
            print("Tokenizer none found in SOURCE; add one with --tokenizer")
        origin = Origin.of(source.files.path, repo_id, source.files.metadata)
        known = f"{origin.license}: it applies to DEST too (from {', '.join(map(str, origin.stated_in))})"
        unknown = "none found in SOURCE; find out what its authors allow before you share DEST"
        print(f"License {known if origin.license else unknown}")
    return 0 if all(verdict.passed for verdict in verdicts) and not differing else 1


if __name__ == "__main__":
    sys.exit(main())

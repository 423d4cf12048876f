# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""`diff-transformer convert SOURCE DEST --from LAYOUT [--to LAYOUT]` and `diff-transformer verify A B`."""

import argparse
import sys

import torch

from .converter import EXACT, convert, describe, open_source
from .layouts import LAYOUTS
from .verification import compare

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diff-transformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert", help="write a checkpoint in another layout")
    one.add_argument("source", metavar="SOURCE", help="folder or file: safetensors or torch tensors")
    one.add_argument("destination", metavar="DEST", help="folder that will appear, whole or not at all")
    one.add_argument("--dtype", choices=DTYPES, help="of the result; as in the source by default")
    one.add_argument("--tokenizer", help="cl100k, yoco or a folder; the source's own by default")
    one.add_argument("--max-shard-size", default="200MB", help="of a weight file, and of the memory that is needed")
    one.add_argument("--overwrite", action="store_true", help="replace DEST")
    one.add_argument("--no-verify", action="store_true", help="do not compare the logits")
    other = commands.add_parser("verify", help="compare the logits of two checkpoints")
    other.add_argument("source", metavar="A")
    other.add_argument("destination", metavar="B")
    other.add_argument("--tolerance", type=float, default=EXACT, help="of the logits, relative to the largest")
    for command in (one, other):
        command.add_argument("--from", dest="layout", choices=LAYOUTS, default="diff_transformer")
        command.add_argument("--to", choices=LAYOUTS, default="diff_transformer")
        command.add_argument("--head-dim", type=int, help="2d, to be checked against the shapes")
        command.add_argument("--heads", type=int, help="differential heads, to be checked against the shapes")
        command.add_argument("--rope-theta", type=float, help="10000 by default, 640000 after the 64K extension")
        command.add_argument("--norm-eps", type=float, help="1e-5 by default")
        command.add_argument("--max-positions", type=int, help="trained length, 4096 by default")
        command.add_argument(
            "--rename",
            nargs=2,
            action="append",
            default=[],
            metavar=("PART", "THEIRS"),
            help="a part of the layout's names, and what stands there in this checkpoint",
        )
        command.add_argument("--ignore", nargs="+", default=[], metavar="REGEX", help="tensors that may stay behind")
        command.add_argument("--state-key", help="where the weights are in a torch file that holds more")
        command.add_argument("--flash-semantics", action="store_true", help="trained with the authors' flash modules")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """0 if all went well, 1 if not; the reason is printed."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    source = open_source(
        options.source,
        options.layout,
        rename=dict(options.rename),
        ignore=tuple(options.ignore),
        state_key=options.state_key,
        flash_semantics=options.flash_semantics,
        head_dim=options.head_dim,
        num_attention_heads=options.heads,
        rope_theta=options.rope_theta,
        rms_norm_eps=options.norm_eps,
        max_position_embeddings=options.max_positions,
    )
    print(f"Found   {describe(source)}")
    if options.command == "verify":
        other = open_source(options.destination, options.to, flash_semantics=True)
        print(f"Found   {describe(other)}")
        verdicts = compare(source, other, options.tolerance)
    else:
        print(f"Plan    {options.layout} -> {options.to}, into {options.destination}", flush=True)
        verdicts = convert(
            source,
            options.destination,
            options.to,
            dtype=DTYPES.get(options.dtype),
            tokenizer=options.tokenizer,
            max_shard_size=options.max_shard_size,
            verify=not options.no_verify,
            overwrite=options.overwrite,
        )
    for verdict in verdicts:
        print(f"Verdict {verdict}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

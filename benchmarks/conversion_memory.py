# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of a conversion, against the size of its checkpoint.

    python -m benchmarks.conversion_memory --out benchmarks/results/conversion_memory_<hardware>_<date>
    python -m benchmarks.conversion_memory --motif 2.6B --out ...
    python -m benchmarks.conversion_memory --motif 12.7B --layers 4 --out ...

writes a synthetic checkpoint in the authors' layout (bfloat16, sharded), or random numbers in the exact shapes of
Motif-2.6B or Motif-2-12.7B (float32, 9.7 or 47.3 GiB) or of their first layers, converts it with the command line in a
new process, with and without the verification of the logits, and writes `<out>.csv`. The peak is that of the resident
memory as the kernel counts it, which includes Python, torch and the mapped pages of files.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import argument_parser, mebibytes, show, versions, write
from benchmarks.timing import measure_apart, resident_peak
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.conversion import __main__ as conversion
from diff_transformer.conversion.checkpoint_files import write_shards
from diff_transformer.conversion.layouts import LAYOUTS
from tests.motif_reference import CONFIG, GROUPED, shapes

MOTIF = {"2.6B": CONFIG, "12.7B": GROUPED}


def write_checkpoint(folder: Path, size: int, hidden_size: int) -> int:
    """Writes a model of about `size` bytes and returns its exact size."""
    sizes = {"hidden_size": hidden_size, "num_attention_heads": hidden_size // 256 or 1}
    sizes |= {"vocab_size": 16 * hidden_size, "tie_word_embeddings": True, "eos_token_id": None}

    def model(layers: int) -> DiffTransformerForCausalLM:
        return DiffTransformerForCausalLM(DiffTransformerConfig(num_hidden_layers=layers, **sizes))

    with torch.device("meta"):
        one, two = model(1).num_parameters(), model(2).num_parameters()
        written = model(max(1, round((size / 2 - 2 * one + two) / (two - one)))).to(torch.bfloat16)
    config, state = written.config, written.state_dict()
    meta = {theirs: state[ours] for ours, theirs in LAYOUTS["yoco"].layer_names(config).items()}
    return write_random(folder, meta, "400MB")


def write_motif(folder: Path, config: dict) -> int:
    """Writes random weights in the shapes of a Motif and returns their size."""
    (folder / "config.json").write_text(json.dumps(config))
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes(config).items()}
    return write_random(folder, meta, "5GB")


def write_random(folder: Path, meta: dict[str, torch.Tensor], shard: str) -> int:
    write_shards(folder, meta, lambda name: [torch.randn(meta[name].shape).mul_(0.02).to(meta[name].dtype)], shard)
    return sum(x.nbytes for x in meta.values())


def convert_here(arguments: list[str]) -> None:
    """Runs the command line in this process, and prints seconds and peak bytes. Without arguments: of its imports."""
    start = time.perf_counter()
    if arguments and conversion.main(arguments) != 0:
        raise SystemExit("The conversion failed.")
    print(time.perf_counter() - start, resident_peak())


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint in GiB (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="of the model (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the temporary checkpoints, which need three times their size")
    parser.add_argument("--motif", choices=MOTIF, help="in the shapes of Motif-2.6B or Motif-2-12.7B")
    parser.add_argument("--layers", type=int, help="of Motif (default: all)")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure is not None:
        return convert_here(options.measure)
    motif = MOTIF[options.motif] if options.motif else {}
    if motif:
        motif = motif | {"num_hidden_layers": options.layers or motif["num_hidden_layers"]}
        options.gib = sum(map(math.prod, shapes(motif).values())) / 2**28
    layout = "motif" if options.motif else "yoco"
    print(f"Budget  {3 * options.gib:.3g} GiB of disk, one minute per GiB", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        gib = int(options.gib * 2**30)
        size = write_motif(source, motif) if motif else write_checkpoint(source, gib, options.hidden_size)
        imports_alone = int(measure_apart("benchmarks.conversion_memory").split()[1])
        for name, verify in (("convert", ["--no-verify"]), ("convert and verify", [])):
            task = ("convert", source, Path(folder) / "converted", "--from", layout, "--overwrite", *verify)
            seconds, peak = map(float, measure_apart("benchmarks.conversion_memory", *task).split())
            sizes = {"checkpoint_mib": size, "peak_mib": peak, "imports_alone_mib": imports_alone}
            row = {"task": name, **{column: mebibytes(number) for column, number in sizes.items()}}
            where = {"hardware": platform.machine(), **versions("torch", "transformers")}
            rows.append(show({**row, "seconds": round(seconds, 1), **where}))
    write(options.out, rows)


if __name__ == "__main__":
    main()

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Peak memory of a conversion, against the size of its checkpoint.

    python -m benchmarks.conversion_memory --out benchmarks/results/conversion_memory_<hardware>_<date>

writes random numbers in the exact shapes of the first layers of Motif-2-12.7B, in float32 (47.3 GiB with all its 40),
converts them with the command line in a new process, with and without the verification of the logits, and writes
`<out>.csv`. The peak is that of the resident memory as the kernel counts it, which includes Python, torch and the
mapped pages of files.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import argument_parser, mebibytes, show, versions, write
from benchmarks.timing import resident_peak
from diff_transformer.conversion import __main__ as conversion
from diff_transformer.conversion.checkpoint_files import write_shards
from tests.motif_reference import GROUPED, shapes


def write_checkpoint(folder: Path, config: dict) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes(config).items()}
    write_shards(folder, meta, lambda name: [torch.randn(meta[name].shape).mul_(0.02)], "5GB")


def convert_here(arguments: list[str]) -> None:
    """Runs the command line in this process, and prints seconds and peak bytes. Without arguments: of its imports."""
    start = time.perf_counter()
    if arguments and conversion.main(arguments) != 0:
        raise SystemExit("The conversion failed.")
    print(time.perf_counter() - start, resident_peak())


def measure_apart(*arguments) -> list[float]:
    """Seconds and peak bytes of a command line in a separate process."""
    command = [sys.executable, "-m", "benchmarks.conversion_memory", "--measure", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(x) for x in done.stdout.splitlines()[-1].split()]


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the temporary checkpoints, which need three times their size")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure is not None:
        return convert_here(options.measure)
    config = GROUPED | {"num_hidden_layers": options.layers}
    size = 4 * sum(map(math.prod, shapes(config).values()))
    print(f"Budget  {3 * size / 2**30:.3g} GiB of disk, one minute per GiB", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        write_checkpoint(source, config)
        _, imports_alone = measure_apart()
        for name, verify in (("convert", ["--no-verify"]), ("convert and verify", [])):
            task = ("convert", source, Path(folder) / "converted", "--from", "motif", "--overwrite", *verify)
            seconds, peak = measure_apart(*task)
            sizes = {"checkpoint_mib": size, "peak_mib": peak, "imports_alone_mib": imports_alone}
            row = {"task": name, **{column: mebibytes(number) for column, number in sizes.items()}}
            where = {"hardware": platform.machine(), **versions("torch", "transformers")}
            rows.append(show({**row, "seconds": round(seconds, 1), **where}))
    write(options.out, rows)


if __name__ == "__main__":
    main()

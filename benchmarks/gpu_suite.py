# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Everything that a GPU is needed for, in stages that each end within eight minutes: `make gpu`.

    python -m benchmarks.gpu_suite --out FOLDER [--stage NAME ...] [--resume]
    python -m benchmarks.gpu_suite --report FOLDER

runs on a machine with torch, triton, transformers and pytest and without a network; it installs and builds nothing.

    correctness      tests/test_flash_diff.py, bfloat16 against float32, equal bits of two runs, compute-sanitizer
    attention        forward + backward and decoding against every installed rival
    tuning           candidates of the block table, compiled in parallel and then timed
    attention-tuned  attention with the fastest of them
    model            layers of the paper's 3B against its Transformer twin: tokens per second, memory, decoding
    loss             LM head and loss of 64K tokens with and without the logits
    training         a short training of DIFF and its twin on Python's and torch's own sources

FOLDER gets `gpu_suite.jsonl` (a row per result, written at once), `report.md`, `blocks.json` (the winners of the
tuning, for DIFF_TRANSFORMER_BLOCKS) and `log.txt`. What fails leaves its error as a row, and the rest still runs. A
stage that is run again replaces its rows; with --resume it keeps them and runs only what is missing. The exit status
is 1 if anything failed. gpu_evidence.py has the rule by which a committed result file makes `flash_diff` the default.

--dry-run tries all of this on a CPU with tiny sizes. Its rows are marked, and no reader of results accepts them.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
STAGES = ("correctness", "attention", "tuning", "attention-tuned", "model", "loss", "training")
MINUTES = 8  # of a stage, all in all
SECONDS_TO_END = 20  # of them, kept to end processes and write the report
LOG_BYTES = 8 << 20
UNFINISHED = ("error", "left out")  # what --resume runs again
SHOWN = ("ms", "tokens_per_second", "over_best_rival", "peak_mib", "peak_gib", "validation_loss", "seconds")
BLOCKS = "DIFF_TRANSFORMER_BLOCKS"

# The arguments of the jobs, on a GPU and in a dry run
FULL: dict[str, Any] = {
    "kernel": {"hidden_size": 3072, "dtype": "bfloat16", "device": "cuda"},
    "lengths": {128: [4096, 2048, 8192, 32768], 64: [4096, 2048, 8192, 32768], 96: [4096]},
    "tests": {"chosen": ["-q"]},
    "checked": 2048,
    "attention": ["--tokens", "65536", "--seconds", "2"],
    "compiled": {"limit": 15, "length": 512},
    "timed": {"limit": 15, "length": 4096, "tokens": 65536, "rounds": 3, "repeats": 3},
    "model": [2048, 4096],
    "model_arguments": ["--tokens", "4096", "--minutes", "60"],
    "loss": {"tokens": 65536, "hidden_size": 3072},
    "training": {"length": 2048, "batch": 16, "steps": 300, "validation": 64, "learning_rate": 6e-4, "ranks": 8192},
    "trained": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4},
    "files": None,
}
DRY: dict[str, Any] = {
    "kernel": {"hidden_size": 32, "dtype": "float16", "device": "cpu"},  # the interpreter gets bfloat16 wrong
    "lengths": {16: [16]},
    "tests": {"chosen": ["-q", "-k", "deltas_follow or errors_of_the_other"]},
    "checked": 16,
    "attention": ["--tokens", "16", "--check-length", "16", "--rounds", "1"],
    "compiled": {"limit": 2, "length": 16},
    "timed": {"limit": 2, "length": 16, "tokens": 16, "rounds": 1, "repeats": 1},
    "model": [4],
    "model_arguments": ["--tiny", "--layers", "1", "--tokens", "4", "--rounds", "1"],
    "loss": {"tokens": 32, "hidden_size": 16},
    "training": {"length": 16, "batch": 2, "steps": 3, "validation": 2, "learning_rate": 3e-3, "ranks": 512},
    "trained": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "initializer_range": 0.2},
    "files": 3,
}


class Job(NamedTuple):
    """A call of a function of gpu_jobs."""

    name: str
    function: str
    arguments: dict[str, Any]


def plan(stage: str, dry_run: bool) -> list[list[Job]]:
    """The steps of a stage. The jobs of a step run at the same time."""
    from benchmarks.attention_ways import WAYS

    size = DRY if dry_run else FULL
    kernel, lengths, device = size["kernel"], size["lengths"], size["kernel"]["device"]
    number = 2 if dry_run else min(16, os.cpu_count() or 1)
    parts = [{"part": i, "parts": number} for i in range(number)]
    options = ["--device", device, "--dtype", kernel["dtype"]]
    if stage == "correctness":
        jobs = [Job(f"tests {part['part']}", "tests", part | size["tests"]) for part in parts]
        for d, norm in product(lengths, (False, True)):
            one = {"d": d, "norm": norm, "length": size["checked"]}
            jobs.append(Job(f"kernels d={d}{' norm' * norm}", "kernels", one | kernel))
        return [[*jobs, Job("memcheck", "memcheck", {"device": device, "seconds": 240})]]
    if stage in ("attention", "attention-tuned"):
        flex = [name for name in WAYS if name.endswith("/flex")]
        ways = [name for name in WAYS if name not in flex]
        flex = ["eager"] if dry_run else flex
        jobs = [Job(f"d={d}", "attention_ways", {"d": d, "lengths": lengths[d], "ways": ways}) for d in lengths]
        if stage == "attention":  # torch.compile takes most of a minute for each of its cells: last, and few
            compiled = {"ways": ["flash_diff", *flex], "suffix": " beside flex"}
            first = {d: {"d": d, "lengths": lengths[d][:1], **compiled} for d in list(lengths)[:2]}
            jobs += [Job(f"d={d} flex", "attention_ways", arguments) for d, arguments in first.items()]
        options += ["--hidden-size", str(kernel["hidden_size"]), *size["attention"]]
        return [[job._replace(arguments=job.arguments | {"options": options})] for job in jobs]
    if stage == "tuning":
        compiled = {"dims": list(lengths), **size["compiled"], **kernel}
        jobs = [Job(f"compile {part['part']}", "compile_candidates", part | compiled) for part in parts]
        return [jobs, *([Job(f"time d={d}", "time_candidates", {"d": d, **size["timed"], **kernel})] for d in lengths)]
    if stage == "model":
        options = ["--device", device, *size["model_arguments"]] + ["--dtype", "float32"] * dry_run
        return [[Job(f"{length} tokens", "model", {"length": length, "options": options})] for length in size["model"]]
    if stage == "loss":
        return [[Job("LM head", "loss", {**size["loss"], "device": device})]]
    trained = {"changes": size["trained"], "files": size["files"], "autocast": not dry_run, "device": device}
    return [[Job("DIFF and Transformer", "training", size["training"] | trained)]]


class Results:
    """The rows in a file, which is as complete as they are at any time."""

    def __init__(self, path: Path, shared: dict[str, Any]) -> None:
        self.path, self.shared = path, shared
        self.rows: list[dict] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if any(row["dry_run"] != shared["dry_run"] for row in self.rows):
            raise SystemExit(f"{path} has rows of {'no' * shared['dry_run'] or 'a'} dry run: name another --out.")

    def drop(self, stage: str, resume: bool) -> None:
        """Drops the rows of a stage or, to resume it, those of jobs that did not end and that of the stage."""

        def is_kept(row: dict) -> bool:
            return resume and row["status"] not in UNFINISHED and row["name"] != stage

        self.rows = [row for row in self.rows if row["stage"] != stage or is_kept(row)]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, **row: Any) -> None:
        row = {"stage": "", "job": "", "name": "", "status": "ok", "reason": "", "is_job": False, **row, **self.shared}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        figures = [f"{key} {row[key]}" for key in SHOWN if key in row]
        print(
            f"{row['stage']:15} {row['name']:45} {row['status']:10} {row['reason'][:120] or ', '.join(figures)}",
            flush=True,
        )

    def done(self, stage: str) -> dict[str, str]:
        return {row["name"]: row["status"] for row in self.rows if row["stage"] == stage and not row["is_job"]}

    def ended(self, stage: str) -> dict[str, str]:
        return {row["name"]: row["status"] for row in self.rows if row["stage"] == stage and row["is_job"]}


def run_step(stage: str, jobs: Sequence[Job], results: Results, deadline: float, log: Path) -> None:
    """Runs jobs at the same time, each in a process of its own, which ends at the deadline."""
    from benchmarks.gpu_jobs import run_job

    # A process with a context of CUDA cannot be forked; without one that saves the imports
    context = multiprocessing.get_context("fork" if results.shared["dry_run"] else "spawn")
    running, done, start = {}, results.done(stage), time.monotonic()
    try:
        for job in jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=run_job, args=(job.function, job.arguments, done, sender, log))
            process.start()
            sender.close()
            running[receiver] = (job, process)
        errors: dict[str, str] = {}

        def add(**row: Any) -> None:
            results.add(stage=stage, seconds=round(time.monotonic() - start, 1), **row)

        while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for receiver in ready:
                job, process = running[receiver]
                try:
                    row = receiver.recv()
                except (EOFError, OSError):  # the process has ended, perhaps within a row
                    process.join()
                    del running[receiver]
                    if process.exitcode != 0 and job.name not in errors:
                        errors[job.name] = f"its process ended with the status {process.exitcode}: see {log.name}"
                    status = "error" if job.name in errors else "ok"
                    add(name=job.name, status=status, reason=errors.get(job.name, ""), is_job=True)
                    continue
                if "error" in row:
                    errors[job.name] = row["error"]
                else:
                    add(job=job.name, **row)
        for job, _ in running.values():
            add(name=job.name, status="error", reason="stopped, as the time of the stage was spent", is_job=True)
    finally:
        for _, process in running.values():
            with suppress(ProcessLookupError):  # it has not become the leader of its group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def run_stage(stage: str, results: Results, folder: Path, dry_run: bool, resume: bool) -> None:
    from benchmarks.gpu_evidence import winning_table

    start = time.monotonic()
    deadline = start + 60 * MINUTES - SECONDS_TO_END
    results.drop(stage, resume)
    blocks = folder / ("dry_run_blocks.json" if dry_run else "blocks.json")
    if stage == "attention-tuned":
        if not blocks.exists():
            reason = f"there is no {blocks}: the stage tuning writes it"
            return results.add(stage=stage, name=stage, status="error", reason=reason, is_job=True)
        os.environ[BLOCKS] = str(blocks)
    try:
        for jobs in plan(stage, dry_run):
            left = [job for job in jobs if job.name not in results.ended(stage)]
            if time.monotonic() < deadline:
                run_step(stage, left, results, deadline, folder / "log.txt")
                continue
            for job in left:
                reason = "the time of the stage was spent"
                results.add(stage=stage, name=job.name, status="left out", reason=reason, is_job=True)
    finally:
        os.environ.pop(BLOCKS, None)
    end = {"seconds": round(time.monotonic() - start, 1), "is_job": True}
    worst = max(results.ended(stage).values(), key=("ok", "left out", "error").index)
    results.add(stage=stage, name=stage, status=worst, **end)
    if stage == "tuning" and (table := winning_table(results.rows)):
        blocks.write_text(json.dumps(table, indent=1) + "\n")


def commit() -> str:
    """Of this repository; "" where it is a plain copy or there is no git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""


def environment(dry_run: bool, command: str) -> dict[str, Any]:
    """What every row says about where it comes from."""
    import torch

    from benchmarks.report import hardware, versions

    device = "cpu" if dry_run else "cuda"
    sources = sorted((ROOT / "diff_transformer").glob("flash_diff*.py"))
    capability = (8, 6) if dry_run else torch.cuda.get_device_capability()
    packages = versions("torch", "triton", "transformers", "numpy", "flash_attn", "flash_attn_interface")
    return {
        "dry_run": dry_run,
        "hardware": hardware(device),
        "capability": ".".join(map(str, capability)),
        "versions": {"python": platform.python_version(), **packages},
        "commit": commit(),
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12],
        "command": command,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="folder of the results; another run adds to it")
    add("--stage", nargs="+", choices=STAGES, default=list(STAGES), metavar="NAME", help="default: all, in order")
    add("--resume", action="store_true", help="keep what a stage has in the folder, and run what is missing")
    add("--dry-run", action="store_true", help="try everything on a CPU, with tiny sizes")
    add("--report", type=Path, metavar="FOLDER", help="print the page of a folder or of a file of rows, and end")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.report is None):
        parser.error("name a folder for the results with --out, or one to read with --report")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if anything failed, otherwise 0."""
    options = parse(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.dry_run:  # before torch and triton are imported
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in (BLOCKS, "DIFF_TRANSFORMER_AUTOTUNE"):  # what is measured is what ships
        os.environ.pop(name, None)
    import torch

    from benchmarks import gpu_evidence

    if options.report:
        try:
            print(gpu_evidence.report(gpu_evidence.read(options.report), STAGES), end="")
        except ValueError as error:
            raise SystemExit(str(error)) from error
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU. --dry-run tries everything on a CPU.")
    out = options.out.absolute()
    os.chdir(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    shared = environment(options.dry_run, " ".join(["python -m benchmarks.gpu_suite", *words]))
    results, log = Results(out / gpu_evidence.ROWS, shared), out / "log.txt"
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.unlink()
    stages = [stage for stage in STAGES if stage in options.stage]
    print(f"Budget  at most {MINUTES} minutes each for {', '.join(stages)}, on {shared['hardware']}", flush=True)
    for stage in stages:
        run_stage(stage, results, out, options.dry_run, options.resume)
    if not options.dry_run:
        (out / "report.md").write_text(gpu_evidence.report(results.rows, STAGES))

    left = [stage for stage in STAGES if results.ended(stage).get(stage) != "ok"]
    if left:
        print(f"Next    python -m benchmarks.gpu_suite --out {options.out} --resume --stage {left[0]}", end="")
        print(" --dry-run" * options.dry_run)
    elif options.dry_run:
        print("Next    the same on a GPU, without --dry-run: these rows show nothing")
    else:
        name = re.sub(r"\W+", "_", shared["hardware"].lower())
        print(f"Next    cp {options.out / gpu_evidence.ROWS} benchmarks/results/gpu_suite_{name}_{date.today()}.jsonl")
    return int(any(row["stage"] in stages and row["status"] in ("RED", "error") for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())

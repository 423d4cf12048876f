# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Does it pay to make a pretrained Llama differential? Its branches, on one GPU, in calls of eight minutes.

    python -m benchmarks.upcycle_gpu --model MODEL --out FOLDER [--minutes 8] [--branch NAME ...]

MODEL is the folder or the GGUF file of a Llama, or the file's parts (`split -b 60M`). The defaults are for
SmolLM2-135M-Instruct, which the wheel in demo/pretrained.py holds. Each branch, one of
diff_transformer/reproduction/branches.py, begins with it and trains on the same rows: the Python sources of all
packages of this machine. Then the branches are measured on sources that are held out: loss by position, needles,
activation outliers.

The same command again goes on, until it ends with the status 0; before that it is 75. FOLDER/losses.json has what is
known after each call, FOLDER/report the measurements. There is one learning rate and one seed: differences as small as
those between seeds mean nothing.

It needs the packages of `pip install "diff-transformer[train,eval,gguf]"`.
"""

import argparse
import gc
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from diff_transformer.conversion import open_checkpoint
from diff_transformer.evaluation.__main__ import evaluate, report
from diff_transformer.extras import skip_unused_deepspeed
from diff_transformer.folders import whole_file, whole_folder
from diff_transformer.reproduction.branches import EVERY_ARM, continued_model
from diff_transformer.reproduction.run import UNFINISHED
from diff_transformer.reproduction.tasks import Text, python_sources
from diff_transformer.training import upcycle
from diff_transformer.training.corpus import CorpusArguments
from diff_transformer.training.data import load_rows

ROOT = Path(__file__).parents[1]
# The first two answer the question; the third asks whether more queries are all that it is
ORDER = ("transformer", "upcycled", "more_heads", "upcycled_noise_0.1", "upcycled_lambda_10", "more_heads_signed")
ORDER += ("upcycled_noise_0.5", "upcycled_redrawn")
SEED = 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, nargs="+", help="folder or GGUF file of a Llama, or the file's parts")
    add("--out", type=Path, required=True, help="folder of all that is made")
    add("--minutes", type=float, default=8.0, help="after which a call stops (default: %(default)s)")
    add("--branch", nargs="+", choices=ORDER, default=list(ORDER), metavar="NAME", help=f"of {', '.join(ORDER)}")
    add("--tokens", type=float, default=1e8, help="that each branch trains on (default: %(default)s)")
    add("--length", type=int, default=2048, help="of a row, in tokens (default: %(default)s)")
    add("--rows", type=int, default=16, help="in a batch, four of which are a step (default: %(default)s)")
    add("--learning-rate", type=float, default=2e-4, help="of all branches (default: %(default)s)")
    add("--samples", type=int, default=50, help="rows and prompts of a measurement (default: %(default)s)")
    add("--megabytes", type=float, help="of sources (default: all)")
    return parser.parse_args(arguments)


def read_llama(paths: list[Path], folder: Path) -> None:
    """Writes the model, in float32, and its tokenizer into a folder. Several paths are the parts of a file."""
    path = paths[0]
    if len(paths) > 1:
        with whole_file(path := folder.with_name("model.gguf")) as joined, joined.open("wb") as file:
            for part in paths:
                file.write(part.read_bytes())
    files = open_checkpoint(path, "llama").files
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(files.folder))
    weights = model.state_dict()
    with torch.no_grad():
        for name in files.meta:
            weights[name].copy_(files.read(name))
    with whole_folder(folder, 4 * model.num_parameters(), overwrite=False) as part:
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(files.folder).save_pretrained(part)


def write_sources(folder: Path, options: argparse.Namespace, base: Path) -> None:
    """validation.jsonl, one file of sources in twenty, and the rows of the others, which are packed once."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    with whole_folder(folder, 0, overwrite=False) as part:
        files = {split: (part / f"{split}.jsonl").open("w") for split in ("train", "validation")}
        for split, text in python_sources(Text("packages", held_out=20, max_megabytes=options.megabytes)):
            files[split].write(json.dumps({"text": text}) + "\n")
        for file in files.values():
            file.close()
        corpus = CorpusArguments(dataset=str(part / "train.jsonl"), sequence_length=options.length)
        rows, _ = load_rows(corpus, tokenizer)
        rows.save_to_disk(part / "rows")
        (part / "train.jsonl").unlink()


def train(branch: str, options: argparse.Namespace, base: Path) -> None:
    """Trains a branch to the end, or as far as it gets until SIGTERM. Its model is FOLDER/BRANCH/model then."""
    folder = options.out / branch
    start = base if branch == "transformer" else folder / "start"
    if not start.exists():
        model = continued_model(branch, base, SEED)
        with whole_folder(start, 4 * model.num_parameters(), overwrite=False) as part:
            model.save_pretrained(part)
            AutoTokenizer.from_pretrained(base).save_pretrained(part)
        del model
    rate = EVERY_ARM[branch].lambda_lr_multiplier
    step = 4 * options.rows * options.length
    steps = round(options.tokens / step)
    arguments = {
        "config": ROOT / "recipes/upcycle/config.yaml",
        "model_name_or_path": start,
        "output_dir": folder,
        "dataset": options.out / "sources" / "rows",
        "source_column": "none",
        "streaming": "false",
        "sequence_length": options.length,
        "validation_rows": 4 * options.rows,
        "total_tokens": steps * step,
        "tokens_per_step": step,
        "per_device_train_batch_size": options.rows,
        "per_device_eval_batch_size": options.rows,
        "learning_rate": options.learning_rate,
        "lambda_lr_multiplier": 1.0 if rate is None else rate,
        "warmup_steps": -(-steps // 20),
        "eval_steps": -(-steps // 10),
        "save_strategy": "no",  # except for the checkpoint of a run that is stopped
        "activation_checkpointing": "false",
        "dataloader_num_workers": 0,
        **dict.fromkeys(("bf16", "dataloader_pin_memory"), str(torch.cuda.is_available()).lower()),
        "report_to": "none",
        "seed": SEED,
    }
    if any(folder.glob("checkpoint-*")):
        arguments["resume_from_checkpoint"] = "last"
    upcycle.main([word for name, value in arguments.items() for word in (f"--{name}", str(value))])
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "start", ignore_errors=True)


def measure(branch: str, options: argparse.Namespace) -> None:
    """What is measured already is left out."""
    model, length, samples = f"{branch}={options.out / branch / 'model'}", str(options.length), str(options.samples)
    shared = ["--model", model, "--dataset", str(options.out / "sources" / "validation.jsonl")]
    shared += ["--out", str(options.out / "report"), "--dtype", "bfloat16" if torch.cuda.is_available() else "float32"]
    evaluate(["nll_by_position", *shared, "--length", length, "--documents", samples, "--join", "true"])
    needles = ["--lengths", length, "--samples", samples, "--dataset_split", "train"]
    evaluate(["needle", *shared, *needles])
    tokens = str(options.samples * options.length)
    evaluate(["outliers", *shared, "--length", length, "--tokens", tokens])


def losses(folder: Path) -> dict[str, dict]:
    """For each branch, the held-out loss in nats at each evaluated step, and the median tokens per second."""
    found = {}
    for branch in ORDER:
        if (state := folder / branch / "trainer_state.json").is_file():
            history = json.loads(state.read_text())["log_history"]
            speeds = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
            found[branch] = {
                "loss": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
                "tokens_per_second": round(statistics.median(speeds)) if speeds else None,
            }
    return found


def run(options: argparse.Namespace, end: float) -> None:
    base = options.out / "base"
    if not base.exists():
        read_llama(options.model, base)
    if not (options.out / "sources").exists():
        write_sources(options.out / "sources", options, base)
    for branch in tqdm(options.branch, desc="Branches", unit="branch"):
        if not (options.out / branch / "model").exists():
            train(branch, options, base)
            gc.collect()
            torch.cuda.empty_cache()
            stop_after(end)
        measure(branch, options)
        stop_after(end)
    report([str(options.out / "report")])


def stop_after(end: float) -> None:
    """A signal in the last step of a training, or while its model is saved, stops nothing."""
    if time.monotonic() > end:
        sys.exit(UNFINISHED)


def stop(number: int, frame: object) -> None:
    sys.exit(UNFINISHED)


def claim(options: argparse.Namespace) -> None:
    """Raises SystemExit if the folder belongs to a call with other options."""
    ours = {name: str(x) for name, x in vars(options).items() if name not in ("out", "branch", "minutes", "model")}
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "options.json"
    if kept.exists() and (theirs := json.loads(kept.read_text())) != ours:
        raise SystemExit(f"{kept} has {theirs}, and this call has {ours}. Choose another --out, or the same options.")
    with whole_file(kept) as part:
        part.write_text(json.dumps(ours) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 when all is done, 75 when the minutes were over."""
    options = parse(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(f"Budget  at most {options.minutes:g} minutes for this call, {options.tokens:.3g} tokens each for", end=" ")
    print(f"{', '.join(options.branch)}, on {device}", flush=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    claim(options)
    skip_unused_deepspeed()
    before = signal.signal(signal.SIGTERM, stop)  # a training that is stopped saves a checkpoint first
    timer = threading.Timer(60 * options.minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    status = 0
    try:
        run(options, time.monotonic() + 60 * options.minutes)
    except SystemExit as end:
        if end.code not in (UNFINISHED, 128 + signal.SIGTERM):
            raise
        status = UNFINISHED
        print("\nStopped. Run the same command to go on.")
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    known = losses(options.out)
    with whole_file(options.out / "losses.json") as part:
        part.write_text(json.dumps({"hardware": device, "branches": known}, indent=1) + "\n")
    steps = sorted(set(itertools.chain.from_iterable(one["loss"] for one in known.values())))
    print(f"\n{'held-out loss after step':<24}" + "".join(f"{step:>8}" for step in steps) + "  tokens/s")
    for branch, one in known.items():
        shown = "".join(f"{one['loss'][step]:8.4f}" if step in one["loss"] else " " * 8 for step in steps)
        print(f"{branch:<24}{shown}{one['tokens_per_second'] or 0:10,}")
    return status


if __name__ == "__main__":
    sys.exit(main())

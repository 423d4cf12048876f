# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Tokens per second of DIFF and of its Transformer twin at the points of Table 7, arXiv:2410.05258.

    python -m benchmarks.throughput --out results

puts them among the results of the evaluations, where `diff-transformer report results` sets them beside the paper's;
a run that was stopped goes on. `benchmarks.model_gpu`, whose clock this is, compares more attentions and lengths.

The 3B over 2048 and 4096 tokens, the 13B over 2048, with random weights. Both models are built in one process and take
turns; a figure is the median over the rounds, by the clock, Python included. Before anything is timed, the logits and
the gradients of a DIFF model of two layers are checked against float32.
"""

import argparse
import gc
import statistics
import sys
import time
from functools import partial

import torch
from tqdm import tqdm

from benchmarks.model_gpu import CONTESTANTS, TASKS, TINY, Stage, attempt, build, faults, seconds, step
from benchmarks.report import hardware
from diff_transformer import DiffTransformerConfig
from diff_transformer.evaluation.results import Measure, Results
from diff_transformer.training.architectures import transformer_twin

LENGTHS = {"3B": (2048, 4096), "13B": (2048,), "tiny": (16, 32)}
WARM_UP = 2  # rounds: compilation, autotuning, allocation
SETTINGS = ("tokens", "rounds", "gradient_checkpointing", "loss_chunk", "one_at_a_time")


def diff_config(size: str) -> DiffTransformerConfig:
    changes = {"max_position_embeddings": max(LENGTHS[size]), "eos_token_id": None}
    if size == "tiny":
        return DiffTransformerConfig.from_paper_size("3B", **TINY, **changes)
    return DiffTransformerConfig.from_paper_size({"13B": "13.1B"}.get(size, size), **changes)


def points_of(size: str) -> list[dict]:
    return [{"size": size, "length": length, "task": task} for length in LENGTHS[size] for task in TASKS]


def contestants(options: argparse.Namespace) -> dict[str, str]:
    """Label of the results -> name in `benchmarks.model_gpu`."""
    return {"DIFF": "DIFF flash_diff", "Transformer": f"Transformer {options.transformer_attention}"}


def open_results(options: argparse.Namespace) -> dict[str, Results]:
    """Raises ValueError if there are results of other settings."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    opened = {}
    for label, contestant in contestants(options).items():
        model = {
            "label": label,
            "name": "random weights",
            "revision": None,
            "model_type": "diff_transformer" if label == "DIFF" else "llama",
            "parameters": None,  # a size each, see the cells
            "dtype": options.dtype,
            "attn_implementation": CONTESTANTS[contestant][1],
        }
        opened[label] = Results.open(options.out, "throughput", model, settings, 0, options.device, options.overwrite)
    return opened


def build_stage(size: str, options: argparse.Namespace) -> Stage:
    config = diff_config(size)
    models = {}
    for name, one in {"DIFF": config, "Transformer": transformer_twin(config)}.items():
        models[name] = build(one, getattr(torch, options.dtype), options.device)
        if options.gradient_checkpointing:
            models[name].gradient_checkpointing_enable({"use_reentrant": False})
            models[name].train()  # without dropout nothing else changes
        if options.one_at_a_time:
            models[name].to("cpu")
    return Stage(models, options.device, options.one_at_a_time)


def take_turns(
    stage: Stage, task: str, length: int, options: argparse.Namespace, progress: tqdm
) -> dict[str, list[float]]:
    """Label -> seconds of every round but those of the warm-up."""
    ids = torch.randint(0, stage.models["DIFF"].config.vocab_size, (batch(length, options), length))
    ids = ids.to(options.device)
    taken: dict[str, list[float]] = {label: [] for label in stage.models}
    for i in range(WARM_UP + options.rounds):
        for label, contestant in contestants(options).items():
            run = step(task, stage.enter(contestant), ids, options.loss_chunk)
            elapsed = seconds(run, options.device)
            if i >= WARM_UP:
                taken[label].append(elapsed)
            progress.update()
    return taken


def batch(length: int, options: argparse.Namespace) -> int:
    return max(1, options.tokens // length)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results", help="folder of the results")
    parser.add_argument("--size", nargs="+", choices=LENGTHS, default=["3B", "13B"], help="tiny tries it on a CPU")
    parser.add_argument("--transformer-attention", choices=("sdpa", "flash_attention_2"), default="sdpa")
    parser.add_argument("--tokens", type=int, default=4096, help="batch x length, where it is more than a length")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep no activations inside a layer")
    parser.add_argument(
        "--loss-chunk", type=int, default=0, help="tokens whose logits are held at a time; 0: all, as the models do"
    )
    parser.add_argument("--one-at-a-time", action="store_true", help="the model that waits does so on the CPU")
    parser.add_argument("--minutes", type=float, default=20.0, help="budget: no point is started after it")
    parser.add_argument("--overwrite", action="store_true", help="replace the results that are there")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no GPU. --size tiny --device cpu tries the script.")
    return options


def measure(size: str, keys: list[dict], results: dict[str, Results], options: argparse.Namespace) -> list[str]:
    """Adds the cells of a size; returns which are missing, and why."""
    stage, left_out = build_stage(size, options), []
    with tqdm(total=len(keys) * (WARM_UP + options.rounds) * 2, unit="run") as progress:
        for key in keys:
            point = "{size}, {length} tokens, {task}".format(**key)
            progress.set_postfix_str(point)
            if time.monotonic() >= options.deadline:
                left_out.append(f"{point}: the budget was spent")
                continue
            turns = partial(take_turns, stage, key["task"], key["length"], options, progress)
            taken, reason = attempt(turns, options.device)
            if reason:
                left_out.append(f"{point}: {reason}")
                for model in stage.models.values():
                    model.zero_grad(set_to_none=True)  # of a backward that broke off
                continue
            for label, model in stage.models.items():
                tokens = batch(key["length"], options) * key["length"]
                speed = Measure(tokens / statistics.median(taken[label]), options.rounds)
                data = {
                    "seconds": taken[label],
                    "batch": batch(key["length"], options),
                    "parameters": model.num_parameters(),
                    "hardware": hardware(options.device),
                }
                if key not in results[label]:
                    results[label].add(key, {"tokens_per_second": speed}, data)
    return left_out


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if flash_diff was wrong or a point is missing, otherwise 0."""
    options = parse(arguments)
    results = open_results(options)
    missing = {
        size: [key for key in points_of(size) if any(key not in r for r in results.values())] for size in options.size
    }
    points = sum(map(len, missing.values()))
    print(f"Budget  {options.minutes:g} minutes for {points} points, on {hardware(options.device)}", flush=True)
    options.deadline = time.monotonic() + 60 * options.minutes
    left_out = []
    for size, keys in missing.items():
        wrong = faults(diff_config(size), getattr(torch, options.dtype), options.device) if keys else []
        if wrong:
            print("RED: flash_diff is wrong, so there is nothing to time.", *wrong, sep="\n  ")
            return 1
        left_out += measure(size, keys, results, options) if keys else []
        gc.collect()  # the models of this size go before those of the next come
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    for label, r in results.items():
        for cell in r.cells:
            print(
                "{size}, {length} tokens, {task}".format(**cell.key),
                f"{label}: {cell['tokens_per_second']:,.0f} tokens/s",
            )
    if left_out:
        print("Missing:", *left_out, sep="\n  ")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())

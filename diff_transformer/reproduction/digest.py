# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""All that a study found, in one file of the schema of results: what the report is drawn from, and nothing else.

A cell has a key of `experiment`, `model`, `seed` and `protocol`, and what that protocol's own keys are:

| protocol | further keys | measures | data |
| --- | --- | --- | --- |
| `data` (no model, no seed) | | | the manifest of the task |
| `run` | | `parameters`, `flops_per_token`, `tokens_per_second` | digests `batches`, `extended_batches`; `steps` |
| `lambda` (DIFF only) | `layer` | `lambda` at the end of the training | `steps`, `lambda` over the training |
| `training` | `tokens` | `validation_loss`, `training_loss` | `seconds` of training up to there |
| `fine_grained_loss` | | `all`, `ar_hit`, `others` | |
| `nll_by_position` | `position` | `nll`, cumulative | |
| all other protocols | their own | their own | |

`tokens_per_second` is the median over the log of a run, and its `seconds` are at that speed.
"""

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from transformers import AutoConfig

from ..evaluation.fine_grained_loss import summary
from ..evaluation.nll_by_position import mean_curve
from ..evaluation.results import Cell, Measure, Results, load_results
from ..training.budget import model_flops_per_token
from .jobs import BATCHES, results_folder, run_folder, variants_of
from .study import DIFF, TRANSFORMER, Study

DIGEST = "results.json"
MOST_APART = 0.001  # of the parameters of the pair

Found = tuple[dict[str, Any], dict[str, Measure], dict[str, Any]]  # key, measures, data


class ParityError(ValueError):
    """The models were not trained on equal terms."""


def write_digest(study: Study, folder: Path, command: str = "diff-transformer reproduce") -> Results:
    """Reads what the pieces left in the study's folder, checks that the terms were equal, writes `results.json`.

    command: by which it is run again.
    """
    model = {"label": study.title, "machine": study.machine}
    results = Results(folder / DIGEST, "reproduction", model, {**asdict(study), "command": command}, study.seeds[0])
    results.runs = _runs(folder, command)
    for name in study.experiments:
        manifest = json.loads((folder / "data" / name / "manifest.json").read_text(encoding="utf-8"))
        results.cells.append(Cell({"experiment": name, "protocol": "data"}, {}, manifest))
        for seed in study.seeds:
            for key, measures, data in _of_seed(study, folder, name, seed):
                results.cells.append(Cell({"experiment": name, **key}, measures, data))
    check_parity(results)
    results.save()
    return results


def check_parity(results: Results) -> None:
    """Raises ParityError unless the pair has equal parameters, within 0.1 %, and all variants had the same batches."""
    by_seed: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in results.select(protocol="run"):
        by_seed.setdefault((cell.key["experiment"], cell.key["seed"]), {})[cell.key["model"]] = cell
    for (experiment, seed), cells in by_seed.items():
        where = f"{experiment}, seed {seed}"
        a, b = cells[TRANSFORMER]["parameters"], cells[DIFF]["parameters"]
        check_parameters(where, a, b)
        for name in ("batches", "extended_batches"):
            batches = {model: cell.data[name] for model, cell in cells.items() if name in cell.data}
            if len(set(batches.values())) > 1:
                raise ParityError(
                    f"{where}: the models were not trained on the same batches: {batches}. Delete "
                    f"runs/{experiment}/<the model>/seed{seed} and results/{experiment}/seed{seed}, then give the "
                    "same command."
                )


def check_parameters(where: str, transformer: float, diff: float) -> None:
    if abs(diff - transformer) > MOST_APART * transformer:
        raise ParityError(
            f"{where}: DIFF has {diff:,.0f} parameters, its Transformer {transformer:,.0f}: more than "
            f"{MOST_APART:.1%} apart. Lambda and the head norms weigh less in more heads, or in wider layers."
        )


def _of_seed(study: Study, folder: Path, name: str, seed: int) -> Iterator[Found]:
    for label in variants_of(study, name, seed):
        run = folder / run_folder(name, label, seed)
        for key, measures, data in _of_run(run, study.experiments[name].sequence_length):
            yield {"model": label, "seed": seed, **key}, measures, data
    for protocol, found in load_results(folder / results_folder(name, seed)).items():
        for results in found:
            for key, measures in _of_results(protocol, results):
                yield {"model": results.label, "seed": seed, "protocol": protocol, **key}, measures, {}


def _of_run(run: Path, sequence_length: int) -> Iterator[Found]:
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(run / "model")
    history, curve, training_loss = state["log_history"], [], float("nan")
    lambdas: dict[int, list[tuple[int, float]]] = {}
    # The first steps are slower, and the log of a run that was stopped has a gap
    speed = statistics.median(entry["tokens_per_second"] for entry in history if "loss" in entry)
    accumulated = yaml.safe_load((run / "config.yaml").read_text()).get("gradient_accumulation_steps", 1)
    tokens_per_step = state["train_batch_size"] * accumulated * sequence_length
    for entry in history:
        if "loss" in entry:
            training_loss = entry["loss"]
            for layer in (key for key in entry if key.startswith("lambda/layer_")):
                lambdas.setdefault(int(layer[-2:]), []).append((entry["step"], entry[layer]))
        elif "eval_loss" in entry:
            rows = round(entry["eval_runtime"] * entry["eval_samples_per_second"])
            measures = {"validation_loss": Measure(entry["eval_loss"], rows)}
            if entry["step"]:
                measures["training_loss"] = Measure(training_loss, entry["step"] * tokens_per_step)
            curve.append((entry["step"], measures))
    parameters = _parameters(run / "model")
    batches = hashlib.sha256((run / BATCHES).read_bytes()).hexdigest()
    numbers = {
        "parameters": parameters,
        "flops_per_token": model_flops_per_token(config, sequence_length),
        "tokens_per_second": speed,
    }
    data = {"batches": batches, "steps": state["global_step"]}
    if (run / "extended").exists():
        data["extended_batches"] = hashlib.sha256((run / "extended" / BATCHES).read_bytes()).hexdigest()
    yield {"protocol": "run"}, {metric: Measure(float(value), 1) for metric, value in numbers.items()}, data
    for layer, values in sorted(lambdas.items()):
        steps, history = zip(*values, strict=True)
        yield (
            {"protocol": "lambda", "layer": layer},
            {"lambda": Measure(history[-1], 1)},
            {"steps": list(steps), "lambda": list(history)},
        )
    for step, measures in curve:
        tokens = step * tokens_per_step
        yield {"protocol": "training", "tokens": tokens}, measures, {"seconds": tokens / speed}


def _of_results(protocol: str, results: Results) -> Iterator[tuple[dict[str, Any], dict[str, Measure]]]:
    if protocol == "fine_grained_loss":
        yield {}, summary(results)
    elif protocol == "nll_by_position":
        for position, measure in mean_curve(results):
            yield {"position": position}, {"nll": measure}
    else:
        for cell in results.cells:
            yield cell.key, cell.measures


def _parameters(folder: Path) -> int:
    """Of a saved model, counted in its files."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _runs(folder: Path, command: str) -> list[dict[str, Any]]:
    """Where and with what it was measured: every kind of machine and versions once."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results/*/*/*/*.json")):
        for run in Results.load(path).runs:
            found.setdefault(f"{run['hardware']} {run['packages']}", {**run, "command": command})
    return list(found.values())


__all__ = ["DIGEST", "ParityError", "check_parameters", "check_parity", "write_digest"]

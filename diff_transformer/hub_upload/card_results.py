# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The evaluation of a model on its card: a number reaches the card only from the cells of a file of results."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from ..evaluation.models import fingerprint
from ..evaluation.results import Cell, Results, load_results
from ..model_cards import hub_id
from .checks import Problem, without_folders

Sections = Sequence[Any]  # of evaluation.render, which needs matplotlib and is imported only to draw something


def evaluation_markdown(found: Sections) -> list[str]:
    """The paragraphs under "Evaluation"; figures are linked as figures/NAME.png."""
    if not found:
        return []
    from ..evaluation.render import models_table, provenance

    parts = ["## Evaluation", models_table(found).markdown()]
    for section in found:
        parts.append(replace(section, results=()).markdown(heading="###"))
        files = ", ".join(f"[results/{r.path.as_posix()}](results/{r.path.as_posix()})" for r in section.results)
        parts.append(f"Every number is from {files}:\n\n```\n" + "\n".join(provenance(section.results)) + "\n```")
    return parts


def own_sections(folder: Path, source: Path, repo_id: str) -> tuple[Sections, list[Problem]]:
    """The report's sections on the results below `folder` that were measured on exactly the files of `source`.

    All other results are left out. That is a problem, fatal if they carry the name of this model.
    """
    try:
        everything = [results for group in load_results(folder).values() for results in group]
    except (ValueError, OSError) as error:
        return [], [Problem("results", str(error))]
    revision, problems = fingerprint(source), []
    own: dict[str, list[Results]] = {}
    for results in everything:
        if results.model["revision"] == revision:
            own.setdefault(results.protocol, []).append(published(results, repo_id))
    for results in everything:
        file = f"{results.path.parent.name}/{results.path.name}"
        if results.model["revision"] == revision:
            continue
        if results.model["name"] == source.resolve().name and results.protocol not in own:
            other = f"{file} was measured on other weights ({results.model['revision']}) than these ({revision})"
            problems.append(Problem("results", f"{other}. Evaluate this model again, or move the file away."))
        else:
            problems.append(Problem("results", f"{file} belongs to another model and is left out", fatal=False))
    for protocol, group in own.items():
        if len(group) > 1:
            several = f"{len(group)} files contain results of {protocol} for this model"
            problems.append(Problem("results", f"{several}. Keep one of them."))
    if not own:
        none = f"{folder} has no results of this model. Run the evaluation with --out {folder}."
        return [], [*problems, Problem("results", none)]
    from ..evaluation.render import sections

    try:
        return sections({protocol: group[:1] for protocol, group in own.items()}), problems
    except ValueError as error:
        return [], [*problems, Problem("results", str(error))]


def published(results: Results, repo_id: str) -> Results:
    """A copy that names the repository, and no folder or command of this machine; every number is the same."""
    label = repo_id.rpartition("/")[2]
    model = {**results.model, "label": label, "name": repo_id}
    path = Path(results.protocol) / f"{label}.json"
    public = Results(path, results.protocol, without_folders(model), without_folders(results.settings), results.seed)
    public.runs = [{name: x for name, x in without_folders(run).items() if name != "command"} for run in results.runs]
    public.cells = [replace(x, key=without_folders(x.key), data=without_folders(x.data)) for x in results.cells]
    return public


def card_files(found: Sections, repo_id: str) -> dict[str, str | bytes]:
    """Path in the repository -> content of the figures, results and leaderboard entries of a card."""
    files: dict[str, str | bytes] = {f"figures/{x.name}.png": x.png() for s in found for x in s.figures}
    files |= {f"results/{r.path.as_posix()}": r.text() for section in found for r in section.results}
    return files | leaderboard_files(found, repo_id)


def model_index(found: Sections, repo_id: str) -> list[EvalResult]:
    """The measures of the cells that the protocols compare with the paper, for the metadata."""
    numbers: dict[tuple[str, str], EvalResult] = {}
    for section in found:
        for comparison in section.comparisons:
            (results,) = comparison.results.results
            for row in comparison.rows:
                measure, cells = comparison.measure(row, results.label), results.select(**row.key)
                if measure is None:
                    continue
                datasets = {_dataset(results, cell) for cell in cells}
                dataset = (datasets.pop() if len(datasets) == 1 else None) or results.protocol
                name = ", ".join([row.metric, *(f"{name} {value}" for name, value in row.key.items())])
                numbers[dataset, name] = EvalResult(
                    task_type="text-generation",
                    dataset_type=dataset,
                    dataset_name=dataset,
                    metric_type=results.protocol,
                    metric_name=name,
                    metric_value=measure.value,
                    source_name="results",
                    source_url=f"https://huggingface.co/{repo_id}/tree/main/results",
                )
    return list(numbers.values())


def leaderboard_files(found: Sections, repo_id: str) -> dict[str, str]:
    """`.eval_results/PROTOCOL.yaml`: the accuracy on whole datasets of the Hub that were measured once."""
    files = {}
    for results in (section.results[0] for section in found):
        if results.settings.get("limit") is not None:
            continue  # a leaderboard ranks whole datasets
        scored = [cell for cell in results.cells if "accuracy" in cell.measures]
        datasets = [hub_id(cell.key.get("dataset") or cell.data.get("dataset")) for cell in scored]
        file = f"results/{results.protocol}/{repo_id.rpartition('/')[2]}.json"
        entries = [
            EvalResultEntry(
                dataset_id=dataset,
                task_id="default",
                value=cell["accuracy"],
                date=results.runs[-1]["date"],
                source_url=f"https://huggingface.co/{repo_id}/blob/main/{file}",
                source_name="results",
                notes=", ".join([*(f"{k} {v}" for k, v in cell.key.items()), f"n {cell.measures['accuracy'].n}"]),
            )
            for cell, dataset in zip(scored, datasets, strict=True)
            if dataset is not None and datasets.count(dataset) == 1
        ]
        if entries:
            files[f".eval_results/{results.protocol}.yaml"] = yaml_dump(eval_result_entries_to_yaml(entries))
    return files


def _dataset(results: Results, cell: Cell) -> str | None:
    """The Hub's dataset on which a cell was measured."""
    return hub_id(cell.key.get("dataset") or cell.data.get("dataset") or results.settings.get("dataset"))

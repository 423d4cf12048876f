# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The sections of a study's report about training: loss, lambda, equal conditions, data, and how to repeat it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from matplotlib import colormaps
from matplotlib.figure import Figure as Canvas

from ..configuration_diff import DiffTransformerConfig
from ..evaluation import protocols
from ..evaluation.render import Figure, Section, Table, color, model_columns, spread
from ..evaluation.results import Measure, Results, mean
from .collect import ExperimentResults, experiments
from .findings import Checkpoint, training_curve
from .study import DIFF, PAIR, TRANSFORMER


def sections(study: Results) -> list[Section]:
    """The sections of every experiment for which there are cells, and the last one."""
    found: list[Section] = []
    for experiment in experiments(study):
        own = [_loss(experiment), *_evaluations(experiment), _lambda(experiment)]
        own += [_conditions(experiment, study.settings["processes"]), _data(experiment)]
        found += [section.of_study(experiment.name) for section in own if section is not None]
    return [*found, _repeat(study)]


def _evaluations(experiment: ExperimentResults) -> Iterator[Section]:
    """The sections of the protocols. Figures over positions show the length of the training."""
    for name in experiment.evaluated:
        section = protocols.load(name).section(experiment.of(name))
        if name == "nll_by_position":
            length, figure = experiment.settings["sequence_length"], section.figures[0]

            def draw(canvas: Canvas, figure: Figure = figure, length: int = length) -> None:
                figure.draw(canvas)
                axes = canvas.axes[0]
                axes.axvline(length, color="#999999", linestyle=":", label=f"length in training, {length:,}")
                axes.legend(frameon=False)

            section = replace(section, figures=[replace(figure, draw=draw)])
        yield section


def _loss(experiment: ExperimentResults) -> Section | None:
    training = experiment.of("training")
    curves = {label: curve for label in training.labels if (curve := _mean_curve(experiment, label))}
    if not curves:
        return None

    def draw(canvas: Canvas) -> None:
        over_tokens, over_time, apart = canvas.subplots(1, 3)
        for label, points in curves.items():
            ink = color(experiment.labels, label)
            for axes, x in (
                (over_tokens, [tokens for tokens, _, _ in points]),
                (over_time, [s for _, s, _ in points]),
            ):
                axes.plot(x, [mean(losses) for *_, losses in points], color=ink, label=label)
                low, high = ([bound(losses) for *_, losses in points] for bound in (min, max))
                axes.fill_between(x, low, high, color=ink, alpha=0.15, linewidth=0)
        for seed in training.seeds(DIFF):
            first, second = ({p.tokens: p.loss for p in training_curve(training, label, seed)} for label in PAIR)
            tokens = sorted((first.keys() & second.keys()) - {0})
            differences = [second[x] - first[x] for x in tokens]
            apart.plot(tokens, differences, color=color(experiment.labels, DIFF), marker=".", linewidth=1)
        apart.axhline(0, color="black", linewidth=0.8)
        over_tokens.set(xlabel="tokens", ylabel="validation loss (nats per token)")
        over_time.set(xlabel="seconds of training")
        apart.set(xlabel="tokens", ylabel="DIFF - Transformer, per seed")
        over_tokens.legend(frameon=False)

    rows: list[list] = [
        [tokens, *model_columns(training, "validation_loss", tokens=tokens)]
        for tokens in spread([tokens for (tokens,) in training.keys("tokens") if tokens])
    ]
    caption = "Validation loss; the bands are the range of the seeds."
    return Section(
        title="Loss during training",
        paper="Table 6" if experiment.is_text else "Not in the paper",
        text="Loss on the validation data in nats per token, lower is better, at equal tokens and at equal training "
        "time. On the right DIFF is better below 0. The untrained models are left out.",
        tables=[Table("Validation loss", ["tokens", *training.labels], rows)],
        figures=[Figure("loss", caption, draw, (13.0, 4.0))],
        notes=[
            "These are means over all seeds of a model; the findings compare seed by seed.",
            "The slower model has taken fewer of its steps at equal time. Where the learning rate decays towards the "
            "last step, this costs it more than its speed alone.",
        ],
    )


def _mean_curve(experiment: ExperimentResults, label: str) -> list[tuple[int, float, list[float]]]:
    """Tokens, mean seconds and the losses of the seeds, at the checkpoints that all seeds have, without the first."""
    training = experiment.of("training")
    by_tokens: dict[int, list[Checkpoint]] = {}
    seeds = training.seeds(label)
    for seed in seeds:
        for point in training_curve(training, label, seed):
            by_tokens.setdefault(point.tokens, []).append(point)
    return [
        (tokens, mean(p.seconds for p in points), [p.loss for p in points])
        for tokens, points in sorted(by_tokens.items())
        if tokens and len(points) == len(seeds)
    ]


def _lambda(experiment: ExperimentResults) -> Section | None:
    results = experiment.of("lambda")
    curves: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for label in results.labels:
        for layer in sorted({cell.key["layer"] for cell in results.select(label)}):
            cells = results.select(label, layer=layer)
            histories = [dict(zip(cell.data["steps"], cell.data["lambda"], strict=True)) for cell in cells]
            steps = sorted(set.intersection(*map(set, histories)))
            means = [mean(history[step] for history in histories) for step in steps]
            curves.setdefault(label, {})[layer] = steps, means
    if not curves:
        return None
    inits = {label: _lambda_inits(experiment, label, layers) for label, layers in curves.items()}

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (label, layers) in zip(panels, curves.items(), strict=True):
            for layer, (steps, values) in layers.items():
                ink = colormaps["viridis"](layer / max(1, max(layers)))
                axes.plot(steps, values, color=ink, label=f"layer {layer + 1}")
                axes.axhline(inits[label][layer], color=ink, linestyle=":", linewidth=1)
            axes.set(title=label, xlabel="step")
        panels[0].set_ylabel("lambda")
        panels[-1].legend(frameon=False, fontsize=8)

    rows: list[list] = [
        [label, layer + 1, inits[label][layer], results.measure(label, "lambda", layer=layer)]
        for label, layers in curves.items()
        for layer in layers
    ]
    caption = "Lambda of each layer during training, averaged over the seeds; dotted: lambda_init."
    return Section(
        title="Lambda during training",
        paper="Eq. 2",
        text="How much of the second softmax map is subtracted from the first. It starts near lambda_init, and every "
        "layer learns its own.",
        tables=[Table("Lambda", ["model", "layer", "lambda_init", "lambda at the end"], rows)],
        figures=[Figure("lambda", caption, draw, (max(7.0, 3.6 * len(curves)), 4.0))],
    )


def _lambda_inits(experiment: ExperimentResults, label: str, layers: Iterable[int]) -> dict[int, float]:
    fields = {**experiment.settings["config"], **experiment.settings["variants"][label]["config"]}
    config = DiffTransformerConfig(**{k: v for k, v in fields.items() if k == "lambda_init"})
    return {layer: config.layer_lambda_init(layer) for layer in layers}


def _conditions(experiment: ExperimentResults, processes: int) -> Section:
    results = experiment.of("run")
    batches = {r.seed: r.cells[0].data["batches"] for r in results.of(TRANSFORMER)}
    rows: list[list] = []
    for label in results.labels:
        cells = results.select(label)
        same = all(batches.get(r.seed) == r.cells[0].data["batches"] for r in results.of(label))
        numbers = [_whole(cell["parameters"] for cell in cells), _whole(cell["flops_per_token"] for cell in cells)]
        speed = _rounded(results.measure(label, "tokens_per_second"))
        row = [label, experiment.architecture(label), len(cells), *numbers, speed, "yes" if same else "NO"]
        rows.append([*row, json.dumps(experiment.settings["variants"][label]["config"])])
    columns = ["model", "architecture", "seeds", "parameters", "FLOPs per token", "tokens/s"]
    return Section(
        title="Equal conditions",
        paper="Section 3.2 and Tables 9 and 10 have the paper's conditions",
        text="The models of a seed differ in their architecture, or in what the last column names, and in nothing "
        "else: the tokens of every step were recorded, and their digests are compared.",
        tables=[Table("The models", [*columns, "the Transformer's batches", "differs in"], rows)],
        notes=["Speed was measured while other trainings ran on the same machine."] if processes > 1 else [],
    )


def _data(experiment: ExperimentResults) -> Section | None:
    rows = list(_condensed(experiment.manifest))
    if not rows:
        return None
    return Section(
        title="Data",
        paper="Section 3.1 has the paper's",
        text="What the models were trained and validated on.",
        tables=[Table("The data", ["", "value"], rows)],
    )


def _repeat(study: Results) -> Section:
    """The command, and where it ran."""
    rows: list[list] = []
    for run in study.runs:
        packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items())
        rows.append([run["date"], run["hardware"], packages, run["command"]])
    seeds = ", ".join(map(str, study.settings["seeds"]))
    return Section(
        title="Run it again",
        paper="Appendices D and E have the paper's recipe",
        text=f"{study.settings.get('command', 'diff-transformer reproduce')}: the study "
        f'"{study.settings["title"]}", seeds {seeds}, about {study.settings["minutes"]:g} minutes on '
        f"{study.settings['machine']}. The same command resumes a stopped run. Everything on this page is made from "
        "the file of results that the command writes.",
        tables=[Table("Where it ran", ["date", "hardware", "packages", "command"], rows)],
    )


def _condensed(content: Mapping, prefix: str = "") -> Iterator[list]:
    """A row for each value; of long lists the length and the ends."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _condensed(value, f"{prefix}{name}: ")
        elif isinstance(value, list) and len(value) > 12:
            yield [f"{prefix}{name}", f"{len(value):,}, from {value[0]} to {value[-1]}"]
        elif isinstance(value, list):
            yield [f"{prefix}{name}", ", ".join(map(str, value))]
        else:
            yield [f"{prefix}{name}", f"{value:,}" if type(value) is int else str(value)]


def _whole(values: Iterable[float]) -> str:
    return " or ".join(f"{value:,.0f}" for value in sorted(set(values)))


def _rounded(measure: Measure | None) -> str | None:
    if measure is None:
        return None
    return f"{measure.value:,.0f}" + ("" if measure.stderr is None else f" ± {measure.stderr:,.0f}")

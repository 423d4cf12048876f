# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The training as curves: validation loss at equal tokens and at equal time, and lambda."""

from collections.abc import Iterable

from matplotlib import colormaps
from matplotlib.figure import Figure as Canvas

from ..configuration_diff import DiffTransformerConfig
from ..evaluation.report.content import Section, Table, colour
from .drawing import draw_band, figure, some
from .reading import Checkpoint, Reading, mean
from .study import DIFF, PAIR


def loss(reading: Reading) -> Section | None:
    curves = {label: curve for label in reading.labels if (curve := mean_curve(reading, label))}
    if not curves:
        return None

    def draw(canvas: Canvas) -> None:
        over_tokens, over_time, apart = canvas.subplots(1, 3)
        for label, points in curves.items():
            draw_band(over_tokens, reading, label, {tokens: losses for tokens, _, losses in points})
            draw_band(over_time, reading, label, {seconds: losses for _, seconds, losses in points})
        for seed in reading.seeds(DIFF):
            x, y = _paired_difference(reading, seed)
            apart.plot(x, y, color=colour(reading.labels, DIFF), marker=".", linewidth=1)
        apart.axhline(0, color="black", linewidth=0.8)
        over_tokens.set(xlabel="tokens", ylabel="validation loss (nats a token)")
        over_time.set(xlabel="seconds of training")
        apart.set(xlabel="tokens", ylabel="DIFF - Transformer, each seed")
        over_tokens.legend(frameon=False)

    rows: list[list] = []
    for tokens in some([tokens for (tokens,) in reading.keys("training", "tokens") if tokens]):
        found = [reading.over_seeds(label, "training", "validation_loss", tokens=tokens) for label in reading.labels]
        rows.append([tokens, *found])
    return Section(
        title=f"{reading.name}: loss over the training",
        paper="Table 6" if reading.is_text else "Not in the paper",
        text="Loss on the validation data in nats a token, lower is better, at equal tokens and at equal time of "
        "training. On the right, below 0, DIFF is the better; the untrained models are left out.",
        tables=[Table("Validation loss", ["tokens", *reading.labels], rows)],
        figures=[figure(reading, "loss", "Validation loss; the bands reach over the seeds.", draw, (13.0, 4.0))],
        notes=[
            "The seeds of a model are means here, of as many as it has; the findings compare seed by seed.",
            "The slower model has taken fewer of its steps at equal time. Where the learning rate falls towards the "
            "last step, this costs it more than its speed alone.",
        ],
    )


def mean_curve(reading: Reading, label: str) -> list[tuple[int, float, list[float]]]:
    """Tokens, mean seconds and the losses of the seeds, at the checkpoints of all seeds but that of the beginning."""
    by_tokens: dict[int, list[Checkpoint]] = {}
    seeds = reading.seeds(label)
    for seed in seeds:
        for point in reading.curve(label, seed):
            by_tokens.setdefault(point.tokens, []).append(point)
    return [
        (tokens, mean(p.seconds for p in points), [p.loss for p in points])
        for tokens, points in sorted(by_tokens.items())
        if tokens and len(points) == len(seeds)
    ]


def lambdas(reading: Reading) -> Section | None:
    curves: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for label in reading.labels:
        for (layer,) in reading.keys("lambda", "layer"):
            if cells := reading.select(label, "lambda", layer=layer):
                histories = [dict(zip(cell.data["steps"], cell.data["lambda"], strict=True)) for cell in cells]
                steps = sorted(set.intersection(*map(set, histories)))
                means = [mean(history[step] for history in histories) for step in steps]
                curves.setdefault(label, {})[layer] = steps, means
    if not curves:
        return None
    inits = {label: _lambda_inits(reading, label, layers) for label, layers in curves.items()}

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

    rows: list[list] = []
    for label, layers in curves.items():
        for layer in layers:
            at_end = reading.over_seeds(label, "lambda", "lambda", layer=layer)
            rows.append([label, layer + 1, inits[label][layer], at_end])
    columns = ["model", "layer", "lambda_init", "lambda at the end"]
    caption = "Lambda of each layer over the training, the mean over seeds; dotted: lambda_init."
    return Section(
        title=f"{reading.name}: lambda over the training",
        paper="Eq. 2",
        text="How much of the second softmax map is subtracted from the first. It begins near lambda_init, and every "
        "layer learns its own.",
        tables=[Table("Lambda", columns, rows)],
        figures=[figure(reading, "lambda", caption, draw, (max(7.0, 3.6 * len(curves)), 4.0))],
    )


def _paired_difference(reading: Reading, seed: int) -> tuple[list[int], list[float]]:
    first, second = ({p.tokens: p.loss for p in reading.curve(label, seed)} for label in PAIR)
    tokens = sorted((first.keys() & second.keys()) - {0})
    return tokens, [second[x] - first[x] for x in tokens]


def _lambda_inits(reading: Reading, label: str, layers: Iterable[int]) -> dict[int, float]:
    fields = {**reading.settings["config"], **reading.settings["variants"][label]["config"]}
    config = DiffTransformerConfig(**{k: v for k, v in fields.items() if k == "lambda_init"})
    return {layer: config.layer_lambda_init(layer) for layer in layers}


__all__ = ["lambdas", "loss"]

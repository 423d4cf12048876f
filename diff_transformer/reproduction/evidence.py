# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What the findings rest on: the curves and grids of every experiment, as sections of the page.

Numbers are means over seeds, ± their standard error; bands of figures reach from the lowest seed to the highest.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Canvas

from ..evaluation.outliers import ACTIVATIONS
from ..evaluation.report.content import Figure, Section, Table
from ..evaluation.report.fine_grained_loss import NAMES as SLICE_NAMES
from ..evaluation.report.needle import draw_panel
from ..evaluation.report.outliers import NAMES as ACTIVATION_NAMES
from ..evaluation.report.outliers import STATISTICS
from ..evaluation.results import Measure, Results
from .curves import lambdas, loss
from .drawing import draw_band, figure, some
from .reading import Reading, readings
from .terms import data, parity


def sections(digest: Results) -> list[Section]:
    """Of every experiment, those that it has cells for."""
    measured = (slices, positions, recall, needles, attention, outliers, quantization)
    found: list[Section | None] = []
    for reading in readings(digest):
        found += [loss(reading), *(make(reading) for make in measured), lambdas(reading)]
        found += [parity(reading, digest.settings["processes"]), data(reading)]
    return [section for section in found if section is not None]


def slices(reading: Reading) -> Section | None:
    columns = list(SLICE_NAMES.items())
    found = {x: [reading.over_seeds(x, "fine_grained_loss", name) for name, _ in columns] for x in reading.labels}
    rows: list[list] = [[label, *row] for label, row in found.items() if any(row)]
    if not rows:
        return None
    return Section(
        title=f"{reading.name}: loss by slice",
        paper="Table 6",
        text="Loss in nats, lower is better: on all tokens, on those that can be recalled from the context (AR-Hit), "
        "and on the others.",
        tables=[Table("Loss", ["model", *(name for _, name in columns)], rows)],
    )


def positions(reading: Reading) -> Section | None:
    curves = _curves(reading, "nll_by_position", "nll", "position")
    if not curves:
        return None

    def draw(canvas: Canvas) -> None:
        axes, length = canvas.subplots(), reading.sequence_length
        for label, curve in curves.items():
            draw_band(axes, reading, label, {position + 1: values for position, values in curve.items()})
        axes.axvline(length, color="#999999", linestyle=":", label=f"length of the training, {length:,}")
        axes.set(xlabel="position (tokens)", ylabel="cumulative average NLL (nats)")
        axes.legend(frameon=False)

    rows: list[list] = []
    for position in some([position for (position,) in reading.keys("nll_by_position", "position")]):
        rows.append([position + 1, *(_measure(curve, position) for curve in curves.values())])
    return Section(
        title=f"{reading.name}: negative log-likelihood by position",
        paper="Figure 4",
        text="Average negative log-likelihood of all tokens up to a position, in nats, lower is better. The paper "
        "shows curves without numbers, lower for DIFF at every length.",
        tables=[Table("Nats a token, up to a position", ["tokens", *curves], rows)],
        figures=[figure(reading, "nll_by_position", "The bands reach over the seeds.", draw)],
    )


def recall(reading: Reading) -> Section | None:
    curves = _curves(reading, "recall", "accuracy", "pairs")
    if not curves:
        return None
    counts = [pairs for (pairs,) in reading.keys("recall", "pairs")]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for label, curve in curves.items():
            draw_band(axes, reading, label, curve, marker="o")
        axes.plot(counts, [1 / n for n in counts], color="#999999", linestyle=":", label="any of the values")
        axes.set(xlabel="pairs", ylabel="accuracy", ylim=(-0.03, 1.03))
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)

    rows: list[list] = [[n, 1 / n, *(_measure(curve, n) for curve in curves.values())] for n in counts]
    return Section(
        title=f"{reading.name}: multi-query associative recall",
        paper="Not in the paper; Zoology, arXiv:2312.04927",
        text="The share of the keys after which the right value is the likeliest of all tokens. A model that answers "
        "with any value it has seen is right once in as many times as there are pairs.",
        tables=[Table("Accuracy by number of pairs", ["pairs", "any of the values", *curves], rows)],
        figures=[figure(reading, "recall", "Accuracy; the bands reach over the seeds.", draw)],
    )


def needles(reading: Reading) -> Section | None:
    points = reading.keys("needle", "length", "needles", "queried")
    labels = [label for label in reading.labels if reading.select(label, "needle")]
    if not points:
        return None
    names = ("length", "needles", "queried")
    rows: list[list] = []
    for point in points:
        key = dict(zip(names, point, strict=True))
        rows.append([*point, *(reading.over_seeds(label, "needle", "accuracy", **key) for label in labels)])
    lengths = list(dict.fromkeys(point[0] for point in points))
    return Section(
        title=f"{reading.name}: multi-needle retrieval",
        paper="Table 2 and Figure 5",
        text="N needles give cities, or letters, numbers somewhere in a long text, and R of the numbers are asked "
        "for. Accuracy is averaged over the depths of the needles that are asked for.",
        tables=[Table("Accuracy", ["tokens", "N", "R", *labels], rows)],
        figures=[_heat_map(reading, labels, length) for length in lengths],
    )


def _heat_map(reading: Reading, labels: Sequence[str], length: int) -> Figure:
    """Depth by number of needles, a panel for each model; the last row is the mean over depths."""
    keys = reading.keys("needle", "length", "needles", "depth")
    numbers, depths = (sorted({key[i] for key in keys if key[0] == length}) for i in (1, 2))

    def accuracy(label: str, needles: int) -> dict[int, float]:
        key = {"length": length, "needles": needles}
        found = ((x, reading.over_seeds(label, "needle", "accuracy", **key, depth=x)) for x in depths)
        return {depth: measure.value for depth, measure in found if measure is not None}

    def draw(canvas: Canvas) -> None:
        for axes, label in zip(canvas.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
            columns = {needles: accuracy(label, needles) for needles in numbers}
            draw_panel(axes, {n: column for n, column in columns.items() if column}, numbers, depths)
            axes.set(title=label, xlabel="needles", ylabel="depth (%)")

    caption = f"Accuracy by depth of the needle that is asked for and number of needles, {length:,} tokens."
    size = (4.2 * len(labels), 1.2 + 0.35 * (len(depths) + 1))
    return figure(reading, f"needle_{length}", caption, draw, size)


def attention(reading: Reading) -> Section | None:
    labels = [label for label in reading.labels if reading.select(label, "attention_allocation")]
    tables = []
    for metric, caption in (("answer", "Attention to the answer"), ("noise", "Attention noise")):
        rows: list[list] = []
        for (depth,) in reading.keys("attention_allocation", "depth"):
            found = [reading.over_seeds(x, "attention_allocation", metric, depth=depth) for x in labels]
            rows.append([depth, *found])
        tables.append(Table(caption, ["depth (%)", *labels], rows))
    if not labels:
        return None
    return Section(
        title=f"{reading.name}: attention to the answer and to noise",
        paper="Table 3",
        text="Of the last token of a prompt that asks for a number: the share of its attention that goes to the "
        "sentence with the number, and to the rest of the text around it.",
        tables=tables,
    )


def outliers(reading: Reading) -> Section | None:
    labels = [label for label in reading.labels if reading.select(label, "outliers")]
    rows: list[list] = []
    for activation in ACTIVATIONS:
        for statistic in STATISTICS:
            found = [reading.over_seeds(x, "outliers", statistic, activation=activation) for x in labels]
            if any(found):
                rows.append([f"{ACTIVATION_NAMES[activation]}, {statistic.replace('_', ' ')}", *found])
    if not rows:
        return None
    return Section(
        title=f"{reading.name}: activation outliers",
        paper="Table 5",
        text="The largest magnitudes of attention logits (before the softmax) and of hidden states (outputs of the "
        "decoder layers), and their median.",
        tables=[Table("Magnitudes of activations", ["magnitude", *labels], rows, digits=2)],
    )


def quantization(reading: Reading) -> Section | None:
    labels = [label for label in reading.labels if reading.select(label, "logit_quantization", task="nll")]
    rows: list[list] = []
    for granularity, bits in reversed(reading.keys("logit_quantization", "granularity", "bits")):
        key = {"task": "nll", "granularity": granularity, "bits": bits}
        found = [reading.over_seeds(label, "logit_quantization", "nll", **key) for label in labels]
        if any(found):
            rows.append([bits, granularity, *found])
    if not rows:
        return None
    return Section(
        title=f"{reading.name}: attention logits in few bits",
        paper="Figure 8, of HellaSwag",
        text="Loss in nats a token when the logits of the attention are quantized as the model runs (absmax, "
        "symmetric, one range for a tensor or for each head); 16 bits: not quantized.",
        tables=[Table("Loss", ["bits", "range of a", *labels], rows)],
    )


def _curves(reading: Reading, protocol: str, metric: str, name: str) -> dict[str, dict[float, list[float]]]:
    """Of every model that has any."""
    found = {label: reading.by_point(label, protocol, metric, name) for label in reading.labels}
    return {label: curve for label, curve in found.items() if curve}


def _measure(curve: Mapping[float, Sequence[float]], x: float) -> Measure | None:
    return Measure.of(curve[x]) if x in curve else None


__all__ = ["sections"]

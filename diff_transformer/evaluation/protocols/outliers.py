# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Activation outliers (Table 5, arXiv:2410.05258).

The protocol measures the largest magnitudes, and the median, over 0.4M tokens of

- attention logits: the scaled products of all queries with the keys visible to them, before the softmax, for both maps
  of a DIFF Transformer. Masked logits are left out.
- hidden states: the output of each decoder layer, before the final norm.

The paper reports "the largest activation values" and "their magnitude", taken here as absolute values over all layers,
heads and channels."""

import base64
import math
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...arguments import option
from ..comparison import UNSTATED, Comparison, Row
from ..generate import CHUNK, chunks
from ..models import LoadedModel, check_length
from ..probe import Probe, attention_probe
from ..render import Figure, Section, color
from ..results import Measure, Results, ResultSet
from ..text import DocumentArguments, load_documents, token_rows

ORDER = 7
RANKS = (1, 2, 3, 10, 100)
LOGITS, HIDDEN = ACTIVATIONS = ("attention_logits", "hidden_states")

NAMES = {LOGITS: "attention logits", HIDDEN: "hidden states"}
STATISTICS = (*(f"top_{rank}" for rank in RANKS), "median")
# Table 5: Transformer and DIFF, each in the order of STATISTICS
PAPER = {
    LOGITS: ((318.0, 308.2, 304.9, 284.7, 251.5, 5.4), (38.8, 38.8, 37.3, 32.0, 27.4, 3.3)),
    HIDDEN: ((3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6), (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2)),
}
PAPER_TOKENS = 400_000
PAPER_SETTINGS = {"tokens": PAPER_TOKENS, "dataset": UNSTATED, "length": UNSTATED}
BITS = 8  # of the mantissa, by which a histogram counts
MEDIAN_ERROR = 2.0 ** -(BITS + 1) + 2.0**-23  # a bound on the relative error of the median


@dataclass
class Arguments(DocumentArguments):
    tokens: int = option(400_000, "Minimum number of tokens in all rows together.")
    length: int = option(4096, "Tokens per row.")
    join: bool = option(True, "Concatenate short documents to reach the length.")
    chunk_size: int = option(CHUNK, "Tokens per forward pass.")


class Magnitudes:
    """The largest |values|, with their layers, and a histogram of more values than fit into memory.

    The histogram is by the leading bits in float32, 8 of the exponent and `BITS` of the mantissa. Bit patterns of
    numbers that are not negative are ordered like the numbers, so a bin is an interval: `[2^e, 2^(e + 1))` has
    `2^BITS` bins of equal width, so a number is at most `2^(e - BITS - 1)` from the middle of its bin. A median, taken
    of these middles, is off by at most `MEDIAN_ERROR`, whose last term is for rounding, or absolutely by
    `2^(-126 - BITS)` below 2^-126, where float32 loses precision."""

    def __init__(self) -> None:
        self.counts, self.top = torch.zeros(255 << BITS, dtype=torch.long), list[tuple[float, int]]()

    def update(self, values: torch.Tensor, layer: int) -> None:
        """Takes values of any shape and floating type. Raises ValueError if one is not finite in float32."""
        magnitudes = values.abs().flatten()
        bins = magnitudes.to(torch.float32).view(torch.int32) >> (23 - BITS)
        counts = torch.bincount(bins, minlength=len(self.counts))
        if len(counts) > len(self.counts):
            raise ValueError("An activation is infinite or not a number. Check the weights, or use another --dtype.")
        self.counts = self.counts.to(counts.device) + counts
        largest = magnitudes.topk(min(RANKS[-1], len(magnitudes))).values.tolist()
        self.top = _largest([*self.top, *((value, layer) for value in largest)])

    def record(self) -> dict[str, Any]:
        """The content as JSON, for the journal."""
        top = {"values": [value for value, _ in self.top], "sources": [layer for _, layer in self.top]}
        packed = base64.b64encode(zlib.compress(self.counts.cpu().numpy().tobytes())).decode()
        return {"top": top, "histogram": {"counts": packed}}


def _largest(pairs: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return sorted(pairs, key=itemgetter(0), reverse=True)[: RANKS[-1]]


def summary(records: Iterable[dict[str, Any]]) -> tuple[dict[str, Measure], dict[str, Any]]:
    """The measures and the data of a cell from the records of its rows. `top_1` ... `top_100` are as far as there are
    enough values; n is the number of values."""
    pairs, counts = list[tuple[float, int]](), np.zeros(255 << BITS, dtype=np.int64)
    for record in records:
        pairs += zip(record["top"]["values"], record["top"]["sources"], strict=True)
        counts += np.frombuffer(zlib.decompress(base64.b64decode(record["histogram"]["counts"])), dtype=np.int64)
    top, n = _largest(pairs), int(counts.sum())
    bins = np.searchsorted(counts.cumsum(), [(n - 1) // 2, n // 2], side="right")
    middles = ((bins << (23 - BITS)) + (1 << (22 - BITS))).astype(np.int32).view(np.float32)
    median = np.where(bins > 0, middles, 0).mean(dtype=np.float64)  # bin 0 holds the zeros
    measures = {f"top_{rank}": Measure(value, n) for rank, (value, _) in enumerate(top, 1) if rank in RANKS}
    octaves = {e: int(count) for e, count in enumerate(counts.reshape(255, -1).sum(1), -127) if count}
    return {**measures, "median": Measure(float(median), n)}, {
        "top": [value for value, _ in top],
        "top_layers": [layer for _, layer in top],
        "median_relative_error": MEDIAN_ERROR,
        "octaves": list(octaves),  # e of [2^e, 2^(e + 1)); -127 counts the values below 2^-126
        "octave_counts": list(octaves.values()),
    }


class LogitsProbe(Probe):
    """Passes the logits that are not masked, with the index of their layer, to `magnitudes`."""

    def __init__(self, magnitudes: Magnitudes):
        self.magnitudes = magnitudes

    def on_logits(self, module: nn.Module, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        for head in logits.unbind(1):  # selecting and sorting takes several times the memory of the logits
            self.magnitudes.update(head.masked_select(visible[:, 0]), module.layer_idx)  # type: ignore[arg-type]
        return logits


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Raises ValueError if the model has no list with one module per layer."""
    layers = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {layers} decoder layers whose outputs could be measured.")


def measure_row(model: PreTrainedModel, input_ids: torch.Tensor, chunk_size: int = CHUNK) -> dict[str, dict[str, Any]]:
    """The records of both activations by name. input_ids: (batch, tokens)."""
    logits, hidden = Magnitudes(), Magnitudes()

    def observe(layer: int, module: nn.Module, args: tuple, output: Any) -> None:
        hidden.update(output[0] if isinstance(output, tuple) else output, layer)

    with attention_probe(model, LogitsProbe(logits)), ExitStack() as hooks:
        for i, layer in enumerate(decoder_layers(model)):
            hooks.enter_context(layer.register_forward_hook(partial(observe, i)))
        for _ in chunks(model, input_ids, size=chunk_size, logits_to_keep=1):
            pass
    return {LOGITS: logits.record(), HIDDEN: hidden.record()}


def run(loaded: LoadedModel, arguments: Arguments, options, results: Results) -> None:
    check_length(loaded.model, arguments.length, "A row")
    todo = results.todo([{"activation": name} for name in ACTIVATIONS])
    if not todo:
        return
    number = math.ceil(arguments.tokens / arguments.length)
    number = min(number, options.limit or number)
    rows = token_rows(load_documents(arguments), loaded.tokenizer, arguments.length, number, arguments.join)
    results.begin()
    journal = results.journal("rows")
    for i, row in enumerate(tqdm(rows, desc=f"{loaded.label}: rows", unit="row")):
        if str(i) not in journal:
            journal.add(str(i), **measure_row(loaded.model, torch.tensor([row]), arguments.chunk_size))
    for key in todo:
        measures, data = summary(journal.records[str(i)][str(key["activation"])] for i in range(len(rows)))
        results.add(key, measures, {**data, "tokens": len(rows) * arguments.length})


def section(results: ResultSet) -> Section:
    rows = [
        Row([NAMES[activation], statistic.replace("_", " ")], statistic, {"activation": activation}, paper)
        for activation, papers in PAPER.items()
        for statistic, *paper in zip(STATISTICS, *papers, strict=True)
    ]
    caption = "The distribution of magnitudes; outliers form the tail on the right."
    return Section(
        title="Activation outliers",
        paper="Table 5",
        text="The largest magnitudes, and the median, of attention logits (before the softmax, without masked logits) "
        "and of hidden states (outputs of the decoder layers). Values far above the median make a model hard to "
        "quantize; in the paper those of DIFF are smaller.",
        tables=[Comparison("Magnitudes of activations", results, ["of", "magnitude"], rows, PAPER_SETTINGS, digits=1)],
        figures=[Figure("outliers", caption, lambda canvas: _draw(canvas, results))],
        notes=_notes(results),
    )


def _draw(canvas, results: ResultSet) -> None:
    for axes, (activation, name) in zip(canvas.subplots(1, 2, sharey=True), NAMES.items(), strict=True):
        for label in results.labels:
            for i, cell in enumerate(results.select(label, activation=activation)):
                counts = cell.data["octave_counts"]
                # One value lies beyond the lower end of the last octave for sure: the largest
                at_least = [*list(accumulate(reversed(counts)))[::-1], 1]
                x = [*(2.0**e for e in cell.data["octaves"]), cell.data["top"][0]]
                y = [count / sum(counts) for count in at_least]
                axes.plot(x, y, label=None if i else label, color=color(results.labels, label))
        axes.set(xscale="log", yscale="log", xlabel=f"magnitude of {name}", xlim=(2.0**-10, None))
    canvas.axes[0].set_ylabel("share of values at least as large")
    canvas.axes[0].legend(frameon=False)


def _notes(results: ResultSet) -> list[str]:
    found = []
    for label in results.labels:
        for cell in results.select(label):
            layers = cell.data["top_layers"]
            most = max(sorted(set(layers)), key=layers.count)
            found.append(
                f"{label}, {NAMES[cell.key['activation']]}: the largest is from layer {layers[0] + 1}; "
                f"{layers.count(most)} of the largest {len(layers)} are from layer {most + 1}."
            )
    error = max(cell.data["median_relative_error"] for cell in results.cells)
    return [*found, f"The largest values are exact; a median is off by at most {error:.1%}."]

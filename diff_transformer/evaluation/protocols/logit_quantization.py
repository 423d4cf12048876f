# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Accuracy with quantized attention logits (Figure 8, arXiv:2410.05258).

This is dynamic absmax quantization after training: the logits of a layer (of both softmaxes of a differential layer)
are rounded to 2^b - 1 evenly spaced levels from -max to max, where max is the largest magnitude in the sequence,
masked logits excluded. As in the paper, 16 bits stand for the unquantized logits. The measure is zero-shot HellaSwag,
or the negative log-likelihood of documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...arguments import option
from ..comparison import PAPER_DIFF, PAPER_TRANSFORMER, UNSTATED, Comparison, Row
from ..generate import in_batches, token_log_probs
from ..models import LoadedModel, check_length
from ..probe import Probe, attention_probe
from ..render import Figure, Section, draw_models
from ..results import Key, Measure, Results, ResultSet
from ..text import DocumentArguments, load_documents, token_rows
from .harness import accuracies, evaluate_task

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from matplotlib.figure import Figure as Canvas

ORDER = 8
NO_SETTINGS = ("task", "bits", "granularity")  # points of the grid, to which a later run may add
UNQUANTIZED = 16

# bits -> HellaSwag in percent; the values of 16 bits are printed (Table 8), all others are read off the figure
FIGURE_8 = {
    PAPER_TRANSFORMER: {16: 63.4, 8: 62.7, 6: 58.9, 4: 33.9},
    PAPER_DIFF: {16: 66.2, 8: 66.3, 6: 66.0, 4: 58.8},
}
_GREYS = {PAPER_TRANSFORMER: "#9a9a9a", PAPER_DIFF: "#4d4d4d"}
_LINES = {"tensor": "-", "head": ":"}  # of the figure
_NAMES = {"hellaswag": "HellaSwag, zero-shot acc_norm (%)", "nll": "negative log-likelihood (nats per token)"}
_METRICS = {"hellaswag": "acc_norm", "nll": "nll"}


@dataclass
class Arguments(DocumentArguments):
    task: list[str] = option(
        ["hellaswag"], "hellaswag: accuracy on lm-eval's task; nll: nats per token of documents.", choices=_NAMES
    )
    bits: list[int] = option([16, 8, 6, 4], "Bits per logit; 16: not quantized.")
    granularity: list[str] = option(
        ["tensor"], "What shares one range: all heads of a layer, or each head.", choices=_LINES
    )
    data_dir: str | None = option(None, "hellaswag: a folder with hellaswag.jsonl, used instead of the Hub.")
    length: int = option(1024, "nll: tokens per row.")
    documents: int = option(50, "nll: number of rows.")
    join: bool = option(True, "nll: concatenate short documents to reach the length.")


def quantize(logits: torch.Tensor, counted: torch.Tensor, bits: int, granularity: str = "tensor") -> torch.Tensor:
    """Rounds logits (batch, heads, rows, keys) to multiples of max|logits| / (2^(bits - 1) - 1).

    counted: (batch or 1, heads or 1, rows, keys), bool; the logits that max is taken over.
    granularity: "tensor", one max per sequence, or "head", one for each of its heads.
    """
    dims = (1, 2, 3) if granularity == "tensor" else (2, 3)
    largest = logits.abs().masked_fill(~counted, 0).amax(dims, keepdim=True)
    step = (largest / (2 ** (bits - 1) - 1)).clamp_min(torch.finfo(logits.dtype).tiny)
    return (logits / step).round() * step


class LogitQuantizer(Probe):
    """Quantizes the logits of every attention that goes through it."""

    all_rows = True  # in one block, since they share a range

    def __init__(self, bits: int, granularity: str = "tensor"):
        self.bits, self.granularity = bits, granularity

    def on_logits(self, module: nn.Module, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        if self.bits == UNQUANTIZED:
            return logits
        if logits.shape[2] != logits.shape[3]:
            raise ValueError(
                f"Got {logits.shape[2]} rows of {logits.shape[3]} attention logits; the range needs all rows at once. "
                "Use no cache, and shorter or fewer sequences (--length, --batch_size 1)."
            )
        real = visible.diagonal(dim1=-2, dim2=-1)[..., None]  # a token sees itself, padding does not
        return quantize(logits, visible & real, self.bits, self.granularity)


def unpadded_lm(loaded: LoadedModel, batch_size: int | None = None) -> "HFLM":
    """A model of lm-eval that scores sequences of equal length together, since lm-eval does not mask padding, whose
    logits would count towards the range."""
    from lm_eval.models.huggingface import HFLM

    class UnpaddedLM(HFLM):
        def _loglikelihood_tokens(
            self,
            requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
            disable_tqdm: bool = False,
            override_bs: int | None = None,
        ) -> list[tuple[float, bool]]:
            """requests: (texts, context tokens, continuation tokens). Returns the log-likelihood of each and whether
            greedy decoding gives the same continuation."""
            score = super()._loglikelihood_tokens
            lengths = [
                min(len(context) + len(continuation), self.max_length + 1) for _, context, continuation in requests
            ]
            answers = {}
            with tqdm(total=len(requests), desc="Log-likelihoods", leave=False, disable=disable_tqdm) as bar:
                longest_first = sorted(range(len(requests)), key=lengths.__getitem__, reverse=True)
                for _, group in groupby(longest_first, key=lengths.__getitem__):
                    for i, answer in in_batches(
                        lambda batch: score([requests[i] for i in batch], disable_tqdm=True, override_bs=len(batch)),
                        list(group),
                        batch_size,
                        start=8,
                    ):
                        answers[i] = answer
                        bar.update()
            return [answers[i] for i in range(len(requests))]

    model = {"pretrained": loaded.model, "tokenizer": loaded.tokenizer, "backend": "causal"}
    return UnpaddedLM(**model, batch_size="auto", softmax_dtype="float32")


def document_nll(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """Mean -log p in nats of the tokens of each row, except the first; the rows have one length."""
    input_ids = torch.tensor(rows)
    logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    return (-token_log_probs(logits[:, :-1], input_ids[:, 1:])).double().mean(1).tolist()


def run(loaded: LoadedModel, arguments: Arguments, options, results: Results) -> None:
    wrong = [bits for bits in arguments.bits if not 2 <= bits <= UNQUANTIZED]
    if wrong:
        raise ValueError(f"Got --bits {wrong[0]}; choose 2 to 15, or 16 for unquantized logits.")
    grid = product(arguments.task, arguments.granularity, arguments.bits)
    keys: list[Key] = [{"task": task, "bits": bits, "granularity": granularity} for task, granularity, bits in grid]
    todo, rows = results.todo(keys), []
    if any(key["task"] == "nll" for key in todo):
        check_length(loaded.model, arguments.length, "A document")
        documents = min(arguments.documents, options.limit or arguments.documents)
        rows = token_rows(load_documents(arguments), loaded.tokenizer, arguments.length, documents, arguments.join)

    lm = unpadded_lm(loaded, options.batch_size)
    for key in tqdm(todo, desc=f"{loaded.label}: bits", unit="cell"):
        with attention_probe(loaded.model, LogitQuantizer(key["bits"], key["granularity"])):
            if key["task"] == "nll":
                losses = [
                    loss
                    for _, loss in in_batches(partial(document_nll, loaded.model), rows, options.batch_size, start=1)
                ]
                measures = {"nll": Measure.of(losses)}
            else:
                samples = evaluate_task(lm, "hellaswag", 0, arguments.data_dir, options.limit, options.seed)
                measures = accuracies(samples)
        results.add(key, measures)


def section(results: ResultSet) -> Section:
    tasks = [task for task in _NAMES if (task,) in results.keys("task")]
    notes = ["The paper's values of 16 bits are printed (Table 8), all others are read off the figure."]
    return Section(
        title="Attention logits in few bits",
        paper="Figure 8",
        text="The quality of a model when its attention logits are quantized as it runs (absmax, symmetric). One "
        "outlier widens the range of all logits, so a model with fewer outliers keeps its quality with fewer bits.",
        tables=[_comparison(results, task) for task in tasks],
        figures=[_figure(results, task) for task in tasks],
        notes=notes if "hellaswag" in tasks else [],
    )


def _comparison(results: ResultSet, task: str) -> Comparison:
    metric, rows = _METRICS[task], []
    for granularity, bits in sorted(results.keys("granularity", "bits"), reverse=True):
        key = {"task": task, "granularity": granularity, "bits": bits}
        paper = [curve.get(bits) for curve in FIGURE_8.values()] if task == "hellaswag" else []
        if any(results.measure(label, metric, **key) for label in results.labels):
            rows.append(Row([bits, granularity], metric, key, paper))
    settings = {"limit": None, "granularity": UNSTATED, "data_dir": None}
    if task == "nll":
        settings = {"task": "hellaswag", **dict.fromkeys(("granularity", "dataset", "length", "samples"), UNSTATED)}
    title, is_share = _NAMES[task][0].upper() + _NAMES[task][1:], task == "hellaswag"
    return Comparison(
        *(title, results, ["bits", "range of a"], rows, settings), percent=is_share, digits=1 if is_share else 3
    )


def _figure(results: ResultSet, task: str) -> Figure:
    is_share = task == "hellaswag"

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for granularity, line in _LINES.items():
            key, name = {"task": task, "granularity": granularity}, f"range of a {granularity}"
            draw_models(axes, results, _METRICS[task], "bits", key, name=name, linestyle=line, marker="o")
        for name, points in FIGURE_8.items() if is_share else ():
            y = [value / 100 for value in points.values()]
            axes.plot(list(points), y, label=f"{name}, read off", color=_GREYS[name], linestyle="--", marker="x")
        axes.set(xlabel="bits per attention logit", ylabel=_METRICS[task])
        axes.set_xticks(sorted({cell.key["bits"] for cell in results.cells if cell.matches(task=task)}))
        axes.invert_xaxis()
        canvas.legend(loc="outside lower center", ncols=2, frameon=False)

    caption = f"{_METRICS[task]} by bits per logit, with standard errors."
    return Figure(f"logit_quantization_{task}", caption, draw, size=(7.0, 4.8))

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Multi-query associative recall for models of any size; not in the paper (Zoology, arXiv:2312.04927).

The paper measures recall in text (`fine_grained_loss`); here every answer is known exactly, and small models can be
trained on the task. A row is `k1 v1 k2 v2 ... k2 v2 k1 v1 ...`: pairs of different keys and values, then each key once
in random order, then keys again until the row is full. Keys and values are ordinary tokens of the vocabulary; no token
is both. A prediction is the likeliest of all tokens. Only the first query of each key counts, since later answers
could be copied from the first."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...arguments import option
from ..comparison import Comparison, Row
from ..generate import in_batches
from ..models import LoadedModel, check_length
from ..render import Figure, Section, draw_models
from ..results import Measure, Results, ResultSet
from ..text import start_ids

ORDER = 11
NO_SETTINGS = ("pairs",)  # points of the grid, to which a later run may add


@dataclass
class Arguments:
    pairs: list[int] = option([4, 8, 16, 32, 64], "Numbers of pairs in a row.")
    length: int = option(256, "Tokens per row.")
    rows: int = option(200, "Rows per number of pairs.")
    vocabulary: int | None = option(
        None, "Draw keys and values from this many ordinary tokens of the vocabulary, by default from all."
    )


class RecallRow(NamedTuple):
    input_ids: list[int]
    queries: list[int]  # the indices of the first query of each key; its answer follows


def keys_and_values(tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None) -> tuple[list[int], list[int]]:
    """The ids of ordinary tokens, alternately keys and values. ValueError if there are fewer than `vocabulary`."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    if vocabulary is not None and not 2 <= vocabulary <= len(ids):
        raise ValueError(f"Got vocabulary={vocabulary}; the tokenizer has {len(ids):,} ordinary tokens.")
    ids = ids[:vocabulary]
    return ids[0::2], ids[1::2]


def recall_row(
    keys: Sequence[int], values: Sequence[int], pairs: int, length: int, rng: random.Random, start: Sequence[int] = ()
) -> RecallRow:
    """A row of `length` tokens that begins with `start`, or of one less if a pair does not fit into the rest. Raises
    ValueError if there are fewer keys than pairs, or no room for a query."""
    if not 1 <= pairs <= len(keys) or len(start) + 2 * pairs + 2 > length:
        raise ValueError(
            f"Got {pairs} pairs in {length} tokens; 1 <= pairs <= {len(keys):,} keys is needed, and room for "
            f"2 pairs + 2 = {len(start) + 2 * pairs + 2} tokens."
        )
    value_of = {key: rng.choice(values) for key in rng.sample(keys, pairs)}
    remembered = list(value_of)
    room = (length - len(start) - 2 * pairs) // 2
    once = rng.sample(remembered, min(pairs, room))
    asked = once + rng.choices(remembered, k=room - len(once))
    input_ids = [*start, *(token for key in remembered + asked for token in (key, value_of[key]))]
    first = len(start) + 2 * pairs
    return RecallRow(input_ids, list(range(first, first + 2 * len(once), 2)))


@torch.inference_mode()
def recall_accuracy(model: PreTrainedModel, rows: Sequence[RecallRow]) -> list[float]:
    """The share of correct answers in each row; the rows have one shape."""
    input_ids = torch.tensor([row.input_ids for row in rows], device=model.device)
    queries = torch.tensor(rows[0].queries, device=model.device)
    logits = model(input_ids=input_ids, logits_to_keep=queries, use_cache=False).logits  # (rows, queries, vocabulary)
    return (logits.argmax(-1) == input_ids[:, queries + 1]).double().mean(1).tolist()


def run(loaded: LoadedModel, arguments: Arguments, options, results: Results) -> None:
    check_length(loaded.model, arguments.length, "A row")
    keys, values = keys_and_values(loaded.tokenizer, arguments.vocabulary)
    start = start_ids(loaded.tokenizer)
    number = min(arguments.rows, options.limit or arguments.rows)

    def make_row(pairs: int, i: int) -> RecallRow:
        rng = random.Random(f"{options.seed}|{pairs}|{i}")
        return recall_row(keys, values, pairs, arguments.length, rng, start)

    todo = results.todo([{"pairs": pairs} for pairs in arguments.pairs])
    for key in todo:
        make_row(int(key["pairs"]), 0)  # raises before the model runs if the pairs do not fit
    for key in tqdm(todo, desc=f"{loaded.label}: numbers of pairs", unit="cell"):
        rows = [make_row(int(key["pairs"]), i) for i in range(number)]
        scores = in_batches(partial(recall_accuracy, loaded.model), rows, options.batch_size, start=16)
        results.add(key, {"accuracy": Measure.of(score for _, score in scores)}, {"queries": len(rows[0].queries)})


def section(results: ResultSet) -> Section:
    caption = "Accuracy by number of pairs"
    rows = [Row([n], "accuracy", {"pairs": n}, [1 / n]) for (n,) in results.keys("pairs")]

    def draw(canvas):
        axes = canvas.subplots()
        draw_models(axes, results, "accuracy", "pairs", marker="o")
        axes.set(xlabel="pairs", ylabel="accuracy", ylim=(-0.03, 1.03))
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)

    return Section(
        title="Multi-query associative recall",
        paper="Not in the paper; Zoology, arXiv:2312.04927",
        text="Each row has pairs of a key and a value, then keys in random order, up to "
        f"{results.settings['length']:,} tokens. Accuracy is the share of keys after which the correct value is the "
        "likeliest of all tokens. A model that answers with any of the values is correct once per number of pairs.",
        tables=[Comparison(caption, results, ["pairs"], rows, None, columns=["any of the values"])],
        figures=[Figure("recall", f"{caption}.", draw)],
    )

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Contextual hallucination (Table 4, arXiv:2410.05258): summaries and answers judged by a language model.

The model first writes all its outputs. A judge (--judge_base_url, --judge_model) then decides for each whether it is
accurate, given the reference and the document, as far as the model read it. Both steps resume where they were stopped.
Without a judge the outputs are kept, and a later run has them judged.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ....arguments import option
from ....extras import require
from ....text_data import load_table
from ...comparison import DIFFERS, PAPER_DIFF, PAPER_TRANSFORMER, model_columns, other_models
from ...generate import iterate_texts
from ...models import LoadedModel
from ...render import Section, Table
from ...results import Cell, Journal, Measure, Results, ResultSet, mean
from .judge import PROMPT, Judge, ask_all
from .samples import TASKS, draw, load_rows

ORDER = 6
NO_SETTINGS = (  # no existing cell depends on how the judge is reached or checked
    *("judge_base_url", "judge_key_variable", "judge_concurrency", "judge_timeout", "judge_retries"),
    *("price_per_million_tokens", "labelled"),
)

# Table 4 (page 8): Transformer, DIFF
PAPER = {
    "Table 4a: summaries": {"xsum": (0.44, 0.53), "cnn_dailymail": (0.32, 0.41), "multi_news": (0.42, 0.61)},
    "Table 4b: answers": {"qasper": (0.28, 0.39), "hotpotqa": (0.36, 0.46), "2wikimqa": (0.29, 0.36)},
}
PAPER_SAMPLES = 100
COUNTS = ("samples", "unparsed", "empty", "cut", "unfinished")


@dataclass
class Arguments:
    datasets: list[str] = option(
        list(TASKS),
        f"Datasets from {', '.join(TASKS)}. NAME=SOURCE reads the rows, which must have the same columns, "
        "from another dataset on the Hub or from a local file or folder.",
    )
    samples: int = option(100, "Samples per dataset.")
    max_length: int | None = option(
        None, "Tokens of a prompt, the middle of which is cut, and its output; by default all positions."
    )
    judge_base_url: str | None = option(
        None, "Address of an OpenAI-compatible server, with its /v1. Without it nothing is judged."
    )
    judge_model: str | None = option(None, "The judge's model, by its name on the server.")
    judge_key_variable: str = option(
        "OPENAI_API_KEY", "Environment variable that holds the judge's key, if it needs one."
    )
    judge_max_tokens: int = option(1024, "Maximum tokens of a reply, that is, of an explanation and its verdict.")
    judge_concurrency: int = option(8, "Number of requests at once.")
    judge_timeout: float = option(120.0, "Seconds to wait for a reply.")
    judge_retries: int = option(
        10, "Retries per request, after 0.5, 1, 2, 4, 8, 8, ... seconds, or up to 120 if the server says so."
    )
    price_per_million_tokens: list[float] = option(
        [], "The judge's price, for prompts and replies together or one for each."
    )
    labelled: str | None = option(
        None, "Rows with document, ground_truth, output and label (true or false) to check the judge on."
    )

    def __post_init__(self):
        names = [entry.partition("=")[0] for entry in self.datasets]
        if not names or not set(names) <= set(TASKS) or len(set(names)) < len(names):
            raise ValueError(
                f"Got --datasets {' '.join(self.datasets)}; it needs at least one of {', '.join(TASKS)}, each at most "
                "once."
            )
        if (self.judge_base_url is None) != (self.judge_model is None):
            raise ValueError("Got only one of --judge_base_url and --judge_model; a judge needs both.")
        if self.labelled is not None and self.judge_model is None:
            raise ValueError("Got --labelled without a judge; add --judge_base_url and --judge_model.")
        if self.samples < 1 or self.judge_concurrency < 1 or self.judge_retries < 0:
            raise ValueError(
                f"Got --samples {self.samples}, --judge_concurrency {self.judge_concurrency} and --judge_retries "
                f"{self.judge_retries}; the first two must be at least 1, the last at least 0."
            )
        if len(self.price_per_million_tokens) > 2:
            raise ValueError(
                f"Got {len(self.price_per_million_tokens)} values for --price_per_million_tokens; it takes one price, "
                "or one for prompts and one for replies."
            )


def run(loaded: LoadedModel, arguments: Arguments, options, results: Results) -> None:
    judge = None
    if arguments.judge_base_url is not None:
        require("openai")  # which is used after the generation
        api_key = os.environ.get(arguments.judge_key_variable, "").strip() or None
        limits = (arguments.judge_max_tokens, arguments.judge_timeout, arguments.judge_retries)
        judge = Judge(arguments.judge_base_url, arguments.judge_model or "", api_key, *limits)
    sources = {name: source for name, _, source in (entry.partition("=") for entry in arguments.datasets)}
    samples = min(arguments.samples, options.limit or arguments.samples)
    outputs = results.journal("outputs")
    written = {}
    model = {name: loaded.identity[name] for name in ("revision", "dtype", "attn_implementation")}
    for key in results.todo([{"dataset": name} for name in sources]):
        name = str(key["dataset"])
        task = TASKS[name]
        drawn = draw(loaded, name, load_rows(task, sources[name]), samples, options.seed, arguments.max_length)
        ids = [f"{sample.id}/{_digest(model, sample.prompt, task.max_new_tokens, task.stop)}" for sample in drawn]
        missing = [i for i, id in enumerate(ids) if id not in outputs]
        inputs = (loaded.model, loaded.tokenizer, [drawn[i].prompt for i in missing], task.max_new_tokens)
        texts = iterate_texts(*inputs, options.batch_size, [task.stop])
        for i, generated in tqdm(texts, f"{loaded.label}: {name}, writing", len(missing), unit="output"):
            outputs.add(ids[missing[i]], **generated._asdict())
        written[name] = [(sample, outputs.records[id]) for sample, id in zip(drawn, ids, strict=True)]
    if judge is None:
        print(f"{loaded.label}: {len(outputs.records)} outputs in {outputs.path}; --judge_base_url has them judged.")
        return
    verdicts = results.journal("verdicts")
    if arguments.labelled is not None:
        _add_agreement(judge, arguments, results, verdicts)
    for name, pairs in written.items():
        asked = {s.id: (s.document, s.reference, o["text"]) for s, o in pairs if o["text"].strip()}
        replies = ask(judge, asked, arguments.judge_concurrency, verdicts, f"{loaded.label}: {name}, judging")
        # An empty output is neither a summary nor an answer, whatever a judge would say
        parsed = [r["verdict"] for r in replies if r["verdict"] is not None] + [False] * (len(pairs) - len(asked))
        measures = {"length": Measure.of(output["tokens"] for _, output in pairs)}
        if parsed:
            measures["accuracy"] = Measure.of(parsed)
        cut = sum(sample.cut for sample, _ in pairs)
        unfinished = sum(not output["finished"] for _, output in pairs)
        counts = (len(pairs), len(pairs) - len(parsed), len(pairs) - len(asked), cut, unfinished)
        data = dict(zip(COUNTS, counts, strict=True)) | usage(replies, arguments.price_per_million_tokens)
        results.add({"dataset": name}, measures, data)


def ask(
    judge: Judge, questions: Mapping[str, tuple[str, str, str]], concurrency: int, journal: Journal, what: str
) -> list[dict[str, Any]]:
    """The judge's replies to (document, reference, output) by id, as records; it is not asked again for those in the
    journal."""
    prompts = {id: PROMPT.format(document=d, ground_truth=r, output=o) for id, (d, r, o) in questions.items()}
    ids = {f"{id}/{_digest(judge.model, judge.max_tokens, prompt)}": prompt for id, prompt in prompts.items()}
    missing = {id: prompt for id, prompt in ids.items() if id not in journal}
    if missing:
        tokens = sum(map(len, missing.values())) // 4
        print(f"{what}: {len(missing)} requests with about {tokens:,} tokens in total")
    for id, reply in tqdm(ask_all(judge, missing, concurrency), what, len(missing), unit="verdict"):
        journal.add(id, **reply._asdict())
    return [journal.records[id] for id in ids]


def agreement(pairs: Sequence[tuple[bool, bool]]) -> dict[str, float]:
    """The share of equal verdicts and labels and, unless all of both are the same, Cohen's kappa."""
    if not pairs:
        return {}
    equal, true, labelled_true = (mean(x) for x in zip(*((a == b, a, b) for a, b in pairs), strict=True))
    by_chance = true * labelled_true + (1 - true) * (1 - labelled_true)
    kappa = {} if by_chance == 1 else {"kappa": (equal - by_chance) / (1 - by_chance)}
    return {"accuracy": equal, **kappa}


def usage(replies: Sequence[dict[str, Any]], prices: Sequence[float] = ()) -> dict[str, Any]:
    """The tokens that the judge reports, and their cost. A request that was retried counts once.

    prices: Per million tokens; one price, or that of prompts and that of replies.
    """
    total: dict[str, Any] = {"judge": sorted({r["model"] for r in replies if r["model"]})}
    for kind in ("prompt_tokens", "completion_tokens"):
        total[kind] = sum(r[kind] or 0 for r in replies)
    total["without_usage"] = sum(None in (r["prompt_tokens"], r["completion_tokens"]) for r in replies)
    if prices:
        total["cost"] = (total["prompt_tokens"] * prices[0] + total["completion_tokens"] * prices[-1]) / 1e6
    return total


def _add_agreement(judge: Judge, arguments: Arguments, results: Results, journal: Journal) -> None:
    path = arguments.labelled or ""
    rows = list(load_table(path, columns=["document", "ground_truth", "output", "label"]))
    wrong = [row["label"] for row in rows if row["label"] not in (True, False)]
    if wrong:
        raise ValueError(f"{path} has the label {wrong[0]!r}; every label must be true or false.")
    key = {"labelled": Path(path).name, "digest": _digest(rows)}
    if key in results:
        return
    questions = {f"labelled/{i}": (row["document"], row["ground_truth"], row["output"]) for i, row in enumerate(rows)}
    replies = ask(judge, questions, arguments.judge_concurrency, journal, "Labelled sample, judging")
    pairs = [(reply["verdict"], bool(row["label"])) for reply, row in zip(replies, rows, strict=True)]
    parsed = [pair for pair in pairs if pair[0] is not None]
    measures = {name: Measure(value, len(parsed)) for name, value in agreement(parsed).items()}
    data = {"samples": len(rows), "unparsed": len(rows) - len(parsed)}
    results.add(key, measures, data | usage(replies, arguments.price_per_million_tokens))


def _digest(*content: Any) -> str:
    """A digest of everything that a record depends on, so that no other record is taken for it."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def section(results: ResultSet) -> Section:
    tables = [_accuracy(caption, paper, results) for caption, paper in PAPER.items()]
    return Section(
        title="Contextual hallucination",
        paper="Table 4",
        text="The share of summaries and answers that a judge finds accurate, that is, free of hallucination: higher "
        "is better. The judge is a language model, which is given a reference and the document, as far as the model "
        "read it. It explains first and gives its verdict last. A reply without a verdict in the requested form "
        "counts neither way, and an empty output counts as inaccurate.",
        tables=[table for table in (*tables, _agreements(results), _details(results)) if table.rows],
        notes=[
            "The paper gives neither its prompts nor the lengths of its outputs. The prompts for answers are "
            "LongBench's, those for summaries are our own. The judge is asked what Chuang et al. (arXiv:2407.07071) "
            "ask, in our own words.",
            "Only values by the same judge can be compared.",
        ],
    )


def _accuracy(caption: str, paper: Mapping[str, tuple[float, float]], results: ResultSet) -> Table:
    rows: list[list] = []
    for name, values in paper.items():
        cells = [cell for cell in results.cells if cell.matches(dataset=name)]
        if cells:
            ours = model_columns(results, "accuracy", dataset=name)
            rows.append([TASKS[name].title, *values, *ours, _differs(name, results, cells)])
    columns = ["dataset", PAPER_TRANSFORMER, PAPER_DIFF, *results.labels, DIFFERS]
    return Table(f"{caption}, accuracy", columns, rows, digits=2)


def _differs(name: str, results: ResultSet, cells: list[Cell]) -> str:
    found, settings = other_models(results), results.settings
    judge = settings["judge_model"]
    if not re.fullmatch(r"(.*/)?gpt-4o(-\d{4}-\d{2}-\d{2})?", judge):
        found.append(f"judge {judge}, not GPT-4o")
    judged = sorted({cell.data["samples"] - cell.data["unparsed"] for cell in cells})
    if judged != [PAPER_SAMPLES]:
        found.append(f"{' and '.join(map(str, judged))} samples, not {PAPER_SAMPLES}")
    source = dict(entry.partition("=")[::2] for entry in settings["datasets"])[name]
    if source:
        found.append(f"rows from {source}")
    cut = max(cell.data["cut"] for cell in cells)
    if cut:
        found.append(f"{cut} documents cut in the middle")
    return "; ".join([*found, "prompts"])


def _agreements(results: ResultSet) -> Table:
    rows = []
    for r in results.results:
        for cell in r.cells:
            if "labelled" in cell.key:
                values = [cell.measures.get("accuracy"), cell.measures.get("kappa")]
                counts = [cell.data["samples"], cell.data["unparsed"]]
                rows.append([_run_name(r, results), cell.key["labelled"], *values, *counts])
    columns = ["model", "labelled sample", "accuracy", "Cohen's kappa", "rows", "unparsed"]
    return Table("Agreement of the judge with a labelled sample", columns, rows, digits=2)


def _details(results: ResultSet) -> Table:
    columns = ["dataset", "model", "outputs", "unparsed", "empty", "cut documents", "outputs at the limit"]
    columns += ["mean length (tokens)", "judge", "judge's tokens read", "written", "cost"]
    rows = []
    for name in TASKS:
        for r in results.results:
            for cell in r.select(dataset=name):
                counts = [cell.data[key] for key in COUNTS]
                used = [cell.data.get(key) for key in ("prompt_tokens", "completion_tokens", "cost")]
                used = [None] * 3 if cell.data["without_usage"] else used
                judge = ", ".join(cell.data["judge"]) or r.settings["judge_model"]
                names = (TASKS[name].title, _run_name(r, results))
                rows.append([*names, *counts, cell.measures["length"], judge, *used])
    return Table("What was judged", columns, rows, digits=2)


def _run_name(r: Results, results: ResultSet) -> str:
    return r.label if len(results.of(r.label)) == 1 else f"{r.label}, seed {r.seed}"

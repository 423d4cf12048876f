# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Many-shot in-context learning and its robustness to order (Figures 6, 7 and 11, arXiv:2410.05258).

A prompt is filled with labelled examples (demonstrations) up to a given length, and the model labels another text. A
longer prompt begins with the demonstrations of the shorter ones, so one prefill serves all lengths and all queries.
For robustness the same demonstrations are shown in other orders: at random, or with the classes taking turns.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers.cache_utils import Cache

from ....arguments import option
from ...comparison import DIFFERS, PAPER_DIFF, PAPER_TRANSFORMER, other_models
from ...generate import CHUNK, prefill
from ...models import LoadedModel, check_length
from ...render import Figure, Section, Table, color
from ...results import Cell, Key, Measure, Results, ResultSet, mean
from .classification import SOURCES, ClassificationTask, Example, find_source, load_task
from .demonstrations import ORDERS, Prompts
from .label_trie import SCORINGS, choose_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = 5

ORDER_NAMES = {"random": ("at random", "Figures 7a and 11"), "alternating": ("alternately by class", "Figure 7b")}
# Title, then percent: Transformer and DIFF, the heights of Figure 6's dashed lines, read off; the printed gain
AVERAGES: dict[str, tuple[str, float | None, float | None, float | None]] = {
    "trec": ("TREC", 69.9, 87.9, 18.0),
    "trec_fine": ("TREC-fine", 61.0, 82.6, 21.6),
    "banking77": ("Banking-77", 65.2, 75.6, 10.4),
    "clinic150": ("Clinic-150", 74.0, 79.2, 5.2),
}
# Transformer and DIFF, printed in Figures 7 and 11, and the number of orders, which the figures draw: the margin grows
# with it
MARGINS = {
    ("trec", "random"): (19.0, 4.0, 10),
    ("trec_fine", "random"): (24.0, 9.0, 10),
    ("banking77", "random"): (13.0, 9.0, 10),
    ("clinic150", "random"): (12.0, 6.0, 10),
    ("trec", "alternating"): (56.7, 13.4, 30),
}

ORDERS_ELSEWHERE = 10  # where the paper has no margin

CellsByLabel = dict[str, list[list[Cell]]]  # for each model, the cells of each of its seeds


@dataclass
class Arguments:
    datasets: list[str] = option(
        list(SOURCES),
        f"Datasets: {', '.join(SOURCES)}; NAME=PATH for a copy of one of them; or a Hub id or local "
        "folder with the splits train and test and the columns text and label.",
    )
    shots: list[int] = option([1], "Demonstrations per class in the first prompts of the curve.")
    lengths: list[int] = option(
        [4096 * i for i in range(1, 17)],
        "Tokens of the other prompts of the curve, which hold as many demonstrations as fit.",
    )
    queries: int = option(100, "Texts from the test split, the same for every prompt.")
    scoring: str = option("trie", "Constrained greedy decoding, or the likelihood of whole labels.", SCORINGS)
    normalize: bool = option(False, "Divide log-likelihoods by the label's number of tokens.")
    orders: list[str] = option(list(ORDERS), "How the demonstrations are permuted.", ORDERS)
    order_seeds: int | None = option(
        None,
        "Permutations per order, by default as many as in the paper: 10 at random, 30 alternating for trec; 10 where "
        "it has none. 0 measures none.",
    )
    order_length: int | None = option(None, "Tokens of a permuted prompt; by default the largest of --lengths.")
    text_column: str | None = option(None, "Column of the texts, if not the usual one.")
    label_column: str | None = option(None, "Column of the labels, if not the usual one.")
    dataset_config: str | None = option(None, "Configuration, if not the usual one.")
    train_split: str | None = option(None, "Split of the demonstrations; by default train.")
    test_split: str | None = option(None, "Split of the queries; by default test.")
    prompt: str | None = option(None, r"Template of an example, such as 'query: {text}\nintent: {label}'.")
    separator: str = option(r"\n==\n", r"Text after each example; \n is a line break.")
    label_names: str | None = option(None, "File with the names of labels that are numbers, one name per line.")
    chunk_size: int = option(CHUNK, "Tokens that go through the model at once.")

    def __post_init__(self):
        for name, values in {"shots": self.shots, "lengths": self.lengths, "queries": [self.queries]}.items():
            if min(values, default=0) < 1:
                raise ValueError(f"Got --{name} {' '.join(map(str, values))}; it must be 1 or more.")
        if self.scoring not in SCORINGS or not set(self.orders) <= set(ORDERS):
            raise ValueError(
                f"Got scoring {self.scoring!r} and orders {self.orders}; choose from {SCORINGS} and {tuple(ORDERS)}."
            )


def number_of_orders(arguments: Arguments, dataset: str, order: str) -> int:
    if arguments.order_seeds is not None:
        return arguments.order_seeds
    *_, orders = MARGINS.get((dataset, order), (None, None, ORDERS_ELSEWHERE))
    return orders


def run(loaded: LoadedModel, arguments: Arguments, options, results: Results) -> None:
    order_length = arguments.order_length or max(arguments.lengths)
    check_length(loaded.model, max(order_length, *arguments.lengths), "A prompt")
    plans = []  # all of them are made before the model runs, so that errors in a dataset show early
    for task in load_tasks(arguments):
        queries = min(arguments.queries, options.limit or arguments.queries)
        prompts = Prompts(task, loaded.tokenizer, arguments.separator.replace(r"\n", "\n"), queries, options.seed)
        points: dict[int, list[Key]] = defaultdict(list)
        for shots in sorted(set(arguments.shots)):
            points[prompts.of_each_class(shots)].append({"dataset": task.name, "shots": shots})
        for length in sorted(set(arguments.lengths)):
            points[prompts.fitting(length)].append({"dataset": task.name, "length": length})
        longest = prompts.length(max(points))
        check_length(loaded.model, longest, f"{task.name}: a prompt")
        permutations = sum(number_of_orders(arguments, task.name, order) for order in arguments.orders)
        permuted = prompts.fitting(order_length) if permutations else 0
        plans.append((prompts, points, permuted))
        print(
            f"{loaded.label}, {task.name}: {len(prompts.queries)} queries after {len(points)} prompts (at most "
            f"{longest:,} tokens) and {permutations} permutations"
        )
    for prompts, points, permuted in plans:
        _measure(loaded, prompts, points, permuted, order_length, arguments, options.batch_size, results)


def load_tasks(arguments: Arguments) -> list[ClassificationTask]:
    """Raises ValueError for two datasets with one name, and for any dataset that cannot be used."""
    names = None
    if arguments.label_names is not None:
        names = Path(arguments.label_names).read_text(encoding="utf-8").splitlines()
    same_names = ("text_column", "label_column", "train_split", "test_split")
    overrides = {name: getattr(arguments, name) for name in same_names} | {"config": arguments.dataset_config}
    prompt = arguments.prompt and arguments.prompt.replace(r"\n", "\n")
    tasks: dict[str, ClassificationTask] = {}
    for spec in arguments.datasets:
        name, source = find_source(spec, prompt=prompt, **overrides)
        if name in tasks:
            raise ValueError(f"Two datasets have the name {name!r}. Rename one of them: --datasets NAME=PATH.")
        tasks[name] = load_task(name, source, names)
    return list(tasks.values())


def _measure(
    loaded: LoadedModel,
    prompts: Prompts,
    points: dict[int, list[Key]],
    permuted: int,
    order_length: int,
    arguments: Arguments,
    batch_size: int | None,
    results: Results,
) -> None:
    """Adds the cells of one dataset. A resumed run takes the same steps and gives the same numbers.

    Args:
        points: The keys of the curve's cells by number of demonstrations.
        permuted: The number of demonstrations of which permutations are shown.
    """
    name, model = prompts.task.name, loaded.model

    def extend(cache: Cache | None, examples: Sequence[Example]) -> Cache:
        ids = (prompts.start if cache is None else []) + prompts.tokens(examples)
        cache, logits = prefill(model, torch.tensor([ids]), cache, arguments.chunk_size)
        if logits.isnan().any():
            raise ValueError("The model's logits are NaN. Check its weights, or evaluate it in another --dtype.")
        return cache

    def add(key: Key, cache: Cache, shown: int) -> None:
        scoring = (arguments.scoring, arguments.normalize, batch_size)
        chosen = choose_labels(model, cache, prompts.queries, prompts.trie, *scoring)
        correct = Measure.of(a == b for a, b in zip(chosen, prompts.answers, strict=True))
        sizes = {"demonstrations": shown, "tokens": cache.get_seq_length(), "classes": len(prompts.labels)}
        results.add(key, {"accuracy": correct}, {**sizes, "source": prompts.task.source.dataset})

    todo = results.todo([key for keys in points.values() for key in keys])
    cache, before = None, 0
    for shown in tqdm(sorted(points), desc=f"{loaded.label}: {name}", unit="prompt"):
        if not todo:
            break
        cache = extend(cache, prompts.demonstrations[before:shown])
        before = shown
        for key in [key for key in points[shown] if key in todo]:
            add(key, cache, shown)
            todo.remove(key)
    keys: list[Key] = [
        {"dataset": name, "length": order_length, "order": order, "order_seed": seed}
        for order in arguments.orders
        for seed in range(number_of_orders(arguments, name, order))
    ]
    for key in tqdm(results.todo(keys), desc=f"{loaded.label}: {name}, orders", unit="prompt"):
        order = str(key["order"])
        examples = prompts.demonstrations[:permuted]
        add(key, extend(None, ORDERS[order](examples, f"{prompts.seed}|{order}|{key['order_seed']}")), permuted)


def stable_average(cells: Sequence[Cell]) -> float:
    """The mean accuracy of the cells with at least half of the largest number of demonstrations.

    The paper averages "after the performance becomes stable" and does not say where that is.
    """
    most = max(cell.data["demonstrations"] for cell in cells)
    late = [cell["accuracy"] for cell in cells if 2 * cell.data["demonstrations"] >= most]
    return sum(late) / len(late)


def margin(cells: Sequence[Cell]) -> float:
    """Best minus worst accuracy."""
    accuracies = [cell["accuracy"] for cell in cells]
    return max(accuracies) - min(accuracies)


def section(results: ResultSet) -> Section:
    names = dict.fromkeys(cell.key["dataset"] for cell in results.cells)
    curves = {name: cells for name in names if (cells := cells_by_label(results, name))}
    tables, figures = [], []
    if curves:
        tables.append(_averages(results, curves))
        caption = "Accuracy by number of demonstrations; dashed: the average once it is stable (Figure 6)."
        figures.append(_panels("many_shot", caption, results, curves))
    permuted = {}
    for order, (arranged, paper) in ORDER_NAMES.items():
        panels = {name: cells for name in names if (cells := cells_by_label(results, name, order))}
        permuted.update({(name, order): cells for name, cells in panels.items()})
        if panels:
            caption = f"Accuracy with demonstrations arranged {arranged}; dotted: best and worst ({paper})."
            figures.append(_panels(f"many_shot_{order}", caption, results, panels))
    if permuted:
        tables.append(_margins(results, permuted))
    return Section(
        title="Many-shot in-context learning",
        paper="Figures 6, 7 and 11",
        text="Accuracy of labelling a text after many labelled examples, by their number, and how much it depends on "
        "their order. The paper prints gains and margins; its averages are read off the figure. It does not say from "
        "where on accuracy is stable, how many queries there are, or how long the permuted prompts are.",
        tables=tables,
        figures=figures,
    )


def cells_by_label(results: ResultSet, dataset: str, order: str | None = None) -> CellsByLabel:
    """The permutations in one order or, without an order, the points of Figure 6 by number of demonstrations."""
    found: CellsByLabel = defaultdict(list)
    for r in results.results:
        cells = [cell for cell in r.select(dataset=dataset) if cell.key.get("order") == order]
        if cells:
            found[r.label].append(sorted(cells, key=lambda cell: cell.data["demonstrations"]))
    return found


def _percent(values: Sequence[float]) -> float | Measure:
    """The value of one seed, or the mean of several."""
    return 100 * values[0] if len(values) == 1 else Measure.of(100 * value for value in values)


def _averages(results: ResultSet, curves: Mapping[str, CellsByLabel]) -> Table:
    diff = [x for x in results.labels if results.of(x)[0].model["model_type"].startswith("diff_transformer")]
    twins = len(results.labels) == 2 and len(diff) == 1
    rows: list[list[Any]] = []
    for name, cells in curves.items():
        # The points that all models have with all seeds; a run that was stopped has fewer
        keys = [[cell.key for cell in found] for found in chain.from_iterable(cells.values())]
        shared = [key for key in keys[0] if all(key in other for other in keys)]
        if not shared:
            continue
        cells = {label: [[c for c in found if c.key in shared] for found in seeds] for label, seeds in cells.items()}
        ours = {label: [stable_average(found) for found in of_seeds] for label, of_seeds in cells.items()}
        row: list[Any] = [*AVERAGES.get(name, (name, None, None, None))]
        row += [_percent(ours[label]) if label in ours else None for label in results.labels]
        if twins:
            signed = [100 * mean(x) if label in diff else -100 * mean(x) for label, x in ours.items()]
            row.append(sum(signed) if len(signed) == 2 else None)
        rows.append([*row, f"{_differs(results, cells)} (paper: 64K)"])
    gain = [f"gain of {diff[0]}"] if twins else []
    columns = ["dataset", PAPER_TRANSFORMER, PAPER_DIFF, "paper: gain", *results.labels, *gain, DIFFERS]
    caption = "Average accuracy (%) once it is stable: here, with at least half of the most demonstrations"
    return Table(caption, columns, rows, digits=1)


def _margins(results: ResultSet, permuted: Mapping[tuple[str, str], CellsByLabel]) -> Table:
    rows: list[list[Any]] = []
    for (name, order), cells in permuted.items():
        transformer, diff, paper_orders = MARGINS.get((name, order), (None, None, None))
        ours = [_percent([margin(x) for x in cells[label]]) if label in cells else None for label in results.labels]
        numbers = sorted({len(found) for of_seeds in cells.values() for found in of_seeds})
        differs = [f"{' and '.join(map(str, numbers))} orders", _differs(results, cells)]
        if paper_orders is not None and numbers != [paper_orders]:
            transformer = diff = None
            differs[0] += f"; the paper's margins, over {paper_orders}, are left out: a margin grows with their number"
        rows.append([_title(name), ORDER_NAMES[order][0], transformer, diff, *ours, "; ".join(differs)])
    caption = "Best minus worst accuracy (%) over permutations of the same demonstrations: smaller is more robust"
    columns = ["dataset", "arranged", PAPER_TRANSFORMER, PAPER_DIFF, *results.labels, DIFFERS]
    return Table(caption, columns, rows, digits=1)


def _differs(results: ResultSet, cells: CellsByLabel) -> str:
    """The data, and the settings that are not the paper's."""
    settings = results.settings
    everything = [cell for of_seeds in cells.values() for found in of_seeds for cell in found]
    data, queries = everything[0].data, everything[0].measures["accuracy"].n
    found = [*other_models(results), f"data: {data['source']}, {data['classes']} classes, {queries} queries"]
    if settings["scoring"] == "likelihood":
        found.append(f"likelihood of labels{' per token' if settings['normalize'] else ''}, not constrained decoding")
    if settings["prompt"] is not None:
        found.append("another prompt")
    longest = max(cell.data["tokens"] for cell in everything)
    return "; ".join([*found, f"at most {longest:,} tokens of demonstrations"])


def _title(dataset: str) -> str:
    return AVERAGES[dataset][0] if dataset in AVERAGES else dataset


def _panels(name: str, caption: str, results: ResultSet, panels: Mapping[str, CellsByLabel]) -> Figure:
    """A panel for each dataset, two per row."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)

    def draw(canvas):
        grid = canvas.subplots(rows, columns, squeeze=False).flat
        for axes, (dataset, cells) in zip(grid, panels.items(), strict=False):
            for label, of_seeds in cells.items():
                _draw(axes, label, of_seeds, color(results.labels, label))
            axes.set(title=_title(dataset), ylabel="accuracy (%)")
        for axes in grid[len(panels) :]:
            axes.remove()
        grid[0].legend(frameon=False)

    return Figure(name, caption, draw, (4.5 * columns, 3.2 * rows))


def _draw(axes: "Axes", label: str, of_seeds: list[list[Cell]], ink: str) -> None:
    """Draws accuracy over the number of demonstrations or the permutation, averaged over seeds, with a band from the
    lowest to the highest seed."""
    permuted = "order" in of_seeds[0][0].key
    points: dict[tuple, list[Cell]] = defaultdict(list)
    for cell in chain.from_iterable(of_seeds):
        points[tuple(cell.key.items())].append(cell)
    drawn = sorted(
        (
            mean(cell.key["order_seed"] if permuted else cell.data["demonstrations"] for cell in cells),
            [100 * cell["accuracy"] for cell in cells],
        )
        for cells in points.values()
    )
    places = [x for x, _ in drawn]
    axes.plot(places, [mean(values) for _, values in drawn], ".-", label=label, color=ink)
    if len(of_seeds) > 1:
        low, high = ([bound(values) for _, values in drawn] for bound in (min, max))
        axes.fill_between(places, low, high, color=ink, alpha=0.15, linewidth=0)
    if permuted:
        for bound in (min, max):
            height = 100 * mean(bound(cell["accuracy"] for cell in cells) for cells in of_seeds)
            axes.axhline(height, linestyle="dotted", linewidth=1, color=ink)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # typed as the base class
        axes.set_xlabel("seed of the permutation")
    else:
        height = 100 * mean(map(stable_average, of_seeds))
        axes.hlines(height, places[-1] / 2, places[-1], linestyles="dashed", color=ink)
        axes.set_xlabel("demonstrations")

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The report of a study, from its study file and its results alone: first what each part of the design does."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullFormatter

from ..evaluation.protocols.fine_grained_loss import PAPER
from ..evaluation.render import COLORS, Figure, Opening, Section, Table, write_pages
from ..evaluation.results import Measure
from .arms import ARMS
from .findings import BETTER, NOT_LEARNT, WORSE, Finding, findings, floor_of, of_arms
from .jobs import chosen_learning_rates, planned_runs
from .results import Result
from .statistics import LEVEL, POWER
from .study import Experiment, Study

INK = dict(zip(ARMS, (*COLORS, "#999999"), strict=True))
_VERDICT_INK = {BETTER: "#009E73", WORSE: "#D55E00"}
OURS = "Not in the paper (arXiv:2410.05258)"
# The arms of the paper's Table 6
_PAPER_ARMS = {
    "transformer": "Transformer",
    "wide": "Transformer, 8 heads",
    "wide_norm": "Transformer, 8 heads, GroupNorm",
    "diff": "DIFF",
    "diff_no_norm": "DIFF without GroupNorm",
}
_AN = {"accuracy": "an accuracy", "loss": "a loss"}
# What an effect is, by the kind of the endpoint
_EFFECTS = {
    "loss": "difference of the validation loss, in nats per token; below 0 the second arm is better",
    "log_loss": "ratio of the validation losses (geometric means); below 1 the second arm is better",
    "tokens": "ratio of the tokens until the accuracy (geometric means); below 1 the second arm is better",
}
_SHORT = {"loss": "difference of loss {}", "log_loss": "loss × {}", "tokens": "tokens × {}"}


class Report:
    """The page of a study."""

    def __init__(self, study: Study, results: Sequence[Result]):
        self.study, self.results = study, results
        self.findings = findings(study, results)
        arms = {name: of_arms(x, name, results) for name, x in study.experiments.items()}
        self.arms = {name: x for name, x in arms.items() if x}

    def write(self, folder: Path) -> list[Path]:
        """Writes report.html (one self-contained page), report.md and figures/; returns the paths of the pages."""
        return write_pages(folder, self.study.title, self.sections(), self.opening())

    def opening(self) -> Opening:
        answers = "\n".join(f"- {sentence}" for sentence in self.answers())
        return [part for part in (answers, self.missing(), self.diverged(), self.scope()) if part]

    def answers(self) -> Iterator[str]:
        """A sentence for each primary contrast."""
        for name, contrast in self.study.contrasts.items():
            rows = [x for x in self.findings if x.name == name]
            if contrast.primary and rows:
                told = "; ".join(f"{row.experiment}: {row.verdict}{self._in_words(row)}" for row in rows)
                yield "{2} `{1}` against `{0}`: {3}.".format(*contrast.arms, contrast.question, told)

    def _in_words(self, row: Finding) -> str:
        if row.verdict == NOT_LEARNT:
            return ""
        effect = self.effect(row)
        if effect is None:
            return " (too few runs, or none that reached the accuracy, or some that diverged)"
        return f" ({_SHORT[self.study.experiments[row.experiment].endpoint.kind].format(effect)})"

    def missing(self) -> str:
        """What there is of a study that is not finished; empty for a finished one."""
        told = []
        for name, experiment in self.study.experiments.items():
            done, planned = sum(x.experiment == name for x in self.results), planned_runs(experiment)
            if done < planned:
                tuned = chosen_learning_rates(experiment, name, self.results)
                told.append(f"{name}: {done} of {planned} runs{'' if tuned else ', no learning rates yet'}")
        return f"The study is not finished ({'; '.join(told)})." if told else ""

    def diverged(self) -> str:
        """Which runs did; empty if there are none."""
        runs = [f"{x.experiment} {x.arm} {x.seed}" for x in self.results if x.diverged and not x.tuning]
        if not runs:
            return ""
        return f"The loss of these runs became infinite or NaN, and their arms are not compared: {', '.join(runs)}."

    def scope(self) -> str:
        results = [x for arms in self.arms.values() for runs in arms.values() for x in runs]
        if not results:
            return "There are no results yet."
        sizes = " to ".join(dict.fromkeys(f"{f(x.parameters for x in results) / 1e6:.2g}" for f in (min, max)))
        tokens = " to ".join(dict.fromkeys(f"{f(x.tokens for x in results) / 1e6:.2g}" for f in (min, max)))
        return (
            f"Models of {sizes} million parameters, trained for {tokens} million tokens, can show what a part of the "
            "design does to models of this kind. They cannot show what it does to the paper's, which have 0.83 to "
            "13.1 billion parameters and saw 10 billion to 1 trillion tokens. Endpoints, contrasts and seeds are "
            f"those of the study file. Primary contrasts are decided at a level of {LEVEL:.0%} for all of them "
            "together (Holm's method); the others only describe."
        )

    # ------------------------------------------------------------------ sections

    def sections(self) -> list[Section]:
        found = [self._forest()]
        for name in self.arms:
            found += [x for x in (self._curves(name), self._conditions(name), self._map(name)) if x is not None]
        return [*found, self._lambda(), self._paper(), self._fairness(), self._again()]

    def _forest(self) -> Section:
        rows: list[list] = []
        for x in self.findings:
            comparison, how = x.comparison, "–"
            if comparison is not None:
                how = comparison.method + (f", r = {x.correlation:.2f}" if x.correlation is not None else "")
            p = None if comparison is None or x.verdict == NOT_LEARNT else _p(comparison.p)
            adjusted = "descriptive" if not x.contrast.primary else None if x.adjusted is None else _p(x.adjusted)
            cells = [x.experiment, " → ".join(x.contrast.arms), x.seeds, self.effect(x), how, p, adjusted]
            rows.append([*cells, self.detectable(x), x.verdict])
        columns = ["experiment", "contrast", "seeds", "effect [95 %]", "test", "p", "p, Holm", "detectable", "verdict"]
        kinds: dict[str, list[str]] = {}
        for name in self.arms:
            kinds.setdefault(self.study.experiments[name].endpoint.kind, []).append(name)
        figure = Figure("forest", "What each part of the design does.", self.draw_forest, (11.0, 4.0))
        return Section(
            title="What each part of the design does",
            paper="Table 6 has the paper's ablations",
            text="Each row of the figure compares two arms. Right of the line the second one is better. Green and red "
            "are primary contrasts whose second arm is better or worse after Holm's correction; black ones are "
            "undecided; grey ones are not primary. The bars are 95 % intervals, without that correction.",
            tables=[Table("Contrasts", columns, rows)],
            figures=[figure] if self.findings else [],
            notes=[
                *(f"Effects of {', '.join(names)}: {_EFFECTS[kind]}." for kind, names in kinds.items()),
                f"Detectable: the smallest effect that a repetition with the same standard error would find in "
                f"{POWER:.0%} of cases; for primary contrasts at the strictest level of Holm's method. Of tokens it "
                "is a ratio of hazards.",
                "The t test is paired by seed where the arms of an experiment correlate over the seeds on average "
                "(r > 0), and Welch's otherwise. Tokens are tested by the log-rank test, and the interval is "
                "Welch's of their logarithms. Runs that never reach the accuracy count with all their tokens: a ratio "
                "is too close to 1 if one of its arms has such runs.",
                f"{NOT_LEARNT[0].upper()}{NOT_LEARNT[1:]}: neither arm is better, by two standard errors, than a "
                "model that has not learnt the task. Such a contrast is not tested.",
            ],
        )

    def draw_forest(self, canvas: Canvas) -> None:
        """All contrasts, in a panel for each experiment, on whose right the second arm is better."""
        panels = canvas.subplots(1, max(1, len(self.arms)), squeeze=False, sharey=True)[0]
        names = [name for name in self.study.contrasts if any(x.name == name for x in self.findings)]
        for axes, experiment in zip(panels, self.arms, strict=False):
            kind = self.study.experiments[experiment].endpoint.kind
            for x in (x for x in self.findings if x.experiment == experiment):
                if x.comparison is None or x.verdict == NOT_LEARNT:
                    continue
                points = [x.comparison.effect, *x.comparison.interval()]
                middle, low, high = points if kind == "loss" else map(_exp, points)
                ink = _VERDICT_INK.get(x.verdict, "#333333") if x.contrast.primary else "#bbbbbb"
                y = names.index(x.name)
                axes.plot([low, high], [y, y], color=ink, linewidth=2)
                axes.plot(middle, y, "o", color=ink)
            axes.axvline(0 if kind == "loss" else 1, color="black", linewidth=0.8)
            if kind != "loss":
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
                axes.tick_params(axis="x", labelsize=8)
            axes.invert_xaxis()
            axes.set(title=experiment, xlabel=fill(_EFFECTS[kind].split(";")[0], 32))
        panels[0].set_yticks(range(len(names)), [" → ".join(self.study.contrasts[name].arms) for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)

    def _curves(self, name: str) -> Section:
        experiment, arms = self.study.experiments[name], self.arms[name]
        threshold, floor = experiment.endpoint.accuracy, floor_of(experiment, arms)
        has_accuracy, first = floor.metric == "accuracy", next(iter(arms))

        def draw(canvas: Canvas) -> None:
            panels = canvas.subplots(1, 2 if threshold is None else 1, squeeze=False)[0]
            for arm, runs in arms.items():
                if threshold is None:
                    tokens, losses, accuracies = np.mean([x.curve for x in runs], axis=0).T
                    if arm == first:
                        reference = losses
                    panels[0].plot(tokens, losses, color=INK[arm], label=arm)
                    panels[1].plot(tokens, accuracies if has_accuracy else losses - reference, color=INK[arm])
                else:  # the curves of runs that end would have no mean
                    reached = sorted(x.tokens for x in runs if x.accuracy >= threshold)
                    shares = [(i + 1) / len(runs) for i in range(len(reached))]
                    end = experiment.training["max_steps"] * _tokens_per_step(runs[0], experiment)
                    x, y = [0, *reached, end], [0, *shares, len(reached) / len(runs)]
                    panels[0].step(x, y, where="post", color=INK[arm], label=arm)
            if threshold is None:
                if has_accuracy:
                    panels[1].axhline(floor.value, color="black", linestyle=":", linewidth=1)
                panels[0].set(ylabel="validation loss (nats)")
                panels[0].set_yscale("log" if experiment.endpoint.kind == "log_loss" else "linear")
                panels[1].set(ylabel="validation accuracy" if has_accuracy else f"loss minus that of {first} (nats)")
            else:
                panels[0].set(ylabel=f"share of runs that have\nreached an accuracy of {threshold:g}")
            for axes in panels:
                axes.set(xlabel="tokens")
            panels[0].legend(frameon=False, fontsize=8)

        rows: list[list] = []
        for arm, runs in arms.items():
            values = self._endpoint(name, arm)
            rows.append([arm, ARMS[arm][0], len(runs), values, Measure.of(x.accuracy for x in runs)])
            if threshold is not None:
                rows[-1].append(f"{sum(x.accuracy >= threshold for x in runs)} of {len(runs)}")
        dotted = "; the dotted line is a model that has not learnt the task" if has_accuracy else ""
        caption = f"Validation during training{dotted}."
        columns = ["arm", "what it is", "seeds", "validation loss", "accuracy"]
        ends = ""
        if threshold is not None:
            caption = "How many runs have reached the accuracy, over their tokens."
            columns[3:] = ["tokens", "accuracy", f"reached {threshold:g}"]
            ends = f" Runs end at an accuracy of {threshold:g}; those that never reach it count with all their tokens."
        guess = f"A model that has not learnt the task has {_AN[floor.metric]} of {floor.value:.3f}."
        return Section(
            title=f"{name}: training",
            paper=OURS if experiment.task["kind"] == "key_value" else "Table 6",
            text=f"Means over the seeds, with their standard errors.{ends} {guess}",
            tables=[Table("At the end", columns, rows)],
            figures=[Figure(f"{name}_curves", caption, draw, (11.0 if threshold is None else 7.0, 4.0))],
        )

    def _conditions(self, name: str) -> Section | None:
        arms = {arm: [x for x in runs if x.conditions] for arm, runs in self.arms[name].items()}
        conditions = list(dict.fromkeys(c for runs in arms.values() for x in runs for c in x.conditions))
        if not conditions:
            return None
        rows: list[list] = []
        for arm, runs in arms.items():
            losses = [Measure.of(x.conditions[c]["loss"] for x in runs) for c in conditions]
            rows.append([arm, *map(_significant, losses)])
        return Section(
            title=f"{name}: loss by kind of row",
            paper=OURS,
            text="Validation loss at the end of training, with standard errors over the seeds. These rows only "
            "describe: runs that reach the accuracy of the endpoint end there.",
            tables=[Table("Validation loss", ["arm", *conditions], rows)],
        )

    def _map(self, name: str) -> Section | None:
        shown = {arm: x for arm, runs in self.arms[name].items() for x in runs if x.map is not None}
        if not shown:
            return None

        def draw(canvas: Canvas) -> None:
            panels = canvas.subplots(len(shown), 1, squeeze=False)[:, 0]
            for axes, (arm, result) in zip(panels, shown.items(), strict=True):
                assert result.map is not None
                layers, place = result.map["layers"], result.map["answer"]
                heads = [head for layer in layers for head in layer]
                axes.imshow(heads, aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
                for i in range(1, len(layers)):
                    axes.axhline(i * len(layers[0]) - 0.5, color="black", linewidth=0.8)
                axes.axvline(place, color="#009E73", linewidth=1, alpha=0.6)
                solved = "" if result.map["solved"] else " (not solved)"
                axes.set_ylabel(arm + solved, rotation=0, ha="right", va="center", fontsize=8)
                axes.set(yticks=[], xticks=[])

        return Section(
            title=f"{name}: attention of one example",
            paper="Figure 1 has one of the paper's",
            text="Attention from the first question of a validation row, one of the hardest, to the tokens before it, "
            "after training with the first seed: one line for each head, the first layer on top. The green line "
            "marks the answer. DIFF's lines are the difference of both maps: red is positive, blue negative.",
            figures=[Figure(f"{name}_map", "Attention to the context.", draw, (10.0, 0.55 * len(shown) + 0.4))],
        )

    def _lambda(self) -> Section:
        columns = ["experiment", "arm", "layer", "lambda_init", "at the end", "seeds outside [0, 1]"]
        rows: list[list] = []
        panels: list[tuple[str, str, Sequence[Result]]] = []
        for name, arms in self.arms.items():
            for arm, runs in arms.items():
                if not runs[0].lambdas:
                    continue
                panels.append((name, arm, runs))
                for i in range(len(runs[0].lambdas[0]) - 1):
                    outside = [x.seed for x in runs if any(not 0 <= entry[i + 1] <= 1 for entry in x.lambdas)]
                    init = runs[0].lambda_init[i] if runs[0].lambda_init else None
                    ends = Measure.of(x.lambdas[-1][i + 1] for x in runs)
                    rows.append([name, arm, i + 1, init, ends, ", ".join(map(str, outside)) or "none"])

        def draw(canvas: Canvas) -> None:
            for axes, (name, arm, runs) in zip(
                canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
            ):
                for result in runs:
                    steps, *layers = zip(*result.lambdas, strict=True)
                    for i, values in enumerate(layers):
                        ink = colormaps["viridis"](i / max(1, len(layers) - 1) * 0.8)
                        axes.plot(steps, values, color=ink, linewidth=0.6, alpha=0.7)
                axes.set_title(f"{name}\n{arm}", fontsize=8)
                axes.set_xlabel("step")

        caption = "Lambda during training, a line for each seed and layer; deeper layers are lighter."
        figures = [Figure("lambda", caption, draw, (max(6.0, 3.0 * len(panels)), 3.2))]
        return Section(
            title="Lambda by layer",
            paper="Eq. 2",
            text="How much of the second softmax map is subtracted. In V1 it begins near lambda_init, which depends "
            "on the layer. V2 has a lambda for each token and head; the table has their mean, which begins near 1/2. "
            "Below 0 the maps are added, above 1 the second outweighs the first: such seeds are listed.",
            tables=[Table("Lambda", columns, rows)],
            figures=figures if panels else [],
        )

    def _paper(self) -> Section:
        rows: list[list] = []
        columns = [name for name, x in self.study.experiments.items() if name in self.arms]
        for arm, of_paper in _PAPER_ARMS.items():
            ours = [self._endpoint(name, arm) for name in columns]
            rows.append([arm, PAPER[of_paper][3], *ours])
        return Section(
            title="The paper's ablations",
            paper="Table 6",
            text="The validation loss of the paper's models of 1.4B parameters after 10B tokens, one run of each, "
            "beside our endpoints. The paper does not say whether its DIFF without GroupNorm keeps the factor "
            "(1 - lambda_init), nor whether its Transformer with GroupNorm has one; ours do.",
            tables=[Table("Validation loss of the paper, and our endpoints", ["arm", "paper", *columns], rows)],
        )

    def _endpoint(self, name: str, arm: str) -> str | None:
        runs, experiment = self.arms[name].get(arm), self.study.experiments[name]
        is_tokens = experiment.endpoint.kind == "tokens"
        return _significant(Measure.of(x.tokens if is_tokens else x.loss for x in runs)) if runs else None

    def _fairness(self) -> Section:
        columns = ["experiment", "arm", "parameters", "FLOPs per token", "learning rate", "lambda_init by layer"]
        rows: list[list] = []
        for name, arms in self.arms.items():
            experiment = self.study.experiments[name]
            rates = chosen_learning_rates(experiment, name, self.results)
            for arm, runs in arms.items():
                is_end = rates[arm] in (min(experiment.learning_rates), max(experiment.learning_rates))
                edge = ", an end of the grid" if is_end and experiment.tunes else ""
                inits = ", ".join(f"{x:.2f}" for x in runs[0].lambda_init)
                flops = round(runs[0].flops_per_token)
                rows.append([name, arm, runs[0].parameters, flops, f"{rates[arm]:g}{edge}", inits])
        return Section(
            title="What makes it fair",
            paper="Tables 9 and 10 have the paper's conditions",
            text="All arms of a seed began with the same matrices, copied from one Transformer, and saw the same "
            "batches; digests of both are compared before anything is drawn. Parameters are equal within 0.1 %. "
            "Where there are several learning rates, each arm has the one that was best for it on other seeds. All "
            "runs of an experiment are measured on the same validation rows, whose choice is in no interval.",
            tables=[Table("Arms", columns, rows)],
            notes=[f"{name}: {_tuning(self.study.experiments[name])}" for name in self.arms],
        )

    def _again(self) -> Section:
        places: dict[tuple, list[Result]] = {}
        for x in self.results:
            places.setdefault((x.hardware, tuple(sorted(x.packages.items()))), []).append(x)
        rows: list[list] = []
        for (hardware, packages), runs in places.items():
            dates = sorted(x.date[:10] for x in runs)
            hours = sum(x.seconds for x in runs) / 3600
            versions = ", ".join(f"{name} {version}" for name, version in packages)
            rows.append(
                [hardware, versions, len(runs), f"{hours:.1f}", " to ".join(dict.fromkeys((dates[0], dates[-1])))]
            )
        return Section(
            title="Run it again",
            paper="Appendices D and E have the paper's recipe",
            text=f"About {self.study.minutes:g} minutes on {self.study.machine}. Everything on this page is made from "
            "study.yaml and results.jsonl. A run that was resumed counts its hours from there.",
            tables=[Table("Where it ran", ["hardware", "packages", "runs", "hours of training", "dates"], rows)],
        )

    # ------------------------------------------------------------------ numbers

    def effect(self, row: Finding) -> str | None:
        """With its 95 % interval: `-0.0250 [-0.0301, -0.0199]`, or for ratios `0.43 [0.31, 0.60]`."""
        if row.comparison is None:
            return None
        low, high = row.comparison.interval()
        show = self._number(row.experiment)
        return f"{show(row.comparison.effect)} [{show(low)}, {show(high)}]"

    def detectable(self, row: Finding) -> str | None:
        if row.comparison is None:
            return None
        value = row.comparison.minimum_detectable(row.level)
        sign = {"loss": "±", "log_loss": "×", "tokens": "hazard ×"}[
            self.study.experiments[row.experiment].endpoint.kind
        ]
        return f"{sign}{self._number(row.experiment)(value)}"

    def _number(self, experiment: str) -> Callable[[float], str]:
        if self.study.experiments[experiment].endpoint.kind == "loss":
            return lambda value: f"{round(value, 4) + 0.0:.4f}"  # no minus before zero
        return lambda value: _ratio(_exp(value))


def _tokens_per_step(result: Result, experiment: Experiment) -> float:
    return result.curve[0][0] / experiment.training["eval_steps"]


def _tuning(experiment: Experiment) -> str:
    rates = ", ".join(f"{x:g}" for x in experiment.learning_rates)
    if not experiment.tunes:
        return f"learning rate {rates}"
    seeds, steps = ", ".join(map(str, experiment.tuning_seeds)), experiment.tuning_steps
    return f"learning rates {rates} on the seeds {seeds}{'' if steps is None else f', in runs of {steps:,} steps'}"


def _exp(value: float) -> float:
    return math.exp(max(-300.0, min(value, 300.0)))  # without overflow


def _ratio(value: float) -> str:
    """Three digits where two seeds leave an interval of many orders of magnitude."""
    if not 0.001 <= value < 10_000:
        return "> 10,000" if value > 1 else "< 0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _significant(measure: Measure) -> str:
    """A mean with its standard error, both to the place of the error's second digit: `2,112 ± 87`,
    `0.00213 ± 0.00012`. Three digits without an error."""
    size = measure.stderr or abs(measure.value) / 10
    places = min(6, max(0, 1 - math.floor(math.log10(size)))) if size else 0
    error = "" if measure.stderr is None else f" ± {measure.stderr:,.{places}f}"
    return f"{measure.value:,.{places}f}{error}"


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"

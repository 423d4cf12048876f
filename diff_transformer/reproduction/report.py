# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The report of a study, from its study file and its results alone: first what each part of the design does."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullFormatter

from ..evaluation.protocols.fine_grained_loss import PAPER
from ..evaluation.render import COLORS, Figure, Opening, Section, Table, write_pages
from ..evaluation.results import Measure
from .arms import ARMS
from .findings import BETTER, NOT_LEARNT, WORSE, Finding, chosen_learning_rates, findings, floor_of, runs_by_arm
from .results import Result
from .statistics import LEVEL, POWER
from .study import Study

INK = dict(zip(ARMS, (*COLORS, "#999999"), strict=True))
_VERDICT_INK = {BETTER: "#009E73", WORSE: "#D55E00"}
# The arms of the paper's Table 6
_PAPER_ARMS = {
    "transformer": "Transformer",
    "wide": "Transformer, 8 heads",
    "wide_norm": "Transformer, 8 heads, GroupNorm",
    "diff": "DIFF",
    "diff_no_norm": "DIFF without GroupNorm",
}
# What an effect is, by the kind of the endpoint
_EFFECTS = {
    "loss": "difference of the validation loss, in nats per token",
    "log_loss": "ratio of the validation losses (geometric means)",
    "tokens": "ratio of the tokens until the accuracy (geometric means)",
}


class Report:
    """The page of a study."""

    def __init__(self, study: Study, results: Sequence[Result]):
        self.study, self.results = study, results
        self.findings = findings(study, results)
        arms = {name: runs_by_arm(x, name, results) for name, x in study.experiments.items()}
        self.arms = {name: x for name, x in arms.items() if x}

    def write(self, folder: Path) -> list[Path]:
        """Writes report.html (one self-contained page), report.md and figures/; returns the paths of the pages."""
        return write_pages(folder, self.study.title, self.sections(), self.opening())

    def opening(self) -> Opening:
        diverged = [f"{x.experiment} {x.arm} {x.seed}" for x in self.results if x.diverged and not x.tuning]
        told = f"The loss became infinite or NaN in {', '.join(diverged)}. These arms are not compared."
        return [part for part in (self.missing(), told if diverged else "", self._scope()) if part]

    def sections(self) -> list[Section]:
        return [self._contrasts(), *map(self._training, self.arms), self._lambda(), self._paper(), self._conditions()]

    def missing(self) -> str:
        """What there is of a study that is not finished; empty for a finished one."""
        told = []
        for name, experiment in self.study.experiments.items():
            done = sum(x.experiment == name for x in self.results)
            tuned = chosen_learning_rates(experiment, name, self.results)
            if done < experiment.runs:
                told.append(f"{name}: {done} of {experiment.runs} runs{'' if tuned else ', no learning rates yet'}")
        return f"The study is not finished ({'; '.join(told)})." if told else ""

    def _scope(self) -> str:
        results = [x for arms in self.arms.values() for runs in arms.values() for x in runs]
        if not results:
            return "There are no results yet."
        sizes, tokens = sorted(x.parameters for x in results), sorted(x.tokens for x in results)
        return (
            f"Models of {sizes[0] / 1e6:.2g} to {sizes[-1] / 1e6:.2g} million parameters, trained for "
            f"{tokens[0] / 1e6:.2g} to {tokens[-1] / 1e6:.2g} million tokens. The paper's have 0.83 to 13.1 billion "
            "parameters and saw 10 billion to 1 trillion tokens."
        )

    def _contrasts(self) -> Section:
        rows: list[list] = []
        for x in self.findings:
            p = test = detectable = None
            if x.comparison is not None:
                test = x.comparison.method + ("" if x.correlation is None else f", r = {x.correlation:.2f}")
                p = None if x.verdict == NOT_LEARNT else _p(x.comparison.p)
                detectable = self._number(x, x.comparison.minimum_detectable(x.level))
            adjusted = "descriptive" if not x.contrast.primary else None if x.adjusted is None else _p(x.adjusted)
            arms = " → ".join(x.contrast.arms)
            rows.append([x.experiment, arms, x.seeds, self._effect(x), test, p, adjusted, detectable, x.verdict])
        columns = ["experiment", "contrast", "seeds", "effect [95 %]", "test", "p", "p, Holm", "detectable", "verdict"]
        kinds = {name: self._kind(name) for name in self.arms}
        return Section(
            title="What each part of the design does",
            paper="Table 6 has the paper's ablations",
            text="The second arm of a contrast against the first. Right of the line of the figure the second one is "
            "better: green and red are decided after Holm's correction, black is undecided, grey is descriptive. The "
            "bars are 95 % intervals, without that correction.",
            tables=[Table("Contrasts", columns, rows)],
            figures=[Figure("forest", "Effects with 95 % intervals.", self.draw_forest, (11.0, 4.0))] if rows else [],
            notes=[
                *(f"Effect on {x}: {_EFFECTS[kind]}; less is better." for x, kind in kinds.items()),
                f"Detectable: the effect that a repetition would find in {POWER:.0%} of cases, for primary contrasts "
                "at the strictest level of Holm's method; for tokens as a ratio of hazards.",
                f"Primary contrasts are decided together at a level of {LEVEL:.0%}. Where the log-rank test and the "
                "ratio of tokens have different directions, p is 1.",
                "Runs that never reach the accuracy count with all their tokens, which makes a ratio too close to 1.",
                f"{NOT_LEARNT.capitalize()}: neither arm is better, by two standard errors, than a model that has not "
                "learnt the task.",
            ],
        )

    def draw_forest(self, canvas: Canvas) -> None:
        """All contrasts, in a panel for each experiment, on whose right the second arm is better."""
        panels = canvas.subplots(1, max(1, len(self.arms)), squeeze=False, sharey=True)[0]
        names = [name for name in self.study.contrasts if any(x.name == name for x in self.findings)]
        for axes, experiment in zip(panels, self.arms, strict=False):
            kind = self._kind(experiment)
            for x in self.findings:
                if x.experiment != experiment or x.comparison is None or x.verdict == NOT_LEARNT:
                    continue
                points = [x.comparison.effect, *x.comparison.interval]
                middle, low, high = points if kind == "loss" else map(_exp, points)
                ink = _VERDICT_INK.get(x.verdict, "#333333") if x.contrast.primary else "#bbbbbb"
                axes.plot([low, high], [names.index(x.name)] * 2, color=ink, linewidth=2)
                axes.plot(middle, names.index(x.name), "o", color=ink)
            axes.axvline(0 if kind == "loss" else 1, color="black", linewidth=0.8)
            if kind != "loss":
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
                axes.tick_params(axis="x", labelsize=8)
            axes.invert_xaxis()
            axes.set(title=experiment, xlabel=fill(_EFFECTS[kind], 32))
        panels[0].set_yticks(range(len(names)), [" → ".join(self.study.contrasts[name].arms) for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)

    def _training(self, name: str) -> Section:
        experiment, arms = self.study.experiments[name], self.arms[name]
        threshold, floor = experiment.endpoint.accuracy, floor_of(experiment, arms)
        conditions = next(iter(arms.values()))[0].conditions
        columns = ["validation loss", "accuracy"] if threshold is None else ["tokens", "accuracy", "reached"]
        rows: list[list] = []
        for arm, runs in arms.items():
            rows.append(
                [arm, ARMS[arm][0], len(runs), self._endpoint(name, arm), Measure.of(x.accuracy for x in runs)]
            )
            if threshold is not None:
                rows[-1].append(f"{sum(x.accuracy >= threshold for x in runs)} of {len(runs)}")
            rows[-1] += [_mean(x.conditions[c]["loss"] for x in runs) for c in conditions]
        return Section(
            title=f"{name}: training",
            paper="Not in the paper (arXiv:2410.05258)" if floor.metric == "accuracy" else "Table 6",
            text="Means over the seeds, with their standard errors. A model that has not learnt the task has "
            f"{'an' if floor.metric == 'accuracy' else 'a'} {floor.metric} of {floor.value:.3f}."
            + ("" if threshold is None else f" Runs end when they reach an accuracy of {threshold:g}."),
            tables=[Table("At the end", ["arm", "what it is", "seeds", *columns, *conditions], rows)],
            figures=[Figure(f"{name}_curves", "Validation.", partial(self.draw_curves, name=name), (11.0, 4.0))],
            notes=["The last columns have the loss on each kind of row; they are descriptive."] if conditions else [],
        )

    def draw_curves(self, canvas: Canvas, name: str) -> None:
        """The mean of each arm, and less that of the first arm. A run that has ended keeps its last value."""
        arms, is_tokens = self.arms[name], self._kind(name) == "tokens"
        longest = max((x.curve for runs in arms.values() for x in runs), key=len)
        tokens, first = [point[0] for point in longest], None
        panels = canvas.subplots(1, 2)
        for arm, runs in arms.items():
            curves = [[*x.curve, *[x.curve[-1]] * (len(longest) - len(x.curve))] for x in runs]
            mean = np.mean(curves, axis=0)[:, 2 if is_tokens else 1]
            first = mean if first is None else first
            panels[0].plot(tokens, mean, color=INK[arm], label=arm)
            panels[1].plot(tokens, mean - first, color=INK[arm])
        label = "validation accuracy" if is_tokens else "validation loss (nats)"
        panels[0].set(xlabel="tokens", ylabel=label, yscale="log" if self._kind(name) == "log_loss" else "linear")
        panels[1].set(xlabel="tokens", ylabel=f"{label}, minus that of {next(iter(arms))}")
        panels[0].legend(frameon=False, fontsize=8)

    def _lambda(self) -> Section:
        rows: list[list] = []
        for name, arm, runs in ((name, arm, runs) for name, x in self.arms.items() for arm, runs in x.items()):
            for i in range(len(runs[0].lambdas[0]) - 1 if runs[0].lambdas else 0):
                paths = [[entry[i + 1] for entry in x.lambdas] for x in runs]
                outside = [str(x.seed) for x, path in zip(runs, paths, strict=True) if min(path) < 0 or max(path) > 1]
                init = runs[0].lambda_init[i] if runs[0].lambda_init else None
                bounds = min(map(min, paths)), max(map(max, paths))
                end = Measure.of(path[-1] for path in paths)
                rows.append([name, arm, i + 1, init, end, *bounds, ", ".join(outside) or "none"])
        columns = ["experiment", "arm", "layer", "lambda_init", "at the end", "lowest", "highest"]
        return Section(
            title="Lambda by layer",
            paper="Eq. 2",
            text="How much of the second softmax map is subtracted; for V2 the mean over tokens and heads. Lowest and "
            "highest are over all seeds and logged steps. Below 0 the maps are added, above 1 the second outweighs "
            "the first.",
            tables=[Table("Lambda", [*columns, "seeds outside [0, 1]"], rows)],
        )

    def _paper(self) -> Section:
        rows: list[list] = [
            [arm, PAPER[of_paper][3], *(self._endpoint(name, arm) for name in self.arms)]
            for arm, of_paper in _PAPER_ARMS.items()
        ]
        return Section(
            title="The paper's ablations",
            paper="Table 6",
            text="The validation loss of the paper's models of 1.4B parameters after 10B tokens, one run of each, "
            "beside our endpoints. The paper does not say whether its DIFF without GroupNorm keeps the factor "
            "(1 - lambda_init), nor whether its Transformer with GroupNorm has one; ours do.",
            tables=[Table("Validation loss of the paper, and our endpoints", ["arm", "paper", *self.arms], rows)],
        )

    def _conditions(self) -> Section:
        arms: list[list] = []
        for name, runs_of in self.arms.items():
            grid = self.study.experiments[name].learning_rates
            for arm, (first, *_) in runs_of.items():
                inits = ", ".join(f"{x:.2f}" for x in first.lambda_init)
                rates = ", ".join(f"{x:g}" for x in grid)
                row = [name, arm, first.parameters, round(first.flops_per_token), f"{first.learning_rate:g}", rates]
                arms.append([*row, inits])
        places = Counter(
            (x.date[:10], x.hardware, ", ".join(f"{name} {version}" for name, version in sorted(x.packages.items())))
            for x in self.results
        )
        where: list[list] = [[*place, runs] for place, runs in places.items()]
        columns = ["experiment", "arm", "parameters", "FLOPs per token", "learning rate", "of", "lambda_init by layer"]
        return Section(
            title="Conditions",
            paper="Tables 9 and 10 and Appendices D and E have the paper's",
            text="All arms of a seed began with the same matrices, copied from one Transformer, and saw the same "
            "batches; digests of both are compared before anything is drawn. Parameters are equal within 0.1 %. "
            "Each arm has the learning rate that was best for it on other seeds.",
            tables=[
                Table("Arms", columns, arms),
                Table("Where it ran", ["date", "hardware", "packages", "runs"], where),
            ],
        )

    def _kind(self, experiment: str) -> str:
        return self.study.experiments[experiment].endpoint.kind

    def _endpoint(self, name: str, arm: str) -> str | None:
        runs, is_tokens = self.arms[name].get(arm), self._kind(name) == "tokens"
        return _mean(x.tokens if is_tokens else x.loss for x in runs) if runs else None

    def _effect(self, row: Finding) -> str | None:
        """With its 95 % interval: `-0.0250 [-0.0301, -0.0199]`, or for ratios `× 0.43 [0.31, 0.60]`."""
        if row.comparison is None:
            return None
        effect, low, high = (self._number(row, x) for x in (row.comparison.effect, *row.comparison.interval))
        return f"{effect} [{low.lstrip('× ')}, {high.lstrip('× ')}]"

    def _number(self, row: Finding, value: float) -> str:
        if self._kind(row.experiment) == "loss":
            return f"{round(value, 4) + 0.0:.4f}"  # no minus before zero
        return f"× {_exp(value):.3g}"


def _exp(value: float) -> float:
    return math.exp(max(-300.0, min(value, 300.0)))  # without overflow, of intervals from two seeds


def _mean(values: Iterable[float]) -> str:
    """With its standard error, both to the place of the error's second digit: `2,112 ± 87`, `0.00213 ± 0.00012`."""
    measure = Measure.of(values)
    size = measure.stderr or abs(measure.value) / 10
    places = min(6, max(0, 1 - math.floor(math.log10(size)))) if size else 0
    return " ± ".join(f"{x:,.{places}f}" for x in (measure.value, measure.stderr) if x is not None)


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"

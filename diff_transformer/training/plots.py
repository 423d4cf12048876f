# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The plot of a run: loss, gradient norm, and lambda of every layer, by step."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from ..folders import whole_file


def plot_run(log_history: list[dict[str, float]], file: Path) -> None:
    """Plots the log of transformers' Trainer (`trainer.state.log_history`) as a PNG."""

    def curve(name: str) -> tuple[list[float], list[float]]:
        entries = [entry for entry in log_history if name in entry]
        return [entry["step"] for entry in entries], [entry[name] for entry in entries]

    lambdas = sorted({name for entry in log_history for name in entry if name.startswith("lambda/")})
    figure = Figure(figsize=(8, 9 if lambdas else 6), dpi=110, layout="constrained")
    axes = figure.subplots(3 if lambdas else 2, sharex=True)
    axes[0].plot(*curve("loss"), color="#6baed6", label="training")
    if any("eval_loss" in entry for entry in log_history):
        axes[0].plot(*curve("eval_loss"), color="#08519c", marker="o", markersize=4, label="validation")
    axes[0].set(ylabel="cross-entropy (nats per token)")
    axes[0].legend()
    axes[1].plot(*curve("grad_norm"), color="#636363", linewidth=1)
    axes[1].set(ylabel="gradient norm", yscale="log")
    for i, name in enumerate(lambdas):
        color = colormaps["viridis"](i / max(1, len(lambdas) - 1))
        axes[2].plot(*curve(name), color=color, linewidth=1, label=f"layer {i + 1}")
    if lambdas:
        axes[2].set(ylabel="lambda")
        axes[2].legend(fontsize=7, ncols=max(1, len(lambdas) // 10 + 1))
    axes[-1].set(xlabel="optimizer step")
    with whole_file(file) as temporary:
        figure.savefig(temporary, format="png")

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The tables and the plot of benchmarks.attention, from its rows."""

from itertools import groupby, product
from pathlib import Path

from benchmarks.attention_ways import TASKS, WAYS


def add_ratios(rows: list[dict]) -> None:
    """Adds the speed relative to the fastest rival and to the fastest standard attention of the same cell."""
    cells: dict[tuple, list[dict]] = {}
    for one in rows:
        cells.setdefault((one["task"], one["d"], one["length"]), []).append(one)
    for cell in cells.values():
        for kind, column in (("rival", "over_best_rival"), ("standard", "over_standard")):
            best = min((one["ms"] for one in cell if one["kind"] == kind and one["ms"] != ""), default=None)
            for one in cell:
                if best is not None and one["ms"] != "":
                    one[column] = round(best / one["ms"], 3)


def as_markdown(rows: list[dict], command: str) -> str:
    """A table per task and d with the useful TFLOP/s (GB/s for decode) by way and length, and what did not run."""
    packages = ", ".join(f"{name} {rows[0][name]}" for name in ("torch", "triton", "transformers"))
    lines = [f"# Differential attention: {rows[0]['hardware']}", "", f"`{command}`, {packages}.", ""]
    lines += ["Useful TFLOP/s (decode: GB/s of K and V), median over rounds in which the ways take turns.", ""]
    return "\n".join([*lines, *tables(rows)]) + "\n"


def tables(rows: list[dict]) -> list[str]:
    """The lines of all tables, and those about what did not run."""
    lines = []
    for (task, d), group in groupby(rows, key=_table):
        cells = {(one["way"], one["length"]): one for one in group}
        lengths = sorted({length for _, length in cells})
        lines += [f"## {task}, d = {d}", "", _line("way", *lengths), _line(*["---"] * (len(lengths) + 1))]
        for way in dict.fromkeys(way for way, _ in cells):
            found = [cells.get((way, length)) for length in lengths]
            if any(one and one["status"] in ("ok", "RED") for one in found):
                lines.append(_line(way, *(_speed(one) for one in found)))
        for column, name in (("over_best_rival", "best rival"), ("over_standard", "standard attention")):
            found = [cells.get(("flash_diff", length), {}).get(column, "") for length in lengths]
            lines.append(_line(f"flash_diff / {name}", *found))
        lines.append("")
    reasons: dict[tuple, dict[tuple, list[int]]] = {}
    for one in rows:
        if one["status"] != "ok":
            where = reasons.setdefault((one["status"], one["way"], one["reason"]), {})
            where.setdefault(_table(one), []).append(one["length"])
    for (status, way, reason), where in reasons.items():
        at = "; ".join(f"{task} d={d}: {', '.join(map(str, lengths))}" for (task, d), lengths in where.items())
        lines.append(f"- {status}: {way}: {reason} ({at})")
    return lines


def _table(one: dict) -> tuple[str, int]:
    return one["task"], one["d"]


def _line(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _speed(one: dict | None) -> str:
    if one is None or one["status"] not in ("ok", "RED"):
        return ""
    return str(one["tflops"] or one["gb_per_s"]) if one["status"] == "ok" else "RED"


def plot(rows: list[dict], path: Path) -> None:
    """Plots the useful speed over the length, with a panel per task and d."""
    try:
        import matplotlib
    except ImportError:
        print("No plot: matplotlib is not installed (pip install matplotlib).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = [one for one in rows if one["status"] == "ok"]
    if not measured:
        return
    names = [name for name in WAYS if any(one["way"] == name for one in measured)]
    tasks = [task for task in TASKS if any(one["task"] == task for one in measured)]
    dims = sorted({one["d"] for one in measured})
    styles = {"ours": ("-", 2.5), "rival": ("-", 1.0), "standard": ("--", 1.0)}
    size = (4.5 * len(tasks), 4 * len(dims))
    figure, axes = plt.subplots(len(dims), len(tasks), figsize=size, squeeze=False, layout="constrained")
    for axis, (d, task) in zip(axes.flat, product(dims, tasks), strict=True):
        for i, name in enumerate(names):
            points = [one for one in measured if _table(one) == (task, d) and one["way"] == name]
            points.sort(key=lambda one: one["length"])
            if points:
                style, width = styles[WAYS[name].kind]
                speeds = [one["tflops"] or one["gb_per_s"] for one in points]
                lengths = [one["length"] for one in points]
                axis.plot(lengths, speeds, style, lw=width, marker=".", color=plt.cm.tab20(i), label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set(title=f"{task}, d = {d}", xlabel="tokens")
        axis.set_ylabel("GB/s" if task == "decode" else "useful TFLOP/s")
        if axis.lines:
            axis.legend(fontsize=6)
    figure.savefig(path, dpi=150)
    plt.close(figure)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What the rows of benchmarks.gpu_suite show: whether `flash_diff` has earned the default on CUDA, and a page to read.

For an architecture it is the default once a result file of `make gpu` is committed in benchmarks/results that shows
`flash_diff` correct and faster than every rival that could run, in every cell of forward + backward and decoding
(`refusals`). `flash_diff_blocks.PROVEN` names that file; a test compares it with `proven`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.attention_report import tables
from diff_transformer.flash_diff_blocks import architecture

RESULTS = Path(__file__).parent / "results"
ROWS = "gpu_suite.jsonl"  # in the folder of a run
TASKS = ("both", "decode")  # forward + backward, and one token after a cache
DIMS = (128, 64)
LENGTHS = (4096, 2048, 8192, 32768)
CHECKS = ("error", "equal bits")  # with float32, and with a second run


def read(path: str | Path) -> list[dict]:
    """The rows of a result file, or of the folder of a run. Raises ValueError if they are of a dry run."""
    path = Path(path)
    path = path / ROWS if path.is_dir() else path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        raise ValueError(f"{path} has no rows. `make gpu` writes them.")
    if any(row["dry_run"] for row in rows):
        raise ValueError(f"{path} is of a dry run: its figures are those of tiny sizes on a CPU and show nothing.")
    return rows


def refusals(rows: Sequence[dict]) -> list[str]:
    """Why these rows do not make `flash_diff` the default, in words; none if they do.

    A rival that could not run, or was wrong, does not count. Standard attention is no rival: it computes something
    else.
    """
    reasons = []
    if any(row["dry_run"] for row in rows):
        reasons.append("the rows are of a dry run")
    used = [row for row in rows if row["stage"] in ("correctness", "attention")]
    for what in ("kernels", "hardware"):
        if len({row[what] for row in used}) > 1:
            reasons.append(f"the rows differ in their {what}")

    ends = {row["name"]: row["status"] for row in used if row["is_job"]}
    for stage in ("correctness", "attention"):
        if ends.get(stage) != "ok":
            reasons.append(f"the stage {stage}: {ends.get(stage, 'did not end')}")
    checks = [row for row in used if row["stage"] == "correctness" and not row["is_job"]]
    wrong = [row for row in checks if row["status"] not in ("ok", "skipped")]
    reasons += [f"{row['name']}: {row['status']} {row['reason']}" for row in wrong]
    passed = {row["name"] for row in checks if row["status"] == "ok"}
    if not any(name.startswith("tests/") for name in passed):
        reasons.append("no test passed")
    for check, task, d in product(CHECKS, TASKS, DIMS):
        if not any(name.startswith(f"{check} {task} d={d} ") for name in passed):
            reasons.append(f"{check} {task} d={d}: not checked")

    cells: dict[tuple, dict[str, dict]] = {}  # the ways of a cell and a job took turns
    for row in used:
        if row["stage"] == "attention" and not row["is_job"]:
            cells.setdefault((row["task"], row["d"], row["length"], row["job"]), {})[row["way"]] = row
    missing = set(product(TASKS, DIMS, LENGTHS)) - {cell[:3] for cell in cells}
    reasons += [f"{task} d={d} {length}: not measured" for task, d, length in sorted(missing)]
    for (task, d, length, _), ways in cells.items():
        ran = {way: row["ms"] for way, row in ways.items() if row["status"] == "ok" and row["kind"] != "standard"}
        ours = ran.pop("flash_diff", None)
        if ours is None or not ran:
            who = "flash_diff has no time" if ours is None else "no rival has a time"
            reasons.append(f"{task} d={d} {length}: {who}")
        else:
            faster = {way: ms for way, ms in ran.items() if ms <= ours}
            reasons += [f"{task} d={d} {length}: {way} {ms} ms, flash_diff {ours} ms" for way, ms in faster.items()]
    return reasons


def proven(folder: Path = RESULTS) -> dict[int, str]:
    """Architecture -> name of the result file that makes `flash_diff` its default.

    The last file of each hardware counts, and those of all hardware of an architecture must agree.
    """
    last: dict[tuple[int, str], tuple[str, list[dict]]] = {}
    for file in sorted(folder.glob("gpu_suite_*.jsonl"), key=lambda file: file.stem[-len("2026-01-01") :]):
        rows = read(file)
        last[_architecture(rows), rows[0]["hardware"]] = (file.name, rows)
    found: dict[int, str] = {}
    refused = set()
    for (number, _), (name, rows) in last.items():
        if refusals(rows):
            refused.add(number)
        found[number] = name
    return {number: name for number, name in found.items() if number not in refused}


def _architecture(rows: Sequence[dict]) -> int:
    major, minor = map(int, rows[0]["capability"].split("."))
    return architecture((major, minor))


def winners(rows: Sequence[dict]) -> list[dict]:
    """The row with the fastest blocks for each kernel and d, from the tuning."""
    best: dict[tuple, dict] = {}
    for row in rows:
        if row["stage"] == "tuning" and row["status"] == "ok" and "ms" in row:
            key = (row["kernel"], row["d"])
            if key not in best or row["ms"] < best[key]["ms"]:
                best[key] = row
    return list(best.values())


def winning_table(rows: Sequence[dict]) -> dict[str, dict[str, dict[str, str]]]:
    """The blocks of `winners`, as a table for DIFF_TRANSFORMER_BLOCKS."""
    table: dict[str, dict[str, dict[str, str]]] = {}
    for row in winners(rows):
        [(architecture, kernels)] = row["table"].items()
        [(kernel, cell)] = kernels.items()
        table.setdefault(architecture, {}).setdefault(kernel, {}).update(cell)
    return table


# ----------------------------------------------------------------------------------------------------------- report


def report(rows: list[dict], stages: Sequence[str]) -> str:
    """The page of a run, in Markdown."""
    first = rows[0]
    packages = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"# Differential attention on {first['hardware']}",
        "",
        f"Compute capability {first['capability']}; {packages}; commit {first['commit'] or 'unknown'}.",
        "",
    ]
    reasons = refusals(rows)
    if reasons:
        lines += [f"`flash_diff` does not become the default of sm_{_architecture(rows)}:", ""]
        lines += [f"- {reason}" for reason in reasons[:20]]
        lines += [f"- and {len(reasons) - 20} more"] if len(reasons) > 20 else []
    else:
        lines += [
            "`flash_diff` is correct and faster than every rival that could run, so that it may be the default of "
            f"sm_{_architecture(rows)}."
        ]
    for stage in stages:
        found = [row for row in rows if row["stage"] == stage and not row["is_job"]]
        lines += ["", f"# {stage.capitalize()}", "", *(_SECTIONS[stage](found) if found else ["Not run."])]
        jobs = [row for row in rows if row["stage"] == stage and row["is_job"] and row["status"] != "ok"]
        lines += ["", *(f"- {row['status']}: {row['name']}: {row['reason']}" for row in jobs)] if jobs else []
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[dict], *columns: str) -> list[str]:
    header = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return header + ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]


def _correctness(rows: list[dict]) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    lines = [", ".join(f"{count} {status}" for status, count in counts.items()) + "."]
    return lines + [f"- {row['status']}: {row['name']}: {row['reason']}" for row in rows if row["status"] != "ok"]


def _attention(rows: list[dict]) -> list[str]:
    blank = dict.fromkeys(("tflops", "gb_per_s", "ms", "over_best_rival", "over_standard", "reason"), "")
    chosen = sorted({f"{row['way']} d={row['d']}: {row['sdpa_backend']}" for row in rows if "sdpa_backend" in row})
    lines = ["Useful TFLOP/s (decode: GB/s of K and V).", ""]
    lines += [f"The backend that torch chose: {'; '.join(chosen)}.", ""] if chosen else []
    groups = {suffix: [row for row in rows if row["name"].endswith(suffix)] for suffix in ("", " beside flex")}
    groups[""] = [row for row in groups[""] if row not in groups[" beside flex"]]
    for group in groups.values():
        ordered = sorted(group, key=lambda row: (row["task"], row["d"]))
        lines += [line.replace("## ", "### ") for line in tables([blank | row for row in ordered])]
    return lines


def _tuning(rows: list[dict]) -> list[str]:
    now = {(row["kernel"], row["d"]): row for row in rows if row.get("is_in_table")}
    lines = []
    for row in winners(rows):
        old = now.get((row["kernel"], row["d"]), {})
        lines.append({**row, "table's blocks": old.get("blocks", ""), "table's ms": old.get("ms", "")})
    failed = Counter((row["status"], row["reason"]) for row in rows if row["status"] != "ok")
    more = [f"- {count} candidates {status}: {reason}" for (status, reason), count in failed.items()]
    return _table(lines, "kernel", "d", "task", "length", "blocks", "ms", "table's blocks", "table's ms") + more


def _model(rows: list[dict]) -> list[str]:
    columns = ("task", "length", "batch", "model", "tokens_per_second", "over_transformer", "peak_gib", "reason")
    return _table(rows, *columns)


def _loss(rows: list[dict]) -> list[str]:
    return _table(rows, "name", "status", "peak_mib", "ms", "loss", "hidden_size", "vocab_size", "reason")


def _training(rows: list[dict]) -> list[str]:
    columns = (
        "name",
        "status",
        "validation_loss",
        "unigram_entropy",
        "tokens_per_second",
        "peak_gib",
        "steps",
        "tokens",
    )
    return _table(rows, *columns, "parameters", "reason")


_SECTIONS = {"correctness": _correctness, "attention": _attention, "tuning": _tuning, "attention-tuned": _attention}
_SECTIONS |= {"model": _model, "loss": _loss, "training": _training}

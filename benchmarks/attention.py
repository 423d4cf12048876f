# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Differential attention on one GPU: our kernels, every other way to compute it, and standard attention.

    python -m benchmarks.attention --out benchmarks/results/attention_<hardware>_<date>

writes `<out>.csv`, `<out>.md` and, if matplotlib is installed, `<out>.png`. The CSV is rewritten after every cell, so
an interrupted run keeps its measurements.

A *way* is a composition over a backend (attention_ways).

Before a way is timed, its output and its gradients are compared with float32. A way that fails is RED and gets no
speed. A way that cannot run is listed with the reason. The ways of a cell (task, d, length) take turns, and a figure
is the median over the rounds. The L2 cache is flushed before every repetition, whose launches queue up behind a short
sleep of the GPU, so that the time is that of the GPU and not of Python.

Useful work is what the fused computation needs, whatever a way computes. In units of 2 N^2 d FLOPs per differential
head, halved by causality (N: tokens of a sequence):

    differential  forward 6 = 2 x q k^T (1 each) + 2 x p v (2 each)
                  backward 10 = scores again 2, dP = dO v^T 2, dV = (P1 - lambda P2)^T dO 2, dQ1 dQ2 dK1 dK2 1 each
    standard      forward 4, backward 10 (two heads of d)

and for a decoding step the bytes of K and V, which are read once.
"""

import argparse
import functools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from benchmarks.attention_report import add_ratios, as_markdown, plot
from benchmarks.attention_ways import TASKS, WAYS, WITH_GRADIENTS, Case, Problem, Way, make_problem
from benchmarks.report import argument_parser, first_line, hardware, rounded, versions, write
from tests.tolerances import allowed_error

UNITS = {  # in 2 N^2 d FLOPs per differential head, see above
    "differential": {"forward": 6, "backward": 10, "both": 16, "varlen": 16},
    "standard": {"forward": 4, "backward": 10, "both": 14, "varlen": 14},
}
_DEVICE_HELP = (
    "default: %(default)s. cpu only shows that the script runs; flash_diff then needs TRITON_INTERPRET=1 and another "
    "type than bfloat16, whose tl.dot Triton's interpreter gets wrong"
)
MIN_ROUNDS = 3


# ------------------------------------------------------------------------------------------------------ correctness


def results(task: str, way: Way, p: Problem) -> dict[str, torch.Tensor | None]:
    """The output and, for tasks with a backward, the gradients."""
    if task not in WITH_GRADIENTS:
        with torch.no_grad():
            return {"output": way.run(p)}
    out = way.run(p)
    gradients = torch.autograd.grad(out, list(p.leaves.values()), p.grad_out, allow_unused=True)
    return {"output": out.detach(), **dict(zip(p.leaves, gradients, strict=True))}


@functools.cache
def fault(way: Way, case: Case) -> str:
    """What is wrong with the results of a differential way, "" if nothing.

    The measure is the eager computation in the case's type, against float32 (float64 for a float32 case): see
    `allowed_error`. The gradient of lambda is a single sum, whose own error can be small by chance. It is allowed the
    error of its addends, one per token and head and of either sign: the root of their summed squares.
    """
    p = make_problem(case)
    wide = torch.float64 if case.dtype == torch.float32 else torch.float32
    exact, low = (results(case.task, WAYS["eager"], one.with_lambda_per_head()) for one in (p.to(wide), p))
    got = results(case.task, way, p)
    for name, expected in exact.items():
        if got[name] is None:
            return f"no gradient of {name}"
        if name == "lambda_full":
            allowed = 4 * (low[name] - expected).norm()
            expected = expected.sum()
            allowed = allowed + torch.finfo(got[name].dtype).eps / 2 * expected.abs()
        else:
            allowed = allowed_error(expected, low[name])
        error = (got[name] - expected).abs().max()
        if not error <= allowed:  # NaN is at fault too
            what = "the output" if name == "output" else f"the gradient of {name}"
            return f"{what} is off by {error.item():.1e}, {allowed.item():.1e} are allowed"
    return ""


# ----------------------------------------------------------------------------------------------------------- timing


class Stopwatch:
    """Measures `timed(set_up())` in milliseconds, without the set-up."""

    def __init__(self, device: str) -> None:
        self.on_cuda = torch.device(device).type == "cuda"
        if self.on_cuda:
            self.flush = torch.empty(256 << 20, dtype=torch.int8, device=device)  # larger than any L2 cache

    def __call__(self, set_up: Callable, timed: Callable) -> float:
        prepared = set_up()
        if not self.on_cuda:
            start = time.perf_counter()
            timed(prepared)
            return (time.perf_counter() - start) * 1000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(2_000_000)  # clock cycles, about a millisecond, in which the timed kernels are launched
        start.record()
        timed(prepared)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def step(task: str, way: Way, p: Problem) -> tuple[Callable, Callable]:
    """The set-up of a task and the timed part, which receives the result of the set-up."""

    def without_gradients(_):
        with torch.no_grad():
            way.run(p)

    def gradients(out):
        torch.autograd.grad(out, list(p.leaves.values()), p.grad_out, allow_unused=True)

    if task not in WITH_GRADIENTS:
        return lambda: None, without_gradients
    if task == "backward":
        return lambda: way.run(p), gradients
    return lambda: None, lambda _: gradients(way.run(p))


def warm_up(stopwatch: Stopwatch, set_up: Callable, timed: Callable) -> tuple[float, float | str]:
    """Runs twice. Returns milliseconds and, on CUDA, peak memory in MiB above that before, both of the second run."""
    stopwatch(set_up, timed)
    if not stopwatch.on_cuda:
        return stopwatch(set_up, timed), ""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ms = stopwatch(set_up, timed)
    return ms, round((torch.cuda.max_memory_allocated() - held) / 2**20)


def useful_flops(case: Case, kind: str) -> float:
    units = UNITS["standard" if kind == "standard" else "differential"][case.task]
    pairs = sum(n * n for n in case.documents) / 2
    return units * 2 * pairs * case.d * case.heads


def useful_bytes(case: Case) -> float:
    """K and V once, 2d numbers each per token and head."""
    return 2 * case.batch * case.length * case.heads * 2 * case.d * case.dtype.itemsize


# ------------------------------------------------------------------------------------------------------------- rows


def row(case: Case, name: str, status: str, reason: str = "", ms: float | str = "", **more) -> dict:
    tflops = gigabytes = ""
    if ms != "" and case.task == "decode":
        gigabytes = rounded(useful_bytes(case) / ms / 1e6)
    elif ms != "":
        tflops = rounded(useful_flops(case, WAYS[name].kind) / ms / 1e9)
    cell = {"task": case.task, "d": case.d, "length": case.length, "way": name, "kind": WAYS[name].kind}
    speed = {"ms": ms if ms == "" else rounded(ms), "tflops": tflops, "gb_per_s": gigabytes}
    later = dict.fromkeys(("over_best_rival", "over_standard", "peak_mib", "rounds", "sdpa_backend"), "")
    sizes = {"batch": len(case.documents), "heads": case.heads, "dtype": str(case.dtype).removeprefix("torch.")}
    where = {"norm": case.norm, "reason": reason, "hardware": hardware(case.device)}
    packages = versions("torch", "triton", "transformers")
    return {**cell, "status": status, **speed, **later, **more, **sizes, **where, **packages}


# --------------------------------------------------------------------------------------------------------- the run


def attempt(run: Callable[[], dict | tuple], case: Case, name: str):
    """What `run` returns, or a row with the reason why it cannot run.

    Any exception of a library is a reason; only an unusable device ends the benchmark. Warnings are added to the
    reason, and dropped if there is none.
    """
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            return run()
        except Exception as error:
            reason = first_line(error, noted)
    if torch.device(case.device).type == "cuda":
        torch.cuda.synchronize()  # raises if the device is lost
        torch.cuda.empty_cache()
    return row(case, name, "cannot run", reason)


def prepare(case: Case, name: str, p: Problem, stopwatch: Stopwatch, check_length: int) -> dict | tuple:
    """Checks and warms up a way. Returns (set-up, timed part, ms, peak memory), or a row with the status RED."""
    way = WAYS[name]
    if way.kind != "standard":  # a small problem represents all lengths of (task, d)
        task = "both" if case.task == "backward" else case.task
        if wrong := fault(way, replace(case, task=task, length=check_length, tokens=2 * check_length)):
            return row(case, name, "RED", wrong)
    set_up, timed = step(case.task, way, p)
    return set_up, timed, *warm_up(stopwatch, set_up, timed)


def measure(case: Case, names: list[str], options: argparse.Namespace, deadline: float, progress: tqdm) -> list[dict]:
    """Returns the rows of a cell. Every way is checked and warmed up, then they take turns."""
    stopwatch = Stopwatch(case.device)
    p = attempt(lambda: make_problem(case), case, names[0])
    if isinstance(p, dict):
        progress.update(len(names))
        return [{**p, "way": name, "kind": WAYS[name].kind} for name in names]
    rows, ready = [], {}
    for name in names:
        progress.set_postfix_str(f"{case.task} d={case.d} {case.length} {name}")
        if time.monotonic() >= deadline:
            rows.append(row(case, name, "left out", "the budget was spent"))
        else:
            ready[name] = attempt(partial(prepare, case, name, p, stopwatch, options.check_length), case, name)
            if isinstance(ready[name], dict):
                rows.append(ready.pop(name))
        progress.update()
    a_round = sum(ms for _, _, ms, _ in ready.values()) / 1000 or 1.0
    rounds = min(options.rounds, max(MIN_ROUNDS, int(options.seconds / a_round)))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, (set_up, timed, _, _) in ready.items():
            times[name].append(stopwatch(set_up, timed))
    for name, (_, _, _, peak) in ready.items():
        found = {"rounds": rounds, "peak_mib": peak, "sdpa_backend": p.sdpa_backend if name.endswith("/sdpa") else ""}
        rows.append(row(case, name, "ok", ms=statistics.median(times[name]), **found))
    return sorted(rows, key=lambda one: names.index(one["way"]))


def show(rows: list[dict]) -> None:
    for one in rows:
        where = f"{one['task']:8} d={one['d']:<3} {one['length']:6} {one['way']:25}"
        if one["status"] != "ok":
            tqdm.write(f"{where} {one['status']}: {one['reason']}")
            continue
        speed = f"{one['gb_per_s']:9} GB/s   " if one["task"] == "decode" else f"{one['tflops']:9} TFLOP/s"
        ratios = f"{one['over_best_rival']:>6} of the best rival, {one['over_standard']:>6} of standard"
        tqdm.write(f"{where} {one['ms']:10.3f} ms {speed} {ratios}, {one['peak_mib']} MiB")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, "files")
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="varlen is both on packed documents")
    add("--lengths", nargs="+", type=int, default=[1024 << i for i in range(7)])
    add("--head-dims", nargs="+", type=int, default=[128, 64, 96], help="d; the values of a head have 2d")
    add("--hidden-size", type=int, default=3072, help="sets h = hidden size / 2d (default: 3072, the paper's 3B)")
    add("--tokens", type=int, default=65536, help="batch size times length (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda", help=_DEVICE_HELP)
    add("--norm", action="store_true", help="include the headwise norm of Eq. 3 in every differential way")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    add("--rounds", type=int, default=50, help="maximum of rounds per cell (default: %(default)s)")
    text = f"time limit of the rounds per cell, after the first {MIN_ROUNDS} (default: 3)"
    add("--seconds", type=float, default=3.0, help=text)
    add("--check-length", type=int, default=512, help="tokens of the check before the timing (default: %(default)s)")
    text = "time limit, after which no way is started (default: %(default)s)"
    add("--minutes", type=float, default=30.0, help=text)
    options = parser.parse_args(arguments)
    for d in options.head_dims:
        if options.hidden_size % (2 * d):
            parser.error(f"--hidden-size {options.hidden_size} is not a multiple of 2d = {2 * d}: change either.")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "--device cuda was asked for, but torch sees no GPU. --device cpu tries the script on tiny sizes."
        )
    return options


def main(arguments: list[str] | None = None, on_rows: Callable[[list[dict]], None] = show) -> int:
    """Returns 1 if a way was RED, otherwise 0. `on_rows` receives the rows of a cell as soon as it is measured."""
    options = parse(arguments)
    command = " ".join(["python -m benchmarks.attention", *(sys.argv[1:] if arguments is None else arguments)])
    shared = {"dtype": getattr(torch, options.dtype), "device": options.device, "norm": options.norm}
    cases = [
        Case(task, d, length, max(options.tokens, length), options.hidden_size // (2 * d), **shared)
        for d, task, length in product(options.head_dims, options.tasks, options.lengths)
    ]
    cells = f"{len(cases)} cells x {len(options.ways)} ways, about {options.seconds:g} s of rounds per cell"
    budget = f"{options.minutes:g} minutes for {cells} and their warm-up"
    print(f"Budget  {budget}, on {hardware(options.device)}", flush=True)

    deadline, rows, left_out = time.monotonic() + 60 * options.minutes, [], []
    with tqdm(total=len(cases) * len(options.ways), unit="way") as progress:
        for case in cases:
            if time.monotonic() >= deadline:
                left_out.append(f"{case.task} d={case.d} {case.length}")
                progress.update(len(options.ways))
                continue
            found = measure(case, options.ways, options, deadline, progress)
            rows += found
            add_ratios(rows)
            on_rows(found)
            write(options.out, rows)
    left_out_line = f"Left out, as the budget was spent: {'; '.join(left_out)}\n" if left_out else ""
    print(left_out_line, end="")
    if options.out and rows:
        write(options.out, rows, as_markdown(rows, command) + left_out_line)
        plot(rows, options.out.with_suffix(".png"))
    return int(any(one["status"] == "RED" for one in rows))


if __name__ == "__main__":
    sys.exit(main())

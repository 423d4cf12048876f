# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What benchmarks.gpu_suite runs, each job in a process of its own.

A job is a function `job(emit, done, **arguments)`. It reports every result at once with
`emit(name, status, reason, **figures)` and skips the names in `done`, which are those that the stage has already. The
status is "ok", "RED" (wrong), "skipped" or "cannot run"; an exception ends the job.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks import attention, gpu_evidence, loss_memory, model_gpu
from benchmarks.attention_ways import WAYS, Case, make_problem
from benchmarks.report import first_line, rounded
from diff_transformer import DiffTransformerConfig, cl100k_tokenizer, flash_diff, flash_diff_blocks
from diff_transformer.training.architectures import transformer_twin

ROOT = Path(__file__).parents[1]
OURS = WAYS["flash_diff"]
FOUND_BY_MEMCHECK = 86  # the exit status that compute-sanitizer is asked for

Emit = Callable[..., None]
Done = Mapping[str, str]  # name -> status, of the whole stage


def run_job(name: str, arguments: dict, done: Done, connection: Connection, log: Path) -> None:
    """Runs a job in this process, whose output goes to `log`. Sends its rows, and the reason if it fails."""
    os.setsid()  # the suite ends this process together with those that it starts
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def emit(name: str, status: str = "ok", reason: str = "", **figures) -> None:
        connection.send({"name": name, "status": status, "reason": reason, **figures})

    try:
        globals()[name](emit, done, **arguments)
    except BaseException as error:
        traceback.print_exc()
        connection.send({"error": first_line(error)})
        sys.exit(1)


def device_capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device == "cuda" else (8, 6)


# ------------------------------------------------------------------------------------------------------- correctness


class _Recorder:
    """A pytest plugin that runs every `parts`-th test and reports it."""

    def __init__(self, emit: Emit, done: Done, part: int, parts: int) -> None:
        self.emit, self.done, self.part, self.parts = emit, done, part, parts

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items[self.part :: self.parts] if item.nodeid not in self.done]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).split("\n")[0][:300]
            self.emit(report.nodeid, "RED", f"{report.when}: {reason}")
        elif report.skipped:
            self.emit(report.nodeid, "skipped", str(report.longrepr[2])[:300])
        elif report.when == "call":
            self.emit(report.nodeid, test_seconds=rounded(report.duration))


def tests(emit: Emit, done: Done, part: int, parts: int, chosen: Sequence[str]) -> None:
    """A part of tests/test_flash_diff.py. `chosen` are further arguments of pytest."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # warnings are errors in the tests, those of plugins too
    arguments = ["tests/test_flash_diff.py", "-p", "no:cacheprovider", *chosen]
    status = pytest.main(arguments, plugins=[_Recorder(emit, done, part, parts)])
    nothing_left = pytest.ExitCode.NO_TESTS_COLLECTED
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, nothing_left):
        raise RuntimeError(f"pytest ended with {status!r}: see log.txt")


def _check(emit: Emit, done: Done, name: str, fault: Callable[[], str]) -> None:
    if name not in done:
        try:
            wrong = fault()
        except Exception as error:
            wrong = first_line(error)
        emit(name, "RED" if wrong else "ok", wrong)


def kernels(
    emit: Emit, done: Done, d: int, norm: bool, length: int, hidden_size: int, dtype: str, device: str
) -> None:
    """The kernels against float32, and twice against themselves."""

    def unequal(case: Case) -> str:
        first, second = (attention.results(case.task, OURS, make_problem(case)) for _ in range(2))
        return ", ".join(name for name, x in first.items() if not torch.equal(x, second[name]))

    for task in ("both", "varlen", "decode"):
        sizes = {"tokens": 2 * length, "heads": hidden_size // (2 * d), "dtype": getattr(torch, dtype)}
        case = Case(task, d, length, **sizes, device=device, norm=norm)
        name = f"{task} d={d} {length}{' norm' * norm} {dtype}"
        _check(emit, done, f"error {name}", partial(attention.fault, OURS, case))
        _check(emit, done, f"equal bits {name}", partial(unequal, case))


def small_shape() -> None:
    """What compute-sanitizer watches: odd lengths, so that every mask at an edge is used."""
    for task in ("both", "varlen", "decode"):
        case = Case(task, 64, 77, 2 * 77, 2, torch.bfloat16, "cuda", norm=True)
        attention.results(task, OURS, make_problem(case))
    torch.cuda.synchronize()


def memcheck(emit: Emit, done: Done, device: str, seconds: float) -> None:
    """compute-sanitizer's memcheck on one small shape, if the tool is there and can attach to the device."""
    name, tool = "compute-sanitizer memcheck", shutil.which("compute-sanitizer")
    if name in done:
        return
    if tool is None or device == "cpu":
        reason = "the tool is not on PATH" if tool is None else "there is nothing to check on a CPU"
        return emit(name, "skipped", reason)
    command = [sys.executable, "-c", "from benchmarks.gpu_jobs import small_shape; small_shape()"]
    subprocess.run(command, check=True)  # compiles the kernels, and shows an error that is not the tool's
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND_BY_MEMCHECK)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has bounds of its own
    try:
        ran = subprocess.run(
            [tool, *options, *command], env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return emit(name, "skipped", f"it took longer than {seconds:g} s")
    print(ran.stdout[-20000:], ran.stderr[-20000:])
    last = (ran.stdout.strip() or ran.stderr.strip()).split("\n")[-1]
    status = {0: "ok", FOUND_BY_MEMCHECK: "RED"}.get(ran.returncode, "skipped")
    emit(name, status, "" if status == "ok" else f"exit status {ran.returncode}: {last}")


# --------------------------------------------------------------------------------------------------------- attention


def _filled(row: dict) -> dict:
    return {key: value for key, value in row.items() if value != ""}


def attention_ways(
    emit: Emit,
    done: Done,
    d: int,
    lengths: Sequence[int],
    ways: Sequence[str],
    options: Sequence[str],
    suffix: str = "",
) -> None:
    """benchmarks.attention at one d, one length after another. The names end with `suffix`."""

    def on_rows(rows: list[dict]) -> None:
        for row in rows:
            emit(f"{row['task']} d={d} {row['length']} {row['way']}{suffix}", **_filled(row))

    for length in lengths:
        left = [task for task in gpu_evidence.TASKS if f"{task} d={d} {length} flash_diff{suffix}" not in done]
        if left:
            where = ["--head-dims", str(d), "--lengths", str(length), "--tasks", *left, "--ways", *ways]
            attention.main([*where, *options], on_rows)


# ------------------------------------------------------------------------------------------------------------ tuning


def kernels_of(device: str, dtype: torch.dtype, d: int) -> dict[str, str]:
    """Kernel -> the task whose time tunes it. split32 needs more query heads per key head than the tasks have."""
    keys = flash_diff_blocks.key_kernels(device_capability(device), dtype, d)
    return {"forward": "forward", "dq": "backward", **dict.fromkeys(keys, "backward"), "split16": "decode"}


def candidates(kernel: str, device: str, dtype: torch.dtype, d: int, limit: int) -> list[str]:
    """At most `limit` candidates as rows/keys/warps/stages, the table's first."""
    found = flash_diff_blocks.candidates(kernel, device_capability(device), dtype, d)
    return ["/".join(map(str, one)) for one in found[:limit]]


def table_of(device: str, kernel: str, d: int, blocks: str) -> dict:
    """A table for DIFF_TRANSFORMER_BLOCKS that has these blocks alone."""
    architecture = flash_diff_blocks.architecture(device_capability(device))
    column = next(width for width in flash_diff_blocks.HEAD_DIMS if d <= width)
    return {str(architecture): {kernel: {str(column): blocks}}}


def use_blocks(table: dict, folder: Path) -> None:
    """Lets all kernels run with the blocks of the repository's table, save for those in `table`."""
    file = folder / f"{hashlib.sha256(json.dumps(table).encode()).hexdigest()}.json"
    file.write_text(json.dumps(table))
    os.environ["DIFF_TRANSFORMER_BLOCKS"] = str(file)
    forget_blocks()


def forget_blocks() -> None:
    """Clears the caches of what was chosen with other blocks."""
    for module in (flash_diff, flash_diff_blocks):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _tuning_case(task: str, d: int, length: int, tokens: int, hidden_size: int, dtype: str, device: str) -> Case:
    return Case(task, d, length, tokens, hidden_size // (2 * d), getattr(torch, dtype), device)


def compile_candidates(
    emit: Emit, done: Done, dims: Sequence[int], part: int, parts: int, limit: int,
    length: int, hidden_size: int, dtype: str, device: str,
) -> None:  # fmt: skip
    """Compiles every `parts`-th candidate into Triton's cache, and compares its results with float32."""
    kind = getattr(torch, dtype)
    every = [
        (d, kernel, task, blocks)
        for d in dims
        for kernel, task in kernels_of(device, kind, d).items()
        for blocks in candidates(kernel, device, kind, d, limit)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for d, kernel, task, blocks in every[part::parts]:
            name, start = f"compile {kernel} d={d} {blocks}", time.monotonic()
            if name in done:
                continue
            use_blocks(table_of(device, kernel, d, blocks), Path(folder))
            case = _tuning_case(task, d, length, 2 * length, hidden_size, dtype, device)
            checked = case if task == "decode" else replace(case, task="both")
            try:
                wrong = attention.fault.__wrapped__(OURS, checked)
                attention.results(task, OURS, make_problem(case))  # as it will be timed
                status = "RED" if wrong else "ok"
            except Exception as error:  # too much shared memory, for example
                wrong, status = first_line(error), "cannot run"
            emit(name, status, wrong, compile_seconds=rounded(time.monotonic() - start))


def time_candidates(
    emit: Emit, done: Done, d: int, limit: int, rounds: int, repeats: int,
    length: int, tokens: int, hidden_size: int, dtype: str, device: str,
) -> None:  # fmt: skip
    """Times the candidates that compiled and are right, in turns: the whole task of each kernel."""
    stopwatch, kind = attention.Stopwatch(device), getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as folder:
        for kernel, task in kernels_of(device, kind, d).items():
            every = candidates(kernel, device, kind, d, limit)
            ready = [blocks for blocks in every if done.get(f"compile {kernel} d={d} {blocks}") == "ok"]
            if all(f"{kernel} d={d} {blocks}" in done for blocks in ready):
                continue
            case = _tuning_case(task, d, length, tokens, hidden_size, dtype, device)
            set_up, timed = attention.step(task, OURS, make_problem(case))
            times: dict[str, list[float]] = {blocks: [] for blocks in ready}
            for i in range(rounds + 1):
                for blocks in ready:
                    use_blocks(table_of(device, kernel, d, blocks), Path(folder))
                    again = [stopwatch(set_up, timed) for _ in range(repeats)]
                    times[blocks] += again if i > 0 else []  # the first round warms up
            for blocks in ready:
                where = {"kernel": kernel, "d": d, "task": task, "length": length, "blocks": blocks}
                found = {"ms": rounded(statistics.median(times[blocks])), "is_in_table": blocks == every[0]}
                emit(f"{kernel} d={d} {blocks}", **where, **found, table=table_of(device, kernel, d, blocks))


# ------------------------------------------------------------------------------------------------------ model, loss


def model(emit: Emit, done: Done, length: int, options: Sequence[str]) -> None:
    """benchmarks.model_gpu at one length."""

    def on_rows(rows: list[dict]) -> None:
        for row in rows:
            emit(f"{row['task']} {row['length']} {row['model']}", **_filled(row))

    left = [task for task in model_gpu.TASKS if f"{task} {length} DIFF flash_diff" not in done]
    if left and model_gpu.main(["--lengths", str(length), "--tasks", *left, *options], on_rows) != 0:
        emit(f"error of the model {length}", "RED", "flash_diff is wrong in the model: see log.txt")


def loss(emit: Emit, done: Done, tokens: int, hidden_size: int, device: str) -> None:
    """benchmarks.loss_memory at one size: without the logits and, if they fit, with them."""
    losses = {}
    for way in ("chunks", "logits"):
        if f"{way} {tokens}" in done:
            continue
        where = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": loss_memory.VOCAB_SIZE}
        if way == "logits" and not loss_memory.logits_fit(tokens, device):
            emit(f"{way} {tokens}", "cannot run", "the logits would fill the memory", **where)
            continue
        if device == "cuda":
            torch.cuda.empty_cache()
        found = loss_memory.measure(way, tokens, hidden_size, device)
        losses[way] = found["loss"]
        wrong = (
            ""
            if math.isclose(found["loss"], losses.get("chunks", found["loss"]), rel_tol=1e-3)
            else f"the losses differ: {losses}"
        )
        figures = {"peak_mib": round(found["peak"] / 2**20), "ms": rounded(1000 * found["seconds"])}
        emit(f"{way} {tokens}", "RED" if wrong else "ok", wrong, loss=found["loss"], **figures, **where)


# ---------------------------------------------------------------------------------------------------------- training


def python_sources() -> Iterator[Path]:
    """Python sources that every machine with torch has: the standard library's and torch's own."""
    roots = (sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent))
    for folder, inside, files in itertools.chain.from_iterable(map(os.walk, roots)):
        inside[:] = sorted(name for name in inside if name not in ("site-packages", "dist-packages"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def token_rows(tokenizer, files: int | None, length: int) -> torch.Tensor:
    """The documents one after the other, each with an end-of-text token, in rows of `length` + 1 tokens."""
    sources = itertools.islice(python_sources(), files)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sources]
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    ids = torch.tensor([i for encoding in encodings for i in (*encoding.ids, tokenizer.eos_token_id)])
    return ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)


def training(
    emit: Emit, done: Done, length: int, batch: int, steps: int, validation: int, learning_rate: float,
    ranks: int, files: int | None, changes: dict, autocast: bool, device: str,
) -> None:  # fmt: skip
    """Trains DIFF and its Transformer twin on the same batches, from the same seed, with AdamW."""
    tokenizer = cl100k_tokenizer(vocab_size=ranks)
    rows = token_rows(tokenizer, files, length)
    generator = torch.Generator().manual_seed(0)
    rows = rows[torch.randperm(len(rows), generator=generator)].to(device)
    held_out, rows = rows[:validation], rows[validation:]
    if len(rows) < batch:
        raise ValueError(f"There are {len(rows)} rows of text beside the {validation} held out; {batch} are needed.")
    share = held_out.flatten().bincount() / held_out.numel()
    unigram_entropy = -torch.special.xlogy(share, share).sum().item()  # the lowest loss of a model without context
    vocab_size = -(-len(tokenizer) // 64) * 64
    changes = changes | {"vocab_size": vocab_size, "max_position_embeddings": length}
    changes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = DiffTransformerConfig(**changes)
    pair = {"DIFF": (config, "flash_diff"), "Transformer": (transformer_twin(config), "sdpa")}
    for name, (one, backend) in pair.items():
        if name in done:
            continue
        torch.manual_seed(0)
        net = AutoModelForCausalLM.from_config(one, attn_implementation=backend).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(20 * (step + 1) / steps, 1 - step / steps)
        )

        def nll(ids: torch.Tensor, net=net) -> torch.Tensor:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                logits = net(ids[:, :-1], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

        @torch.no_grad()
        def validate(nll=nll) -> float:
            return statistics.fmean(nll(part).item() for part in held_out.split(batch))

        def wait() -> float:
            if device == "cuda":
                torch.cuda.synchronize()
            return time.monotonic()

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = validate()
        order = itertools.cycle(range(0, len(rows) - batch + 1, batch))
        losses, began, start = [], 0, wait()
        for step in range(steps):
            if step == min(10, steps // 2):  # compilation and warm-up are not timed
                began, start = step, wait()
            first = next(order)
            value = nll(rows[first : first + batch])
            value.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        seconds = wait() - start
        peak = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if device == "cuda" else {}
        after = validate()
        curve = torch.stack(losses).tolist()
        wrong = "" if all(map(math.isfinite, [*curve, after])) else "a loss is not finite"
        if not wrong and after >= before:
            wrong = f"the validation loss did not fall: {before:.3f} before, {after:.3f} after"
        figures = {"validation_loss": rounded(after), "unigram_entropy": rounded(unigram_entropy), **peak}
        figures |= {"tokens_per_second": round((steps - began) * batch * length / seconds, 1), "attention": backend}
        figures |= {"steps": steps, "tokens": steps * batch * length, "parameters": net.num_parameters()}
        figures["train_loss"] = [rounded(x) for x in curve[:: max(1, steps // 20)]]
        emit(name, "RED" if wrong else "ok", wrong, **figures)
        del net, optimizer

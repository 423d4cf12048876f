# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Tokens per second of the paper's 3B on one GPU, against a Transformer of equal size (Table 7, arXiv:2410.05258).

    python -m benchmarks.model_gpu --out benchmarks/results/model_gpu_<hardware>_<date>

writes `<out>.csv` and `<out>.md`. DIFF is our model, Transformer is transformers' own Llama with 2h heads of d. Both
have the same widths, layers and vocabulary, and random weights. All configurations run in one process and take turns.
Every figure is the median wall-clock time over the rounds, including Python.

forward computes the logits of all tokens. forward+backward computes the loss and all gradients, without an optimizer.
decode generates tokens one by one after a context of the length, with transformers' default cache; its peak memory
includes the cache and the forward pass of the context.
Before anything is timed, the logits and the gradients of a DIFF model with two layers are compared with float32.
"""

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.report import argument_parser, first_line, hardware, versions, write
from diff_transformer import DiffTransformerConfig
from diff_transformer.training.architectures import transformer_twin
from tests.tolerances import allowed_error

TASKS = ("forward", "forward+backward", "decode")
DECODED = 16  # tokens that decode generates, at most as many as the context has
CONTESTANTS = {  # name -> model, attention
    "DIFF flash_diff": ("DIFF", "flash_diff"),
    "DIFF sdpa": ("DIFF", "sdpa"),
    "Transformer sdpa": ("Transformer", "sdpa"),
    "Transformer flash_attention_2": ("Transformer", "flash_attention_2"),
}
# DIFF over Transformer in Table 7, 3B: tokens per second with the authors' kernels
PAPER = {
    ("forward", 2048): 46811 / 51228,
    ("forward", 4096): 44521 / 48762,
    ("forward+backward", 2048): 6635 / 7247,
    ("forward+backward", 4096): 6718 / 7491,
}
TINY = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY["num_attention_heads"] = 2


def diff_config(options: argparse.Namespace) -> DiffTransformerConfig:
    changes = {"max_position_embeddings": max(options.lengths), "eos_token_id": None}
    if options.tiny:
        changes |= TINY
    if options.layers is not None:
        changes["num_hidden_layers"] = options.layers
    return DiffTransformerConfig.from_paper_size("3B", **changes)


def build(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def faults(config: DiffTransformerConfig, dtype: torch.dtype, device: str) -> list[str]:
    """What is wrong with flash_diff in a model with two layers, over 256 tokens.

    The logits and the gradients of the weight matrices are compared with eager in float32 (float64 for float32). The
    errors of eager in `dtype` say how large theirs may be: see `allowed_error`.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    length = min(256, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (1, length), device=device)
    low = build(config, dtype, device)
    exact = copy.deepcopy(low).to(torch.float64 if dtype == torch.float32 else torch.float32)

    def results(model: PreTrainedModel, attention: str) -> dict[str, torch.Tensor]:
        model.set_attn_implementation(attention)
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        found = {"logits": out.logits.detach()}
        for name, p in model.named_parameters():
            if p.ndim == 2:
                found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        return found

    expected, eager, ours = results(exact, "eager"), results(low, "eager"), results(low, "flash_diff")
    wrong = []
    for name, right in expected.items():
        allowed = allowed_error(right, eager[name])
        error = (ours[name] - right).abs().max()
        if not error <= allowed:  # NaN is at fault too
            wrong.append(f"{name}: off by {error.item():.1e}, {allowed.item():.1e} are allowed")
    return wrong


def enable_checkpointing(model: PreTrainedModel) -> None:
    name = "activation_checkpointing_enable"  # from transformers 5.23 on
    enable = getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def loss_in_chunks(model: PreTrainedModel, ids: torch.Tensor, size: int) -> torch.Tensor:
    """The loss that `labels=ids` gives, with the logits of only `size` tokens in memory. The backward recomputes them.
    ids (batch, tokens)."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    pairs = zip(hidden.split(size), labels.split(size), strict=True)
    return sum(checkpoint(chunk_loss, h, y, use_reentrant=False) for h, y in pairs) / len(labels)


def step(task: str, model: PreTrainedModel, ids: torch.Tensor, options: argparse.Namespace) -> Callable[[], None]:
    """Returns a function that performs the task once and leaves no gradients behind."""
    # Checkpointing is active in training mode; without dropout nothing else changes
    model.train(options.gradient_checkpointing and task == "forward+backward")

    def forward():
        with torch.no_grad():
            model(ids, use_cache=False)

    def forward_backward():
        if options.loss_chunk:
            loss_in_chunks(model, ids, options.loss_chunk).backward()
        else:
            model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    if task != "decode":
        return forward if task == "forward" else forward_backward
    with torch.no_grad():
        past = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def decode():
        token = ids[:, -1:]
        with torch.no_grad():
            for _ in range(min(DECODED, ids.shape[1])):
                token = model(token, past_key_values=past, use_cache=True).logits.argmax(-1)

    return decode


class Stage:
    """Holds both models on the device or, with `one_at_a_time`, one of them while the other waits on the CPU."""

    def __init__(self, models: dict[str, PreTrainedModel], device: str, one_at_a_time: bool) -> None:
        self.models, self.device, self.one_at_a_time = models, device, one_at_a_time

    def enter(self, contestant: str) -> PreTrainedModel:
        name, attention = CONTESTANTS[contestant]
        if self.one_at_a_time:
            for other, model in self.models.items():
                if other != name:
                    model.to("cpu")
            self.models[name].to(self.device)
        self.models[name].set_attn_implementation(attention)
        return self.models[name]


def seconds(run: Callable[[], None], device: str) -> float:
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else torch.cpu.synchronize
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(x.nbytes for x in model.parameters())


def peak_gib(run: Callable[[], None], model: PreTrainedModel, device: str) -> float | str:
    """Peak memory of a run in GiB: the weights of its model and what the run allocates, without the other model."""
    if not device.startswith("cuda"):
        run()
        return ""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    return round((torch.cuda.max_memory_allocated() - held + weight_bytes(model)) / 2**30, 2)


def attempt(run: Callable[[], float | str], device: str) -> tuple[float | str, str]:
    """(what `run` returns, "") or ("", why it cannot run)."""
    try:
        return run(), ""
    except (ImportError, ValueError, RuntimeError) as error:  # OutOfMemoryError is a RuntimeError
        reason = first_line(error)
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of memory; --gradient-checkpointing, --loss-chunk, --one-at-a-time and --layers need less"
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()  # raises if the device is lost
        torch.cuda.empty_cache()
    return "", reason


def measure(task: str, length: int, stage: Stage, options: argparse.Namespace, progress: tqdm) -> list[dict]:
    """Returns the rows of a cell. Every contestant warms up, then they take turns."""
    batch = max(1, options.tokens // length)
    vocab_size = stage.models["DIFF"].config.vocab_size
    ids = torch.randint(0, vocab_size, (batch, length), device=options.device)
    peaks, reasons = {}, {}
    for name in CONTESTANTS:
        progress.set_postfix_str(f"{task} {length} {name}")

        def warm_up(name: str = name) -> float | str:
            model = stage.enter(name)
            step(task, model, ids, options)()
            return peak_gib(lambda: step(task, model, ids, options)(), model, options.device)

        peaks[name], reasons[name] = attempt(warm_up, options.device)
        for parameter in (p for model in stage.models.values() for p in model.parameters()):
            parameter.grad = None  # left by a backward that failed
        progress.update()
    ready = [name for name in CONTESTANTS if not reasons[name]]
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(options.rounds):
        for name in ready:
            run = step(task, stage.enter(name), ids, options)
            times[name].append(seconds(run, options.device))
        progress.update(len(CONTESTANTS))
    tokens = batch * (min(DECODED, length) if task == "decode" else length)
    speed = {name: tokens / statistics.median(taken) for name, taken in times.items()}
    best = max((value for name, value in speed.items() if name.startswith("Transformer")), default=None)
    config, rows = stage.models["DIFF"].config, []
    for name in CONTESTANTS:
        row = {"task": task, "length": length, "batch": batch, "model": name, "status": "cannot run"}
        row |= {"tokens_per_second": "", "over_transformer": ""}
        if name in speed:
            row |= {"status": "ok", "tokens_per_second": round(speed[name], 1)}
            row["over_transformer"] = round(speed[name] / best, 3) if best else ""
        row |= {"paper_over_transformer": round(PAPER.get((task, length), 0), 3) or "", "peak_gib": peaks[name]}
        row |= {"rounds": options.rounds, "layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
        row |= {option: getattr(options, option) for option in ("dtype", "gradient_checkpointing", "loss_chunk")}
        where = {"hardware": hardware(options.device), **versions("torch", "triton", "transformers")}
        rows.append({**row, "reason": reasons[name], **where})
    return rows


def settings(options: argparse.Namespace, config: DiffTransformerConfig) -> str:
    """Describes how the model and the run differ from the paper's."""
    parts = [f"{config.num_hidden_layers} layers of width {config.hidden_size}, {options.dtype}"]
    if options.tiny:
        parts.append("a tiny model: the figures mean only that the script runs")
    elif options.layers is not None:
        parts.append(f"fewer layers than the 3B's 28 (--layers {options.layers}): its vocabulary takes a larger share")
    if options.gradient_checkpointing:
        parts.append("gradient checkpointing (the backward recomputes every layer)")
    if options.loss_chunk:
        parts.append(f"loss in chunks of {options.loss_chunk} tokens (the backward recomputes the logits)")
    return "; ".join(parts)


def as_markdown(rows: list[dict], command: str, what: str) -> str:
    packages = ", ".join(f"{name} {rows[0][name]}" for name in ("torch", "triton", "transformers"))
    lines = [f"# Tokens per second: {rows[0]['hardware']}", "", f"`{command}`, {packages}. {what}.", ""]
    lines += [
        "Ratios are to the faster Transformer of the same run; the paper's are of its own kernels (Table 7).",
        "",
    ]
    lines += ["| task | length | batch | model | tokens/s | / Transformer | paper | peak GiB |", "| --- " * 8 + "|"]
    for row in rows:
        cells = [row[name] for name in ("task", "length", "batch", "model")]
        if row["status"] == "ok":
            paper = row["paper_over_transformer"] if row["model"].startswith("DIFF") else ""
            cells += [row["tokens_per_second"], row["over_transformer"], paper, row["peak_gib"]]
        else:
            cells += [row["reason"], "", "", ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, "files")
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--lengths", nargs="+", type=int, default=[2048, 4096, 16384, 65536])
    text = "batch size times length (default: %(default)s), at least one sequence"
    add("--tokens", type=int, default=4096, help=text)
    add("--rounds", type=int, default=10)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    text = "recompute the activations inside of each layer in the backward"
    add("--gradient-checkpointing", action="store_true", help=text)
    text = "tokens whose logits are in memory at a time (default: 0, all of them)"
    add("--loss-chunk", type=int, default=0, help=text)
    add("--one-at-a-time", action="store_true", help="keep the idle model on the CPU")
    add("--layers", type=int, help="number of layers, if the 28 of the 3B do not fit")
    text = "time limit, after which no cell is started (default: %(default)s)"
    add("--minutes", type=float, default=20.0, help=text)
    add("--tiny", action="store_true", help="use a model small enough to try the script on a CPU")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no GPU. --tiny --device cpu tries the script.")
    return options


def main(arguments: list[str] | None = None, on_rows: Callable[[list[dict]], None] = lambda rows: None) -> int:
    """Returns 1 if flash_diff was wrong, otherwise 0. `on_rows` receives the rows of a cell once it is measured."""
    options = parse(arguments)
    command = " ".join(["python -m benchmarks.model_gpu", *(sys.argv[1:] if arguments is None else arguments)])
    config, dtype = diff_config(options), getattr(torch, options.dtype)
    cells = [(task, length) for length in options.lengths for task in options.tasks]
    what = settings(options, config)
    runs = f"{len(cells)} cells x {len(CONTESTANTS)} contestants x {options.rounds} rounds"
    print(f"Budget  {options.minutes:g} minutes for {runs}, on {hardware(options.device)}: {what}", flush=True)
    deadline, rows, left_out = time.monotonic() + 60 * options.minutes, [], []

    wrong = faults(config, dtype, options.device)
    if wrong:
        print("RED: flash_diff is wrong, so there is nothing to time.", *wrong, sep="\n  ")
        return 1
    configs = {"DIFF": config, "Transformer": transformer_twin(config)}
    models = {}
    for name, one in configs.items():
        models[name] = build(one, dtype, options.device)
        if options.gradient_checkpointing:
            enable_checkpointing(models[name])
        if options.one_at_a_time:
            models[name].to("cpu")
        print(f"Model   {name}: {models[name].num_parameters() / 1e6:,.1f} million parameters")
    stage = Stage(models, options.device, options.one_at_a_time)
    with tqdm(total=len(cells) * len(CONTESTANTS) * (options.rounds + 1), unit="run") as progress:
        for task, length in cells:
            if time.monotonic() >= deadline:
                left_out.append(f"{task} {length}")
                continue
            found = measure(task, length, stage, options, progress)
            on_rows(found)
            rows += found
            write(options.out, rows)
    left_out_line = f"\nLeft out, as the budget was spent: {'; '.join(left_out)}\n" if left_out else ""
    report = (as_markdown(rows, command, what) if rows else "") + left_out_line
    print(report)
    write(options.out, rows, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

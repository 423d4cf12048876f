# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Data and a model for `--smoke`, made on this machine without the Hub; the code path is that of a real run.

The corpus is the Python standard library's sources. The questions are sums, in the columns of the real datasets.
"""

import json
import random
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from ..conversion import convert, open_checkpoint
from ..folders import whole_file
from ..text_data import standard_library_sources
from .architectures import NewModelArguments, new_config, new_tokenizer, whole_models

LENGTH = 256
_PACKAGES = re.compile(r"(json|email|http|logging)/[^/]+\.py")


def smoke_recipe(stage: str) -> dict[str, Any]:
    """The values that `--smoke` sets for a stage."""
    return yaml.safe_load((Path(__file__).parent / "smoke_recipes" / f"{stage}.yaml").read_text())


def write_inputs(training: TrainingArguments, data: Any, chosen_model: Any) -> None:
    """Writes the data and the model that the smoke recipes name to the output folder, and sets their paths.

    The first process writes, while the others wait.
    """
    folder = Path(training.output_dir)
    with training.main_process_first(local=False):
        for arguments, field in ((data, "dataset"), (chosen_model, "model_name_or_path")):
            name = getattr(arguments, field)
            if name in WRITERS:
                setattr(arguments, field, str(WRITERS[name](folder / name)))


def write_corpus(folder: Path, num_files: int = 24) -> Path:
    """Writes JSON lines of `text` and `meta.source` (packages, modules) from the Python standard library."""
    files = dict(standard_library_sources())
    sources = {"modules": [path for path in files if "/" not in path], "packages": filter(_PACKAGES.fullmatch, files)}
    rows = [
        {"text": files[path].read_text(encoding="utf-8", errors="replace"), "meta": {"source": source}}
        for source, paths in sources.items()
        for path in islice(paths, num_files // 2)
    ]
    if len(rows) < 10:
        raise FileNotFoundError(
            f"This Python has {len(rows)} sources of its standard library and 10 are needed: some systems ship Python "
            "without them. Name a corpus of your own with --dataset."
        )
    return _write(folder / "corpus.jsonl", rows)


def _sums(seed: int, count: int) -> Iterable[tuple[str, str, int]]:
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randint(2, 99), draw.randint(2, 99)
        yield f"What is {a} plus {b}?", f"{a} + {b} = {a + b}.", a + b


def write_questions(folder: Path, count: int = 400) -> Path:
    rows = [{"problem": question, "solution": answer} for question, answer, _ in _sums(0, count)]
    return _write(folder / "questions.jsonl", rows)


def write_traces(folder: Path, count: int = 200) -> Path:
    """Rows like those of open-r1/OpenThoughts-114k-math; the short solution in `messages` must not be trained on."""
    thought, solution = "<|begin_of_thought|>{}<|end_of_thought|>", "<|begin_of_solution|>{}<|end_of_solution|>"
    trace = f"{thought}\n\n{solution}".replace("{}", "\n\n{}\n\n")
    rows = [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "SHORT SOLUTION"}],
            "system": "Think first.",
            "conversations": [
                {"from": "user", "value": "Return your final response within \\boxed{}. " + question},
                {"from": "assistant", "value": trace.format(answer, f"\\boxed{{{result}}}")},
            ],
            "correct": True,
        }
        for question, answer, result in _sums(1, count)
    ]
    return _write(folder / "traces.jsonl", rows)


def write_model(folder: Path, architecture: str = "diff") -> Path:
    """Saves an untrained checkpoint, for a stage that starts from one."""
    values = smoke_recipe("pretrain")
    arguments = NewModelArguments(architecture, "3B", values["config_overrides"], values["tokenizer_ranks"])
    tokenizer = new_tokenizer(arguments, LENGTH)
    set_seed(0)
    config = new_config(arguments, tokenizer, LENGTH)
    with whole_models():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_upcycled_model(folder: Path) -> Path:
    """Saves an untrained Llama, and the DIFF V2 into which it is converted."""
    llama = write_model(folder.with_name(f"{folder.name}-llama"), "transformer")
    with whole_models():
        convert(open_checkpoint(llama, "llama"), folder, overwrite=True)
    return folder


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    with whole_file(file) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


# What the smoke recipes name instead of a dataset or a checkpoint
WRITERS: dict[str, Callable[[Path], Path]] = {
    "smoke-corpus": write_corpus,
    "smoke-questions": write_questions,
    "smoke-traces": write_traces,
    "smoke-model": write_model,
    "smoke-upcycled-model": write_upcycled_model,
}

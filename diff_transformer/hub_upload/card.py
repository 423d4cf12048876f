# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The model card, made from configuration, weights, training and evaluation results; unknown facts are left out."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, TrainerState

from ..model_cards import BEGIN, END, hub_id, manual_section, read_metadata
from . import card_results
from .checks import Problem, read_weights, without_folders
from .staging import Staged

TEMPLATE = Path(__file__).with_name("model_card_template.md")
# In the cards of transformers' push_to_hub, of its Trainer, and of huggingface_hub's template (PEFT)
GENERATED = "This model card has been (automatically generated|generated automatically)"
# Arguments of a run about folders, logging and speed, which did not shape the model
HOUSEKEEPING = (
    *("output_dir", "logging_", "save_", "report_to", "dataloader_", "hub_", "push_to_hub", "run_name"),
    *("model_name_or_path", "peak_tflops", "expected_mfu", "dataset_num_proc", "resume_from_checkpoint"),
)


def write_card(staged: Staged, options: argparse.Namespace, remote_card: str = "") -> list[Problem]:
    """README.md with the figures, results and leaderboard entries that it shows. Returns what is wrong or missing.

    Needs a sound model or adapter. remote_card: the README.md of the repository.
    """
    path = staged.source / "README.md"
    local_card = path.read_text(encoding="utf-8") if path.exists() else ""
    known = {**read_metadata(remote_card), **read_metadata(local_card)}  # FOLDER takes precedence
    known["base_model"] = options.base_model or hub_id(known.get("base_model"))
    if staged.adapter:
        known["base_model"] = staged.adapter["base_model_name_or_path"]
    given = {"license": options.license, "language": options.language, "datasets": options.dataset}
    known |= {name: value for name, value in given.items() if value}
    problems = [] if options.force else list(_check_manual_section(options.repo_id, local_card, remote_card))
    if not known.get("license"):
        problems.append(Problem("card", "the license is unknown. Pass it: --license mit, apache-2.0, cc-by-4.0, ..."))
    if not known.get("language"):
        problems.append(Problem("card", "the language is unknown. Pass it: --language en (code, multilingual, ...)."))
    state, arguments = None, {}
    try:
        state = read_trainer_state(staged.source)
        arguments = read_run_file(options.recipe) if options.recipe else {}
    except (ValueError, OSError) as error:
        problems.append(Problem("training", str(error)))
    if (dataset := hub_id(arguments.get("dataset"))) and not known.get("datasets"):
        hint = f"the run read {dataset}: if it is a dataset on the Hub, pass --dataset {dataset}"
        problems.append(Problem("training", hint, fatal=False))
    found: card_results.Sections = ()
    if options.results is not None:
        found, faults = card_results.own_sections(options.results, staged.source, options.repo_id)
        problems += faults

    for name, content in card_results.card_files(found, options.repo_id).items():
        staged.write(name, content)
    name, counts = options.repo_id.rpartition("/")[2], read_weights(staged).parameter_count
    numbers = card_results.model_index(found, options.repo_id)
    peft_type = [staged.adapter["peft_type"].lower()] if staged.adapter else []
    known.pop("model-index", None)
    known |= {  # all other metadata of a card is the user's and is kept
        "library_name": "peft" if staged.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["diff_transformer", "differential-attention", "arxiv:2410.05258", *peft_type],
        "model_name": name if numbers else None,
        "eval_results": numbers or None,
    }
    card = ModelCard.from_template(
        ModelCardData(**known),
        template_path=str(TEMPLATE),
        name=name,
        repo_id=options.repo_id,
        model_type=staged.model_type,
        config=None if staged.adapter else AutoConfig.from_pretrained(staged.folder),
        adapter=staged.adapter,
        parameters=sum(counts.values()),
        dtypes=", ".join(sorted(counts)),
        has_chat_template=(staged.folder / "chat_template.jinja").exists(),
        state=state,
        arguments=arguments,
        evaluation="\n\n".join(card_results.evaluation_markdown(found)),
        manual=f"{BEGIN}\n{manual_section(local_card) or manual_section(remote_card) or ''}\n{END}",
    )
    staged.write("README.md", f"{card}\n")
    return problems


def read_trainer_state(folder: Path) -> TrainerState | None:
    """That of the run that made the model in `folder`, if there is one. Raises ValueError if it is damaged."""
    path = folder / "trainer_state.json"
    if not path.exists() and folder.resolve().name in ("model", "adapter"):  # the names that a training stage gives
        path = folder.resolve().parent / "trainer_state.json"
    try:
        return TrainerState.load_from_json(str(path)) if path.exists() else None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a trainer state ({error!r}). Move it away, or save it again.") from error


def read_run_file(path: str | Path) -> dict[str, Any]:
    """The arguments of a run's YAML file that shaped the model. Raises ValueError if the file holds none."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name: without_folders(value) for name, value in content.items() if not name.startswith(HOUSEKEEPING)}
    except (yaml.YAMLError, AttributeError) as error:
        needed = "Pass the YAML file with which the training was started"
        raise ValueError(f"{path} holds no arguments ({error}). {needed}.") from error


def _check_manual_section(repo_id: str, local: str, remote: str) -> Iterator[Problem]:
    """A manual section is kept, no matter where it was edited."""
    ours, theirs = manual_section(local), manual_section(remote)
    if ours and theirs and ours != theirs:
        differ = "the manual sections of FOLDER/README.md and of the card on the Hub differ"
        yield Problem("card", f"{differ}. Make them equal, or take FOLDER's with --force.")
    elif remote.strip() and theirs is None and not re.search(GENERATED, remote):
        remedy = f"Put the text to keep into FOLDER/README.md, between the lines\n{BEGIN}\n{END}\nand replace the card"
        yield Problem("card", f"the card of {repo_id} was written by someone else. {remedy} with --force.")
    elif local and ours is None:
        yield Problem("card", "README.md in FOLDER has no manual section; only its metadata is used", fatal=False)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The card states what the configuration, the trainer's state and the results contain: no more, no less, no paths."""

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import Trainer, TrainingArguments

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerV2ForCausalLM
from diff_transformer.evaluation.__main__ import main as evaluate
from diff_transformer.evaluation.models import load_model
from diff_transformer.evaluation.protocols.math import _SHARES as SHARES
from diff_transformer.evaluation.protocols.math.benchmarks import BENCHMARKS
from diff_transformer.evaluation.protocols.nll_by_position import condense
from diff_transformer.evaluation.results import Cell, Measure, Results
from diff_transformer.hub_upload import card, card_results
from diff_transformer.hub_upload.card import gather, write_card
from diff_transformer.hub_upload.checks import check_texts
from diff_transformer.hub_upload.staging import stage

REPO = "tester/small-diff"


def options(**given) -> Namespace:
    defaults = dict.fromkeys(("dataset", "base_model", "results", "recipe"))
    defaults |= {"repo_id": REPO, "license": "mit", "language": ["en", "code"], "force": False}
    return Namespace(**{**defaults, **given})


def written(folder: Path, remote: str | None = None, **given) -> tuple[str, dict[str, bytes], list]:
    """The card, all files, and the problems."""
    with stage(folder) as staged:
        facts, problems = gather(staged, options(**given), remote)
        write_card(staged, facts)
        assert list(check_texts(staged)) == []
        files = {name: path.read_bytes() for name, path in staged.files().items()}
        metadata_load(staged.folder / "README.md")
    return files["README.md"].decode(), files, problems


def fatal_messages(folder: Path, remote: str | None = None, **given) -> list[str]:
    with stage(folder) as staged:
        return [problem.message for problem in gather(staged, options(**given), remote)[1] if problem.fatal]


@pytest.fixture(scope="module")
def results(pristine, tmp_path_factory) -> Path:
    """A curve of the evaluation, two mathematics benchmarks, and results of another model."""
    folder = tmp_path_factory.mktemp("results")
    text = tmp_path_factory.mktemp("texts") / "private.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    command = ["evaluate", "nll_by_position", "--model", f"here={pristine}", "--dataset", str(text), "--length", "64"]
    assert evaluate([*command, "--documents", "1", "--points", "8", "--out", str(folder), "--device", "cpu"]) == 0
    math = {"prompt": "cot", "data_dir": None, "dataset": [], "max_new_tokens": None, "chat": False, "limit": None}
    identity = load_model(f"here={pristine}", device="cpu").identity
    of_math = Results.open(folder, "math", identity, math, 0)
    for name, dataset, share in (("gsm8k", "openai/gsm8k", 3 / 7), ("svamp", "/data/me/svamp.jsonl", 1 / 7)):
        measures = {name: Measure(share, 7, 0.1) for name in ("accuracy", *SHARES)}
        measures["length"] = Measure(100 * share, 7)
        of_math.add({"benchmark": name}, measures, {"dataset": dataset, "chat": False})
    other = {**identity, "label": "other", "name": "other", "revision": "sha256:0"}
    Results.open(folder, "math", other, math, 0).save()
    return folder


def test_facts_are_those_of_the_configuration(folder):
    text, files, _ = written(folder)
    config = DiffTransformerConfig.from_pretrained(folder)
    model = DiffTransformerForCausalLM(config)
    for row in (
        f"| parameters | {model.num_parameters():,} |",
        "| layers | 2 |",
        "| differential heads | 4 |",
        "| differential key/value heads | 2 |",
        "| head dimension d | 8 (two queries and keys of d, values of 2d = 16) |",
        "0.200 in the first layer, 0.356 in the last",  # 0.8 - 0.6 exp(-0.3)
        "| positions | 128 |",
        "| stored as | F32 |",
    ):
        assert row in text
    data = ModelCard(text).data
    assert (data.license, data.language, data.library_name) == ("mit", ["en", "code"], "transformers")
    assert data.pipeline_tag == "text-generation" and "arxiv:2410.05258" in data.tags
    for unknown in ("datasets", "base_model", "eval_results"):
        assert getattr(data, unknown) is None
    assert "## Training" not in text and "## Evaluation" not in text, "nothing is known of them"
    assert "None" not in text


def test_facts_of_v2(folder_v2):
    text, files, _ = written(folder_v2, base_model="owner/llama")
    model = DiffTransformerV2ForCausalLM.from_pretrained(folder_v2)
    for row in (
        f"| parameters | {model.num_parameters():,} |",
        "| query heads | 8 |",
        "| differential heads | 4 |",
        "| key/value heads | 2 |",
        "| head dimension d | 16 |",
        "| query and key normalisation | no |",
        "It was made from [owner/llama](https://huggingface.co/owner/llama).",
        "its numbers are about V1",
    ):
        assert row in text
    assert "lambda_init" not in text and "signal heads" not in text and "sliding window" not in text
    assert ModelCard(text).data.base_model == "owner/llama"
    assert text.index("title        = {Differential Transformer V2}") < text.index(card.CITATION)
    assert {name for name in files if name.endswith(".py")} == {
        *("attention_diff_base.py", "configuration_diff_base.py", "configuration_diff_v2.py"),
        *("modeling_diff_base.py", "modeling_diff_v2.py"),
    }
    config = json.loads((folder_v2 / "config.json").read_text())
    more = {"num_signal_heads_per_noise_head": 3, "sliding_window": 32, "use_qk_norm": True}
    (folder_v2 / "config.json").write_text(json.dumps(config | more))
    text, _, _ = written(folder_v2)
    for row in (
        "differential heads | 6",
        "signal heads per noise head | 3",
        "sliding window | 32",
        "normalisation | yes",
    ):
        assert f"{row} |" in text


def test_an_adapter_names_the_architecture_of_its_base(folder_v2, tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder_v2)}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    with stage(tmp_path / "adapter", base_model="owner/base") as staged:
        text = card.render(gather(staged, options(), None)[0])
    assert f"for the [Differential Transformer V2]({card.V2}) owner/base." in text


def test_the_citation_is_that_of_the_project():
    cff = yaml.safe_load((Path(__file__).parent.parent.parent / "CITATION.cff").read_text())
    paper = cff["preferred-citation"]
    authors = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
    for words in (cff["title"], cff["version"], authors, paper["title"], paper["collection-title"], paper["url"]):
        assert words in card.CITATION


def test_the_card_states_what_is_known_about_the_training(folder, tmp_path):
    history = [{"loss": 3.5, "learning_rate": 1e-3, "step": 1}, {"loss": 2.25, "learning_rate": 5e-4, "step": 8}]
    state = {"global_step": 8, "epoch": 0.5, "total_flos": 1.5e12, "num_input_tokens_seen": 4096}
    (tmp_path / "trainer_state.json").write_text(json.dumps({**state, "log_history": history}))
    recipe = tmp_path / "config.yaml"
    recipe.write_text(
        "dataset: owner/corpus\nlearning_rate: 1.0e-3\noutput_dir: /home/me/run\ntokenizer: /home/me/tok\n"
    )
    text, _, problems = written(folder, recipe=str(recipe))
    for row in (
        "| optimizer steps | 8 |",
        "| tokens seen | 4,096 |",
        "| compute | 1.5e+12 FLOPs |",
        "| highest learning rate | 0.001 |",
        "| last training loss | 2.2500, after step 8 |",
        "| `learning_rate` | `0.001` |",
        "| `tokenizer` | `tok` |",
        "| `dataset` | `owner/corpus` |",
    ):
        assert row in text
    assert "validation" not in text and "output_dir" not in text
    assert ModelCard(text).data.datasets is None and any("--dataset owner/corpus" in p.message for p in problems)
    text, _, _ = written(folder, recipe=str(recipe), dataset=["owner/corpus"])
    assert "Data: [owner/corpus](https://huggingface.co/datasets/owner/corpus)." in text
    assert ModelCard(text).data.datasets == ["owner/corpus"]
    folder = folder.rename(tmp_path / "another")
    assert "optimizer steps" not in written(folder)[0], "the state next to a folder of another name is not its own"
    (folder / "trainer_state.json").write_text("{}")
    assert "is not a trainer state" in fatal_messages(folder)[0]
    best = {**state, "best_global_step": 1, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(best))
    assert "| best checkpoint | step 1 |" in written(folder)[0]
    recipe.write_text("1: 2\n")
    assert "holds no arguments" in fatal_messages(folder, recipe=str(recipe))[0]


def test_every_number_is_that_of_its_file(pristine, results):
    text, files, problems = written(pristine, results=results)
    (other,) = [problem.message for problem in problems if problem.check == "results"]
    assert other == "math/other.json belongs to another model and is left out"
    nll = Results.load(results / "nll_by_position" / "here.json")
    curve = {f"{cell.key['position'] + 1:,}": cell["nll"] for cell in condense(nll.cells)}
    differs = r"models of \d\.\d million parameters; not stated in the paper: samples 1, dataset private.txt"
    rows = re.findall(rf"^\| (\d+) \| (\d\.\d{{3}}) \| {differs} \|$", text, re.MULTILINE)
    assert len(rows) == 4 and all(f"{curve[position]:.3f}" == value for position, value in rows)
    assert re.search(rf"^\| {BENCHMARKS['gsm8k'].title} \|.*\| 42.9 ± 10.0 \|", text, re.MULTILINE)

    data = ModelCard(text).data
    numbers = {r.metric_name: r.metric_value for r in data.eval_results}
    for position, _ in rows:
        assert numbers[f"nll, position {int(position) - 1}"] == curve[position]
    assert numbers["accuracy, benchmark gsm8k"] == 3 / 7
    datasets = {r.metric_name: r.dataset_type for r in data.eval_results}
    assert datasets["accuracy, benchmark gsm8k"] == "openai/gsm8k"
    assert datasets["accuracy, benchmark svamp"] == "math", "a file of this machine is not a dataset of the Hub"

    name, parsed = model_index_to_eval_results(yaml.safe_load(text.split("---")[1])["model-index"])
    assert name == "small-diff" and len(parsed) == len(numbers)
    (entry,) = yaml.safe_load(files[".eval_results/math.yaml"])
    assert entry["dataset"] == {"id": "openai/gsm8k", "task_id": "default"}
    assert entry["notes"] == "benchmark gsm8k, n 7"
    assert entry["value"] == 3 / 7 and entry["source"]["url"].endswith("/results/math/small-diff.json")


@pytest.mark.parametrize(
    ("limit", "datasets", "named"),
    [(None, ["a/b", "c/d"], ["a/b", "c/d"]), (2, ["a/b"], []), (None, ["a/b", "a/b", "c/d"], ["c/d"])],
)
def test_a_leaderboard_gets_whole_datasets_once(limit, datasets, named):
    results = Results(Path("math/x.json"), "math", {"label": "x"}, {"limit": limit}, 0)
    results.runs = [{"date": "2026-01-01"}]
    results.cells = [Cell({"part": i}, {"accuracy": Measure(0.5, 2)}, {"dataset": d}) for i, d in enumerate(datasets)]
    files = card_results.leaderboard_files([SimpleNamespace(results=[results])], REPO)
    entries = [entry for text in files.values() for entry in yaml.safe_load(text)]
    assert [entry["dataset"]["id"] for entry in entries] == named


def test_results_are_published_without_what_is_private(pristine, results):
    text, files, _ = written(pristine, results=results)
    for name in ("results/nll_by_position/small-diff.json", "results/math/small-diff.json"):
        ours = Results.load(results / name.removeprefix("results/").replace("small-diff", "here"))
        public = json.loads(files[name])
        assert not any("command" in run for run in public["runs"]), "it may name anything of this machine"
        assert public["model"]["name"] == REPO and public["model"]["revision"] == ours.model["revision"]
        values = [{k: m["value"] for k, m in cell["measures"].items()} for cell in public["cells"]]
        assert values == [{k: m.value for k, m in cell.measures.items()} for cell in ours.cells]
        assert f"[{name}]({name})" in text
    for place in (text, *(content.decode() for name, content in files.items() if name.endswith("small-diff.json"))):
        assert str(pristine) not in place and "/tmp" not in place and "/data/me" not in place
    for image in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert files[image].startswith(b"\x89PNG")
    assert {"figures/nll_by_position.png", "figures/math.png"} <= set(files)
    run = Results.load(results / "math" / "here.json").runs[0]
    assert run["hardware"] in text and run["date"] in text and f"torch {run['packages']['torch']}" in text
    assert Results.load(results / "math" / "here.json").model["revision"] in text


def test_results_of_other_weights_are_rejected(folder, results, tmp_path):
    assert fatal_messages(folder, results=results) == [], "a copy has the same weights"
    identity = {**load_model(str(folder), device="cpu").identity, "revision": "sha256:other"}
    stale = tmp_path / "stale"
    Results.open(stale, "math", identity, {"prompt": "cot"}, 0).save()
    other, none = fatal_messages(folder, results=stale)
    assert f"math/{folder.name}.json was measured on other weights (sha256:other)" in other
    assert "has no results of this model" in none
    (stale / "math" / "bad.json").write_text("{")
    for place, message in ((stale, "is not JSON"), (tmp_path / "absent", "holds no results"), (tmp_path, "holds no")):
        assert message in fatal_messages(folder, results=place)[0]


def test_metadata_that_the_user_gave_survives(folder):
    given = "license: other\nlicense_name: ours\nextra_gated_prompt: Ask us.\nbase_model: owner/base\n"
    remote = f"---\n{given}---\n{card.BEGIN}\n{card.END}\n"
    text = written(folder, remote=remote, license=None)[0]
    data = yaml.safe_load(text.split("---")[1])
    assert {name: data[name] for name in yaml.safe_load(given)} == yaml.safe_load(given)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = written(folder, remote=remote, license=None)[0]
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0", "FOLDER takes precedence"


def test_the_manual_section_is_kept(folder):
    text, _, _ = written(folder)
    edited = text.replace(f"{card.BEGIN}\n\n{card.END}", f"{card.BEGIN}\n## My words\n\nA * B\n{card.END}")
    edited = edited.replace("license: mit", "license: apache-2.0")
    assert edited != text
    assert fatal_messages(folder, remote=edited, license=None) == []
    assert written(folder, remote=edited, license=None)[0] == edited, "and so is the metadata that was not given"
    (folder / "README.md").write_text(edited)
    assert written(folder, license=None)[0] == edited, "from the folder as well"
    conflicting = edited.replace("My words", "Their words")
    assert "differ" in fatal_messages(folder, remote=conflicting)[0]
    assert written(folder, remote=conflicting, force=True)[0] == edited.replace("apache-2.0", "mit")


def trainer_card(folder) -> str:
    """The card that transformers' Trainer writes."""
    model = DiffTransformerForCausalLM.from_pretrained(folder)
    args = TrainingArguments(output_dir=str(folder.parent / "trainer"), report_to="none", use_cpu=True)
    Trainer(model=model, args=args).create_model_card(model_name="x")
    return (folder.parent / "trainer" / "README.md").read_text()


def test_a_foreign_card_is_not_lost_silently(folder):
    (message,) = fatal_messages(folder, remote="# By hand\n")
    assert "written by someone else" in message and "--force" in message
    assert fatal_messages(folder, remote="# Mine\n\nText generated from this model is mine.")
    for generated in ("This model card has been automatically generated.", trainer_card(folder)):
        assert not fatal_messages(folder, remote=generated)
    assert not fatal_messages(folder, remote="# By hand\n", force=True)
    (folder / "README.md").write_text("---\nlicense: [\n---\nMy notes.")
    assert "only its metadata is used" in "".join(problem.message for problem in written(folder)[2])

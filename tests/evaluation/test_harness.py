# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""lm-eval's seven tasks on rows written here: prompts by hand, scores by a plain forward, runs, and the report."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diff_transformer.evaluation.__main__ import Options, main
from diff_transformer.evaluation.models import load_model
from diff_transformer.evaluation.render import sections
from diff_transformer.evaluation.results import Results, load_results

pytest.importorskip("lm_eval", reason="the harness is lm-eval")

from lm_eval import simple_evaluate  # noqa: E402  (after the check that it is there)
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from diff_transformer.evaluation.protocols import harness  # noqa: E402
from diff_transformer.evaluation.protocols.harness import METRICS, TABLE_1, TABLE_8  # noqa: E402


def arc(question, key, *choices, labels="ABCD"):
    labels = list(labels[: len(choices)])
    row = {"id": "x", "question": question, "choices": {"text": list(choices), "label": labels}, "answerKey": key}
    return row, [(f"Question: {question}\nAnswer:", f" {choice}") for choice in choices], labels.index(key)


def boolq(passage, question, label):
    row = {"passage": passage, "question": question, "label": label, "idx": 0}
    return row, [(f"{passage}\nQuestion: {question}?\nAnswer:", f" {word}") for word in ("no", "yes")], label


def openbookqa(stem, key, *choices):
    row = {
        "id": "x",
        "question_stem": stem,
        "choices": {"text": list(choices), "label": list("ABCD")},
        "answerKey": key,
    }
    return row, [(stem, f" {choice}") for choice in choices], "ABCD".index(key)


def piqa(goal, label, *solutions):
    row = {"goal": goal, "sol1": solutions[0], "sol2": solutions[1], "label": label}
    return row, [(f"Question: {goal}\nAnswer:", f" {solution}") for solution in solutions], label


def winogrande(before, after, answer, *options):
    row = {"sentence": f"{before}_{after}", "option1": options[0], "option2": options[1], "answer": answer}
    return row, [(before + option, f" {after.strip()}") for option in options], int(answer) - 1


def hellaswag(activity, a, b, endings, label, query, cleaned):
    row = {"ind": 1, "activity_label": activity, "ctx_a": a, "ctx_b": b, "ctx": f"{a} {b}", "endings": endings}
    row |= {"label": label, "source_id": "wikihow", "split": "val", "split_type": "indomain"}
    return row, [(query, f" {ending}") for ending in cleaned], int(label)


# Task -> rows of the original dataset, the (context, continuation) of each choice as lm-eval has to ask, the right one
CASES = {
    "arc_challenge": [
        arc("Which is a gas?", "2", "Iron", "Oxygen that we breathe", "Sand", labels="1234"),
        arc("What melts?", "A", "Ice", "Steam", "Air", "Light"),
    ],
    "arc_easy": [
        arc("What do plants need?", "C", "Noise", "Dark", "Light and water", "Salt"),
        arc("Where do fish live?", "B", "Trees", "Water", "Sand", "Fire"),
    ],
    "boolq": [
        boolq("Cats are mammals and eat mice.", "are cats mammals", 1),
        boolq("The moon is far away from us.", "is the moon near", 0),
    ],
    "hellaswag": [
        hellaswag(
            "Baking bread",
            "A man [header] mixes dough.",
            "he",
            ["bakes it.", "eats [title] the bowl now.", "flies  away.", "sleeps [step] for a year."],
            "0",
            "Baking bread: A man mixes dough. He",
            ["bakes it.", "eats. the bowl now.", "flies away.", "sleeps for a year."],
        ),
        hellaswag(
            "Swimming", "A dog jumps.", "it", ["swims.", "is red.", "sings.", "reads a long book."], "3",
            "Swimming: A dog jumps. It", ["swims.", "is red.", "sings.", "reads a long book."],
        ),
    ],
    "openbookqa": [
        openbookqa("The sun is", "D", "cold", "green", "a very small fish", "hot"),
        openbookqa("Bees make", "A", "honey", "iron", "rain and snow", "books"),
    ],
    "piqa": [
        piqa("Open a jar.", 0, "Turn the lid.", "Sing to the lid until it opens."),
        piqa("Dry a shirt.", 1, "Put it into water.", "Hang it up."),
    ],
    "winogrande": [
        winogrande("The cup fell off the table since the ", " was tilted.", "2", "cup", "table"),
        winogrande("Ann thanked Eve because ", " had helped.", "2", "Ann", "Eve"),
    ],
}  # fmt: skip


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Half of the tasks as TASK.jsonl, all with examples, which are the same rows the other way round."""
    folder = tmp_path_factory.mktemp("rows")
    for i, (task, cases) in enumerate(CASES.items()):
        rows = [row for row, *_ in cases]
        split = "test" if task in ("arc_challenge", "arc_easy", "openbookqa") else "validation"
        write(folder / f"{task}.jsonl" if i % 2 else folder / task / f"{split}.jsonl", rows)
        write(folder / task / "train.jsonl", rows[::-1])
    return str(folder)


def language_model(loaded, batch_size=4):
    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)


def log_likelihood(loaded, context, continuation):
    """With the model alone, a sequence at a time."""
    tokens = loaded.tokenizer(context + continuation)["input_ids"]
    n = len(tokens) - len(loaded.tokenizer(context)["input_ids"])
    with torch.no_grad():
        log_probs = loaded.model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return sum(log_probs[i - 1, tokens[i]].item() for i in range(len(tokens) - n, len(tokens)))


# ------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("task", harness.TASKS)
def test_a_task_asks_and_scores_as_by_hand(loaded, data_dir, task):
    samples = harness.evaluate_task(language_model(loaded), task, data_dir=data_dir)
    assert len(samples) == len(CASES[task])
    for sample, (_, asked, right) in zip(samples, CASES[task], strict=True):
        assert [tuple(pair) for pair in sample["arguments"]] == asked, "another prompt than lm-eval documents"
        expected = [log_likelihood(loaded, *pair) for pair in asked]
        found = [value for value, _ in sample["filtered_resps"]]
        assert found == pytest.approx(expected, rel=1e-4), "not the log-likelihood of the continuation"
        assert sample["acc"] == (expected.index(max(expected)) == right)
        if "acc_norm" in sample["metrics"]:
            lengths = [len(continuation) - 1 for _, continuation in asked]  # without the space
            by_length = [value / n for value, n in zip(expected, lengths, strict=True)]
            assert sample["acc_norm"] == (by_length.index(max(by_length)) == right)
    assert ("acc_norm" in samples[0]["metrics"]) == (task not in ("boolq", "winogrande"))


def test_log_likelihoods_of_16_bits_are_not_rounded(twin_folders, data_dir):
    """lm-eval sums in the type of the model if it is not told otherwise: bf16 has whole nats at such sizes."""
    loaded = load_model(str(twin_folders["DIFF"]), dtype="bfloat16", device="cpu")
    options = Options(device="cpu", batch_size=2)
    found, accuracies = [], harness.accuracies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "accuracies", lambda samples: found.extend(samples) or accuracies(samples))
        results = Results(Path("unused.json"), "harness", {"label": "x"}, {}, 0)
        patch.setattr(results, "save", lambda: None)
        harness.run(loaded, harness.Arguments(["hellaswag"], [0], data_dir), options, results)
    log_likelihoods = [response[0] for sample in found for response in sample["filtered_resps"]]
    assert len(log_likelihoods) == 8 and all(2 * x != round(2 * x) for x in log_likelihoods)


@pytest.mark.parametrize("task", harness.TASKS)
def test_an_example_comes_before_the_question(loaded, data_dir, task):
    zero = harness.evaluate_task(language_model(loaded), task, data_dir=data_dir)
    one = harness.evaluate_task(language_model(loaded), task, shots=1, data_dir=data_dir)
    examples = ["".join(asked[right]) + "\n\n" for _, asked, right in CASES[task]]
    for without, with_example in zip(zero, one, strict=True):
        for (context, continuation), (longer, same) in zip(
            without["arguments"], with_example["arguments"], strict=True
        ):
            assert same == continuation
            assert longer in [example + context for example in examples], "no training row, answered, precedes"


def test_examples_depend_on_the_seed_alone(loaded, tmp_path):
    write(tmp_path / "piqa.jsonl", [row for row, *_ in CASES["piqa"]])
    write(tmp_path / "piqa" / "train.jsonl", [piqa(f"Do {i}.", 0, "Yes.", "No.")[0] for i in range(9)])

    def prompts(seed, limit=None):
        found = harness.evaluate_task(language_model(loaded), "piqa", 1, str(tmp_path), limit, seed)
        return [sample["arguments"] for sample in found]

    assert prompts(0) == prompts(0)
    assert prompts(0, limit=1) == prompts(0)[:1], "the limit changed the examples"
    assert any(prompts(0) != prompts(seed) for seed in range(1, 6)), "the seed draws nothing"


def test_as_lm_eval_itself_reports(loaded, data_dir):
    samples = harness.evaluate_task(language_model(loaded), "hellaswag", 1, data_dir, seed=3)
    manager = TaskManager(include_defaults=False)
    whole = simple_evaluate(
        model=language_model(loaded),
        tasks=[harness.load_task("hellaswag", 1, data_dir)],
        num_fewshot=1,
        fewshot_random_seed=3,
        bootstrap_iters=10,
        task_manager=manager,
    )
    reported = whole["results"]["hellaswag"]
    for metric, measure in harness.accuracies(samples).items():
        assert measure.value == reported[f"{metric},none"] and measure.n == reported["sample_len"] == 2
        assert measure.stderr == pytest.approx(reported[f"{metric}_stderr,none"])


@pytest.mark.parametrize("task", harness.TASKS)
def test_the_hub_and_local_rows_are_the_same_task(monkeypatch, data_dir, task):
    import datasets

    asked = []
    rows = [row for row, *_ in CASES[task]]

    def load_dataset(path, name=None, **kwargs):
        asked.append((path, name))
        splits = {split: datasets.Dataset.from_list(rows[:n]) for split, n in (("train", 2), ("validation", 2))}
        if task in ("arc_challenge", "arc_easy", "openbookqa"):
            splits |= {"validation": splits["train"].select([0]), "test": splits["train"]}
        return datasets.DatasetDict(splits)

    local = harness.load_task(task, 1, data_dir)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = harness.load_task(task)
    assert len(asked) == 1 and asked[0][0] != "json"
    assert list(hub.eval_docs) == list(local.eval_docs), "other rows or another split are evaluated"
    assert hub.config.doc_to_text == local.config.doc_to_text
    assert hub.config.metric_list == local.config.metric_list


def test_prompts_that_are_cut_are_counted(loaded, tmp_path):
    rows = [boolq("word " * n, "is it", 1)[0] for n in (10, 3000)]
    write(tmp_path / "boolq.jsonl", rows)
    lm = language_model(loaded)
    samples = harness.evaluate_task(lm, "boolq", data_dir=str(tmp_path))
    assert harness.truncated(lm, samples) == 1
    assert harness.truncated(lm, samples[:1]) == 0
    longest = max(len(loaded.tokenizer(a + b)["input_ids"]) for a, b in samples[0]["arguments"])
    for lm._max_length, expected in ((longest - 1, 0), (longest - 2, 1)):  # the last token is only predicted
        assert harness.truncated(lm, samples[:1]) == expected


# --------------------------------------------------------------------------------------------------------- bad input


def test_rows_that_are_missing_or_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"piqa needs .*validation\.jsonl or .*piqa\.jsonl: .* goal, sol1"):
        harness.load_task("piqa", data_dir=str(tmp_path))
    row = CASES["piqa"][0][0]
    write(tmp_path / "piqa.jsonl", [{"goal": "x", "label": 0}])
    with pytest.raises(ValueError, match="sol1, sol2 is needed"):
        harness.load_task("piqa", data_dir=str(tmp_path))
    write(tmp_path / "piqa" / "validation.jsonl", [row])
    with pytest.raises(ValueError, match=r"train\.jsonl, from which 2 examples are drawn"):
        harness.load_task("piqa", 2, str(tmp_path))
    write(tmp_path / "piqa" / "train.jsonl", [row, row])
    with pytest.raises(ValueError, match="has 2 rows; more than 2 are needed"):
        harness.load_task("piqa", 2, str(tmp_path))


def test_a_hub_that_cannot_be_reached():
    with pytest.raises(ValueError, match="piqa cannot be read from the Hub.*--data_dir"):
        harness.load_task("piqa")


def test_fewer_examples_than_none(loaded, tmp_path):
    arguments = harness.Arguments(shots=[-1])
    with pytest.raises(ValueError, match="--shots -1"):
        harness.run(loaded, arguments, None, Results(tmp_path / "x", "harness", {"label": "x"}, {}, 0))


# ------------------------------------------------------------------------------------------------- runs and the report


def command(twin_folders, data_dir, out, *more):
    models = [word for label in twin_folders for word in ("--model", str(twin_folders[label]))]
    fixed = ["--data_dir", data_dir, "--batch_size", "4", "--device", "cpu", "--out", str(out)]
    return ["evaluate", "harness", *models, *fixed, *map(str, more)]


@pytest.mark.slow
def test_run_stops_resumes_and_is_reported(twin_folders, data_dir, tmp_path, monkeypatch):
    tasks = ("--tasks", *harness.TASKS, "--shots", 0, 1)
    assert main(command(twin_folders, data_dir, tmp_path / "whole", *tasks)) == 0

    evaluate_task, calls = harness.evaluate_task, []

    def stop_after_three(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return evaluate_task(*args)

    monkeypatch.setattr(harness, "evaluate_task", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        main(command(twin_folders, data_dir, tmp_path / "parts", *tasks))
    monkeypatch.setattr(harness, "evaluate_task", evaluate_task)
    assert len(load_results(tmp_path / "parts")["harness"][0].cells) == 3
    assert main(command(twin_folders, data_dir, tmp_path / "parts", *tasks)) == 0

    whole, parts = (load_results(tmp_path / name)["harness"] for name in ("whole", "parts"))
    assert [r.label for r in whole] == ["DIFF", "Transformer"]
    for one, other in zip(whole, parts, strict=True):
        assert len(one.cells) == 14
        assert [(c.key, c.measures, c.data) for c in one.cells] == [(c.key, c.measures, c.data) for c in other.cells]

    (section,) = sections({"harness": whole})
    zero, paper_1t, one_shot = section.tables
    assert zero.columns[2:6] == ["DIFF", "Transformer", "paper: Transformer", "paper: DIFF"]
    for i, (task, metric) in enumerate(METRICS.items()):
        row = zero.rows[i]
        assert row[:2] == [task, metric] and row[4:6] == [TABLE_8[0][name][i] for name in zero.columns[4:6]]
        for ours, r in zip(row[2:4], whole, strict=True):
            assert ours.value == 100 * r.select(task=task, shots=0)[0][metric] and ours.n == 2
        assert row[-1] == f"models of 0.1 million parameters; rows of {data_dir}"
        assert "examples drawn with seed 0" in one_shot.rows[i][-1]
    average = sum(whole[0].select(task=task, shots=0)[0][metric] for task, metric in METRICS.items()) / 7
    assert zero.rows[-1][2] == pytest.approx(100 * average)
    assert zero.rows[-1][4:6] == [55.4, 56.2] and paper_1t.rows[-1][-2] == 60.6
    assert one_shot.rows[0][4:6] == [None, None], "the paper has no 1-shot"


def test_report_of_some_tasks_has_no_average(twin_folders, data_dir, tmp_path):
    assert main(command(twin_folders, data_dir, tmp_path, "--tasks", "boolq", "--shots", 0, "--limit", 1)) == 0
    (section,) = sections(load_results(tmp_path))
    rows = section.tables[0].rows
    assert rows[0][0] == "boolq" and "; at most the first 1 samples; rows of" in rows[0][-1]
    assert rows[-1][2:4] == [None, None]


def test_the_papers_averages_are_of_its_rows():
    """A slip of the pen in a table of the paper would show here."""
    for column in (*TABLE_8[0].values(), *TABLE_8[5].values(), *TABLE_1.values()):
        *tasks, average = column
        if average is not None:
            assert sum(tasks) / 7 == pytest.approx(average, abs=0.06)


def test_the_accuracy_that_table_1_has():
    """(acc, acc_norm) in percent, as Stability AI published them (github.com/Stability-AI/StableLM, evals/external/
    openlm-research-open_llama_3b_v2.json and evals/stablelm-base-alpha-3b-v2.json): no other choice is the paper's."""
    published = {
        "OpenLLaMA-3B-v2": {
            "arc_challenge": (33.87, 36.09),
            "arc_easy": (67.59, 63.51),
            "boolq": (65.69, None),
            "hellaswag": (52.23, 69.99),
            "openbookqa": (26.0, 37.6),
            "piqa": (76.66, 77.86),
            "winogrande": (62.9, None),
        },
        "StableLM-base-alpha-3B-v2": {
            "arc_challenge": (32.42, 35.07),
            "arc_easy": (67.26, 63.26),
            "boolq": (64.56, None),
            "hellaswag": (51.06, 68.58),
            "openbookqa": (26.4, 38.6),
            "piqa": (76.01, 78.02),
            "winogrande": (62.12, None),
        },
    }
    for model, values in published.items():
        for i, (task, metric) in enumerate(METRICS.items()):
            shown = values[task][("acc", "acc_norm").index(metric)]
            assert shown == pytest.approx(TABLE_1[model][i], abs=0.051), f"{metric} of {task}"


@pytest.mark.slow
def test_batches_are_found_automatically(loaded, data_dir, tmp_path):
    """Without --batch_size."""
    results = Results.open(tmp_path, "harness", loaded.identity, {}, 0)
    options = SimpleNamespace(batch_size=None, limit=None, seed=0)
    harness.run(loaded, harness.Arguments(tasks=["winogrande"], shots=[0], data_dir=data_dir), options, results)
    alone = harness.accuracies(harness.evaluate_task(language_model(loaded, 1), "winogrande", data_dir=data_dir))
    assert results.cells[0].measures == alone

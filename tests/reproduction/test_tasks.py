# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""What a study is trained on: split once and for all, every answer right, and the same bytes every time."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import load_from_disk

from diff_transformer import cl100k_tokenizer
from diff_transformer.evaluation.recall import keys_and_values
from diff_transformer.reproduction import tasks
from diff_transformer.reproduction.tasks import python_sources, write_task
from diff_transformer.training.corpus import CorpusArguments
from diff_transformer.training.data import load_rows

LENGTH = 48
HELD_OUT = 3
TOKENIZER = cl100k_tokenizer(vocab_size=1024)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A Python standard library of 30 modules, each of one word."""
    root = tmp_path / "stdlib"
    for i in range(30):
        write(root / ("pkg" if i % 2 else ".") / f"m{i}.py", i)
    monkeypatch.setattr(tasks.sysconfig, "get_paths", lambda *args, **kwargs: {"stdlib": str(root)})
    return root


def write(file: Path, word: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"w{word:03d} = 0\n" * 12)


def words(text: str) -> set[str]:
    return set(re.findall(r"w\d{3}(?= =)", text))


def sides(held_out: int = HELD_OUT, **kwargs) -> dict[str, str]:
    """The side of each word."""
    texts, _ = python_sources("stdlib", held_out, **kwargs)
    found = [(word, side) for side, rows in texts.items() for row in rows for word in words(row["text"])]
    assert len(dict(found)) == len(found), "a text is on two sides, or twice"
    return dict(found)


def rows_of(folder: Path, split: str) -> list[list[int]]:
    return [list(row) for row in load_from_disk(str(folder / split))[:]["input_ids"]]


# ------------------------------------------------------------------------------------------------------------- text


def path_of(word: int) -> str:
    return f"{'pkg/' if word % 2 else ''}m{word}.py"


def digest_of(path: str) -> bytes:
    """Files are read in its order; its last byte is the side."""
    return hashlib.sha256(path.encode()).digest()


def side_of(path: str) -> str:
    return "validation" if digest_of(path)[-1] < 256 / HELD_OUT else "train"


def test_every_file_is_on_the_side_that_its_path_says(root):
    expected = {f"w{i:03d}": side_of(path_of(i)) for i in range(30)}
    assert 4 <= list(expected.values()).count("validation") <= 16, "no case to tell from another"
    assert sides() == expected


def test_one_of_held_out_files_is_held_out(root):
    for i in range(30, 330):
        write(root / f"a{i}.py", i)
    for held_out, least, most in ((3, 85, 135), (20, 6, 28)):
        assert least < list(sides(held_out).values()).count("validation") < most


def test_a_file_stays_on_its_side_when_others_come_and_go(root):
    before = sides()
    for i in range(30, 60):
        write(root / f"a{i}.py", i)
    (root / "m4.py").unlink()
    after = sides()
    assert len(after) == 59 and {word: after[word] for word in before if word != "w004"} == {
        word: side for word, side in before.items() if word != "w004"
    }


def test_texts_that_are_the_same_are_there_once(root):
    copies = {f"w{i:03d}": (path_of(i), f"copy{i}.py") for i in range(30)}
    for i in range(30):
        write(root / f"copy{i}.py", i)
    assert sides() == {word: side_of(min(paths, key=digest_of)) for word, paths in copies.items()}
    _, manifest = python_sources("stdlib", HELD_OUT)
    assert sum(manifest["files"].values()) == 30


def test_what_is_not_text_is_left_out(root, monkeypatch):
    before = sides()
    for i, name in enumerate(["test/a", "pkg/tests/a", "idle_test/a", "site-packages/a", "encodings/a"], 100):
        write(root / f"{name}.py", i)
    write(root / "data.txt", 110)
    monkeypatch.setattr(tasks, "_LARGEST_FILE", 1000)
    (root / "generated.py").write_text("w120 = 0\n" * 200)
    assert sides() == before


def test_bytes_that_are_no_unicode_are_replaced(root):
    (root / "latin.py").write_bytes(b"name = '\xe9'\r\n")
    texts, _ = python_sources("stdlib", HELD_OUT)
    assert "name = '�'\r\n" in {row["text"] for rows in texts.values() for row in rows}


def test_max_megabytes_ends_the_reading(root):
    """A file has 108 bytes; the first that is beyond is the last."""
    assert len(sides(max_megabytes=0.001)) == 10  # 1080 bytes
    assert sides(max_megabytes=0.001).items() <= sides().items()


def test_the_manifest_says_what_it_is(root):
    texts, manifest = python_sources("stdlib", HELD_OUT)
    assert manifest["files"] == {side: len(rows) for side, rows in texts.items()}
    assert manifest["bytes"] == 30 * 108 and manifest["source"] == "stdlib"
    sources = {row["source"] for rows in texts.values() for row in rows}
    assert sources == {"pkg", *(f"m{i}" for i in range(0, 30, 2))}, "a source is a package, or a module"
    assert manifest["packages"] == sorted(sources)
    write(root / "m0.py", 500)
    assert python_sources("stdlib", HELD_OUT)[1]["sha256"] != manifest["sha256"]


def test_packages_are_all_distributions_but_this_one(tmp_path, monkeypatch):
    def distribution(name: str, version: str, *files: str) -> SimpleNamespace:
        paths = [tmp_path / name / file for file in files]
        for i, path in enumerate(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {i}\n")
        located = [path.relative_to(tmp_path) for path in paths]
        return SimpleNamespace(metadata={"Name": name}, version=version, files=[Located(path) for path in located])

    class Located(type(Path())):
        def locate(self):
            return tmp_path / self

    found = [
        distribution("b", "2.0", "one.py", "two.txt", "tests/three.py"),
        distribution("a", "1.0", *(f"{i}.py" for i in range(20))),
        distribution("diff_transformer", "0.1.0", "model.py"),
        SimpleNamespace(metadata={"Name": "none"}, version="1", files=None),
        SimpleNamespace(metadata={"Name": "gone"}, version="1", files=[Located("gone/x.py")]),
    ]
    monkeypatch.setattr(tasks, "distributions", lambda: found)
    texts, manifest = python_sources("packages", HELD_OUT)
    rows = texts["train"] + texts["validation"]
    assert sorted(row["text"].strip() for row in rows) == sorted(["b 0", *(f"a {i}" for i in range(20))])
    assert manifest["packages"] == ["a 1.0", "b 2.0"] and {row["source"] for row in rows} == {"a 1.0", "b 2.0"}


def test_text_is_read_by_pretraining(root, tmp_path):
    write_task({"kind": "text", "held_out": HELD_OUT}, tmp_path / "data", TOKENIZER, LENGTH)
    args = CorpusArguments(
        dataset=str(tmp_path / "data" / "train.jsonl"),
        validation_dataset=str(tmp_path / "data" / "validation.jsonl"),
        sequence_length=LENGTH,
    )
    train, validation, _ = load_rows(args, TOKENIZER)
    text = {"train": TOKENIZER.decode(sum(train[:]["input_ids"], []))}
    text["validation"] = TOKENIZER.decode(sum(validation[:]["input_ids"], []))
    found = {word: side for side in text for word in words(text[side])}
    assert found == sides() and not words(text["train"]) & words(text["validation"])


# ----------------------------------------------------------------------------------------------------------- recall


def recall(folder: Path, **kwargs) -> Path:
    defaults = {"kind": "recall", "rows": 60, "validation_rows": 30, "pairs": [2, 7], "vocabularies": [8, 32]}
    write_task({**defaults, **kwargs}, folder, TOKENIZER, LENGTH)
    return folder


def pairs_of(row: list[int]) -> int:
    """How many keys come before the first that was there."""
    keys = row[0::2]
    return next(i for i in range(len(keys)) if keys[i] in keys[:i])


def test_every_value_is_that_of_its_key(tmp_path):
    folder, seen = recall(tmp_path / "data"), set()
    keys, values = keys_and_values(TOKENIZER, 32)
    few_keys, few_values = keys_and_values(TOKENIZER, 8)
    assert set(few_keys) < set(keys) and set(few_values) < set(values), "the vocabularies are not nested"
    for split, number in {"train": 60, "validation": 30}.items():
        rows = rows_of(folder, split)
        assert len(rows) == number and {len(row) for row in rows} == {LENGTH}
        assert len(set(map(tuple, rows))) == number, "rows are the same"
        for row in rows:
            pairs = pairs_of(row)
            value_of = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
            assert len(value_of) == pairs, "a key has two values"
            assert all(value_of[key] == value for key, value in zip(row[0::2], row[1::2], strict=True))
            assert set(row[2 * pairs : 4 * pairs : 2]) == set(value_of), "a key is not asked for once at first"
            assert value_of.keys() <= set(keys) and set(value_of.values()) <= set(values)
            few = value_of.keys() <= set(few_keys) and set(value_of.values()) <= set(few_values)
            seen.add((pairs, few))
    assert seen == {(2, True), (2, False), (7, False)}, "seven pairs need more keys than the small vocabulary has"
    assert not set(map(tuple, rows_of(folder, "train"))) & set(map(tuple, rows_of(folder, "validation")))


def test_rows_in_order_are_for_training_only(tmp_path):
    def share(split: str, in_order: float) -> float:
        rows = rows_of(recall(tmp_path / f"{split}{in_order}", in_order=in_order, pairs=[7]), split)
        for row in rows:
            assert {len(row), pairs_of(row)} == {LENGTH, 7}
        return sum(row == (row[:14] * LENGTH)[:LENGTH] for row in rows) / len(rows)

    assert (share("train", 0.0), share("train", 1.0), share("validation", 1.0)) == (0, 1, 0)
    assert 0.2 < share("train", 0.5) < 0.8


def test_rows_of_recall_are_read_by_pretraining(tmp_path):
    folder = recall(tmp_path / "data")
    paths = {"dataset": str(folder / "train"), "validation_dataset": str(folder / "validation")}
    train, validation, _ = load_rows(CorpusArguments(**paths, sequence_length=LENGTH), TOKENIZER)
    assert train[:]["input_ids"] == rows_of(folder, "train")
    assert validation[:]["input_ids"] == rows_of(folder, "validation")


# ---------------------------------------------------------------------------------------------------------- needles


def needles(folder: Path, **kwargs) -> Path:
    defaults = {"kind": "needles", "rows": 30, "validation_rows": 20, "needles": [1, 4], "queries": [3, 6]}
    write_task({**defaults, "held_out": HELD_OUT, **kwargs}, folder, TOKENIZER, 80)
    return folder


def answers_of(row: list[int]) -> list[tuple[str, str]]:
    """The questions with their answers at the end of a row, of three tokens each."""
    found = []
    while (match := re.fullmatch(r"\n([A-Z])(\d+)", TOKENIZER.decode(row[-3:]))) and row:
        found.insert(0, match.groups())
        row = row[:-3]
    return found


def test_every_answer_is_in_the_filler_and_each_needle_is_asked_for(root, tmp_path):
    folder, seen = needles(tmp_path / "data"), set()
    for split, number in {"train": 30, "validation": 20}.items():
        rows = rows_of(folder, split)
        assert len(rows) == number and {len(row) for row in rows} == {80}
        for row in rows:
            answers = answers_of(row)
            context = TOKENIZER.decode(row[: -3 * len(answers)])
            hidden = re.findall(r"\n([A-Z])(\d+)\n", context)
            assert set(answers) <= set(hidden), "an answer is wrong"
            assert len({number for _, number in hidden}) == len(hidden) == len({name for name, _ in hidden})
            first = answers[: len(hidden)]
            assert len(set(first)) == len(first), "a needle is asked for again before all were"
            seen.add((len(hidden), len(answers)))
    assert seen == {(1, 3), (1, 6), (4, 3), (4, 6)}


def test_the_needle_asked_for_first_is_anywhere(root, tmp_path):
    rows = rows_of(needles(tmp_path / "data", rows=80, needles=[4]), "train")
    places = []
    for row in rows:
        answers = answers_of(row)
        context = TOKENIZER.decode(row[: -3 * len(answers)])
        places.append([name for name, _ in re.findall(r"\n([A-Z])(\d+)\n", context)].index(answers[0][0]))
    assert set(places) == {0, 1, 2, 3}, "its place among the needles tells it"


def test_rows_in_order_ask_in_the_order_of_the_text_again_and_again(root, tmp_path):
    folder = needles(tmp_path / "data", rows=40, needles=[4], in_order=1.0)
    for row in rows_of(folder, "train"):
        answers = answers_of(row)
        hidden = re.findall(r"\n([A-Z])(\d+)\n", TOKENIZER.decode(row[: -3 * len(answers)]))
        begin = hidden.index(answers[0])
        assert answers == [hidden[(begin + i) % 4] for i in range(len(answers))]
    validation = [answers_of(row) for row in rows_of(folder, "validation")]
    contexts = [TOKENIZER.decode(row[:-3]) for row in rows_of(folder, "validation")]
    in_order = [[c.index(f"\n{a}{b}\n") for a, b in asked[:3]] for asked, c in zip(validation, contexts, strict=True)]
    assert any(places != sorted(places) for places in in_order), "what is validated is in order, too"


def test_questions_and_answers_are_learnt_and_the_filler_is_not(root, tmp_path):
    for row in load_from_disk(str(needles(tmp_path / "data") / "train")):
        learnt = 3 * len(answers_of(row["input_ids"]))
        assert row["labels"] == [-100] * (80 - learnt) + row["input_ids"][-learnt:]


def test_the_filler_of_validation_was_not_trained_on(root, tmp_path):
    folder, found = needles(tmp_path / "data"), sides()
    held_out = {word for word, side in found.items() if side == "validation"}
    trained = set().union(*(words(TOKENIZER.decode(row)) for row in rows_of(folder, "train")))
    validated = set().union(*(words(TOKENIZER.decode(row)) for row in rows_of(folder, "validation")))
    assert trained <= found.keys() - held_out and validated <= held_out and trained and validated
    haystack = (folder / "haystack.jsonl").read_text().splitlines()
    assert set().union(*(words(json.loads(line)["text"]) for line in haystack)) == held_out


# ------------------------------------------------------------------------------------------------------------ folder

TASKS = {
    "text": {"held_out": HELD_OUT},
    "recall": {"rows": 6, "validation_rows": 3, "pairs": [2, 4], "vocabularies": [16], "in_order": 0.5},
    "needles": {"rows": 6, "validation_rows": 3, "needles": [1, 2], "queries": [3], "held_out": HELD_OUT},
}


@pytest.mark.parametrize("kind", TASKS)
def test_the_same_arguments_are_the_same_bytes(root, tmp_path, kind):
    def written(folder: Path, **kwargs) -> dict[str, bytes]:
        write_task({"kind": kind, **TASKS[kind], **kwargs}, folder, TOKENIZER, LENGTH)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert set(TASKS) == set(tasks.TASKS)
    first = written(tmp_path / "first")
    assert written(tmp_path / "second") == first
    assert written(tmp_path / "first") == first, "a folder that was there is replaced"
    manifest = json.loads(first["manifest.json"])
    assert manifest["task"] == {"kind": kind, **TASKS[kind]} and manifest["sequence_length"] == LENGTH
    if kind != "text":
        assert manifest["rows"] == {"train": 6, "validation": 3}
    changed = {"max_megabytes": 0.001} if kind == "text" else {"rows": 7}
    assert json.loads(written(tmp_path / "third", **changed)["manifest.json"])["sha256"] != manifest["sha256"]
    assert not list(tmp_path.glob(".*")), "temporary folders were left"


@pytest.mark.parametrize("kind", ["text", "needles"])
def test_a_machine_without_sources_is_told_so(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tasks.sysconfig, "get_paths", lambda *args, **kwargs: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match=r"\(stdlib\) are 0 files: too few"):
        write_task({"kind": kind, **TASKS[kind]}, tmp_path / "data", TOKENIZER, LENGTH)
    with pytest.raises(ValueError, match="Got the source 'books'; there are stdlib, packages"):
        write_task({"kind": kind, **TASKS[kind], "source": "books"}, tmp_path / "data", TOKENIZER, LENGTH)
    assert not (tmp_path / "data").exists() and not list(tmp_path.glob(".*")), "half a folder was left"


def test_needles_and_pairs_need_room(root, tmp_path):
    with pytest.raises(ValueError, match="no room for a haystack"):
        write_task({"kind": "needles", **TASKS["needles"], "queries": [16]}, tmp_path / "data", TOKENIZER, LENGTH)
    with pytest.raises(ValueError, match="Got 4 pairs in 9 tokens"):
        write_task({"kind": "recall", **TASKS["recall"], "pairs": [4]}, tmp_path / "data", TOKENIZER, 9)
    with pytest.raises(ValueError, match="Got 9 pairs in 48 tokens; needed are 1 <= pairs <= 8 keys"):
        write_task({"kind": "recall", **TASKS["recall"], "pairs": [9]}, tmp_path / "data", TOKENIZER, LENGTH)

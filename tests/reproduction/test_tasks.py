# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The training data of a study: a fixed split, correct answers, and the same bytes every time."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import load_from_disk

from diff_transformer import cl100k_tokenizer, text_data
from diff_transformer.evaluation.protocols.recall import keys_and_values
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
    """A Python standard library of 30 modules, each with one word."""
    root = tmp_path / "stdlib"
    for i in range(30):
        write(root / ("pkg" if i % 2 else ".") / f"m{i}.py", i)
    monkeypatch.setattr(text_data.sysconfig, "get_paths", lambda *args, **kwargs: {"stdlib": str(root)})
    return root


def write(file: Path, word: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"w{word:03d} = 0\n" * 12)


def words(text: str) -> set[str]:
    return set(re.findall(r"w\d{3}(?= =)", text))


def split_of_words(held_out: int = HELD_OUT, **kwargs) -> dict[str, str]:
    """The split that each word is in."""
    texts, _ = python_sources("stdlib", held_out, **kwargs)
    found = [(word, split) for split, rows in texts.items() for row in rows for word in words(row["text"])]
    assert len(dict(found)) == len(found), "a text occurs twice"
    return dict(found)


def rows_of(folder: Path, split: str) -> list[list[int]]:
    return [list(row) for row in load_from_disk(str(folder / split))[:]["input_ids"]]


# ------------------------------------------------------------------------------------------------------------- text


def path_of(word: int) -> str:
    return f"{'pkg/' if word % 2 else ''}m{word}.py"


def digest_of(path: str) -> bytes:
    """Files are read in the order of their digests; the last byte decides the split."""
    return hashlib.sha256(path.encode()).digest()


def split_of(path: str) -> str:
    return "validation" if digest_of(path)[-1] < 256 / HELD_OUT else "train"


def test_the_path_of_a_file_decides_its_split(root):
    expected = {f"w{i:03d}": split_of(path_of(i)) for i in range(30)}
    assert 4 <= list(expected.values()).count("validation") <= 16, "too few files in one of the splits"
    assert split_of_words() == expected


def test_one_file_in_held_out_is_held_out(root):
    for i in range(30, 330):
        write(root / f"a{i}.py", i)
    for held_out, least, most in ((3, 85, 135), (20, 6, 28)):
        assert least < list(split_of_words(held_out).values()).count("validation") < most


def test_a_file_stays_in_its_split_when_others_are_added_or_removed(root):
    before = split_of_words()
    for i in range(30, 60):
        write(root / f"a{i}.py", i)
    (root / "m4.py").unlink()
    after = split_of_words()
    del before["w004"]
    assert len(after) == 59 and before.items() <= after.items()


def test_of_identical_files_one_is_kept(root):
    copies = {f"w{i:03d}": (path_of(i), f"copy{i}.py") for i in range(30)}
    for i in range(30):
        write(root / f"copy{i}.py", i)
    assert split_of_words() == {word: split_of(min(paths, key=digest_of)) for word, paths in copies.items()}
    _, manifest = python_sources("stdlib", HELD_OUT)
    assert sum(manifest["files"].values()) == 30


def test_tests_tables_and_generated_files_are_left_out(root, monkeypatch):
    before = split_of_words()
    for i, name in enumerate(["test/a", "pkg/tests/a", "idle_test/a", "site-packages/a", "encodings/a"], 100):
        write(root / f"{name}.py", i)
    write(root / "data.txt", 110)
    monkeypatch.setattr(tasks, "_LARGEST_FILE", 1000)
    (root / "generated.py").write_text("w120 = 0\n" * 200)
    assert split_of_words() == before


def test_bytes_that_are_not_unicode_are_replaced(root):
    (root / "latin.py").write_bytes(b"name = '\xe9'\r\n")
    texts, _ = python_sources("stdlib", HELD_OUT)
    assert "name = '�'\r\n" in {row["text"] for rows in texts.values() for row in rows}


def test_max_megabytes_limits_the_files(root):
    """A file has 108 bytes, and the file that crosses the limit is kept."""
    assert len(split_of_words(max_megabytes=0.001)) == 10  # 1080 bytes
    assert split_of_words(max_megabytes=0.001).items() <= split_of_words().items()


def test_the_manifest_describes_the_data(root):
    texts, manifest = python_sources("stdlib", HELD_OUT)
    assert manifest["files"] == {split: len(rows) for split, rows in texts.items()}
    assert manifest["bytes"] == 30 * 108 and manifest["source"] == "stdlib"
    sources = {row["source"] for rows in texts.values() for row in rows}
    assert sources == {"pkg", *(f"m{i}" for i in range(0, 30, 2))}, "a source is a package or a module"
    assert manifest["packages"] == sorted(sources)
    write(root / "m0.py", 500)
    assert python_sources("stdlib", HELD_OUT)[1]["sha256"] != manifest["sha256"]


def test_packages_are_all_distributions_except_this_one(tmp_path, monkeypatch):
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


@pytest.mark.oldest
def test_text_is_read_by_pretraining(root, tmp_path):
    write_task({"kind": "text", "held_out": HELD_OUT}, tmp_path / "data", TOKENIZER, LENGTH)
    train, validation = (str(tmp_path / "data" / f"{split}.jsonl") for split in ("train", "validation"))
    args = CorpusArguments(dataset=train, validation_dataset=validation, sequence_length=LENGTH)
    splits = dict(zip(("train", "validation"), load_rows(args, TOKENIZER)[:2], strict=True))
    text = {split: TOKENIZER.decode(sum(rows[:]["input_ids"], [])) for split, rows in splits.items()}
    found = {word: split for split in text for word in words(text[split])}
    assert found == split_of_words() and not words(text["train"]) & words(text["validation"])


# ----------------------------------------------------------------------------------------------------------- recall


def recall(folder: Path, **kwargs) -> Path:
    defaults = {"kind": "recall", "rows": 60, "validation_rows": 30, "pairs": [2, 7], "vocabularies": [8, 32]}
    write_task({**defaults, **kwargs}, folder, TOKENIZER, LENGTH)
    return folder


def pairs_of(row: list[int]) -> int:
    """The number of keys before the first one that is repeated."""
    keys = row[0::2]
    return next(i for i in range(len(keys)) if keys[i] in keys[:i])


def test_every_key_has_its_value(tmp_path):
    folder, seen = recall(tmp_path / "data"), set()
    keys, values = keys_and_values(TOKENIZER, 32)
    few_keys, few_values = keys_and_values(TOKENIZER, 8)
    assert set(few_keys) < set(keys) and set(few_values) < set(values), "the vocabularies are not nested"
    for split, number in {"train": 60, "validation": 30}.items():
        rows = rows_of(folder, split)
        assert len(rows) == number and {len(row) for row in rows} == {LENGTH}
        assert len(set(map(tuple, rows))) == number, "identical rows"
        for row in rows:
            pairs = pairs_of(row)
            value_of = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
            assert len(value_of) == pairs, "a key has two values"
            assert all(value_of[key] == value for key, value in zip(row[0::2], row[1::2], strict=True))
            assert set(row[2 * pairs : 4 * pairs : 2]) == set(value_of), "the first queries do not include every key"
            assert value_of.keys() <= set(keys) and set(value_of.values()) <= set(values)
            few = value_of.keys() <= set(few_keys) and set(value_of.values()) <= set(few_values)
            seen.add((pairs, few))
    assert seen == {(2, True), (2, False), (7, False)}, "seven pairs need more keys than the small vocabulary has"
    assert not set(map(tuple, rows_of(folder, "train"))) & set(map(tuple, rows_of(folder, "validation")))


def test_only_training_has_rows_in_order(tmp_path):
    def share(split: str, in_order: float) -> float:
        rows = rows_of(recall(tmp_path / f"{split}{in_order}", in_order=in_order, pairs=[7]), split)
        for row in rows:
            assert {len(row), pairs_of(row)} == {LENGTH, 7}
        return sum(row == (row[:14] * LENGTH)[:LENGTH] for row in rows) / len(rows)

    assert (share("train", 0.0), share("train", 1.0), share("validation", 1.0)) == (0, 1, 0)
    assert 0.2 < share("train", 0.5) < 0.8


@pytest.mark.oldest
def test_rows_of_recall_are_read_by_pretraining(tmp_path):
    folder = recall(tmp_path / "data")
    paths = {"dataset": str(folder / "train"), "validation_dataset": str(folder / "validation")}
    train, validation, _ = load_rows(CorpusArguments(**paths, sequence_length=LENGTH), TOKENIZER)
    for split, rows in {"train": train, "validation": validation}.items():
        assert rows[:]["input_ids"] == rows_of(folder, split)


# ---------------------------------------------------------------------------------------------------------- needles


def needles(folder: Path, **kwargs) -> Path:
    defaults = {"kind": "needles", "rows": 30, "validation_rows": 20, "needles": [1, 4], "queries": [3, 6]}
    write_task({**defaults, "held_out": HELD_OUT, **kwargs}, folder, TOKENIZER, 80)
    return folder


def answers_of(row: list[int]) -> list[tuple[str, str]]:
    """The questions and answers at the end of a row; each pair takes three tokens."""
    found = []
    while (match := re.fullmatch(r"\n([A-Z])(\d+)", TOKENIZER.decode(row[-3:]))) and row:
        found.insert(0, match.groups())
        row = row[:-3]
    return found


def test_every_answer_is_in_the_filler_and_every_needle_is_queried(root, tmp_path):
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
            assert len(set(first)) == len(first), "a needle is queried again before all of them were"
            seen.add((len(hidden), len(answers)))
    assert seen == {(1, 3), (1, 6), (4, 3), (4, 6)}


def test_the_needle_that_is_queried_first_is_at_any_place(root, tmp_path):
    rows = rows_of(needles(tmp_path / "data", rows=80, needles=[4]), "train")
    places = []
    for row in rows:
        answers = answers_of(row)
        context = TOKENIZER.decode(row[: -3 * len(answers)])
        places.append([name for name, _ in re.findall(r"\n([A-Z])(\d+)\n", context)].index(answers[0][0]))
    assert set(places) == {0, 1, 2, 3}, "its place gives it away"


def test_rows_in_order_repeat_the_order_of_the_text(root, tmp_path):
    folder = needles(tmp_path / "data", rows=40, needles=[4], in_order=1.0)
    for row in rows_of(folder, "train"):
        answers = answers_of(row)
        hidden = re.findall(r"\n([A-Z])(\d+)\n", TOKENIZER.decode(row[: -3 * len(answers)]))
        begin = hidden.index(answers[0])
        assert answers == [hidden[(begin + i) % 4] for i in range(len(answers))]
    validation = [answers_of(row) for row in rows_of(folder, "validation")]
    contexts = [TOKENIZER.decode(row[:-3]) for row in rows_of(folder, "validation")]
    in_order = [[c.index(f"\n{a}{b}\n") for a, b in asked[:3]] for asked, c in zip(validation, contexts, strict=True)]
    assert any(places != sorted(places) for places in in_order), "validation is in order, too"


def test_the_loss_is_on_questions_and_answers(root, tmp_path):
    for row in load_from_disk(str(needles(tmp_path / "data") / "train")):
        learnt = 3 * len(answers_of(row["input_ids"]))
        assert row["labels"] == [-100] * (80 - learnt) + row["input_ids"][-learnt:]


def test_the_filler_of_validation_was_not_trained_on(root, tmp_path):
    folder, found = needles(tmp_path / "data"), split_of_words()
    held_out = {word for word, split in found.items() if split == "validation"}
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
def test_the_same_arguments_give_the_same_bytes(root, tmp_path, kind):
    def written(folder: Path, **kwargs) -> dict[str, bytes]:
        write_task({"kind": kind, **TASKS[kind], **kwargs}, folder, TOKENIZER, LENGTH)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert set(TASKS) == set(tasks.TASKS)
    first = written(tmp_path / "first")
    assert written(tmp_path / "second") == first
    assert written(tmp_path / "first") == first, "an existing folder is replaced"
    manifest = json.loads(first["manifest.json"])
    assert manifest["task"] == {"kind": kind, **TASKS[kind]} and manifest["sequence_length"] == LENGTH
    if kind != "text":
        assert manifest["rows"] == {"train": 6, "validation": 3}
    changed = {"max_megabytes": 0.001} if kind == "text" else {"rows": 7}
    assert json.loads(written(tmp_path / "third", **changed)["manifest.json"])["sha256"] != manifest["sha256"]
    assert not list(tmp_path.glob(".*")), "temporary folders remain"


MISTAKES = [  # the task, its length in tokens, the message
    ({"kind": "text", **TASKS["text"], "source": "books"}, LENGTH, "Input should be 'stdlib' or 'packages'"),
    ({"kind": "needles", **TASKS["needles"], "queries": [16]}, LENGTH, "no room for a haystack"),
    ({"kind": "recall", **TASKS["recall"], "pairs": [4]}, 9, "4 pairs in 9 tokens"),
    ({"kind": "recall", **TASKS["recall"], "pairs": [9]}, LENGTH, "9 pairs in 48 tokens; 1 <= pairs <= 8 keys"),
]


def test_mistakes_are_named_and_leave_nothing(root, tmp_path, monkeypatch):
    for task, length, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            write_task(task, tmp_path / "data", TOKENIZER, length)
    monkeypatch.setattr(text_data.sysconfig, "get_paths", lambda *args, **kwargs: {"stdlib": str(tmp_path / "none")})
    for kind in ("text", "needles"):
        with pytest.raises(FileNotFoundError, match=r"Found 0 Python source files \(stdlib\)"):
            write_task({"kind": kind, **TASKS[kind]}, tmp_path / "data", TOKENIZER, LENGTH)
    assert not (tmp_path / "data").exists() and not list(tmp_path.glob(".*")), "an incomplete folder remains"

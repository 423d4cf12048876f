# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Corpora as rows: what is read, how it is packed, what is left out, and what a resumed run sees."""

import bz2
import gzip
import json
import lzma
import os
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer

from diff_transformer import DiffTransformerForCausalLM, cl100k_tokenizer, text_data
from diff_transformer.training import data
from diff_transformer.training.corpus import CorpusArguments
from diff_transformer.training.data import CausalCollator, ReportPasses, load_rows, pack, tokenize

LENGTH = 16
TEXTS = [" ".join(str(i * j) for j in range(1, 2 + i % 7)) for i in range(60)]
pytestmark = [
    # Some tests need more workers than shards or cores
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # Python 3.12 and later, of DataLoader's own workers
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    # datasets leaves the .csv and .json files open that it streams
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def line_of(texts, tokenizer) -> list[int]:
    """The tokens of all documents, one after another: what the rows are cut from."""
    return [i for text in texts for i in [*tokenizer(text, split_special_tokens=True)["input_ids"], 512]]


def cut(line: list[int], length: int = LENGTH) -> list[list[int]]:
    return [line[i : i + length] for i in range(0, len(line), length)]


def listed(rows) -> list[list[int]]:
    return [list(map(int, row["input_ids"])) for row in rows]


def pack_stream(documents: IterableDataset, tokenizer, **options) -> IterableDataset:
    return data._pack_stream(tokenize(documents, tokenizer, **options), LENGTH, [0] * documents.num_shards)


def write_lines(file: Path, rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.fixture
def corpus(tmp_path) -> Path:
    """TEXTS in three files of 20."""
    for i in range(3):
        write_lines(tmp_path / f"corpus/{i}.jsonl", [{"text": text} for text in TEXTS[20 * i : 20 * (i + 1)]])
    return tmp_path / "corpus"


def arguments(dataset, **kwargs) -> CorpusArguments:
    return CorpusArguments(dataset=str(dataset), **{"sequence_length": LENGTH, **kwargs})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "json", "parquet", "csv", "txt", "saved", "saved splits", "hub"]
)
def test_load_documents_reads_nested_columns_of_every_kind_of_file(tmp_path, kind, streaming):
    sources = [f"s{i % 2}" for i in range(6)]
    texts = [{"body": {"text": text}} for text in TEXTS[:6]]
    rows = [{"doc": x, "text": "not this", "meta": {"name": y}} for x, y in zip(texts, sources, strict=True)]
    folder, options = tmp_path / "corpus", {"text_column": "doc.body.text", "source_column": "meta.name"}
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "state.csv").write_text("not the corpus")
    table = Dataset.from_list(rows)
    if kind == "txt":
        options = {}
        for i, text in enumerate(TEXTS[:6]):
            (folder / f"{i}.txt").write_text(text)
    elif kind == "csv":
        table.flatten().flatten().to_csv(folder / "a.csv")
    elif kind == "parquet":
        for i in range(2):
            table.shard(2, i, contiguous=True).to_parquet(folder / f"{i}.parquet")
    elif kind == "saved":
        table.save_to_disk(folder)
    elif kind == "saved splits":
        options["dataset_split"] = "big"
        DatasetDict({"small": table.select([0]), "big": table}).save_to_disk(folder)
    elif kind == "hub":  # a copy of a repository, opened as one
        options |= {"dataset_config": "default", "dataset_split": "test"}
        write_lines(folder / "test.jsonl", rows)
    else:
        for name, half in (("a", rows[:3]), ("b", rows[3:])):
            file = write_lines(folder / f"{name}.{kind}", half)
            if kind == "jsonl.gz":
                file.write_bytes(gzip.compress(file.read_bytes()))

    documents = arguments(folder, streaming=streaming, **options).load_documents()
    assert isinstance(documents, IterableDataset) == streaming
    found = [{name: value for name, value in row.items() if name != "fault"} for row in documents]
    expected = [{"text": text, "source": source} for text, source in zip(TEXTS, sources, strict=False)]
    assert found == ([{"text": text} for text in TEXTS[:6]] if kind == "txt" else expected)


def test_load_documents_rejects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("corpus/a.jsonl"), [{"text": "a", "meta": {"name": "s"}}])
    write_lines(Path("mixed/a.jsonl"), [{"text": "a"}])
    Path("mixed/a.csv").write_text("text\na\n")
    for name in ("train/chunk1/a.jsonl", "validation/a.jsonl", "test/a.jsonl"):
        write_lines(Path("splits") / name, [{"text": "a"}])
    for name in ("train-00000-of-00001", "test"):
        write_lines(Path("hub") / f"{name}.jsonl", [{"text": name}])
    Path("nothing").mkdir()
    Path("zst").mkdir()
    Path("zst/a.jsonl.zst").write_bytes(b"")
    rows = Dataset.from_list([{"text": "a"}])
    DatasetDict({"train": rows, "other": rows}).save_to_disk("saved")
    monkeypatch.setattr(text_data, "find_spec", lambda name: None)
    for file, options, message in [
        ("", {}, "Got no dataset"),
        ("missing", {}, "'missing', configuration None, split 'train' cannot be opened"),
        ("corpus", {"text_column": "txt"}, "no column 'txt'; it has meta, meta.name, text. Name one with --text_c"),
        ("corpus", {"source_column": "meta.nam"}, "no column 'meta.nam'; it has meta, meta.name, text"),
        ("corpus", {"dataset_split": "test"}, "split 'test' of the files in"),
        ("mixed", {}, "holds .csv and .jsonl to read"),
        ("splits", {}, "^splits holds the splits test, train, validation. Name the file or folder of one, or"),
        ("hub", {}, "^hub holds the splits test, train. .*--dataset_config default"),
        ("nothing", {}, "holds nothing to read"),
        ("zst", {}, "pip install zstandard"),
        ("saved", {"dataset_split": "test"}, "splits train, other, not 'test'"),
        ("saved", {"text_column": "txt"}, "no column 'txt'; it has text"),
        ("corpus", {"dataset_config": "en"}, "Available: \\['default'\\]"),
        ("corpus", {"dataset_config": "default", "dataset_split": "test"}, "split 'test' cannot be .*train"),
    ]:
        for streaming in (False, True):
            with pytest.raises(ValueError, match=message):
                arguments(file, streaming=streaming, **options).load_documents()
    for folder in ("splits", "hub"):  # as the message says
        assert len(arguments(folder, dataset_config="default").load_documents()) == 1
    assert len(arguments("splits/train").load_documents()) == 1
    Dataset.from_dict({"text": list("abcdef")}).save_to_disk("one")
    for folder, split, number in (("one", "train[:50%]", 3), ("saved", "train+other", 2), ("saved", "other[:0]", 0)):
        assert len(arguments(folder, dataset_split=split).load_documents()) == number


def test_replaced_file_is_read_again(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    assert arguments(file).load_documents()[:]["text"] == ["first"]
    write_lines(file, [{"text": "other"}])
    os.utime(file, ns=(0, 0))  # also within the clock's resolution
    assert arguments(file).load_documents()[:]["text"] == ["other"]


@pytest.mark.parametrize("num_proc, at_once", [(None, 256), (2, 7), (None, 1)])
def test_pack_cuts_one_line_of_tokens_whatever_num_proc_is(tokenizer, monkeypatch, num_proc, at_once):
    monkeypatch.setattr(data, "_DOCUMENTS_AT_ONCE", at_once)
    rows = pack(Dataset.from_dict({"text": TEXTS}), tokenizer, LENGTH, num_proc=num_proc)
    assert listed(rows) == cut(line_of(TEXTS, tokenizer)), "tokens were lost, repeated or moved"
    assert rows["row"][:] == list(range(len(rows)))
    assert rows.features["input_ids"].feature.dtype == "int32"
    assert not list(Path(datasets.config.HF_DATASETS_CACHE).rglob("tmp*")), "temporary files were left"


def test_pack_reads_its_own_cache_the_second_time(tokenizer, monkeypatch):
    documents = Dataset.from_dict({"text": TEXTS})
    rows = pack(documents, tokenizer, LENGTH)

    def files():
        return {file: file.stat().st_mtime_ns for file in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")}

    before = files()
    assert len(before) == 2
    monkeypatch.setattr(data, "_encode", None)  # must not be called
    again = cl100k_tokenizer(vocab_size=512)
    again("text of", padding=True)
    assert listed(pack(documents, again, LENGTH, num_proc=2)) == listed(rows)
    assert files() == before
    monkeypatch.undo()
    first = listed(rows)
    for more in ((tokenizer, LENGTH + 1), (cl100k_tokenizer(vocab_size=300), LENGTH)):
        assert listed(pack(documents, *more)) != first, "another cache was taken"
    assert listed(pack(documents, tokenizer, LENGTH, max_document_characters=10)) != first
    assert listed(pack(Dataset.from_dict({"text": TEXTS[1:]}), tokenizer, LENGTH)) != first


def test_tokenize_reads_special_tokens_as_characters_and_ends_with_one(tokenizer):
    rows = pack(Dataset.from_dict({"text": ["a<|endoftext|>b"]}), tokenizer, 64)
    ids = rows[0]["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "a<|endoftext|>b"
    endless = cl100k_tokenizer(vocab_size=512)
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        pack(Dataset.from_dict({"text": TEXTS}), endless, LENGTH)


def test_pack_of_a_stream_is_one_line_a_shard_whatever_the_workers(tokenizer):
    rows = pack_stream(Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(3), tokenizer)
    expected = [row for i in range(3) for row in cut(line_of(TEXTS[i * 20 : (i + 1) * 20], tokenizer))]
    assert listed(rows) == expected
    assert listed(rows) == expected, "the second pass differs"
    for num_workers in (1, 2, 5):
        loader = DataLoader(rows, batch_size=None, num_workers=num_workers)
        assert sorted(listed(loader)) == sorted(expected), "rows were lost or repeated between workers"


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_rows_are_held_out_and_the_same_every_time(corpus, tokenizer, streaming):
    args = arguments(corpus, streaming=streaming, validation_rows=4, shuffle_buffer=8)
    train, validation = load_rows(args, tokenizer)
    whole = listed(load_rows(arguments(corpus, streaming=streaming), tokenizer)[0])
    assert len(validation) == 4 and isinstance(validation, Dataset)
    assert sorted(listed(train) + listed(validation)) == sorted(whole)
    assert listed(load_rows(args, tokenizer, seed=1)[1]) == listed(validation)
    if streaming:
        first = [cut(line_of(TEXTS[20 * i : 20 * (i + 1)], tokenizer)) for i in range(3)]
        assert listed(validation) == [*first[0][:2], *first[1][:2]]
        assert listed(train) != listed(load_rows(args, tokenizer, seed=1)[0]), "the seed does not shuffle"
    else:
        assert np.ptp(np.diff(validation["row"][:])) <= 1, "not spread evenly"
    with pytest.raises(ValueError, match="validation_rows=1000"):
        load_rows(arguments(corpus, streaming=streaming, validation_rows=1000), tokenizer)


def test_validation_rows_of_a_stream_open_few_shards_or_as_many_as_it_takes(tmp_path, tokenizer, monkeypatch):
    """200 files: the first two are one row each, and the others have enough."""
    for i in range(200):
        write_lines(tmp_path / f"corpus/{i:03d}.jsonl", [{"text": TEXTS[6]}] * (1 if i < 2 else 20))
    opened, read = [], data._counted
    monkeypatch.setattr(data, "_counted", lambda *args: opened.append(args) or read(*args))
    args = arguments(tmp_path / "corpus", streaming=True, validation_rows=64, shuffle_buffer=0)
    train, validation = load_rows(args, tokenizer)
    assert len(validation) == 64 and len(opened) < 25, "more than 16 files, short ones and a few to see the rest"
    monkeypatch.undo()
    whole = listed(load_rows(arguments(tmp_path / "corpus", streaming=True, shuffle_buffer=0), tokenizer)[0])
    assert sorted(listed(train) + listed(validation)) == sorted(whole)


def test_load_rows_takes_packed_rows_and_their_labels_as_they_are(tmp_path, tokenizer):
    rows = pack(Dataset.from_dict({"text": TEXTS}), tokenizer, LENGTH)
    rows.select(range(20)).remove_columns("row").save_to_disk(tmp_path / "rows")
    train, validation = load_rows(arguments(tmp_path / "rows", validation_rows=2), tokenizer)
    assert validation["row"][:] == [5, 15] and listed(validation) == [listed(rows)[5], listed(rows)[15]]
    assert len(train) == 18
    for changes, vocab_size, message in (
        ({"sequence_length": 32}, 512, "packed rows of 16 tokens .* sequence_length is 32"),
        ({}, 300, "tokenizer has 308 tokens"),
        ({"streaming": True}, 512, "--streaming false"),
        ({"validation_rows": 20}, 512, "validation_rows=20 of 20 rows"),
        ({"validation_rows": -1}, 512, "validation_rows=-1 of"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(arguments(tmp_path / "rows", **changes), cl100k_tokenizer(vocab_size=vocab_size))

    for i, ids, message in (
        (7, [1] * 9, "packed rows of 9 to 16 tokens"),
        (19, [1] * 17, "packed rows of 16 to 17 tokens"),
        (7, [999] * LENGTH, "ids up to 999, .* tokenizer has 520"),
    ):
        changed = [{"input_ids": ids if i == number else [1] * LENGTH} for number in range(20)]
        Dataset.from_list(changed).save_to_disk(tmp_path / f"{message[:9]}{len(ids)}")
        with pytest.raises(ValueError, match=message):
            load_rows(arguments(tmp_path / f"{message[:9]}{len(ids)}"), tokenizer)
    Dataset.from_list([{"input_ids": [1] * LENGTH}, {"input_ids": [1] * 3}]).save_to_disk(tmp_path / "short end")
    assert len(load_rows(arguments(tmp_path / "short end"), tokenizer)[0]) == 2

    rows = [{"input_ids": [i] * LENGTH, "labels": [-100] * (LENGTH - 1) + [i]} for i in range(1, 7)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    train, validation = load_rows(arguments(tmp_path / "rows.parquet", validation_rows=2), tokenizer)
    for ids, part in {(2, 5): validation, (1, 3, 4, 6): train}.items():
        batch = CausalCollator(0)(list(part))
        assert batch["input_ids"].tolist() == [[i] * LENGTH for i in ids]
        assert batch["labels"].tolist() == [[-100] * (LENGTH - 1) + [i] for i in ids]


@pytest.mark.parametrize("shards", [0, 1, 3], ids=["map", "stream", "three shards"])
def test_unusable_documents_are_skipped_and_counted(tokenizer, warnings, shards):
    documents = Dataset.from_dict({"text": [*TEXTS[:10], "", " \n", None, "x" * 300, *TEXTS[10:]]})
    if shards:
        rows = pack_stream(documents.to_iterable_dataset(shards), tokenizer, max_document_characters=100)
    else:
        rows = pack(documents, tokenizer, LENGTH, max_document_characters=100)
    rows = listed(rows)
    where = "shard 0 of 3 of the corpus: 18" if shards == 3 else "the corpus: 60"
    where = where if shards != 1 else f"shard 0 of 1 of {where}"
    assert warnings == [f"In {where} documents used, 4 skipped (2 empty, 1 no text, 1 too long)."]
    if shards != 3:
        assert rows == cut(line_of(TEXTS, tokenizer))


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_lines_and_text_files_affect_no_others(tmp_path, tokenizer, warnings, streaming):
    """Half a surrogate pair, half a line, a number, a list, bytes that are not UTF-8."""
    broken = ['{"text": "\\ud83d"}', '{"text": "cut of', '{"text": 5}', "[1]", ""]
    file = write_lines(tmp_path / "a.jsonl", [{"text": TEXTS[1]}, *broken, {"text": TEXTS[2]}])
    file.write_bytes(file.read_bytes() + b'{"text": "caf\xe9"}\n')
    train, _ = load_rows(arguments(file, streaming=streaming), tokenizer)
    assert listed(train) == cut(line_of(TEXTS[1:3], tokenizer))
    (warning,) = warnings
    assert warning.endswith("2 documents used, 5 skipped (1 invalid Unicode, 1 no text, 3 unreadable).")

    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files/b.jsonl", [{"text": TEXTS[1]}])
    (tmp_path / "files/a.jsonl").touch()
    train, _ = load_rows(arguments(tmp_path / "files"), tokenizer)
    assert listed(train) == cut(line_of(TEXTS[1:2], tokenizer)), "the first file is empty"

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "texts/b.txt").write_bytes("\ufeffcafé".encode())
    train, _ = load_rows(arguments(tmp_path / "texts", streaming=streaming), tokenizer)
    assert [row for row in listed(train) if row] == [line_of(["café"], tokenizer)]
    assert warnings[-1].endswith("1 skipped (1 invalid Unicode).")


@pytest.mark.parametrize("streaming", [False, True])
def test_truncated_file_is_named(tmp_path, streaming):
    lines = write_lines(tmp_path / "a.jsonl", [{"text": f"{i * 7919}"} for i in range(3000)]).read_bytes()
    for kind, compress, share in (("gz", gzip.compress, 0.9), ("xz", lzma.compress, 0.9), ("bz2", bz2.compress, 0.01)):
        file = tmp_path / f"b.jsonl.{kind}"
        file.write_bytes(compress(lines)[: int(len(compress(lines)) * share)])
        with pytest.raises(ValueError, match=f"{re.escape(str(file))} cannot be read to its end: .*Fetch it again"):
            list(arguments(file, streaming=streaming).load_documents())


def stream_of(texts) -> IterableDataset:
    return IterableDataset.from_generator(lambda: ({"text": text} for text in texts))


def test_stream_may_hold_what_arrow_cannot(tokenizer, warnings):
    rows = pack_stream(stream_of([TEXTS[1], "x\udc00", TEXTS[2], 7, TEXTS[3]]), tokenizer)
    assert listed(rows) == cut(line_of(TEXTS[1:4], tokenizer))
    assert "3 documents used, 2 skipped (1 invalid Unicode, 1 no text)" in warnings[0]


def test_broken_file_of_a_stream_is_an_error_with_its_shard(tmp_path, tokenizer, monkeypatch):
    """Read by datasets, which cannot skip a line."""
    write_lines(tmp_path / "corpus/a.json", [{"text": TEXTS[1]}])
    write_lines(tmp_path / "corpus/b.json", [{"text": TEXTS[2]}, '{"text": "cut of'])
    errors: list[str] = []
    monkeypatch.setattr(data.logger, "error", errors.append)
    train, _ = load_rows(arguments(tmp_path / "corpus", streaming=True, shuffle_buffer=0), tokenizer)
    rows = iter(train)
    assert next(rows)["input_ids"].tolist() == line_of([TEXTS[1]], tokenizer)
    with pytest.raises(ValueError, match="JSON"):
        next(rows)
    assert errors == ["The error is in shard 1 of 2 of the corpus."]


@pytest.mark.parametrize("streaming", [False, True])
def test_load_rows_rejects_a_corpus_without_a_usable_document(tmp_path, tokenizer, monkeypatch, streaming):
    for i in range(3):
        write_lines(tmp_path / f"corpus/{i}.jsonl", [{"text": 5}] * 3)
    message = (
        "first of its shards, and a row"
        if streaming
        else r"0 documents used, 9 skipped \(9 no text\).* another text_column"
    )
    with pytest.raises(ValueError, match=message):
        load_rows(arguments(tmp_path / "corpus", streaming=streaming), tokenizer)
    if streaming:  # and at once for one that may not end
        monkeypatch.setattr(data, "_MAX_UNUSABLE_DOCUMENTS", 512)
        with pytest.raises(ValueError, match="In shard 0 of 1 of the corpus: 0 documents used, 512 skipped"):
            list(pack_stream(stream_of([""] * 5000), tokenizer))
        rows = pack_stream(stream_of([TEXTS[1], *[""] * 5000]), tokenizer)
        assert listed(rows) == [line_of(TEXTS[1:2], tokenizer)]


def test_collator_pads_on_the_right_and_takes_labels_of_the_rows():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3], "row": 4},
        {"input_ids": [5, 6], "labels": np.array([-100, 6], np.int32), "row": 9},
        {"input_ids": np.array([8], np.int32), "row": 11},
    ]
    batch = CausalCollator(pad_token_id=7)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 6, 7], [8, 7, 7]]
    assert batch["labels"].tolist() == [[-100, -100, 3], [-100, 6, -100], [8, -100, -100]]
    assert batch["row"].tolist() == [4, 9, 11] and {value.dtype for value in batch.values()} == {torch.int64}
    assert set(CausalCollator(7)([{"input_ids": [1]}])) == {"input_ids", "labels"}
    batch = CausalCollator(7, pad_to_multiple_of=4, sequence_parallel=True)([{"input_ids": [1] * 5, "row": 4}])
    assert batch["position_ids"].tolist() == [list(range(8))] and "row" not in batch
    for labels in ([3], [1, 2, 3, 4]):  # one label would be spread over all tokens
        with pytest.raises(ValueError, match=f"Row 4 has 3 input_ids and {len(labels)} labels"):
            CausalCollator(7)([{"input_ids": [1, 2, 3], "labels": labels, "row": 4}])


class Recorder(Trainer):
    """Keeps the rows of every optimizer step, in order."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.steps.setdefault(self.state.global_step, []).extend(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.fixture
def make_trainer(tiny_config, training_arguments):
    def make(rows, **kwargs) -> Recorder:
        torch.manual_seed(0)
        sizes = {"vocab_size": 520, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        defaults = {"max_steps": 6, "save_steps": 4, "data_seed": 3, "remove_unused_columns": True}
        defaults |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        model, args = DiffTransformerForCausalLM(tiny_config(**sizes)), training_arguments(**{**defaults, **kwargs})
        trainer = Recorder(model, args, CausalCollator(0, pad_to_multiple_of=LENGTH), rows)
        trainer.steps = {}
        return trainer

    return make


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_resumed_trainer_takes_the_same_stream(tmp_path, corpus, tokenizer, make_trainer, workers):
    args = arguments(corpus, streaming=True, shuffle_buffer=5, validation_rows=3)
    whole, resumed = (
        make_trainer(load_rows(args, tokenizer, seed=1)[0], dataloader_num_workers=workers) for _ in range(2)
    )
    whole.train()
    assert len({tuple(row) for step in whole.steps.values() for row in step}) == 24, "rows were seen twice"
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert resumed.steps == {step: whole.steps[step] for step in (4, 5)}


@pytest.mark.slow
def test_stream_reports_further_passes(tmp_path, corpus, tokenizer, make_trainer, warnings):
    args = arguments(corpus, streaming=True, shuffle_buffer=5)
    num_rows = len(list(load_rows(args, tokenizer)[0]))

    def train(steps: int, resume: str | None = None) -> dict[int, list[list[int]]]:
        warnings.clear()
        rows = load_rows(args, tokenizer, seed=1)[0]
        trainer = make_trainer(rows, max_steps=steps, per_device_train_batch_size=8, save_steps=10)
        trainer.add_callback(ReportPasses("the corpus"))
        trainer.train(resume_from_checkpoint=resume)
        return trainer.steps

    whole = train(20)
    again = r"Step (\d+): the stream of the corpus has ended and begins again: pass (\d)\. .* max_steps\)\."
    (end, second), (later_end, third) = (map(int, re.fullmatch(again, message).groups()) for message in warnings)
    assert (second, third) == (2, 3) and end < 10 < later_end == 2 * end
    first_pass, second_pass = ([row for i in steps for row in whole[i]] for steps in (range(end), range(end, 2 * end)))
    assert sorted(first_pass) == sorted(second_pass) and len(first_pass) == num_rows, "a pass is not every row once"
    assert first_pass != second_pass, "the passes have the same order"

    resumed = train(11, str(tmp_path / "run/checkpoint-10"))
    assert resumed == {10: whole[end]}, "docs/training_data.md: the second pass starts at its beginning"
    assert len(warnings) == 1 and warnings[0].startswith("Step 10: ")

    train(end)
    assert warnings == [], "one whole pass is no second one"

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Labelled texts: the four datasets of many-shot in-context learning, and any other dataset with such columns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ....text_data import load_table


class Example(NamedTuple):
    text: str
    label: str


@dataclass(frozen=True)
class Source:
    """The place of a dataset, the columns to read, and how an example is shown to a model."""

    dataset: str
    prompt: str = "text: {text}\nlabel: {label}"
    config: str | None = None
    label_column: str = "label"
    left_out: tuple[str, ...] = ()  # labels that are not a class of the task
    words: Mapping[str, str] = field(default_factory=dict)  # for labels that are codes, such as HUM:gr

    def readable(self, label: str) -> str:
        """A label as the prompt shows it: "card_arrival" becomes "card arrival", "HUM:gr" becomes "human group"."""
        parts = re.split(r"[:_\s]+" if self.words else r"[_\s]+", label)
        return " ".join(self.words.get(part, part) for part in parts if part)


_TREC_WORDS = {
    **{"ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human", "LOC": "location"},
    **{"NUM": "numeric", "abb": "abbreviation", "cremat": "creation", "def": "definition", "desc": "description"},
    **{"dismed": "disease", "dist": "distance", "exp": "expansion", "gr": "group", "ind": "individual"},
    **{"instru": "instrument", "lang": "language", "mount": "mountain", "ord": "order", "perc": "percent"},
    **{"techmeth": "technique", "temp": "temperature", "termeq": "term", "veh": "vehicle", "volsize": "size"},
}
_TREC_PROMPT = "Question: {text}\nType: {label}"

# Repositories of plain data (Parquet, JSON): the original repositories of TREC and Banking-77 need a script, which
# datasets no longer runs. Prompts and the words for labels are those of Ratner et al. (ACL 2023) and Bertsch et al.
# (arXiv:2405.00200), whose protocol the paper follows.
SOURCES = {
    "trec": Source("SetFit/TREC-QC", _TREC_PROMPT, label_column="label_coarse_original", words=_TREC_WORDS),
    "trec_fine": Source("SetFit/TREC-QC", _TREC_PROMPT, label_column="label_original", words=_TREC_WORDS),
    "banking77": Source("legacy-datasets/banking77", "query: {text}\nintent: {label}"),
    "clinic150": Source(
        "clinc/clinc_oos", "utterance: {text}\nintent: {label}", "plus", label_column="intent", left_out=("oos",)
    ),
}


@dataclass(frozen=True)
class ClassificationTask:
    name: str
    source: Source
    train: list[Example]
    test: list[Example]

    @property
    def labels(self) -> list[str]:
        """The labels of the training split, sorted."""
        return sorted({example.label for example in self.train})


def find_source(spec: str) -> tuple[str, Source]:
    """The name and source of `NAME`, `PATH` or `NAME=PATH`, which is a copy of the dataset NAME.

    A path is a Hub id or a local folder.
    """
    name, equals, path = spec.partition("=")
    source = SOURCES.get(name)
    if not (path if equals else name):
        raise ValueError(f"Got the dataset {spec!r}; it needs a path or a Hub id: NAME=PATH.")
    if source is None:
        return (name, Source(path)) if equals else (Path(name).name, Source(name))
    return name, replace(source, dataset=path, config=None) if equals else source


def load_task(name: str, source: Source) -> ClassificationTask:
    """The splits train and test of a dataset, with readable labels.

    Raises ValueError for a missing column or split, and for a label that is not text or that only the test split has.
    """
    path = Path(source.dataset).expanduser()
    if path.is_file() or (path / "state.json").is_file():
        raise ValueError(
            f"{path} has one split, but demonstrations and queries come from two. Name a folder with train.jsonl and "
            "test.jsonl (or .csv, .parquet), or with a saved DatasetDict."
        )
    task = ClassificationTask(name, source, _read(source, "train"), _read(source, "test"))
    unknown = sorted({example.label for example in task.test} - set(task.labels))
    if unknown:
        raise ValueError(
            f"{source.dataset}: the split 'train' has no example of labels of 'test': {', '.join(unknown[:5])}. Add "
            "examples, or drop the rows with these labels."
        )
    return task


def _read(source: Source, split: str) -> list[Example]:
    from datasets import ClassLabel

    rows = load_table(source.dataset, source.config, split, ["text", source.label_column])
    feature, examples = rows.features[source.label_column], []
    for text, label in zip(rows["text"], rows[source.label_column], strict=True):
        if isinstance(feature, ClassLabel) and label is not None:
            label = feature.int2str(label)
        if not isinstance(text, str) or not isinstance(label, str) or not source.readable(label):
            raise ValueError(
                f"{source.dataset} has a row with the text {text!r} and the label {label!r}; both are needed, as "
                "text. Replace numbers by the names of their classes, and drop rows without a text or a label."
            )
        if label not in source.left_out:
            # On one line: in the prompt a line break ends a text and a label
            examples.append(Example(" ".join(text.split()), source.readable(label)))
    return examples

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Which text a stage trains on, and how it becomes rows."""

from dataclasses import dataclass, field

from datasets import Dataset, IterableDataset

from ..text_data import load_documents


@dataclass
class CorpusArguments:
    """Which text, and how it becomes rows."""

    dataset: str = field(
        default="",
        metadata={
            "help": "Hub id, or a local path: a file or folder of .jsonl, .json, .txt (a document a file) or .csv, "
            "also as .gz, .bz2, .xz or .zst, or of .parquet; or a folder that save_to_disk wrote. Rows with a column "
            "input_ids, and optionally labels, count as packed already."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    dataset_split: str = field(
        default="train", metadata={"help": "Its split; a slice such as train[:1%%] where nothing is streamed."}
    )
    text_column: str = field(default="text", metadata={"help": "The column of the text."})
    source_column: str | None = field(
        default=None,
        metadata={"help": "The column that names a document's source; dots go inside, as in meta.redpajama_set_name."},
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read while training instead of tokenizing first: no disk, no wait, and max_steps is needed. "
            "Resuming then reads everything up to the step again."
        },
    )
    sequence_length: int = field(default=4096, metadata={"help": "Tokens of a row, the context that is trained."})
    max_document_characters: int | None = field(
        default=10_000_000,
        metadata={"help": "Longer documents are skipped and counted (a book has about a million characters)."},
    )
    num_proc: int | None = field(
        default=None, metadata={"help": "Processes that tokenize and pack; the rows do not depend on their number."}
    )
    validation_rows: int = field(
        default=0,
        metadata={
            "help": "Rows held out for the validation loss: spread evenly over the corpus, or the first of each shard "
            "of a stream."
        },
    )
    validation_dataset: str | None = field(
        default=None,
        metadata={"help": "Instead of that: a corpus of its own, of the same kinds and columns as the dataset."},
    )
    shuffle_buffer: int = field(
        default=1000,
        metadata={
            "help": "Streaming: rows held in memory (4 bytes a token, in every worker), of which a random one comes "
            "next; 0 leaves the order as it is. Without streaming Trainer shuffles all rows."
        },
    )

    def load_documents(self) -> Dataset | IterableDataset:
        """The documents, as `text_data.load_documents` returns them."""
        return load_documents(
            self.dataset,
            self.dataset_config,
            self.dataset_split,
            text_column=self.text_column,
            source_column=self.source_column,
            streaming=self.streaming,
            num_proc=self.num_proc,
        )

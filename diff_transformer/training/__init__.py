# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The paper's training: pretraining, the extension to 64K, and two stages of fine-tuning on mathematics."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a stage's arguments, with the text that `--help` prints."""
    return field(default=default, metadata={"help": help, **metadata})

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Converts checkpoints of other code bases into ours, and back."""

from .checkpoint import OpenCheckpoint, open_checkpoint
from .converter import VerificationError, convert
from .tokenization_yoco import yoco_tokenizer
from .verification import Verdict, compare

__all__ = ["OpenCheckpoint", "Verdict", "VerificationError", "compare", "convert", "open_checkpoint", "yoco_tokenizer"]

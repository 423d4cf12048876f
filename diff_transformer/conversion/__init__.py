# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Checkpoints of other code bases into ours, and out again."""

from .converter import VerificationError, convert, open_source
from .tokenizers import yoco_tokenizer
from .verification import Source, Verdict, compare

__all__ = ["Source", "Verdict", "VerificationError", "compare", "convert", "open_source", "yoco_tokenizer"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Flash differential attention (arXiv:2410.05258) as a kernel of the Hub."""

from . import layers
from .flash_diff import (
    LambdaVectors,
    flash_diff_attention,
    flash_diff_attention_varlen,
    flash_diff_attention_with_kvcache,
)

__all__ = [
    "LambdaVectors",
    "flash_diff_attention",
    "flash_diff_attention_varlen",
    "flash_diff_attention_with_kvcache",
    "layers",
]

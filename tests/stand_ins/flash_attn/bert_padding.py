# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""transformers' copies of these two functions of flash-attn, which it uses for flash-attn 3 and 4."""

from transformers.modeling_flash_attention_utils import _pad_input as pad_input
from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input

__all__ = ["pad_input", "unpad_input"]

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Headers of safetensors files: the names, types and shapes of the tensors, without their values."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open


@dataclass(frozen=True)
class TensorHeader:
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]


def read_header(file: str | Path) -> dict[str, TensorHeader]:
    """The tensors of one file, by name.

    Raises ValueError if the header is damaged or the file is shorter than its header says.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            return {name: TensorHeader(x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except SafetensorError as error:
        got = f"{file} is not a complete safetensors file ({error})"
        raise ValueError(f"{got}. It is damaged or truncated: save, copy or download it again.") from error


def read_weight_map(index: str | Path) -> dict[str, str]:
    """Tensor name -> file name, as stated in the index of a sharded checkpoint.

    Raises ValueError if the file is not such an index.
    """
    try:
        return dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{index} is not an index of weight files ({error!r})"
        raise ValueError(f"{got}. Save, copy or download it again.") from error

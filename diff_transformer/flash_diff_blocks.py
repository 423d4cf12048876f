# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Blocks of the Triton kernels: what each program holds, for every architecture, kernel, element size and d.

Chosen by compiling: the largest of a list of candidates that neither spills registers nor passes the shared memory of
a program (tests/test_flash_diff_compile.py compiles those for d = 64 and 128 again). The backward in float32 at
d = 128 spills whatever its blocks. Not yet tuned by timing.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Query rows and keys of a block, warps and pipeline stages of a program: what a kernel takes as options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


HEAD_DIMS = (16, 32, 64, 128)  # d, rounded up
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may have

# (architecture, kernel, bytes of an element): rows/keys/warps/stages for each of HEAD_DIMS
# fmt: off
_TABLE = {
    (80, "forward", 2): "64/64/4/3  64/32/8/3  64/32/8/3  32/32/4/2",
    (80, "forward", 4): "64/16/8/2  64/16/8/2  64/16/8/2  16/16/4/2",
    (80, "dq", 2): "64/64/8/2  64/32/8/2  64/32/8/2  64/32/8/2",
    (80, "dq", 4): "32/32/4/2  32/32/4/2  32/32/8/1  16/16/4/1",
    (80, "dkdv", 2): "64/64/8/2  64/64/8/2  64/64/8/2  16/64/8/2",
    (80, "dkdv", 4): "16/64/8/2  16/64/8/2  16/64/8/2  16/16/4/1",
    (80, "split16", 2): "16/64/4/3  16/64/4/3  16/64/4/3  16/32/4/3",
    (80, "split16", 4): "16/64/4/3  16/64/4/3  16/32/4/2  16/32/4/1",
    (80, "split32", 2): "32/64/8/3  32/64/8/3  32/64/8/3  32/64/8/3",
    (80, "split32", 4): "32/64/8/3  32/64/8/3  32/32/8/2  32/16/8/1",
    (86, "forward", 2): "64/64/4/3  64/32/8/3  64/32/8/3  32/32/4/2",
    (86, "forward", 4): "16/16/4/1  16/16/4/1  16/16/4/1  16/16/4/2",
    (86, "dq", 2): "64/64/8/2  64/32/8/2  64/32/8/2  64/32/8/1",
    (86, "dq", 4): "16/16/4/1  16/16/4/1  16/16/4/1  16/16/4/1",
    (86, "dkdv", 2): "64/64/8/2  64/64/8/2  64/64/8/2  16/64/8/2",
    (86, "dkdv", 4): "16/16/4/1  16/16/4/1  16/16/4/1  16/16/4/1",
    (86, "split16", 2): "16/64/4/3  16/64/4/3  16/64/4/3  16/32/4/2",
    (86, "split16", 4): "16/16/4/1  16/16/4/1  16/16/4/1  16/16/4/1",
    (86, "split32", 2): "32/64/8/3  32/64/8/3  32/64/8/3  32/64/8/2",
    (86, "split32", 4): "32/16/4/1  32/16/4/1  32/16/4/1  32/16/4/1",
    (90, "forward", 2): "64/64/4/3  64/64/4/3  64/32/8/3  64/32/8/3",
    (90, "forward", 4): "32/32/4/2  64/16/8/2  64/16/8/2  16/16/4/2",
    (90, "dq", 2): "64/64/8/2  64/64/8/2  128/64/8/2  64/32/8/2",
    (90, "dq", 4): "32/32/4/2  32/32/4/2  32/32/8/1  16/16/4/1",
    (90, "dkdv", 2): "64/64/8/2  64/64/8/2  32/64/8/2  32/32/8/1",
    (90, "dkdv", 4): "16/64/8/2  16/64/8/2  16/64/8/2  16/16/4/1",
    (90, "split16", 2): "16/64/4/3  16/64/4/3  16/64/4/3  16/32/4/2",
    (90, "split16", 4): "16/64/4/3  16/32/4/2  16/32/4/1  16/16/4/1",
    (90, "split32", 2): "32/64/8/3  32/64/8/3  32/64/8/3  32/64/8/3",
    (90, "split32", 4): "32/64/8/3  32/32/8/2  32/32/8/2  32/16/8/1",
    (100, "forward", 2): "64/64/4/3  64/64/4/3  128/64/8/3  64/32/8/3",
    (100, "forward", 4): "32/32/4/2  64/16/8/2  64/16/8/2  16/16/4/2",
    (100, "dq", 2): "64/64/8/2  64/64/8/2  128/64/8/2  64/32/8/2",
    (100, "dq", 4): "32/32/4/2  32/32/4/2  32/32/8/1  16/16/4/1",
    (100, "dkdv", 2): "64/64/8/2  64/64/8/2  32/64/8/2  32/32/8/1",
    (100, "dkdv", 4): "16/64/8/2  16/64/8/2  16/64/8/2  16/16/4/1",
    (100, "split16", 2): "16/64/4/3  16/64/4/3  16/64/4/3  16/32/4/2",
    (100, "split16", 4): "16/64/4/3  16/32/4/2  16/32/4/1  16/16/4/1",
    (100, "split32", 2): "32/64/8/3  32/64/8/3  32/64/8/3  32/64/8/3",
    (100, "split32", 4): "32/64/8/3  32/32/8/2  32/32/8/2  32/16/8/1",
}
# fmt: on


def architecture(capability: tuple[int, int]) -> int:
    """The column of the table for a device: 80 (A100), 90 (H100, H200), 100 (B200), and 86 for everything with 99 KiB
    of shared memory (RTX 30, 40 and 50, L40)."""
    return {(8, 0): 80, (8, 7): 80, (9, 0): 90, (10, 0): 100, (10, 3): 100}.get(capability, 86)


def blocks(kernel: str, capability: tuple[int, int], dtype: torch.dtype, d: int) -> Blocks:
    """For "forward", "dq", "dkdv", "split16" or "split32" (decoding, by the rows of a block)."""
    column = next(i for i, width in enumerate(HEAD_DIMS) if d <= width)
    cells = _TABLE[architecture(capability), kernel, dtype.itemsize].split()
    return Blocks(*map(int, cells[column].split("/")))


def candidates(kernel: str) -> list[Blocks]:
    """All blocks of the table for a kernel, as candidates for autotuning."""
    cells = (cell for (_, name, _), line in _TABLE.items() if name == kernel for cell in line.split())
    return [Blocks(*map(int, cell.split("/"))) for cell in dict.fromkeys(cells)]


PROVEN: dict[int, str] = {}  # architecture -> the result of `make gpu` that shows flash_diff correct and the fastest

__all__ = ["HEAD_DIMS", "PROVEN", "SHARED_MEMORY", "Blocks", "architecture", "blocks", "candidates"]

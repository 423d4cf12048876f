# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Kernels of differential attention for sm_90 (H100, H200), in Triton's Gluon: TMA, asynchronous wgmma and warps with
tasks of their own.

They are candidates to replace the Triton kernels of `flash_diff` on these GPUs: in no wheel, and on no path of the
package. No GPU has run them yet.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.hopper import dkdv, dq, forward
from diff_transformer import flash_diff

# By the kernels that flash_diff launches: what launches ours, and the number of tensors among its arguments
LAUNCHES = {"forward": (forward.launch, 9), "dq": (dq.launch, 8)}
LAUNCHES |= dict.fromkeys(("dkdv", "dk", "dv"), (dkdv.launch, 9))


def _applies(tensors: tuple, spans_and_mask: tuple, d: int) -> bool:
    """Whether our kernels take this launch: no spans and no mask, d of 64 or 128, and what TMA needs."""
    return (
        all(x is None for x in spans_and_mask)
        and d in forward.BLOCKS
        and all(
            x.element_size() == 2
            and x.numel() > 0
            and x.data_ptr() % 16 == 0
            and all(stride % 8 == 0 for stride in x.stride()[:3])
            for x in tensors
            if x is not None and x.ndim == 4
        )
    )


@contextmanager
def kernels() -> Iterator[Counter]:
    """Within it, the operators of `flash_diff` launch these kernels where they apply. Yields the launches of ours."""
    count: Counter = Counter()
    launch = flash_diff._launch

    def launch_ours(name, kernel, q, grid, *args, **constants):
        ours, num_tensors = LAUNCHES.get(name, (None, 0))
        tensors, spans_and_mask = args[:num_tensors], args[num_tensors : num_tensors + 5]
        if ours is None or not _applies(tensors, spans_and_mask, constants["D"]):
            launch(name, kernel, q, grid, *args, **constants)
        elif constants.get("MAP") != 2 and constants.get("DK", True):  # the other launch computes both
            numbers = args[-3:] if name == "forward" else args[-1:]
            ours(*tensors, constants["CAUSAL"], *numbers)
            count[name] += 1

    with mock.patch.object(flash_diff, "_launch", launch_ours):
        yield count

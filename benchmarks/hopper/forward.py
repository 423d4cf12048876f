# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The forward of `flash_diff` without masks and spans, for sm_90, in Triton's Gluon.

A program owns 128 query rows of one head. One warp loads blocks of keys and values by TMA into a ring in shared
memory; two groups of four warps read them, each for 64 of the rows. They go over the keys twice: for the second map,
whose output stays in shared memory, and for the first, from which they subtract it and, if asked to, normalise the
head. Both maps at once would leave 64 rows to a program, and L2 would have to deliver a third more. While the tensor
cores multiply a block of probabilities and values, a group computes the probabilities of the next block.

Legend for shapes: B batch, T query tokens, S key tokens, H query heads, K key/value heads, 2d the width of a head.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer import flash_diff

ROWS = 64  # of a group of warps: those of one wgmma
GROUPS_OF_WARPS = 2
BLOCKS = {64: (128, 3), 128: (64, 2)}  # by d: keys of a block, and blocks in the ring


@gluon.jit
def load_keys_and_values(q, k, v, queries, ring, q_full, start, head, z, blocks, GROUPS: gl.constexpr):
    """The warp that fills the ring: the second map's keys and the values, then the first map's keys and the values."""
    keys, values, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = k.block_shape[1]
    D: gl.constexpr = k.block_shape[3]
    M: gl.constexpr = q.block_shape[1]
    for i in gl.static_range(4):  # map 2 and map 1 of both groups' rows
        if i % 2 == 0:
            mbarrier.expect(q_full.index(i // 2), 2 * q.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q, [z, start + i % 2 * M, head, D - i // 2 * D], q_full.index(i // 2), queries.index(i)
        )
    for use in range(2 * blocks):
        stage, phase = use % STAGES, use // STAGES & 1
        row = use % blocks * BLOCK_N
        column = gl.where(use < blocks, D, 0)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k, [z, row, head // GROUPS, column], k_full.index(stage), keys.index(stage)
        )
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [z, row, head // GROUPS, 0], v_full.index(stage), values.index(stage))


@gluon.jit
def online_softmax(scores, scale, maximum, total, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr):
    """One step of a base-2 softmax over (rows, keys) scores: probabilities relative to the new maximum, the factor for
    what was summed before, the new maximum and total."""
    new = gl.maximum(maximum, gl.max(scores, 1) * scale)
    probabilities = gl.exp2(scores * scale - new[:, None])
    factor = gl.exp2(maximum - new)
    total = total * factor + gl.sum(probabilities, 1)
    return gl.convert_layout(probabilities.to(DTYPE), P_LAYOUT), factor, new, total


@gluon.jit
def attend(queries, ring, use, unmasked, blocks, all_blocks, seen, scale, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """softmax(scale queries keys^T) values of 64 rows that see `seen` keys each, and the base-2 log-sums of
    exponentials. `use` blocks went through the ring before; the first `unmasked` of these hide nothing from any row,
    and after `blocks` everything is hidden."""
    keys, values, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[2]
    D: gl.constexpr = keys.shape[4]
    DTYPE: gl.constexpr = keys.dtype
    M: gl.constexpr = queries.shape[0]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    zero = gl.zeros([M, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([M, 2 * D], gl.float32, O_LAYOUT)
    maximum = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S_LAYOUT))

    stage = use % STAGES
    mbarrier.wait(k_full.index(stage), use // STAGES & 1)
    block = keys.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
    token = warpgroup_mma(queries, block, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(k_empty.index(stage))
    scores = gl.where(columns[None, :] < seen[:, None], scores, float("-inf"))
    p, factor, maximum, total = online_softmax(scores, scale, maximum, total, DTYPE, P_LAYOUT)

    for HIDDEN in gl.static_range(2):
        for i in range(unmasked if HIDDEN else 1, blocks if HIDDEN else unmasked):
            stage = (use + i) % STAGES
            mbarrier.wait(k_full.index(stage), (use + i) // STAGES & 1)
            block = keys.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
            token = warpgroup_mma(queries, block, zero, use_acc=False, is_async=True)
            last = (use + i - 1) % STAGES
            mbarrier.wait(v_full.index(last), (use + i - 1) // STAGES & 1)
            acc_token = warpgroup_mma(p, values.index(last).reshape([BLOCK_N, 2 * D]), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(token,))
            mbarrier.arrive(k_empty.index(stage))
            if HIDDEN:
                scores = gl.where(i * BLOCK_N + columns[None, :] < seen[:, None], scores, float("-inf"))
            new_p, factor, maximum, total = online_softmax(scores, scale, maximum, total, DTYPE, P_LAYOUT)
            acc, _ = warpgroup_mma_wait(0, deps=(acc_token, p))
            mbarrier.arrive(v_empty.index(last))
            p = new_p
            acc *= gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]

    last = (use + blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), (use + blocks - 1) // STAGES & 1)
    token = warpgroup_mma(p, values.index(last).reshape([BLOCK_N, 2 * D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(v_empty.index(last))
    for i in range(use + blocks, use + all_blocks):  # those that only the other group sees
        mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(k_empty.index(i % STAGES))
        mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(v_empty.index(i % STAGES))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))
    return acc * inverse[:, None], maximum + gl.log2(total)


@gluon.jit
def store(tile, descriptor, shared, z, row, head):
    shared.reshape([tile.shape[0], tile.shape[1]]).store(tile.to(descriptor.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [z, row, head, 0], shared)


@gluon.jit
def attend_with_both_maps(
    queries, ring, q_full, shared, outputs, lambda_full, norm_weight, numbers, row, GROUP: gl.constexpr, CAUSAL: gl.constexpr
):
    """A group of warps that computes 64 rows, from `row` on."""
    out, out_diff, out2, lse = outputs
    head, z, T, S, blocks, scale, eps, out_scale = numbers
    M: gl.constexpr = queries.shape[2]
    D: gl.constexpr = queries.shape[4]
    BLOCK_N: gl.constexpr = ring[0].shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * D, 16])
    rows = row + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT))
    seen = gl.full([M], 0, gl.int32, gl.SliceLayout(1, S_LAYOUT)) + S
    first_stop, stop = S, S
    if CAUSAL:
        seen = gl.minimum(S, rows + 1 + S - T)
        first_stop = gl.minimum(S, row + 1 + S - T)
        stop = gl.minimum(S, row + M + S - T)
    unmasked = gl.maximum(1, first_stop // BLOCK_N)
    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    mine = shared.index(GROUP)
    for i in gl.static_range(2):
        mbarrier.wait(q_full.index(i), 0)
        tile = queries.index(2 * i + GROUP).reshape([M, D])
        acc, stat = attend(
            tile, ring, i * blocks, unmasked, gl.cdiv(stop, BLOCK_N), blocks, seen, scale2, S_LAYOUT, O_LAYOUT
        )
        if lse is not None:
            num_heads, num_stats = gl.num_programs(1), gl.num_programs(2) * T
            stats = lse + ((1 - i) * num_heads + head).to(gl.int64) * num_stats + z * T
            gl.store(stats + rows, stat, mask=rows < T)
        if i == 0:
            if out2 is not None:
                store(acc, out2, mine, z, row, head)
            else:
                mine.reshape([M, 2 * D]).store(acc.to(out.dtype))
        else:
            second = mine.reshape([M, 2 * D]).load(O_LAYOUT)
            difference = acc - gl.load(lambda_full) * second.to(gl.float32)
            if out2 is not None:
                tma.store_wait(0)
            if norm_weight is not None:
                if out_diff is not None:
                    store(difference, out_diff, mine, z, row, head)
                    tma.store_wait(0)
                columns = gl.arange(0, 2 * D, gl.SliceLayout(0, O_LAYOUT))
                weight = gl.load(norm_weight + columns).to(gl.float32)
                r = gl.rsqrt(gl.sum(difference * difference, 1) / (2 * D) + eps)
                difference = difference * r[:, None] * weight[None, :] * out_scale
            store(difference, out, mine, z, row, head)
            tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q, k, v, out, out_diff, out2, lambda_full, norm_weight, lse, T, S, scale, eps, out_scale,
    GROUPS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    head, z = gl.program_id(1), gl.program_id(2)
    # The longest rows first: the last wave of programs is then the cheapest
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    stop = S
    if CAUSAL:
        stop = gl.minimum(S, start + BLOCK_M + S - T)
    blocks = gl.cdiv(stop, BLOCK_N)
    M: gl.constexpr = BLOCK_M // 2
    queries = gl.allocate_shared_memory(q.dtype, [4, 1, M, 1, D], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, 1, BLOCK_N, 1, 2 * D], v.layout)
    shared = gl.allocate_shared_memory(out.dtype, [2, 1, M, 1, 2 * D], out.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    ring = (keys, values, k_full, k_empty, v_full, v_empty)
    outputs = (out, out_diff, out2, lse)
    numbers = (head, z, T, S, blocks, scale, eps, out_scale)
    gl.warp_specialize(
        [
            (attend_with_both_maps, (queries, ring, q_full, shared, outputs, lambda_full, norm_weight, numbers, start, 0, CAUSAL)),
            (attend_with_both_maps, (queries, ring, q_full, shared, outputs, lambda_full, norm_weight, numbers, start + M, 1, CAUSAL)),
            (load_keys_and_values, (q, k, v, queries, ring, q_full, start, head, z, blocks, GROUPS)),
        ],
        [4, 1],
        [240, 24],
    )


def launch(
    q, k, v, lambda_full, norm_weight, out, out_diff, out2, lse, causal: bool, scale: float, eps: float,
    out_scale: float,
) -> None:  # fmt: skip
    """Into outputs as of `flash_diff._new_outputs`."""
    d = q.shape[-1] // 2
    block_n, stages = BLOCKS[d]
    save = lse.numel() > 0
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def descriptor(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
        block = [1, rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)

    grid = (triton.cdiv(q.shape[1], 2 * ROWS), q.shape[2], q.shape[0])
    forward_kernel[grid](
        descriptor(q, ROWS, d), descriptor(k, block_n, d), descriptor(v, block_n, 2 * d), descriptor(out, ROWS, 2 * d),
        descriptor(out_diff, ROWS, 2 * d) if out_diff.numel() else None,
        descriptor(out2, ROWS, 2 * d) if save else None,
        lambda_full, norm_weight, lse if save else None, q.shape[1], k.shape[1], scale, eps, out_scale,
        GROUPS=q.shape[2] // k.shape[2], D=d, BLOCK_M=2 * ROWS, BLOCK_N=block_n, STAGES=stages, CAUSAL=causal,
        num_warps=4,
    )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lambda_full: torch.Tensor,
    norm_weight: torch.Tensor | None,
    save: bool,
    causal: bool,
    scale: float,
    eps: float,
    out_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = flash_diff._new_outputs(q, k, v, lambda_full, norm_weight, save)
    launch(q, k, v, lambda_full, norm_weight, *outputs, causal, scale, eps, out_scale)
    return outputs

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The gradient of the queries of `flash_diff` without masks and spans, for sm_90, in Triton's Gluon.

A program owns 128 query rows of one head. Their queries and output gradients stay in shared memory; one warp loads
blocks of keys and values by TMA into rings; two groups of four warps read them, each for 64 of the rows and both maps:

    dP = dO V^T, S_i = Q_i K_i^T, P_i = 2^(S_i scale log2(e) - lse_i), dS_i = P_i (dP - D_i), dQ_i += dS_i K_i

dS_i goes to the tensor cores in registers, so that nothing is written to shared memory before the end. While a group
computes P1, the tensor cores compute its dP; P2 and dS2 overlap with dQ1, and all of it with the other group.

Why nobody waits for ever, and no tile is overwritten too early: the barrier `full` of a stage completes once for each
block loaded into it, its `empty` once both groups have waited for all products that read the block. The loader waits
for `empty` before it loads the next block into a stage, and loads in the order in which the groups wait: K1, V, K2.
For block i it thus needs no more than that both groups finish a block before i, all of which is loaded already. The
second group sees at most one block more than the first; that is the last, and nobody waits for the first to empty it.

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

ROWS, KEYS = 64, 64  # of a group of warps, of a block
STAGES = {64: (2, 2), 128: (2, 1)}  # by d: blocks of keys and of values in their rings
LOG2_E = 1.4426950408889634  # exp(x) = 2^(x log2 e)


@gluon.jit
def load_blocks(descriptors, shared, barriers, start, head, key_head, z, blocks):
    """The warp that loads: the queries and output gradients of both groups, then keys and values."""
    q, k, v, grad = descriptors
    queries, grads, keys1, keys2, values = shared
    rows_full, k1_full, k2_full, k_empty, v_full, v_empty = barriers
    D: gl.constexpr = k.block_shape[3]
    for group in gl.static_range(2):
        row = start + group * q.block_shape[1]
        full = rows_full.index(group)
        mbarrier.expect(full, 2 * q.block_type.nbytes + grad.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [z, row, head, 0], full, queries.index(2 * group))
        tma.async_copy_global_to_shared(q, [z, row, head, D], full, queries.index(2 * group + 1))
        tma.async_copy_global_to_shared(grad, [z, row, head, 0], full, grads.index(group))
    for i in range(blocks):
        row = i * k.block_shape[1]
        stage, phase = i % keys1.shape[0], i // keys1.shape[0] & 1
        v_stage, v_phase = i % values.shape[0], i // values.shape[0] & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k1_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [z, row, key_head, 0], k1_full.index(stage), keys1.index(stage))
        mbarrier.wait(v_empty.index(v_stage), v_phase ^ 1)
        mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [z, row, key_head, 0], v_full.index(v_stage), values.index(v_stage))
        mbarrier.expect(k2_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [z, row, key_head, D], k2_full.index(stage), keys2.index(stage))


@gluon.jit
def tile(buffers, i):
    """Buffer i as a matrix."""
    return buffers.index(i).reshape([buffers.shape[2], buffers.shape[4]])


@gluon.jit
def multiply(a, b, LAYOUT: gl.constexpr):
    """Starts to compute a b^T."""
    unused = gl.full([a.shape[0], b.shape[0]], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(a, b.permute((1, 0)), unused, use_acc=False, is_async=True)


@gluon.jit
def probabilities(scores, scale, logsum, cols, seen, HIDDEN: gl.constexpr):
    """A softmax map again, from scores and their base-2 log-sum of exponentials."""
    if HIDDEN:
        # cols < seen. A thread's columns are 2 (lane % 4) + {0, 1} + 8 j; this way the last two terms are immediates
        scores = gl.where((cols & -7) < seen - (cols & 6), scores, float("-inf"))
    return gl.exp2(scores * scale - logsum)


@gluon.jit
def compute_rows(
    shared, barriers, statistics, lambda_full, grad_q, start, numbers,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A group of warps: 64 rows, from `start` on."""
    queries, grads, keys1, keys2, values = shared
    rows_full, k1_full, k2_full, k_empty, v_full, v_empty = barriers
    M: gl.constexpr = queries.shape[2]
    N: gl.constexpr = keys1.shape[2]
    D: gl.constexpr = keys1.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, k_width=2)
    EARLY: gl.constexpr = D <= 64  # registers are left for the scores of the second map besides those of the first
    rows = start + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT))
    cols = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))[None, :]
    head, z, T, S, scale, scale2 = numbers
    lse, deltas, stat_row, map_stride = statistics
    stats = stat_row + rows
    inside = rows < T  # what the other rows get does not matter: they are not written
    logsum1 = gl.load(lse + stats, mask=inside)[:, None]
    logsum2 = gl.load(lse + map_stride + stats, mask=inside)[:, None]
    delta1 = gl.load(deltas + stats, mask=inside)[:, None]
    delta2 = gl.load(deltas + map_stride + stats, mask=inside)[:, None]
    # The blocks before `full` hide nothing. Beyond S, keys are zeros, but 2^-lse may be infinite, and its product NaN
    full, blocks, seen = S // N, gl.cdiv(S, N), S
    if CAUSAL:  # the last row sees all S keys
        full = gl.minimum(full, (start + 1 + S - T) // N)
        blocks = gl.minimum(blocks, gl.cdiv(start + M + S - T, N))
        seen = rows[:, None] + (1 + S - T)

    dq1 = gl.full([M, D], 0.0, gl.float32, Q_LAYOUT)
    dq2 = gl.full([M, D], 0.0, gl.float32, Q_LAYOUT)
    mbarrier.wait(rows_full.index(GROUP), 0)
    for HIDDEN in gl.static_range(2):
        for i in range(full * HIDDEN, blocks if HIDDEN else full):
            # A zero, unknown to the compilers. It keeps them from holding the addresses of operands that never move in
            # dozens of registers
            zero = i >> 30
            stage, phase = i % keys1.shape[0], i // keys1.shape[0] & 1
            v_stage, v_phase = i % values.shape[0], i // values.shape[0] & 1
            k1, k2 = tile(keys1, stage), tile(keys2, stage)

            mbarrier.wait(k1_full.index(stage), phase)
            s1 = multiply(tile(queries, 2 * GROUP + zero), k1, S_LAYOUT)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            dp = multiply(tile(grads, GROUP + zero), tile(values, v_stage + zero), S_LAYOUT)
            s1 = warpgroup_mma_wait(1, deps=(s1,))
            p = probabilities(s1, scale2, logsum1, cols, seen - i * N, HIDDEN)
            # Here and below, where nothing new is waited for: ptxas moves work across a wait for products (P1 behind
            # dP, S2 before dS1), but not across one for a barrier
            mbarrier.wait(k2_full.index(stage), phase)
            if EARLY:
                s2 = multiply(tile(queries, 2 * GROUP + 1 + zero), k2, S_LAYOUT)
            dp = warpgroup_mma_wait(1 if EARLY else 0, deps=(dp,))
            mbarrier.arrive(v_empty.index(v_stage))
            ds = gl.convert_layout((p * (dp - delta1)).to(queries.dtype), DS_LAYOUT)
            if not EARLY:
                mbarrier.wait(k2_full.index(stage), phase)
                s2 = multiply(tile(queries, 2 * GROUP + 1 + zero), k2, S_LAYOUT)
            dq1 = warpgroup_mma(ds, k1, dq1, is_async=True)
            s2 = warpgroup_mma_wait(1, deps=(s2,))
            p = probabilities(s2, scale2, logsum2, cols, seen - i * N + zero, HIDDEN)
            ds = gl.convert_layout((p * (dp - delta2)).to(queries.dtype), DS_LAYOUT)
            dq2 = warpgroup_mma(ds, k2, dq2, is_async=True)
            dq1, dq2 = warpgroup_mma_wait(0, deps=(dq1, dq2))
            mbarrier.arrive(k_empty.index(stage))

    # By way of the place of the queries, which nobody reads any more
    tile(queries, 2 * GROUP).store((dq1 * scale).to(queries.dtype))
    tile(queries, 2 * GROUP + 1).store((dq2 * (-scale * gl.load(lambda_full))).to(queries.dtype))
    fence_async_shared()
    for i in gl.static_range(2):
        tma.async_copy_shared_to_global(grad_q, [z, start, head, i * D], queries.index(2 * GROUP + i))
    tma.store_wait(0)


@gluon.jit
def dq_kernel(
    q, k, v, grad, grad_q,  # descriptors
    lambda_full, lse, deltas,  # pointers
    T, S, num_stats, scale, scale2,
    GROUPS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    head, z = gl.program_id(1), gl.program_id(2)
    # The longest rows first: the last wave of programs is then the cheapest
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    blocks = gl.cdiv(S, BLOCK_N)
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv(start + BLOCK_M + S - T, BLOCK_N))
    M: gl.constexpr = BLOCK_M // 2
    queries = gl.allocate_shared_memory(q.dtype, [4, 1, M, 1, D], q.layout)  # of two groups, of both maps each
    grads = gl.allocate_shared_memory(q.dtype, [2, 1, M, 1, 2 * D], grad.layout)
    keys1 = gl.allocate_shared_memory(k.dtype, [K_STAGES, 1, BLOCK_N, 1, D], k.layout)
    keys2 = gl.allocate_shared_memory(k.dtype, [K_STAGES, 1, BLOCK_N, 1, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [V_STAGES, 1, BLOCK_N, 1, 2 * D], v.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k1_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    k2_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(rows_full.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k1_full.index(i), count=1)
        mbarrier.init(k2_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both groups
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    shared = (queries, grads, keys1, keys2, values)
    barriers = (rows_full, k1_full, k2_full, k_empty, v_full, v_empty)
    stat_row = head.to(gl.int64) * num_stats + z.to(gl.int64) * T
    statistics = (lse, deltas, stat_row, gl.num_programs(1).to(gl.int64) * num_stats)
    numbers = (head, z, T, S, scale, scale2)
    gl.warp_specialize(
        [
            (compute_rows, (shared, barriers, statistics, lambda_full, grad_q, start, numbers, 0, CAUSAL)),
            (compute_rows, (shared, barriers, statistics, lambda_full, grad_q, start + M, numbers, 1, CAUSAL)),
            (load_blocks, ((q, k, v, grad), shared, barriers, start, head, head // GROUPS, z, blocks)),
        ],
        [4, 1],  # warps of the last two; the first has the launch's 4
        [240, 24],  # registers
    )


def launch(q, k, v, lambda_full, grad_diff, lse, deltas, grad_q, causal: bool, scale: float) -> None:
    """Writes grad_q. Strides of the 4-dimensional tensors are multiples of 16 bytes."""
    d = q.shape[-1] // 2
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def blocks(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
        """Each of one sequence and head: rows beyond the sequence's are zero, and are not written."""
        shape = [1, rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, layout)

    k_stages, v_stages = STAGES[d]
    dq_kernel[triton.cdiv(q.shape[1], 2 * ROWS), q.shape[2], q.shape[0]](
        blocks(q, ROWS, d), blocks(k, KEYS, d), blocks(v, KEYS, 2 * d), blocks(grad_diff, ROWS, 2 * d),
        blocks(grad_q, ROWS, d), lambda_full, lse, deltas,
        q.shape[1], k.shape[1], lse.shape[2], scale, scale * LOG2_E,
        GROUPS=q.shape[2] // k.shape[2], D=d, BLOCK_M=2 * ROWS, BLOCK_N=KEYS, K_STAGES=k_stages, V_STAGES=v_stages,
        CAUSAL=causal, num_warps=4,
    )  # fmt: skip


def dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lambda_full: torch.Tensor,
    grad_diff: torch.Tensor,
    lse: torch.Tensor,
    deltas: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """The gradient of the queries.

    Args:
        q (`torch.Tensor`): (B, T, H, 2d), bfloat16 or float16, d = 64 or 128, strides of multiples of 16 bytes.
        k (`torch.Tensor`): (B, S, K, 2d); K divides H, and S >= T if `causal`.
        v (`torch.Tensor`): (B, S, K, 2d).
        lambda_full (`torch.Tensor`): One number in float32.
        grad_diff (`torch.Tensor`): (B, T, H, 2d), the gradient of the difference of the maps' outputs.
        lse (`torch.Tensor`): (2, H, B * T), float32, base-2 log-sums of exponentials of both maps.
        deltas (`torch.Tensor`): (2, H, B * T), float32, sums of grad_diff times the maps' outputs.
        causal (`bool`): The last query sees the last key.
        scale (`float`): Of the scores.

    Returns:
        (B, T, H, 2d), in the type of q.
    """
    grad_q = flash_diff._empty_like(q)
    launch(q, k, v, lambda_full, grad_diff, lse, deltas, grad_q, causal, scale)
    return grad_q


def emulate_dq(q, k, v, lambda_full, grad_diff, lse, deltas, causal, scale):
    """`dq` in float32 on any device: the same blocks in the same order, rounded where the kernel rounds."""
    (B, T, H, width), S = q.shape, k.shape[1]
    d = width // 2

    def heads(x: torch.Tensor, multiple: int) -> torch.Tensor:
        """(B, H, rows, 2d); rows beyond the sequence's are zeros."""
        x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % multiple))
        return x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2)

    def statistics(x: torch.Tensor) -> torch.Tensor:
        """(2, B, H, rows, 1)"""
        return torch.nn.functional.pad(x.view(2, H, B, T).transpose(1, 2), (0, -T % ROWS))[..., None]

    q, grad, k, v = heads(q, ROWS), heads(grad_diff, ROWS), heads(k, KEYS), heads(v, KEYS)
    lse, deltas = statistics(lse), statistics(deltas)
    grad_q = torch.zeros_like(q)
    for start in range(0, T, ROWS):
        m = slice(start, start + ROWS)
        full, blocks, seen = S // KEYS, triton.cdiv(S, KEYS), torch.full((ROWS, 1), S)
        if causal:
            full = min(full, (start + 1 + S - T) // KEYS)
            blocks = min(blocks, triton.cdiv(start + ROWS + S - T, KEYS))
            seen = torch.arange(start, start + ROWS)[:, None] + 1 + S - T
        for i in range(blocks):
            n = slice(i * KEYS, (i + 1) * KEYS)
            dp = grad[:, :, m] @ v[:, :, n].mT
            for half in range(2):
                columns = slice(half * d, (half + 1) * d)
                keys = k[:, :, n, columns]
                scores = q[:, :, m, columns] @ keys.mT
                if i >= full:
                    scores = scores.masked_fill(torch.arange(KEYS) + i * KEYS >= seen, float("-inf"))
                p = torch.exp2(scores * (scale * LOG2_E) - lse[half, :, :, m])
                ds = (p * (dp - deltas[half, :, :, m])).to(grad_diff.dtype).float()
                grad_q[:, :, m, columns] += ds @ keys
    grad_q[..., :d] *= scale
    grad_q[..., d:] *= -scale * lambda_full
    return grad_q[:, :, :T].transpose(1, 2).to(grad_diff.dtype)

# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The forward of `flash_diff` without masks and spans, for sm_90, in Triton's Gluon.

A program owns 128 query rows of one head. One warp loads blocks of keys and values by TMA into a ring in shared
memory; two groups of four warps read them, each for 64 of the rows. They go over the keys twice: for the second map,
whose output stays in shared memory, and for the first, from which they subtract it and, if asked to, normalise the
head. Both maps at once would leave 64 rows to a program, and make L2 deliver a third more. The scores of the next
block are on the tensor cores while a group computes the probabilities of this one.

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

ROWS = 64  # of a group of warps, as wgmma has
BLOCKS = {64: (128, 3), 128: (64, 2)}  # by d: keys of a block, blocks in the ring


@gluon.jit
def load_block(x, z, row, head, column, tiles, full, empty, n):
    """Block n of the ring, as soon as the one that it replaces has been read."""
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(empty.index(n % STAGES), (n // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(n % STAGES), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [z, row, head, column], full.index(n % STAGES), tiles.index(n % STAGES))


@gluon.jit
def load(q, k, v, queries, ring, q_full, start, head, key_head, z, blocks):
    """The warp that loads: queries and keys of the second map, with the values, and then of the first."""
    keys, values, k_full, k_empty, v_full, v_empty = ring
    BLOCK_N: gl.constexpr = k.block_shape[1]
    D: gl.constexpr = k.block_shape[3]
    for i in gl.static_range(2):
        mbarrier.expect(q_full.index(i), 2 * q.block_type.nbytes)
        for group in gl.static_range(2):
            coordinates = [z, start + group * q.block_shape[1], head, D - i * D]
            tma.async_copy_global_to_shared(q, coordinates, q_full.index(i), queries.index(2 * i + group))
    for n in range(2 * blocks + 1):  # keys are read, and their place is free, one block before values
        if n < 2 * blocks:
            column = gl.where(n < blocks, D, 0)
            load_block(k, z, n % blocks * BLOCK_N, key_head, column, keys, k_full, k_empty, n)
        if n > 0:
            load_block(v, z, (n - 1) % blocks * BLOCK_N, key_head, 0, values, v_full, v_empty, n - 1)


@gluon.jit
def multiply_keys(queries, ring, n, LAYOUT: gl.constexpr):
    """Starts to compute the scores of block n of the ring."""
    keys, _, k_full, _, _, _ = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[2]
    mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
    block = keys.index(n % STAGES).reshape([BLOCK_N, keys.shape[4]]).permute((1, 0))
    zero = gl.full([queries.shape[0], BLOCK_N], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(queries, block, zero, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(p, acc, ring, n):
    """Starts to add the product of probabilities and block n of the ring."""
    _, values, _, _, v_full, _ = ring
    STAGES: gl.constexpr = values.shape[0]
    mbarrier.wait(v_full.index(n % STAGES), n // STAGES & 1)
    return warpgroup_mma(p, values.index(n % STAGES).reshape([values.shape[2], values.shape[4]]), acc, is_async=True)


@gluon.jit
def online_softmax(scores, acc, maximum, total, scale, DTYPE: gl.constexpr):
    """One step of a base-2 softmax over (rows, keys) scores: probabilities relative to the new maximum, earlier sums
    relative to it, the new maximum and the total."""
    new = gl.maximum(maximum, gl.max(scores, 1) * scale)
    probabilities = gl.exp2(scores * scale - new[:, None])
    factor = gl.exp2(maximum - new)
    total = total * factor + gl.sum(probabilities, 1)
    p = gl.convert_layout(probabilities.to(DTYPE), gl.DotOperandLayout(0, acc.type.layout, k_width=2))
    acc *= gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, new, total


@gluon.jit
def attend(queries, ring, start, unmasked, blocks, seen, scale, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Output and base-2 log-sums of exponentials of 64 rows that see `seen` keys each. They lie in `blocks` blocks of
    the ring, from `start` on; the first `unmasked` of them hide nothing."""
    keys, values, _, k_empty, _, v_empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[2]
    acc = gl.full([queries.shape[0], values.shape[4]], 0.0, gl.float32, O_LAYOUT)
    maximum = gl.full([queries.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.full([queries.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))[None, :]

    scores = warpgroup_mma_wait(0, deps=(multiply_keys(queries, ring, start, S_LAYOUT),))
    mbarrier.arrive(k_empty.index(start % STAGES))
    for HIDDEN in gl.static_range(2):
        for i in range(unmasked * HIDDEN, blocks - 1 if HIDDEN else unmasked):
            n = start + i
            next_scores = multiply_keys(queries, ring, n + 1, S_LAYOUT)
            if HIDDEN:
                scores = gl.where(i * BLOCK_N + columns < seen[:, None], scores, float("-inf"))
            p, acc, maximum, total = online_softmax(scores, acc, maximum, total, scale, keys.dtype)
            product = multiply_values(p, acc, ring, n)
            scores = warpgroup_mma_wait(1, deps=(next_scores,))
            mbarrier.arrive(k_empty.index((n + 1) % STAGES))
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(n % STAGES))
    n = start + blocks - 1
    scores = gl.where((blocks - 1) * BLOCK_N + columns < seen[:, None], scores, float("-inf"))
    p, acc, maximum, total = online_softmax(scores, acc, maximum, total, scale, keys.dtype)
    acc = warpgroup_mma_wait(0, deps=(multiply_values(p, acc, ring, n),))
    mbarrier.arrive(v_empty.index(n % STAGES))
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))
    return acc * inverse[:, None], maximum + gl.log2(total)


@gluon.jit
def skip(ring, n):
    """Gives block n of the ring back, unread."""
    keys, _, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
    mbarrier.arrive(k_empty.index(n % STAGES))
    mbarrier.wait(v_full.index(n % STAGES), n // STAGES & 1)
    mbarrier.arrive(v_empty.index(n % STAGES))


@gluon.jit
def store_tile(tile, descriptor, shared, z, row, head):
    shared.reshape(tile.shape).store(tile.to(descriptor.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [z, row, head, 0], shared)


@gluon.jit
def compute_rows(
    shared, outputs, lambda_full, norm_weight, numbers, start, GROUP: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """A group of warps: 64 rows, from `start` on."""
    queries, ring, q_full, second = shared
    out, out_diff, out2, lse = outputs
    head, z, T, S, all_blocks, scale, eps, out_scale = numbers
    M: gl.constexpr = queries.shape[2]
    D: gl.constexpr = queries.shape[4]
    BLOCK_N: gl.constexpr = ring[0].shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * D, 16])
    rows = start + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT))
    seen = gl.full([M], 0, gl.int32, gl.SliceLayout(1, S_LAYOUT)) + S
    seen_by_all, stop = S, S
    if CAUSAL:  # the last row sees all S keys
        seen = gl.minimum(S, rows + 1 + S - T)
        seen_by_all = gl.minimum(S, start + 1 + S - T)
        stop = gl.minimum(S, start + M + S - T)
    blocks = gl.cdiv(stop, BLOCK_N)
    unmasked = gl.minimum(seen_by_all // BLOCK_N, blocks - 1)
    stats = lse
    if lse is not None:
        stats += head.to(gl.int64) * gl.num_programs(2) * T + z * T + rows
    tile = second.index(GROUP)

    for i in gl.static_range(2):
        mbarrier.wait(q_full.index(i), 0)
        acc, stat = attend(
            queries.index(2 * i + GROUP).reshape([M, D]), ring, i * all_blocks, unmasked, blocks, seen, scale,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        for n in range(i * all_blocks + blocks, (i + 1) * all_blocks):  # those that only the other group sees
            skip(ring, n)
        if lse is not None:
            map_stride = gl.num_programs(1).to(gl.int64) * gl.num_programs(2) * T
            gl.store(stats + (1 - i) * map_stride, stat, mask=rows < T)
        if i == 0:
            if out2 is not None:
                store_tile(acc, out2, tile, z, start, head)
            else:
                tile.reshape(acc.shape).store(acc.to(out.dtype))
    difference = acc - gl.load(lambda_full) * tile.reshape(acc.shape).load(O_LAYOUT).to(gl.float32)
    tma.store_wait(0)
    if norm_weight is not None:
        if out_diff is not None:
            store_tile(difference, out_diff, tile, z, start, head)
        weight = gl.load(norm_weight + gl.arange(0, 2 * D, gl.SliceLayout(0, O_LAYOUT))).to(gl.float32)
        r = gl.rsqrt(gl.sum(difference * difference, 1) / (2 * D) + eps)
        difference = difference * r[:, None] * weight[None, :] * out_scale
        tma.store_wait(0)
    store_tile(difference, out, tile, z, start, head)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q, k, v, out, out_diff, out2,  # descriptors
    lambda_full, norm_weight, lse,  # pointers
    T, S, scale, eps, out_scale,
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
    queries = gl.allocate_shared_memory(q.dtype, [4, 1, M, 1, D], q.layout)  # of map 2 and map 1, of two groups each
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, 1, BLOCK_N, 1, 2 * D], v.layout)
    second = gl.allocate_shared_memory(out.dtype, [2, 1, M, 1, 2 * D], out.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both groups
        mbarrier.init(v_empty.index(i), count=2)
    ring = (keys, values, k_full, k_empty, v_full, v_empty)
    outputs = (out, out_diff, out2, lse)
    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    numbers = (head, z, T, S, blocks, scale2, eps, out_scale)
    shared = (queries, ring, q_full, second)
    gl.warp_specialize(
        [
            (compute_rows, (shared, outputs, lambda_full, norm_weight, numbers, start, 0, CAUSAL)),
            (compute_rows, (shared, outputs, lambda_full, norm_weight, numbers, start + M, 1, CAUSAL)),
            (load, (q, k, v, queries, ring, q_full, start, head, head // GROUPS, z, blocks)),
        ],
        [4, 1],  # warps of the last two; the first has the launch's 4
        [240, 24],  # registers
    )  # fmt: skip


def launch(
    q, k, v, lambda_full, norm_weight, out, out_diff, out2, lse, causal: bool, scale: float, eps: float,
    out_scale: float,
) -> None:  # fmt: skip
    """Writes the outputs, of `flash_diff._new_outputs`; out2 only if there is an lse. Strides of q, k and v are
    multiples of 16 bytes."""
    d = q.shape[-1] // 2
    keys, stages = BLOCKS[d]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def blocks(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor | None:
        """Each of one sequence and head: rows beyond the sequence's are zero, and are not written."""
        shape = [1, rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, layout) if x.numel() else None

    save = lse.numel() > 0
    forward_kernel[triton.cdiv(q.shape[1], 2 * ROWS), q.shape[2], q.shape[0]](
        blocks(q, ROWS, d), blocks(k, keys, d), blocks(v, keys, 2 * d),
        blocks(out, ROWS, 2 * d), blocks(out_diff, ROWS, 2 * d), blocks(out2, ROWS, 2 * d) if save else None,
        lambda_full, norm_weight, lse if save else None, q.shape[1], k.shape[1], scale, eps, out_scale,
        GROUPS=q.shape[2] // k.shape[2], D=d, BLOCK_M=2 * ROWS, BLOCK_N=keys, STAGES=stages, CAUSAL=causal,
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
    """Differential attention, and what its backward needs.

    Args:
        q (`torch.Tensor`): (B, T, H, 2d), bfloat16 or float16, d = 64 or 128, strides of multiples of 16 bytes.
        k (`torch.Tensor`): (B, S, K, 2d); K divides H, and S >= T if `causal`.
        v (`torch.Tensor`): (B, S, K, 2d).
        lambda_full (`torch.Tensor`): One number in float32.
        norm_weight (`torch.Tensor`, *optional*): (2d,), of the head norm.
        save (`bool`): Whether there will be a backward.
        causal, scale, eps, out_scale: As in `flash_diff_attention`.

    Returns:
        As `flash_diff._forward`: the output; if `save`, also the difference of the maps' outputs before the norm (if
        there is one), the output of the second map and the base-2 log-sums of exponentials, (2, H, B * T).
    """
    outputs = flash_diff._new_outputs(q, k, v, lambda_full, norm_weight, save)
    launch(q, k, v, lambda_full, norm_weight, *outputs, causal, scale, eps, out_scale)
    return outputs


def emulate_forward(q, k, v, lambda_full, norm_weight, save, causal, scale, eps, out_scale):
    """`forward` in float32 on any device: the same blocks in the same order, rounded where the kernel rounds."""
    out, out_diff, out2, lse = flash_diff._new_outputs(q, k, v, lambda_full, norm_weight, save)
    (T, H, width), (S, K) = q.shape[1:], k.shape[1:3]
    d, scale2 = width // 2, scale * 1.4426950408889634
    keys, _ = BLOCKS[d]
    k, v = (x.float().repeat_interleave(H // K, 2) for x in (k, v))
    for start in range(0, T, ROWS):
        rows = slice(start, start + ROWS)
        seen = torch.full((T,), S)[rows]
        if causal:
            seen = torch.arange(S - T + 1, S + 1)[rows]
        outputs = []
        for i in (1, 0):  # the second map first
            half = slice(i * d, (i + 1) * d)
            maximum = torch.full((q.shape[0], H, len(seen)), float("-inf"))
            total, acc = torch.zeros_like(maximum), torch.zeros(*maximum.shape, width)
            for n in range(0, int(seen[-1]), keys):
                block = slice(n, n + keys)
                scores = torch.einsum("bthd,bshd->bhts", q[:, rows, :, half].float(), k[:, block, :, half])
                scores.masked_fill_(torch.arange(S)[block] >= seen[:, None], float("-inf"))
                new = maximum.maximum(scores.amax(-1) * scale2)
                p, factor = torch.exp2(scores * scale2 - new[..., None]), torch.exp2(maximum - new)
                maximum, total = new, total * factor + p.sum(-1)
                acc = acc * factor[..., None] + torch.einsum("bhts,bshd->bhtd", p.to(q.dtype).float(), v[:, block])
            outputs.append((acc / total[..., None]).transpose(1, 2))
            if save:
                lse[i].view(H, -1, T)[..., rows] = (maximum + total.log2()).transpose(0, 1)
        second = outputs[0].to(q.dtype)
        difference = outputs[1] - lambda_full * second.float()
        if save:
            out2[:, rows] = second
        if norm_weight is not None:
            if save:
                out_diff[:, rows] = difference
            r = torch.rsqrt(difference.square().mean(-1, keepdim=True) + eps)
            difference = difference * r * norm_weight.float() * out_scale
        out[:, rows] = difference
    return out, out_diff, out2, lse

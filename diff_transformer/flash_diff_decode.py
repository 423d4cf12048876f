# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Decoding: a few query tokens against a long cache, read once.

The queries of all heads that share a key/value head form one block of rows. The keys are split among programs, so that
few heads can use a whole GPU (split_kernel); combine_kernel merges the splits of a row, subtracts and normalises.
"""

from __future__ import annotations  # tl.constexpr in signatures, also where triton is absent

from .flash_diff_forward import finish, hide, jit, load_rows, online_softmax, tl


@jit
def split_kernel(
    q, k, v, parts, stats, key_length, mask,  # pointers
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, mask_batch, mask_row, mask_key,
    T, S, scale,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Unnormalised outputs of both maps, parts (B, K, splits, 2, GROUPS T, 2D), and their base-2 maxima and sums,
    stats (B, K, splits, 2, 2, GROUPS T), all float32, over the keys of one split."""
    split, kv_head, z = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    part = (z * tl.num_programs(1) + kv_head) * tl.num_programs(0) + split
    if key_length is not None:
        S = tl.load(key_length + z)
    blocks = tl.cdiv(tl.cdiv(S, BLOCK_N), tl.num_programs(0))  # of a split
    first = split * blocks * BLOCK_N
    stop = tl.minimum(S, first + blocks * BLOCK_N)
    if MASK is not None:
        mask += z * mask_batch
    k += z * k_batch + kv_head * k_head
    v += z * v_batch + kv_head * v_head

    rows = tl.arange(0, BLOCK_M)
    num_rows = GROUPS * T
    head, token = kv_head * GROUPS + rows // T, rows % T
    dims, wide = tl.arange(0, BLOCK_D), tl.arange(0, 2 * BLOCK_D)
    pointers = q + z * q_batch + (head * q_head + token * q_token)[:, None] + dims[None, :]
    inside = (rows < num_rows)[:, None] & (dims < D)[None, :]
    q1 = tl.load(pointers, mask=inside, other=0.0)
    q2 = tl.load(pointers + D, mask=inside, other=0.0)
    max1 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    max2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum1, sum2 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc1 = tl.zeros((BLOCK_M, 2 * BLOCK_D), tl.float32)
    acc2 = tl.zeros((BLOCK_M, 2 * BLOCK_D), tl.float32)
    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)

    for n in range(first, stop, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        k1 = load_rows(k, k_token, n, S, BLOCK_N, dims, D)
        k2 = load_rows(k + D, k_token, n, S, BLOCK_N, dims, D)
        values = load_rows(v, v_token, n, S, BLOCK_N, wide, 2 * D)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale2
        scores = hide(scores, token[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p, factor, max1, sum1 = online_softmax(scores, max1, sum1)
        acc1 = tl.dot(p.to(values.dtype), values, acc1 * factor[:, None], input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * scale2
        scores = hide(scores, token[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p, factor, max2, sum2 = online_softmax(scores, max2, sum2)
        acc2 = tl.dot(p.to(values.dtype), values, acc2 * factor[:, None], input_precision=PRECISION)

    inside = (rows < num_rows)[:, None] & (wide < 2 * D)[None, :]
    target = parts + part * 2 * num_rows * 2 * D + rows[:, None] * 2 * D + wide[None, :]
    tl.store(target, acc1, mask=inside)
    tl.store(target + num_rows * 2 * D, acc2, mask=inside)
    target = stats + part * 4 * num_rows + rows
    tl.store(target, max1, mask=rows < num_rows)
    tl.store(target + num_rows, sum1, mask=rows < num_rows)
    tl.store(target + 2 * num_rows, max2, mask=rows < num_rows)
    tl.store(target + 3 * num_rows, sum2, mask=rows < num_rows)


@jit
def merge(parts, stats, splits, part_stride, stat_stride, num_rows, wide, inside):
    """The output of one map: the softmax-weighted mean over the splits of a row."""
    s = tl.arange(0, 1)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros(wide.shape, tl.float32)
    for i in range(0, splits):
        part_max = tl.load(stats + i * stat_stride + s)
        new = tl.maximum(maximum, part_max)
        base = tl.where(new == float("-inf"), 0.0, new)
        before, now = tl.exp2(maximum - base), tl.exp2(part_max - base)
        total = total * before + tl.load(stats + i * stat_stride + num_rows + s) * now
        acc = acc * before + tl.load(parts + i * part_stride + wide, mask=inside, other=0.0) * now
        maximum = new
    return acc / tl.where(total == 0.0, 1.0, total)


@jit
def combine_kernel(
    parts, stats, lambda_full, norm_weight, out,  # pointers
    o_batch, o_token, o_head,  # strides
    T, splits, eps, out_scale,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, kv_head, z = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_rows = GROUPS * T
    wide = tl.arange(0, 2 * BLOCK_D)
    inside = wide < 2 * D
    part = (z * tl.num_programs(1) + kv_head) * splits
    part_stride, stat_stride = 2 * num_rows * 2 * D, 4 * num_rows
    parts += part * part_stride + row * 2 * D
    stats += part * stat_stride + row
    out1 = merge(parts, stats, splits, part_stride, stat_stride, num_rows, wide, inside)
    parts += num_rows * 2 * D
    stats += 2 * num_rows
    out2 = merge(parts, stats, splits, part_stride, stat_stride, num_rows, wide, inside)
    difference = (out1 - tl.load(lambda_full) * out2)[None, :]
    difference = finish(difference, norm_weight, wide, eps, out_scale, D)
    target = out + z * o_batch + row % T * o_token + (kv_head * GROUPS + row // T) * o_head
    tl.store(target + wide[None, :], difference.to(out.dtype.element_ty), mask=inside[None, :])

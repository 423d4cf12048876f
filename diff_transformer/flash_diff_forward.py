# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The fused forward kernel: both softmax maps of a head in one pass over K and V (docs/how_it_works.md).

A program owns a block of query rows of one head. It walks over the keys that its rows may see and keeps two online
softmaxes, one for [q1 . k1] and one for [q2 . k2], with an accumulator each over the shared values. At the end it
subtracts, and, if asked to, normalises the head (RMSNorm over 2d), weights and scales it: the output is written once.
"""

from __future__ import annotations  # tl.constexpr in signatures, also where triton is absent

try:
    import triton
    import triton.language as tl

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        raise ImportError("an older triton spills registers, and fails to compile for some GPUs")
except ImportError:
    triton = tl = None


def jit(function):
    """`triton.jit`; without triton the function stays as it is, and is never called."""
    return function if triton is None else triton.jit(function)


@jit
def sequence(z, T, S, q_starts, q_ends, k_starts, k_ends):
    """Where sequence z lies: its first query row and first key row, the first column of its statistics, its numbers of
    queries and keys. Starts and ends are rows of its own in a padded batch, of all in a packed one, where T is 0."""
    q_row, k_row, stat_row = z * 0, z * 0, z * T
    if q_starts is not None:
        q_row = tl.load(q_starts + z).to(tl.int64)
        k_row = tl.load(k_starts + z).to(tl.int64)
        stat_row += q_row
        T = (tl.load(q_ends + z) - q_row).to(tl.int32)
        S = (tl.load(k_ends + z) - k_row).to(tl.int32)
    return q_row, k_row, stat_row, T, S


@jit
def load_rows(pointer, stride, start, num_rows, BLOCK: tl.constexpr, dims, num_dims: tl.constexpr):
    """(BLOCK, dims) of a row-major matrix from row `start` on, zero outside of it."""
    # A 64-bit scalar and 32-bit offsets inside the block: the pointers of a block live in registers
    rows = tl.arange(0, BLOCK)
    pointers = pointer + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    inside = (rows < num_rows - start)[:, None]
    if num_dims != dims.shape[0]:
        inside = inside & (dims < num_dims)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def hide(scores, rows, cols, T, S, mask, mask_row, mask_key, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """-inf where a row may not see a key. rows and cols are (N, 1) and (1, M), or (1, N) and (M, 1) for transposed
    scores. The last row sees all S keys if CAUSAL; mask points to the sequence's own boolean mask of its keys (MASK =
    "keys") or of its rows and keys ("full")."""
    seen = cols < S
    if MASK == "keys":
        seen = seen & (tl.load(mask + cols * mask_key, mask=cols < S, other=0) != 0)
    if CAUSAL:
        seen = seen & (cols <= rows + S - T)
    if MASK == "full":
        pointers = mask + rows.to(tl.int64) * mask_row + cols * mask_key
        seen = seen & (tl.load(pointers, mask=(rows < T) & (cols < S), other=0) != 0)
    return tl.where(seen, scores, float("-inf"))


@jit
def online_softmax(scores, maximum, total):
    """One step of a base-2 softmax over (rows, keys) scores: probabilities relative to the new maximum, the factor for
    what was summed before, the new maximum and total. Rows that saw no key yet stay at zero."""
    new = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    probabilities = tl.exp2(scores - base[:, None])
    factor = tl.exp2(maximum - base)
    return probabilities, factor, new, total * factor + tl.sum(probabilities, 1)


@jit
def finish(difference, norm_weight, wide, eps, out_scale, D: tl.constexpr):
    """The head norm over (rows, 2D), out_scale * weight * RMSNorm(difference), or nothing without a weight."""
    if norm_weight is not None:
        mean_square = tl.sum(difference * difference, 1) / (2 * D)
        weight = tl.load(norm_weight + wide, mask=wide < 2 * D, other=0.0).to(tl.float32)
        difference = difference * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :] * out_scale
    return difference


@jit
def forward_kernel(
    q, k, v, lambda_full, norm_weight, out, out_diff, out2, lse,  # pointers
    q_starts, q_ends, k_starts, k_ends, mask,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    mask_batch, mask_row, mask_key,  # strides
    T, S, num_stats, scale, eps, out_scale,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # 64 bits: a long cache has wide strides
    q_row, k_row, stat_row, T, S = sequence(z, T, S, q_starts, q_ends, k_starts, k_ends)
    # The longest rows first: the last wave of programs is then the cheapest
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if start >= T:
        return
    rows, dims, wide = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, 2 * BLOCK_D)
    q += z * q_batch + q_row * q_token + head * q_head
    if MASK is not None:
        mask += z * mask_batch
    k += z * k_batch + k_row * k_token + head // GROUPS * k_head
    v += z * v_batch + k_row * v_token + head // GROUPS * v_head
    q1 = load_rows(q, q_token, start, T, BLOCK_M, dims, D)
    q2 = load_rows(q + D, q_token, start, T, BLOCK_M, dims, D)
    max1 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    max2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum1, sum2 = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc1 = tl.zeros((BLOCK_M, 2 * BLOCK_D), tl.float32)
    acc2 = tl.zeros((BLOCK_M, 2 * BLOCK_D), tl.float32)
    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)

    stop = S
    if CAUSAL:
        stop = tl.minimum(S, start + BLOCK_M + S - T)
    for n in range(0, stop, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        k1 = load_rows(k, k_token, n, S, BLOCK_N, dims, D)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale2
        scores = hide(scores, rows[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p1, factor1, max1, sum1 = online_softmax(scores, max1, sum1)
        k2 = load_rows(k + D, k_token, n, S, BLOCK_N, dims, D)
        scores = tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * scale2
        scores = hide(scores, rows[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p2, factor2, max2, sum2 = online_softmax(scores, max2, sum2)
        values = load_rows(v, v_token, n, S, BLOCK_N, wide, 2 * D)
        acc1 = tl.dot(p1.to(values.dtype), values, acc1 * factor1[:, None], input_precision=PRECISION)
        acc2 = tl.dot(p2.to(values.dtype), values, acc2 * factor2[:, None], input_precision=PRECISION)

    # A row that saw no key: zero, and +inf in the backward, where its probabilities then come out as zero
    lse1 = tl.where(sum1 == 0.0, float("inf"), max1 + tl.log2(tl.where(sum1 == 0.0, 1.0, sum1)))
    lse2 = tl.where(sum2 == 0.0, float("inf"), max2 + tl.log2(tl.where(sum2 == 0.0, 1.0, sum2)))
    acc1 /= tl.where(sum1 == 0.0, 1.0, sum1)[:, None]
    acc2 /= tl.where(sum2 == 0.0, 1.0, sum2)[:, None]
    difference = acc1 - tl.load(lambda_full) * acc2
    inside = (rows < T)[:, None] & (wide < 2 * D)[None, :]
    o_offset = z * o_batch + (q_row + rows)[:, None] * o_token + head * o_head + wide[None, :]
    if SAVE:  # for the backward
        stat = lse + head * num_stats + stat_row + rows
        tl.store(stat, lse1, mask=rows < T)
        stat += tl.num_programs(1) * num_stats
        tl.store(stat, lse2, mask=rows < T)
        tl.store(out2 + o_offset, acc2.to(out2.dtype.element_ty), mask=inside)
        if norm_weight is not None:
            tl.store(out_diff + o_offset, difference.to(out.dtype.element_ty), mask=inside)
    difference = finish(difference, norm_weight, wide, eps, out_scale, D)
    tl.store(out + o_offset, difference.to(out.dtype.element_ty), mask=inside)

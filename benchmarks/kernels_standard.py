# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Standard causal attention in Triton, FlashAttention-2's algorithm (arXiv:2307.08691): the measure of kernel_model.

Three kernels, as ours: the forward, dQ by blocks of rows, and dK with dV by blocks of keys. The main loops mask
nothing; the blocks on the diagonal have a loop of their own. A head dimension that is no power of two is computed in
two parts that are, 96 as 64 + 32, so that nothing is padded.

Shapes, with strides: q, out, grad_out, grad_q (batch, T, heads, D); k, v, grad_k, grad_v (batch, S, heads, D), the
last dimension contiguous; lse (in base 2) and deltas, the row sums of grad_out * out, (batch, heads, T) in float32.
The last query sees all keys.
"""

import torch
import triton
import triton.language as tl

from diff_transformer.flash_diff_blocks import Blocks


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, used: Blocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and the gradients of q, k and v, all kernels with the same blocks."""
    (batch, T, heads, d), S = q.shape, k.shape[1]
    out, grad_q, grad_k, grad_v = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    lse = torch.full((batch, heads, T), torch.nan, dtype=torch.float32, device=q.device)
    rows, keys = ((triton.cdiv(n, block), heads, batch) for n, block in ((T, used.BLOCK_M), (S, used.BLOCK_N)))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    numbers, options = (T, S, d**-0.5), {"D": d, **used._asdict()}
    forward_kernel[rows](q, k, v, out, lse, *strides, *out.stride()[:3], *numbers, **options)
    deltas = (grad_out * out).sum(-1, dtype=torch.float32).transpose(1, 2).contiguous()
    given, strides = (q, k, v, grad_out, lse, deltas), (*strides, *grad_out.stride()[:3])
    dq_kernel[rows](*given, grad_q, *strides, *grad_q.stride()[:3], *numbers, **options)
    dkdv_kernel[keys](*given, grad_k, grad_v, *strides, *grad_k.stride()[:3], *numbers, **options)
    return out, grad_q, grad_k, grad_v


@triton.jit
def load_part(pointer, stride, start, num_rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    pointers = pointer + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + tl.arange(0, WIDTH)[None, :])
    if BOUND:
        return tl.load(pointers, mask=(rows < num_rows - start)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(pointer, stride, start, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, BOUND: tl.constexpr):
    """(BLOCK, D) from row `start` on, in parts whose widths are powers of two. BOUND: zero beyond num_rows."""
    REST: tl.constexpr = D % (triton.next_power_of_2(D + 1) // 2)
    first = load_part(pointer, stride, start, num_rows, BLOCK, D - REST, BOUND)
    if REST == 0:
        return (first,)
    else:
        return first, load_part(pointer + D - REST, stride, start, num_rows, BLOCK, REST, BOUND)


@triton.jit
def store_part(pointer, stride, start, num_rows, block):
    rows = start + tl.arange(0, block.shape[0])
    pointers = pointer + rows[:, None].to(tl.int64) * stride + tl.arange(0, block.shape[1])[None, :]
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit
def store_rows(pointer, stride, start, num_rows, parts, factor):
    store_part(pointer, stride, start, num_rows, parts[0] * factor)
    if len(parts) == 2:
        store_part(pointer + parts[0].shape[1], stride, start, num_rows, parts[1] * factor)


@triton.jit
def zeros(BLOCK: tl.constexpr, D: tl.constexpr):
    REST: tl.constexpr = D % (triton.next_power_of_2(D + 1) // 2)
    first = tl.zeros((BLOCK, D - REST), tl.float32)
    if REST == 0:
        return (first,)
    else:
        return first, tl.zeros((BLOCK, REST), tl.float32)


@triton.jit
def multiply_transposed(a, b):
    """a b^T, summed over the parts of their rows."""
    product = tl.dot(a[0], tl.trans(b[0]))
    if len(a) == 2:
        product = tl.dot(a[1], tl.trans(b[1]), product)
    return product


@triton.jit
def accumulate(acc, weights, b):
    """acc + weights b, part by part."""
    weights = weights.to(b[0].dtype)
    first = tl.dot(weights, b[0], acc[0])
    if len(b) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, b[1], acc[1])


@triton.jit
def multiply(parts, factor):
    if len(parts) == 1:
        return (parts[0] * factor,)
    else:
        return parts[0] * factor, parts[1] * factor


@triton.jit
def hide(scores, rows, cols, T, S):
    return tl.where((cols < S) & (cols <= rows + S - T), scores, float("-inf"))


@triton.jit
def forward_step(
    acc, maximum, total, q, k, v, k_token, v_token, n, rows, T, S, scale2,
    BLOCK_N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = load_rows(k, k_token, n, S, BLOCK_N, D, MASKED)
    scores = multiply_transposed(q, keys)
    if MASKED:
        scores = hide(scores, rows[:, None], (n + tl.arange(0, BLOCK_N))[None, :], T, S)
    new = tl.maximum(maximum, tl.max(scores, 1) * scale2)
    base = new
    if MASKED:
        base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores * scale2 - base[:, None])
    factor = tl.exp2(maximum - base)
    values = load_rows(v, v_token, n, S, BLOCK_N, D, MASKED)
    acc = accumulate(multiply(acc, factor[:, None]), p, values)
    return acc, new, total * factor + tl.sum(p, 1)


@triton.jit
def forward_kernel(
    q, k, v, out, lse,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    T, S, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    rows = start + tl.arange(0, BLOCK_M)
    k += z * k_batch + head * k_head
    v += z * v_batch + head * v_head
    queries = load_rows(q + z * q_batch + head * q_head, q_token, start, T, BLOCK_M, D, True)
    acc = zeros(BLOCK_M, D)
    maximum, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    diagonal = tl.maximum(0, start + S - T + 1) // BLOCK_N * BLOCK_N  # all rows see all keys before it
    stop = tl.minimum(S, start + BLOCK_M + S - T)
    for n in range(0, diagonal, BLOCK_N):
        acc, maximum, total = forward_step(
            acc, maximum, total, queries, k, v, k_token, v_token, n, rows, T, S, scale2, BLOCK_N, D, False
        )
    for n in range(diagonal, stop, BLOCK_N):
        acc, maximum, total = forward_step(
            acc, maximum, total, queries, k, v, k_token, v_token, n, rows, T, S, scale2, BLOCK_N, D, True
        )
    tl.store(lse + (z * tl.num_programs(1) + head) * T + rows, maximum + tl.log2(total), mask=rows < T)
    store_rows(out + z * o_batch + head * o_head, o_token, start, T, acc, 1 / total[:, None])


@triton.jit
def dq_step(
    acc, q, grad, k, v, k_token, v_token, n, rows, logsum, delta, T, S, scale2,
    BLOCK_N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    grad_p = multiply_transposed(grad, load_rows(v, v_token, n, S, BLOCK_N, D, MASKED))
    keys = load_rows(k, k_token, n, S, BLOCK_N, D, MASKED)
    scores = multiply_transposed(q, keys)
    if MASKED:
        scores = hide(scores, rows[:, None], (n + tl.arange(0, BLOCK_N))[None, :], T, S)
    p = tl.exp2(scores * scale2 - logsum[:, None])
    return accumulate(acc, p * (grad_p - delta[:, None]), keys)


@triton.jit
def dq_kernel(
    q, k, v, grad_out, lse, deltas, grad_q,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    dq_batch, dq_token, dq_head,
    T, S, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    k += z * k_batch + head * k_head
    v += z * v_batch + head * v_head
    queries = load_rows(q + z * q_batch + head * q_head, q_token, start, T, BLOCK_M, D, True)
    grad = load_rows(grad_out + z * g_batch + head * g_head, g_token, start, T, BLOCK_M, D, True)
    statistics = (z * tl.num_programs(1) + head) * T + rows
    logsum = tl.load(lse + statistics, mask=rows < T, other=float("inf"))
    delta = tl.load(deltas + statistics, mask=rows < T, other=0.0)
    acc = zeros(BLOCK_M, D)
    scale2 = scale * 1.4426950408889634
    diagonal = tl.maximum(0, start + S - T + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(S, start + BLOCK_M + S - T)
    for n in range(0, diagonal, BLOCK_N):
        acc = dq_step(
            acc, queries, grad, k, v, k_token, v_token, n, rows, logsum, delta, T, S, scale2, BLOCK_N, D, False
        )
    for n in range(diagonal, stop, BLOCK_N):
        acc = dq_step(
            acc, queries, grad, k, v, k_token, v_token, n, rows, logsum, delta, T, S, scale2, BLOCK_N, D, True
        )
    store_rows(grad_q + z * dq_batch + head * dq_head, dq_token, start, T, acc, scale)


@triton.jit
def dkdv_step(
    acc_k, acc_v, keys, values, q, grad_out, q_token, g_token, m, cols, lse, deltas, T, S, scale2,
    BLOCK_M: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Everything is transposed, (keys, rows). Rows beyond T have an infinite lse: their probabilities are zero."""
    rows = m + tl.arange(0, BLOCK_M)
    queries = load_rows(q, q_token, m, T, BLOCK_M, D, True)
    scores = multiply_transposed(keys, queries)
    if MASKED:
        scores = hide(scores, rows[None, :], cols[:, None], T, S)
    p = tl.exp2(scores * scale2 - tl.load(lse + rows, mask=rows < T, other=float("inf"))[None, :])
    grad = load_rows(grad_out, g_token, m, T, BLOCK_M, D, True)
    acc_v = accumulate(acc_v, p, grad)
    grad_p = multiply_transposed(values, grad)
    grad_s = p * (grad_p - tl.load(deltas + rows, mask=rows < T, other=0.0)[None, :])
    return accumulate(acc_k, grad_s, queries), acc_v


@triton.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, deltas, grad_k, grad_v,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    dk_batch, dk_token, dk_head,  # grad_v has grad_k's
    T, S, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK_N
    cols = start + tl.arange(0, BLOCK_N)
    q += z * q_batch + head * q_head
    grad_out += z * g_batch + head * g_head
    keys = load_rows(k + z * k_batch + head * k_head, k_token, start, S, BLOCK_N, D, True)
    values = load_rows(v + z * v_batch + head * v_head, v_token, start, S, BLOCK_N, D, True)
    statistics = (z * tl.num_programs(1) + head) * T
    lse += statistics
    deltas += statistics
    acc_k, acc_v = zeros(BLOCK_N, D), zeros(BLOCK_N, D)
    scale2 = scale * 1.4426950408889634
    first = tl.maximum(0, start - S + T) // BLOCK_M * BLOCK_M
    below = tl.maximum(0, start + BLOCK_N - 1 - S + T)  # the first row that sees all keys of the block
    below = tl.minimum(tl.cdiv(below, BLOCK_M), tl.cdiv(T, BLOCK_M)) * BLOCK_M
    for m in range(first, below, BLOCK_M):
        acc_k, acc_v = dkdv_step(
            acc_k, acc_v, keys, values, q, grad_out, q_token, g_token, m, cols, lse, deltas, T, S, scale2,
            BLOCK_M, D, True,
        )  # fmt: skip
    for m in range(below, T, BLOCK_M):
        acc_k, acc_v = dkdv_step(
            acc_k, acc_v, keys, values, q, grad_out, q_token, g_token, m, cols, lse, deltas, T, S, scale2,
            BLOCK_M, D, False,
        )  # fmt: skip
    offset = z * dk_batch + head * dk_head
    store_rows(grad_k + offset, dk_token, start, S, acc_k, scale)
    store_rows(grad_v + offset, dk_token, start, S, acc_v, 1.0)

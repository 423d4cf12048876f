# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Standard causal attention in Triton, FlashAttention-2's algorithm (arXiv:2307.08691): the measure of kernel_model.

Three kernels, as ours: the forward, dQ by blocks of rows, and dK with dV by blocks of keys. The main loops mask
nothing; the blocks on the diagonal have a loop of their own. A head dimension that is no power of two is computed in
two parts that are, 96 as 64 + 32, so that nothing is padded.

Shapes, all contiguous, with a batch of heads Z: q, out and their gradients (Z, T, D); k, v and theirs (Z, S, D); lse
(in base 2) and deltas, the row sums of grad_out * out, (Z, T) in float32. The last query sees all keys.
"""

import torch
import triton
import triton.language as tl

from diff_transformer.flash_diff_blocks import Blocks

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, used: Blocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and the gradients of q, k and v, all kernels with the same blocks."""
    (Z, T, D), S = q.shape, k.shape[1]
    out, grad_q, grad_k, grad_v = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    lse = torch.full((Z, T), torch.nan, dtype=torch.float32, device=q.device)
    rows, keys = ((triton.cdiv(n, block), Z) for n, block in ((T, used.BLOCK_M), (S, used.BLOCK_N)))
    options = {"T": T, "S": S, "scale": D**-0.5, "D": D, **used._asdict()}
    forward_kernel[rows](q, k, v, out, lse, **options)
    given = (q, k, v, grad_out, lse, (grad_out * out).sum(-1, dtype=torch.float32))
    dq_kernel[rows](*given, grad_q, **options)
    dkdv_kernel[keys](*given, grad_k, grad_v, **options)
    return out, grad_q, grad_k, grad_v


@triton.jit
def load_part(
    pointer, start, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr
):
    rows = tl.arange(0, BLOCK)
    pointers = pointer + tl.cast(start, tl.int64) * D + (rows[:, None] * D + tl.arange(0, WIDTH)[None, :])
    if BOUND:
        return tl.load(pointers, mask=(rows < num_rows - start)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(pointer, start, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, BOUND: tl.constexpr):
    """(BLOCK, D) from row `start` on, in parts whose widths are powers of two. BOUND: zero beyond num_rows."""
    REST: tl.constexpr = D % (triton.next_power_of_2(D + 1) // 2)
    first = load_part(pointer, start, num_rows, BLOCK, D, D - REST, BOUND)
    if REST == 0:
        return (first,)
    else:
        return first, load_part(pointer + D - REST, start, num_rows, BLOCK, D, REST, BOUND)


@triton.jit
def store_part(pointer, start, num_rows, block, D: tl.constexpr):
    rows = start + tl.arange(0, block.shape[0])
    pointers = pointer + rows[:, None].to(tl.int64) * D + tl.arange(0, block.shape[1])[None, :]
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit
def store_rows(pointer, start, num_rows, parts, factor, D: tl.constexpr):
    store_part(pointer, start, num_rows, parts[0] * factor, D)
    if len(parts) == 2:
        store_part(pointer + parts[0].shape[1], start, num_rows, parts[1] * factor, D)


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
def forward_kernel(q, k, v, out, lse, T, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    z = tl.program_id(1).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    k += z * S * D
    v += z * S * D
    queries = load_rows(q + z * T * D, start, T, BLOCK_M, D, True)
    acc = zeros(BLOCK_M, D)
    maximum, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    diagonal = tl.maximum(0, start + S - T + 1) // BLOCK_N * BLOCK_N  # all rows see all keys before it
    stop = tl.minimum(S, start + BLOCK_M + S - T)
    for MASKED in tl.static_range(2):
        for n in range(diagonal if MASKED else 0, stop if MASKED else diagonal, BLOCK_N):
            keys = load_rows(k, n, S, BLOCK_N, D, MASKED)
            scores = multiply_transposed(queries, keys)
            if MASKED:
                scores = hide(scores, rows[:, None], (n + tl.arange(0, BLOCK_N))[None, :], T, S)
            new = tl.maximum(maximum, tl.max(scores, 1) * (scale * LOG2E))
            base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
            p = tl.exp2(scores * (scale * LOG2E) - base[:, None])
            factor = tl.exp2(maximum - base)
            acc = accumulate(multiply(acc, factor[:, None]), p, load_rows(v, n, S, BLOCK_N, D, MASKED))
            maximum, total = new, total * factor + tl.sum(p, 1)
    tl.store(lse + z * T + rows, maximum + tl.log2(total), mask=rows < T)
    store_rows(out + z * T * D, start, T, acc, 1 / total[:, None], D)


@triton.jit
def dq_kernel(
    q, k, v, grad_out, lse, deltas, grad_q, T, S, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    z = tl.program_id(1).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    k += z * S * D
    v += z * S * D
    queries = load_rows(q + z * T * D, start, T, BLOCK_M, D, True)
    grad = load_rows(grad_out + z * T * D, start, T, BLOCK_M, D, True)
    logsum = tl.load(lse + z * T + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(deltas + z * T + rows, mask=rows < T, other=0.0)
    acc = zeros(BLOCK_M, D)
    diagonal = tl.maximum(0, start + S - T + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(S, start + BLOCK_M + S - T)
    for MASKED in tl.static_range(2):
        for n in range(diagonal if MASKED else 0, stop if MASKED else diagonal, BLOCK_N):
            grad_p = multiply_transposed(grad, load_rows(v, n, S, BLOCK_N, D, MASKED))
            keys = load_rows(k, n, S, BLOCK_N, D, MASKED)
            scores = multiply_transposed(queries, keys)
            if MASKED:
                scores = hide(scores, rows[:, None], (n + tl.arange(0, BLOCK_N))[None, :], T, S)
            p = tl.exp2(scores * (scale * LOG2E) - logsum[:, None])
            acc = accumulate(acc, p * (grad_p - delta[:, None]), keys)
    store_rows(grad_q + z * T * D, start, T, acc, scale, D)


@triton.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, deltas, grad_k, grad_v, T, S, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Everything is transposed, (keys, rows). Rows beyond T have an infinite lse: their probabilities are zero."""
    start, z = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    cols = start + tl.arange(0, BLOCK_N)
    q += z * T * D
    grad_out += z * T * D
    lse += z * T
    deltas += z * T
    keys = load_rows(k + z * S * D, start, S, BLOCK_N, D, True)
    values = load_rows(v + z * S * D, start, S, BLOCK_N, D, True)
    acc_k, acc_v = zeros(BLOCK_N, D), zeros(BLOCK_N, D)
    first = tl.maximum(0, start - S + T) // BLOCK_M * BLOCK_M
    below = tl.maximum(0, start + BLOCK_N - 1 - S + T)  # the first row that sees all keys of the block
    below = tl.minimum(tl.cdiv(below, BLOCK_M), tl.cdiv(T, BLOCK_M)) * BLOCK_M
    for UNMASKED in tl.static_range(2):
        for m in range(below if UNMASKED else first, T if UNMASKED else below, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            queries = load_rows(q, m, T, BLOCK_M, D, True)
            scores = multiply_transposed(keys, queries)
            if not UNMASKED:
                scores = hide(scores, rows[None, :], cols[:, None], T, S)
            logsum = tl.load(lse + rows, mask=rows < T, other=float("inf"))
            p = tl.exp2(scores * (scale * LOG2E) - logsum[None, :])
            grad = load_rows(grad_out, m, T, BLOCK_M, D, True)
            acc_v = accumulate(acc_v, p, grad)
            grad_p = multiply_transposed(values, grad)
            grad_s = p * (grad_p - tl.load(deltas + rows, mask=rows < T, other=0.0)[None, :])
            acc_k = accumulate(acc_k, grad_s, queries)
    store_rows(grad_k + z * S * D, start, S, acc_k, scale, D)
    store_rows(grad_v + z * S * D, start, S, acc_v, 1.0, D)

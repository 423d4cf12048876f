# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Standard causal attention in Triton, FlashAttention-2's algorithm (arXiv:2307.08691): the measure of kernel_model.

Three kernels, as ours and of the same parts (flash_diff_forward): the forward, dQ by blocks of rows, and dK with dV by
blocks of keys. The main loops mask nothing; the blocks on the diagonal have their own loop.

Shapes, all contiguous, with a batch of heads Z: q, out and their gradients (Z, T, D); k, v and theirs (Z, S, D); lse
(in base 2) and deltas, the row sums of grad_out * out, (Z, T) in float32. The last query sees all keys.
"""

import torch
import triton
import triton.language as tl

from diff_transformer.flash_diff_blocks import Blocks
from diff_transformer.flash_diff_forward import (
    add_dot,
    dot_transposed,
    hide,
    key_blocks,
    load_tile,
    online_softmax,
    scale_rows,
    store_tile,
    zero_tile,
)

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e)


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
def forward_kernel(q, k, v, out, lse, T, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    z = tl.program_id(1).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    k += z * S * D
    v += z * S * D
    queries = load_tile(q + z * T * D, D, start, T, BLOCK_M, D, False)
    acc = zero_tile(BLOCK_M, D)
    maximum, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    first, stop = key_blocks(start, T, S, BLOCK_M, BLOCK_N, True, None)
    for HIDDEN in tl.static_range(2):
        for n in range(first * HIDDEN, stop if HIDDEN else first, BLOCK_N):
            scores = dot_transposed(queries, load_tile(k, D, n, S, BLOCK_N, D, not HIDDEN), "ieee")
            if HIDDEN:
                cols = n + tl.arange(0, BLOCK_N)[None, :]
                scores = hide(scores, rows[:, None], cols, T, S, None, 0, 0, True, None)
            p, factor, maximum, total = online_softmax(scores, scale * LOG2E, maximum, total, HIDDEN)
            acc = add_dot(p, load_tile(v, D, n, S, BLOCK_N, D, not HIDDEN), scale_rows(acc, factor), "ieee")
    tl.store(lse + z * T + rows, maximum + tl.log2(total), mask=rows < T)
    store_tile(out + z * T * D, D, start, T, scale_rows(acc, 1.0 / total), 1.0, D)


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
    queries = load_tile(q + z * T * D, D, start, T, BLOCK_M, D, False)
    grad = load_tile(grad_out + z * T * D, D, start, T, BLOCK_M, D, False)
    logsum = tl.load(lse + z * T + rows, mask=rows < T, other=float("inf"))
    delta = tl.load(deltas + z * T + rows, mask=rows < T, other=0.0)
    acc = zero_tile(BLOCK_M, D)
    first, stop = key_blocks(start, T, S, BLOCK_M, BLOCK_N, True, None)
    for HIDDEN in tl.static_range(2):
        for n in range(first * HIDDEN, stop if HIDDEN else first, BLOCK_N):
            grad_p = dot_transposed(grad, load_tile(v, D, n, S, BLOCK_N, D, not HIDDEN), "ieee")
            keys = load_tile(k, D, n, S, BLOCK_N, D, not HIDDEN)
            scores = dot_transposed(queries, keys, "ieee")
            if HIDDEN:
                cols = n + tl.arange(0, BLOCK_N)[None, :]
                scores = hide(scores, rows[:, None], cols, T, S, None, 0, 0, True, None)
            p = tl.exp2(scores * (scale * LOG2E) - logsum[:, None])
            acc = add_dot(p * (grad_p - delta[:, None]), keys, acc, "ieee")
    store_tile(grad_q + z * T * D, D, start, T, acc, scale, D)


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
    keys = load_tile(k + z * S * D, D, start, S, BLOCK_N, D, False)
    values = load_tile(v + z * S * D, D, start, S, BLOCK_N, D, False)
    acc_k, acc_v = zero_tile(BLOCK_N, D), zero_tile(BLOCK_N, D)
    first = tl.maximum(0, start - S + T) // BLOCK_M * BLOCK_M
    below = tl.maximum(0, start + BLOCK_N - 1 - S + T)  # the first row that sees all keys of the block
    below = tl.minimum(tl.cdiv(below, BLOCK_M), tl.cdiv(T, BLOCK_M)) * BLOCK_M
    for SEEN in tl.static_range(2):
        for m in range(below if SEEN else first, T if SEEN else below, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            queries = load_tile(q, D, m, T, BLOCK_M, D, False)
            scores = dot_transposed(keys, queries, "ieee")
            if not SEEN:
                scores = hide(scores, rows[None, :], cols[:, None], T, S, None, 0, 0, True, None)
            logsum = tl.load(lse + rows, mask=rows < T, other=float("inf"))
            p = tl.exp2(scores * (scale * LOG2E) - logsum[None, :])
            grad = load_tile(grad_out, D, m, T, BLOCK_M, D, False)
            acc_v = add_dot(p, grad, acc_v, "ieee")
            grad_p = dot_transposed(values, grad, "ieee")
            grad_s = p * (grad_p - tl.load(deltas + rows, mask=rows < T, other=0.0)[None, :])
            acc_k = add_dot(grad_s, queries, acc_k, "ieee")
    store_tile(grad_k + z * S * D, D, start, S, acc_k, scale, D)
    store_tile(grad_v + z * S * D, D, start, S, acc_v, 1.0, D)

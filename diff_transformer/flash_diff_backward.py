# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The fused backward kernels. With P_i the softmax maps, O_i = P_i V and dO the gradient of O1 - lambda O2:

    D_i = rowsum(dO * O_i)          dlambda = -sum D_2                   prepare
    dP  = dO V^T                    once, shared by both maps
    dS1 = P1 * (dP - D1)            dS2 = -lambda P2 * (dP - D2)
    dQ_i = scale dS_i K_i                                                dq
    dK_i = scale dS_i^T Q_i         dV = (P1 - lambda P2)^T dO           dkdv

Two kernels without atomic operations, so that equal inputs give equal bits: dq owns rows and walks over keys, dkdv
owns keys and walks over rows (of all heads that share them).
"""

from __future__ import annotations  # tl.constexpr in signatures, also where triton is absent

from .flash_diff_forward import hide, jit, load_rows, sequence, tl


@jit
def prepare_kernel(
    grad_out, out_diff, out2, norm_weight, lambda_full, grad_diff, deltas, grad_weight,  # pointers
    q_starts, q_ends, k_starts, k_ends,
    g_batch, g_token, g_head, o_batch, o_token, o_head,  # strides; grad_diff has out's
    T, S, num_stats, eps, out_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """D1 and D2 of a block of rows; with the head norm, first its backward: grad_diff and a share of grad_weight.

    y = c w r O with r = rsqrt(mean O^2 + eps), g = c w dy: dO = r (g - O r^2 mean(g O)), dw = sum c dy O r.
    """
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_row, _, stat_row, T, _ = sequence(z, T, S, q_starts, q_ends, k_starts, k_ends)
    start = tl.program_id(0) * BLOCK_M
    rows, wide = start + tl.arange(0, BLOCK_M), tl.arange(0, 2 * BLOCK_D)
    grad_out += z * g_batch + q_row * g_token + head * g_head
    o_base = z * o_batch + q_row * o_token + head * o_head
    grad = load_rows(grad_out, g_token, start, T, BLOCK_M, wide, 2 * D).to(tl.float32)
    diff = load_rows(out_diff + o_base, o_token, start, T, BLOCK_M, wide, 2 * D).to(tl.float32)
    second = load_rows(out2 + o_base, o_token, start, T, BLOCK_M, wide, 2 * D).to(tl.float32)
    if norm_weight is not None:
        weight = tl.load(norm_weight + wide, mask=wide < 2 * D, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(diff * diff, 1) / (2 * D) + eps)[:, None]
        program = (z * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
        share = tl.sum(grad * diff * r, 0) * out_scale
        tl.store(grad_weight + program * 2 * D + wide, share, mask=wide < 2 * D)
        grad = grad * weight[None, :] * out_scale
        grad = r * (grad - diff * r * r * (tl.sum(grad * diff, 1) / (2 * D))[:, None])
        target = grad_diff + o_base + rows[:, None].to(tl.int64) * o_token + wide[None, :]
        inside = (rows < T)[:, None] & (wide < 2 * D)[None, :]
        tl.store(target, grad.to(grad_diff.dtype.element_ty), mask=inside)
    delta2 = tl.sum(grad * second, 1)
    delta1 = tl.sum(grad * diff, 1) + tl.load(lambda_full) * delta2
    stat = deltas + head * num_stats + stat_row + rows
    tl.store(stat, delta1, mask=rows < T)
    tl.store(stat + tl.num_programs(1) * num_stats, delta2, mask=rows < T)


@jit
def dq_kernel(
    q, k, v, lambda_full, grad_out, lse, deltas, grad_q,  # pointers
    q_starts, q_ends, k_starts, k_ends, mask,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    dq_batch, dq_token, dq_head, mask_batch, mask_row, mask_key,  # strides
    T, S, num_stats, scale,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_row, k_row, stat_row, T, S = sequence(z, T, S, q_starts, q_ends, k_starts, k_ends)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if start >= T:
        return
    rows, dims, wide = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, 2 * BLOCK_D)
    q += z * q_batch + q_row * q_token + head * q_head
    if MASK is not None:
        mask += z * mask_batch
    k += z * k_batch + k_row * k_token + head // GROUPS * k_head
    v += z * v_batch + k_row * v_token + head // GROUPS * v_head
    grad_out += z * g_batch + q_row * g_token + head * g_head
    stat1 = head * num_stats + stat_row
    stat2 = stat1 + tl.num_programs(1) * num_stats
    q1 = load_rows(q, q_token, start, T, BLOCK_M, dims, D)
    q2 = load_rows(q + D, q_token, start, T, BLOCK_M, dims, D)
    grad = load_rows(grad_out, g_token, start, T, BLOCK_M, wide, 2 * D)
    delta1 = tl.load(deltas + stat1 + rows, mask=rows < T, other=0.0)[:, None]
    logsum1 = tl.load(lse + stat1 + rows, mask=rows < T, other=float("inf"))[:, None]
    delta2 = tl.load(deltas + stat2 + rows, mask=rows < T, other=0.0)[:, None]
    logsum2 = tl.load(lse + stat2 + rows, mask=rows < T, other=float("inf"))[:, None]
    grad_q1 = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_q2 = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    stop = S
    if CAUSAL:
        stop = tl.minimum(S, start + BLOCK_M + S - T)
    for n in range(0, stop, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        values = load_rows(v, v_token, n, S, BLOCK_N, wide, 2 * D)
        grad_p = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        k1 = load_rows(k, k_token, n, S, BLOCK_N, dims, D)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale2
        scores = hide(scores, rows[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p = tl.exp2(scores - logsum1)
        grad_q1 = tl.dot((p * (grad_p - delta1)).to(k1.dtype), k1, grad_q1, input_precision=PRECISION)
        k2 = load_rows(k + D, k_token, n, S, BLOCK_N, dims, D)
        scores = tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * scale2
        scores = hide(scores, rows[:, None], cols[None, :], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
        p = tl.exp2(scores - logsum2)
        grad_q2 = tl.dot((p * (grad_p - delta2)).to(k2.dtype), k2, grad_q2, input_precision=PRECISION)

    inside = (rows < T)[:, None] & (dims < D)[None, :]
    target = grad_q + z * dq_batch + (q_row + rows)[:, None] * dq_token + head * dq_head + dims[None, :]
    tl.store(target, (grad_q1 * scale).to(grad_q.dtype.element_ty), mask=inside)
    grad_q2 *= -tl.load(lambda_full) * scale
    tl.store(target + D, grad_q2.to(grad_q.dtype.element_ty), mask=inside)


@jit
def dkdv_kernel(
    q, k, v, lambda_full, grad_out, lse, deltas, grad_k, grad_v,  # pointers
    q_starts, q_ends, k_starts, k_ends, mask,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    dk_batch, dk_token, dk_head, mask_batch, mask_row, mask_key,  # strides; grad_v has grad_k's
    T, S, num_stats, scale,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_row, k_row, stat_row, T, S = sequence(z, T, S, q_starts, q_ends, k_starts, k_ends)
    start = tl.program_id(0) * BLOCK_N
    if start >= S:
        return
    cols, dims, wide = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, 2 * BLOCK_D)
    q += z * q_batch + q_row * q_token
    if MASK is not None:
        mask += z * mask_batch
    k += z * k_batch + k_row * k_token + kv_head * k_head
    v += z * v_batch + k_row * v_token + kv_head * v_head
    grad_out += z * g_batch + q_row * g_token
    k1 = load_rows(k, k_token, start, S, BLOCK_N, dims, D)
    k2 = load_rows(k + D, k_token, start, S, BLOCK_N, dims, D)
    values = load_rows(v, v_token, start, S, BLOCK_N, wide, 2 * D)
    grad_k1 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_k2 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_values = tl.zeros((BLOCK_N, 2 * BLOCK_D), tl.float32)
    lam = tl.load(lambda_full)

    scale2 = scale * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    first_row = 0
    if CAUSAL:
        first_row = tl.maximum(0, start - S + T) // BLOCK_M * BLOCK_M
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        statistics = head * num_stats + stat_row
        for m in range(first_row, T, BLOCK_M):
            rows = (m + tl.arange(0, BLOCK_M))[None, :]
            stat1 = statistics + rows
            stat2 = stat1 + tl.num_programs(1) * GROUPS * num_stats
            # Everything is transposed, (keys, rows), so that no block has to be turned for the products below
            grad = load_rows(grad_out + head * g_head, g_token, m, T, BLOCK_M, wide, 2 * D)
            grad_p = tl.dot(values, tl.trans(grad), input_precision=PRECISION)
            q1 = load_rows(q + head * q_head, q_token, m, T, BLOCK_M, dims, D)
            scores = tl.dot(k1, tl.trans(q1), input_precision=PRECISION) * scale2
            scores = hide(scores, rows, cols[:, None], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
            p1 = tl.exp2(scores - tl.load(lse + stat1, mask=rows < T, other=float("inf")))
            grad_s = p1 * (grad_p - tl.load(deltas + stat1, mask=rows < T, other=0.0))
            grad_k1 = tl.dot(grad_s.to(q1.dtype), q1, grad_k1, input_precision=PRECISION)
            q2 = load_rows(q + head * q_head + D, q_token, m, T, BLOCK_M, dims, D)
            scores = tl.dot(k2, tl.trans(q2), input_precision=PRECISION) * scale2
            scores = hide(scores, rows, cols[:, None], T, S, mask, mask_row, mask_key, CAUSAL, MASK)
            p2 = tl.exp2(scores - tl.load(lse + stat2, mask=rows < T, other=float("inf")))
            grad_s = p2 * (grad_p - tl.load(deltas + stat2, mask=rows < T, other=0.0))
            grad_k2 = tl.dot(grad_s.to(q2.dtype), q2, grad_k2, input_precision=PRECISION)
            grad_values = tl.dot((p1 - lam * p2).to(grad.dtype), grad, grad_values, input_precision=PRECISION)

    offsets = z * dk_batch + (k_row + cols)[:, None] * dk_token + kv_head * dk_head
    inside = (cols < S)[:, None] & (dims < D)[None, :]
    tl.store(grad_k + offsets + dims[None, :], (grad_k1 * scale).to(grad_k.dtype.element_ty), mask=inside)
    grad_k2 *= -lam * scale
    tl.store(grad_k + offsets + D + dims[None, :], grad_k2.to(grad_k.dtype.element_ty), mask=inside)
    inside = (cols < S)[:, None] & (wide < 2 * D)[None, :]
    tl.store(grad_v + offsets + wide[None, :], grad_values.to(grad_v.dtype.element_ty), mask=inside)

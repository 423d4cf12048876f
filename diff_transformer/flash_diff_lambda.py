# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""lambda = exp(q1 . k1) - exp(q2 . k2) + init (Eq. 2, arXiv:2410.05258) of four vectors (d,), computed in float32.

Written as torch operations it costs a dozen launches each way, in every layer. In training it is one kernel forward
and one backward; while decoding, the kernel that subtracts the maps computes it.
"""

from __future__ import annotations  # tl.constexpr in signatures, also where triton is absent

from .flash_diff_forward import jit, tl, triton


@jit
def load_vector(pointer, D: tl.constexpr):
    dims = tl.arange(0, triton.next_power_of_2(D))
    return tl.load(pointer + dims, mask=dims < D, other=0.0).to(tl.float32)


@jit
def exp_dot(a, b, D: tl.constexpr):
    """exp(a . b) of two vectors."""
    return tl.exp(tl.sum(load_vector(a, D) * load_vector(b, D), 0))


@jit
def full_lambda(q1, k1, q2, k2, init, D: tl.constexpr):
    """lambda of four vectors or, if there is only one pointer, the number that it points to."""
    return tl.load(q1) if k1 is None else exp_dot(q1, k1, D) - exp_dot(q2, k2, D) + init


@jit
def lambda_kernel(q1, k1, q2, k2, out, init, D: tl.constexpr):
    tl.store(out, full_lambda(q1, k1, q2, k2, init, D))


@jit
def store_grads(grad, a, b, grad_a, grad_b, D: tl.constexpr):
    """Of `grad` a . b: `grad` b and `grad` a."""
    dims = tl.arange(0, triton.next_power_of_2(D))
    tl.store(grad_a + dims, (grad * load_vector(b, D)).to(grad_a.dtype.element_ty), mask=dims < D)
    tl.store(grad_b + dims, (grad * load_vector(a, D)).to(grad_b.dtype.element_ty), mask=dims < D)


@jit
def lambda_grad_kernel(grad, q1, k1, q2, k2, grad_q1, grad_k1, grad_q2, grad_k2, D: tl.constexpr):
    total = tl.load(grad)
    store_grads(total * exp_dot(q1, k1, D), q1, k1, grad_q1, grad_k1, D)
    store_grads(-total * exp_dot(q2, k2, D), q2, k2, grad_q2, grad_k2, D)

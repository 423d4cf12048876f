# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The gradient of the queries by the Gluon kernel for sm_90 (benchmarks/hopper/dq.py) against the formula."""

import math
from unittest import mock

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")

import gluon_interpreter  # noqa: E402
import torch  # noqa: E402
from tolerances import assert_same_computation  # noqa: E402

from benchmarks.hopper import dq  # noqa: E402

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LAMBDA = 0.55


def maps(q, k, causal):
    """The scores of both maps, (2, B, H, T, S), -inf where a key is hidden."""
    d, groups = q.shape[-1] // 2, q.shape[2] // k.shape[2]
    q, k = (x.unflatten(-1, (2, d)).permute(3, 0, 2, 1, 4) for x in (q, k.repeat_interleave(groups, 2)))
    scores = (q @ k.mT) * d**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(k.shape[3] - q.shape[3] + 1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def difference(q, k, v, causal):
    """The output, (B, T, H, 2d), and that of both maps, (2, B, T, H, 2d)."""
    values = v.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    outputs = (maps(q, k, causal).softmax(-1).to(v.dtype) @ values).transpose(2, 3)
    return outputs[0] - LAMBDA * outputs[1], outputs


def gradient(q, k, v, grad, causal):
    q = q.detach().requires_grad_()
    return torch.autograd.grad(difference(q, k, v, causal)[0], q, grad)[0]


def of_forward(q, k, v, grad, causal):
    """Base-2 log-sums of exponentials, and the sums of grad times the outputs of the maps: (2, H, B * T), float32."""
    lse = maps(q, k, causal).logsumexp(-1) / math.log(2)
    deltas = (difference(q, k, v, causal)[1] * grad).sum(-1).transpose(2, 3)
    return [x.transpose(1, 2).flatten(2).float().contiguous() for x in (lse, deltas)]


def interpreted(late: str):
    """The kernel itself, on a CPU."""

    def compute(*args):
        with mock.patch.object(gluon_interpreter.State, "late", late):
            return gluon_interpreter.interpreted(dq.__file__).dq(*args)

    return compute


WAYS = pytest.mark.parametrize(
    ("compute", "device"),
    [
        pytest.param(dq.emulate_dq, "cpu", id="emulated"),
        pytest.param(interpreted("copies"), "cpu", id="interpreted with late copies"),
        pytest.param(interpreted("products"), "cpu", id="interpreted with late products"),
        pytest.param(dq.dq, "cuda", id="GPU", marks=pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of sm_90")),
    ],
)


@WAYS
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads", "d", "causal", "dtype"),
    [
        (1, 3, 1, 1, 64, True, torch.bfloat16),
        (63, 63, 2, 2, 128, True, torch.float16),
        (130, 200, 4, 2, 64, True, torch.bfloat16),  # 70 keys more: two blocks on the diagonal
        (130, 200, 2, 1, 128, True, torch.float16),
        (257, 257, 2, 1, 128, True, torch.bfloat16),
        (200, 130, 2, 2, 64, False, torch.float16),
        (63, 200, 3, 1, 128, False, torch.bfloat16),
        (128, 192, 1, 1, 128, False, torch.bfloat16),  # nothing to hide
    ],
)
def test_gradient_of_the_queries_is_the_formulas(q_len, kv_len, heads, kv_heads, d, causal, dtype, compute, device):
    q, grad = (torch.randn(2, q_len, heads, 2 * d).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(2, kv_len, kv_heads, 2 * d).to(device, dtype) for _ in range(2))
    in_float64 = [x.double() for x in (q, k, v, grad)]
    lse, deltas = of_forward(*in_float64, causal)
    ours = compute(q, k, v, torch.tensor(LAMBDA, device=device), grad, lse, deltas, causal, d**-0.5)
    assert_same_computation(ours, gradient(q, k, v, grad, causal), gradient(*in_float64, causal))


@WAYS
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_of_keys_that_are_none_do_not_overflow(causal, compute, device):
    """The scores of the keys are about -184 (base 2), but 0 where a block has no keys any more."""
    q = torch.full((1, 3, 1, 128), -4.0, dtype=torch.bfloat16, device=device)
    v = torch.randn(1, 3, 1, 128, device=device).to(q)
    inputs = [x.double() for x in (q, -q, v, v)]
    lse, deltas = of_forward(*inputs, causal)
    ours = compute(q, -q, v, torch.tensor(LAMBDA, device=device), v, lse, deltas, causal, 64**-0.5)
    assert lse.max() < -128, "not small enough for the purpose"
    assert ours.isfinite().all()

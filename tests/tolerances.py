# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Tolerances that follow from the arithmetic, for tests and benchmarks."""

import torch


def allowed_error(exact: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest error that another computation of `exact` may have in the type of `reference`.

    exact is computed in a wider type, reference in the type of the test. Both computations round as often, but in
    another order of the same sums, which at most doubles the error; the factor of 4 leaves as much again. Half a unit
    in the last place of the largest entry is the rounding of the result, which can be exact in `reference` by chance.
    """
    error = (reference.to(exact.dtype) - exact).abs().max()
    return 4 * error + torch.finfo(reference.dtype).eps / 2 * exact.abs().max()


def assert_same_computation(actual: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """That `actual` is as close to `exact` as `reference`, the same function computed in the same type, implies."""
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} in place of {tuple(exact.shape)}"
    error, allowed = (actual.to(exact.dtype) - exact).abs().max(), allowed_error(exact, reference)
    assert error <= allowed, f"off by {error.item():.1e} where {allowed.item():.1e} are allowed"


def assert_equal_in_float64(actual: tuple, expected: tuple, what: str = "") -> None:
    """Output, and gradients by name, of two computations in float64, where only a mistake makes a difference. Those of
    lambda are sums that nearly cancel."""
    (output, gradients), (expected_output, expected_gradients) = actual, expected
    assert (output - expected_output).abs().max() <= 1e-12 * expected_output.abs().max(), f"{what} output"
    for name, gradient in expected_gradients.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-9), f"{what} gradient of {name}"


def assert_all_close(actual: dict, expected: dict, what: str, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """Tensor by tensor; `atol` is relative to the largest entry of each."""
    assert actual.keys() == expected.keys(), f"{what}: other names"
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        assert scale > 0, f"{what}: the expected {name} is all zero, which compares nothing"
        torch.testing.assert_close(
            actual[name], tensor, rtol=rtol, atol=atol * scale, msg=lambda m, name=name: f"{what} of {name}: {m}"
        )

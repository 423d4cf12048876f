# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The largest and the median of a stream of magnitudes, compared with numpy, on examples drawn by hypothesis."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_transformer.evaluation.protocols.outliers import BITS, MEDIAN_ERROR, Magnitudes

TINY = 2.0**-126  # the smallest normal float32
# zeros, subnormals, ordinary values, huge ones
FLOATS = st.one_of(
    st.just(0.0), st.floats(0, 10, width=32), st.floats(0, 2.0**127, width=32), st.sampled_from([TINY, 1.0, 65504.0])
)
BATCHES = st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=8).filter(any)
THOROUGH = settings(max_examples=60, deadline=None)


def summed(batches, dtype=torch.float32, count=5):
    magnitudes = Magnitudes(count)
    for layer, batch in enumerate(batches):
        magnitudes.update(torch.as_tensor(batch, dtype=dtype), layer)
    return magnitudes


def assert_median(magnitudes, values):
    expected = np.median(np.asarray(values, dtype=np.float64))
    bound = MEDIAN_ERROR * expected + 2.0 ** (-126 - BITS)
    assert abs(magnitudes.median() - expected) <= bound * (1 + 1e-12), "the median is off by more than its bound"


@pytest.mark.slow
@THOROUGH
@given(BATCHES, st.integers(1, 30))
def test_the_median_is_numpys_within_its_bound_and_the_largest_exactly(batches, count):
    magnitudes = summed(batches, count=count)
    values = np.concatenate([np.asarray(batch, dtype=np.float32) for batch in batches])
    assert magnitudes.total == len(values)
    assert_median(magnitudes, values)
    assert magnitudes.top.tolist() == np.sort(values)[::-1][:count].tolist()
    for value, layer in zip(magnitudes.top, magnitudes.layers, strict=True):
        assert value in torch.tensor(batches[layer]), "a value is attributed to the wrong layer"


@pytest.mark.parametrize(
    "values, median",
    [
        ([1.0], 1 + 2**-9),  # the edge of the bin [1, 1 + 2^-8), whose middle is 1 + 2^-9: the bound is tight
        ([[0.0, 0.0], [0.0, 0.0]], 0),
        ([8.0, 1.0, 2.0, 100.0], 5 * (1 + 2**-9)),  # an even number has the mean of two
    ],
)
def test_medians(values, median):
    assert summed([values]).median() == median
    assert pytest.approx(2**-9, rel=1e-4) == MEDIAN_ERROR


@settings(max_examples=20, deadline=None)
@given(BATCHES, BATCHES)
def test_parts_add_up_also_from_json(first, second):
    whole, part, other = summed(first + second), summed(first), summed(second)
    other.layers += len(first)
    part, other = (Magnitudes.from_json(json.loads(json.dumps(x.to_json()))) for x in (part, other))
    part.merge(other)
    assert part.counts.equal(whole.counts)
    assert part.top.tolist() == whole.top.tolist()
    for value, layer in zip(part.top, part.layers, strict=True):
        assert value in torch.tensor((first + second)[layer])


def test_octaves_count_by_powers_of_two():
    magnitudes = summed([[0.0, 1e-40, 0.5, 0.75, 1.0, 1.99, 2.0, 1024.0, 3e38]])
    assert magnitudes.octaves() == {-127: 2, -1: 2, 0: 2, 1: 1, 10: 1, 127: 1}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
def test_values_that_are_not_finite_are_rejected(value):
    with pytest.raises(ValueError, match="infinite or not a number.*--dtype"):
        summed([[1.0, value]], dtype=torch.float64)


def test_no_numbers_have_no_median():
    with pytest.raises(ValueError, match="no numbers"):
        Magnitudes().median()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_both_in_other_types(dtype):
    values = torch.as_tensor(np.random.default_rng(0).standard_cauchy(size=(5, 7, 11)).clip(-6e4, 6e4)).to(dtype)
    magnitudes, exact = summed([values], dtype=dtype, count=100), values.double().abs().numpy().ravel()
    assert_median(magnitudes, exact)
    assert magnitudes.top.tolist() == np.sort(exact)[::-1][:100].tolist()

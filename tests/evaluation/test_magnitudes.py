# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The largest and the median of a stream of magnitudes, compared with numpy, on examples drawn by hypothesis."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_transformer.evaluation.protocols.outliers import BITS, MEDIAN_ERROR, Magnitudes, summary
from diff_transformer.evaluation.results import Measure

TINY = 2.0**-126  # the smallest normal float32
# zeros, subnormals, ordinary values, huge ones
FLOATS = st.one_of(
    st.just(0.0), st.floats(0, 10, width=32), st.floats(0, 2.0**127, width=32), st.sampled_from([TINY, 1.0, 65504.0])
)
BATCHES = st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=8).filter(any)


def summed(*rows, dtype=torch.float32):
    """The summary of rows of batches of values."""
    records = []
    for batches in rows:
        magnitudes = Magnitudes()
        for batch in batches:
            magnitudes.update(torch.as_tensor(batch, dtype=dtype))
        records.append(json.loads(json.dumps(magnitudes.record())))
    return summary(records)


def assert_summary(found, values):
    """`values`: an array."""
    measures, top = found
    expected = np.median(values.astype(np.float64))
    bound = MEDIAN_ERROR * expected + 2.0 ** (-126 - BITS)
    assert abs(measures.pop("median").value - expected) <= bound * (1 + 1e-12), "the median is off by more"
    assert top == np.sort(values)[::-1][:100].tolist()
    ranks = [rank for rank in (1, 2, 3, 10, 100) if rank <= len(values)]
    assert measures == {f"top_{rank}": Measure(top[rank - 1], len(values)) for rank in ranks}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(BATCHES, BATCHES)
def test_summary_of_rows_is_numpys(first, second):
    values = np.concatenate([np.asarray(batch, dtype=np.float32) for batch in first + second])
    assert_summary(summed(first, second), values)


@pytest.mark.parametrize(
    "values, median",
    [
        ([1.0], 1 + 2**-9),  # the edge of the bin [1, 1 + 2^-8), whose middle is 1 + 2^-9: the bound is tight
        ([[0.0, 0.0], [0.0, 0.0]], 0),
        ([8.0, 1.0, 2.0, 100.0], 5 * (1 + 2**-9)),  # an even number has the mean of two
    ],
)
def test_summary_takes_the_middles_of_bins(values, median):
    assert summed([values])[0]["median"].value == median
    assert pytest.approx(2**-9, rel=1e-4) == MEDIAN_ERROR


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
def test_magnitudes_rejects_values_that_are_not_finite(value):
    with pytest.raises(ValueError, match="infinite or not a number.*--dtype"):
        summed([[1.0, value]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_magnitudes_takes_other_types(dtype):
    values = torch.as_tensor(np.random.default_rng(0).standard_cauchy(size=(5, 7, 11)).clip(-6e4, 6e4)).to(dtype)
    assert_summary(summed([values], dtype=dtype), values.double().abs().numpy().ravel())

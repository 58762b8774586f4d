"""Rounding of weights: never worse than rounding to the nearest step of the whole range, whatever the weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from starsd.export import quantise
from starsd.export.quantise import blocks_of, channels_of
from starsd.shared.errors import UnsupportedModelError

VALUES = st.floats(-1e4, 1e4, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6)
WEIGHTS = st.integers(1, 3).flatmap(
    lambda rows: st.integers(1, 2).flatmap(lambda groups: arrays(np.float32, (rows, 32 * groups), elements=VALUES))
)
SLACK = 1e-5  # of a group's squared values: float32 sums


def squares(difference: np.ndarray, groups: int) -> np.ndarray:
    return np.square(difference.astype(np.float64)).reshape(len(difference), groups, -1).sum(-1)


def nearest(weight: np.ndarray, bits: int, groups: int) -> np.ndarray:
    """Squared error of each group when its range is cut into equal steps."""
    values = weight.astype(np.float64).reshape(len(weight), groups, -1)
    if bits == 4:
        low = values.min(-1, keepdims=True)
        step = np.maximum((values.max(-1, keepdims=True) - low) / 15, 1e-30)
    else:
        low, step = 0.0, np.maximum(np.abs(values).max(-1, keepdims=True) / 127, 1e-30)
    return np.square(np.rint((values - low) / step) * step + low - values).sum(-1)


@settings(max_examples=60, deadline=None)
@given(weight=WEIGHTS, bits=st.sampled_from([4, 8]))
def test_blocks_are_no_worse_than_nearest(weight: np.ndarray, bits: int) -> None:
    groups = weight.shape[1] // 32
    blocks = blocks_of(weight, bits)
    assert blocks.scale.shape == (len(weight), groups)
    assert blocks.scale.dtype == np.float32
    error = squares(blocks.dequantise() - weight, groups)
    assert (error <= nearest(weight, bits, groups) * (1 + 1e-4) + SLACK * squares(weight, groups) + 1e-24).all()


@settings(max_examples=60, deadline=None)
@given(weight=WEIGHTS)
def test_channels_are_no_worse_than_nearest(weight: np.ndarray) -> None:
    scale, quants = channels_of(weight)
    assert (scale.shape, quants.dtype) == ((len(weight),), np.int8)
    assert np.abs(quants.astype(int)).max() <= 127
    error = squares(quants * scale[:, None] - weight, 1)
    assert (error <= nearest(weight, 8, 1) * (1 + 1e-4) + SLACK * squares(weight, 1)).all()


@pytest.mark.parametrize(("bits", "gain"), [(4, 0.95), (8, 0.999)])
def test_the_search_gains_on_normal_weights(bits: int, gain: float) -> None:
    weight = np.random.default_rng(1).normal(0, 0.05, (64, 256)).astype(np.float32)
    error = squares(blocks_of(weight, bits).dequantise() - weight, 8).sum()
    assert error < gain * nearest(weight, bits, 8).sum()


def test_forms() -> None:
    weight = np.random.default_rng(1).normal(0, 1, (3, 64)).astype(np.float32)
    four, eight = blocks_of(weight, 4), blocks_of(weight, 8)
    assert (four.kind, four.quants.dtype, four.quants.shape) == ("Q4_1", np.uint8, (3, 64))
    assert four.minimum is not None
    assert four.minimum.dtype == np.float32
    assert four.quants.max() <= 15
    assert (eight.kind, eight.quants.dtype, eight.minimum) == ("Q8_0", np.int8, None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.37, -2.5, 1e20, -1e-10])
def test_equal_weights_stay_what_they_are(bits: int, value: float) -> None:
    weight = np.full((2, 64), value, np.float32)
    np.testing.assert_allclose(blocks_of(weight, bits).dequantise(), weight, rtol=1e-6, atol=1e-12)
    scale, quants = channels_of(weight)
    np.testing.assert_allclose(quants * scale[:, None], weight, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outlier", [1e3, -1e3, 1e18, 1e25])
def test_a_single_outlier_is_kept(bits: int, outlier: float) -> None:
    """Squares of the largest overflow float32: the search then falls back to nearest rounding."""
    weight = np.random.default_rng(1).normal(0, 1, (2, 32)).astype(np.float32)
    weight[0, 5] = outlier
    with np.errstate(over="ignore", invalid="ignore"):
        got = blocks_of(weight, bits).dequantise()
        scale, quants = channels_of(weight)
    np.testing.assert_allclose(got[0, 5], outlier, rtol=0.01)
    np.testing.assert_allclose(quants[0, 5] * scale[0], outlier, rtol=0.01)
    np.testing.assert_allclose(got[1], weight[1], atol=0.3)


@pytest.mark.parametrize("scale", [1e-8, 1e15])
def test_size_does_not_matter(scale: float) -> None:
    weight = np.random.default_rng(1).normal(0, 1, (4, 64)).astype(np.float32)
    for bits in (4, 8):
        relative = np.sqrt(squares(blocks_of(weight * np.float32(scale), bits).dequantise() / scale - weight, 2))
        assert (relative < 0.1 * np.sqrt(squares(weight, 2))).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_a_few_at_a_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(1).normal(0, 1, (7, 64)).astype(np.float32)
    whole, (scale, quants) = blocks_of(weight, bits).dequantise(), channels_of(weight)
    monkeypatch.setattr(quantise, "_VALUES_AT_ONCE", 130)
    np.testing.assert_array_equal(blocks_of(weight, bits).dequantise(), whole)
    np.testing.assert_array_equal(channels_of(weight)[0], scale)
    np.testing.assert_array_equal(channels_of(weight)[1], quants)


@pytest.mark.parametrize(("width", "bits"), [(40, 4), (31, 8)])
def test_other_widths_are_refused(width: int, bits: int) -> None:
    message = f"^a weight has rows of {width} values, expected a multiple of 32 for int{bits}$"
    with pytest.raises(UnsupportedModelError, match=message):
        blocks_of(np.ones((2, width), np.float32), bits)

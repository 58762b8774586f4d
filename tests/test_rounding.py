"""Rounding with feedback: less error on the inputs it was made for than rounding each weight by itself."""

from __future__ import annotations

import numpy as np
import pytest

from starsd.export import rounding
from starsd.export.gguf import Blocks
from starsd.export.quantise import blocks_of, channels_of
from starsd.export.rounding import Curvature, refine_blocks, refine_channels

OUTPUTS, INPUTS = 24, 96


def inputs(rows: int = 400) -> np.ndarray:
    """Rows whose values go together, as a model's do: a few directions, and noise."""
    values = np.random.default_rng(3)
    directions = values.normal(0, 1, (6, INPUTS))
    return (values.normal(0, 1, (rows, 6)) @ directions + values.normal(0, 0.3, (rows, INPUTS))).astype(np.float32)


def weights() -> np.ndarray:
    return np.random.default_rng(4).normal(0, 0.05, (OUTPUTS, INPUTS)).astype(np.float32)


def curvature(x: np.ndarray | None = None) -> Curvature:
    x = inputs() if x is None else x
    return Curvature(x.T @ x)


def test_what_an_error_costs_is_what_it_adds_to_the_outputs() -> None:
    x, difference = inputs(), weights()
    assert curvature(x).error(difference) == pytest.approx(float(np.square(x @ difference.T).sum()), rel=1e-3)


def test_channels_lose_less() -> None:
    weight, cost = weights(), curvature()
    scale, nearest = channels_of(weight)
    refined = refine_channels(weight, scale, cost)
    assert refined.dtype == np.int8
    assert np.abs(refined.astype(int)).max() <= 127
    assert np.abs(refined.astype(int) - nearest).max() > 0
    assert cost.error(refined * scale[:, None] - weight) < 0.5 * cost.error(nearest * scale[:, None] - weight)


@pytest.mark.parametrize(("bits", "gain"), [(4, 0.5), (8, 0.5)])
def test_blocks_lose_less(bits: int, gain: float) -> None:
    weight, cost = weights(), curvature()
    nearest = blocks_of(weight, bits)
    refined = refine_blocks(weight, nearest, cost)
    assert (refined.kind, refined.quants.dtype) == (nearest.kind, nearest.quants.dtype)
    np.testing.assert_array_equal(refined.scale, nearest.scale)
    assert refined.quants.min() >= (0 if bits == 4 else -127)
    assert refined.quants.max() <= (15 if bits == 4 else 127)
    assert cost.error(refined.dequantise() - weight) < gain * cost.error(nearest.dequantise() - weight)


def test_symmetric_blocks_lose_less() -> None:
    weight, cost = weights(), curvature()
    scale = (np.abs(weight.reshape(OUTPUTS, -1, 32)).max(-1) / 7).astype(np.float32)
    quants = np.clip(np.rint(weight / np.repeat(scale, 32, axis=1)), -8, 7).astype(np.int8)
    nearest = Blocks("Q4_0", scale, None, quants)
    refined = refine_blocks(weight, nearest, cost)
    assert (refined.quants.min(), refined.quants.max()) >= (-8, 0)
    assert refined.quants.max() <= 7
    assert cost.error(refined.dequantise() - weight) < 0.5 * cost.error(nearest.dequantise() - weight)


def test_inputs_that_know_nothing_of_each_other_are_rounded_to_the_nearest() -> None:
    weight = weights()
    scale, nearest = channels_of(weight)
    cost = Curvature(np.diag(np.linspace(1, 2, INPUTS)).astype(np.float32))
    np.testing.assert_array_equal(refine_channels(weight, scale, cost), nearest)


def test_a_text_that_never_used_the_layer_changes_nothing() -> None:
    weight = weights()
    scale, nearest = channels_of(weight)
    np.testing.assert_array_equal(
        refine_channels(weight, scale, Curvature(np.zeros((INPUTS,) * 2, np.float32))), nearest
    )


def test_weights_on_the_grid_stay() -> None:
    """Whatever order and feedback: where nothing is lost, nothing is made good."""
    blocks = blocks_of(weights(), 4)
    again = refine_blocks(blocks.dequantise(), blocks, curvature())
    np.testing.assert_array_equal(again.quants, blocks.quants)


def test_constant_groups_have_no_step() -> None:
    weight = np.full((2, INPUTS), 0.25, np.float32)
    refined = refine_blocks(weight, blocks_of(weight, 4), curvature())
    np.testing.assert_allclose(refined.dequantise(), weight, atol=1e-6)


def test_blocks_of_columns_and_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, cost = weights(), curvature()
    scale, _ = channels_of(weight)
    whole = refine_channels(weight, scale, cost)
    monkeypatch.setattr(rounding, "_VALUES_AT_ONCE", 5 * INPUTS)
    np.testing.assert_array_equal(refine_channels(weight, scale, cost), whole)
    monkeypatch.setattr(rounding, "_COLUMNS_AT_ONCE", 7)
    other = refine_channels(weight, scale, cost)
    assert (other != whole).mean() < 0.02  # sums in another order
    assert cost.error(other * scale[:, None] - weight) == pytest.approx(
        cost.error(whole * scale[:, None] - weight), rel=0.1
    )

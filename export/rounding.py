"""Rounding weights column by column, each column's error made good by those that follow (GPTQ, arXiv 2210.17323).

Rounding a layer's weights one by one to the nearest step is best for inputs that know nothing of each other. Real ones
do: what one rounded weight adds wrongly to the output, weights of similar inputs can take back. With H the sum of x·xᵀ
over inputs x of a calibration text, the error e of a column is spread over the columns not yet rounded by a row of the
Cholesky factor of H⁻¹. Columns with the largest inputs go first. Steps are found beforehand, by `quantise.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf import BLOCK, Blocks

Floats = NDArray[np.float32]
_DAMPING = 0.01  # of the mean of H's diagonal, added to it: a calibration text is short
_COLUMNS_AT_ONCE = 64
_VALUES_AT_ONCE = 1 << 22


class Curvature:
    """What the errors of a layer's inputs cost together; `squares` (K, K) is the sum of x·xᵀ over a text's rows."""

    def __init__(self, squares: Floats) -> None:
        self._squares = squares

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Inputs by size, the largest first."""
        return np.argsort(-np.diag(self._squares), kind="stable")

    @cached_property
    def factor(self) -> Floats:
        """Upper triangular U with Uᵀ·U = H⁻¹, inputs in `order`. Shape (K, K)."""
        squares = self._squares[np.ix_(self.order, self.order)].astype(np.float64)
        mean = float(np.diag(squares).mean())
        squares[np.diag_indices_from(squares)] += _DAMPING * mean if mean > 0 else 1.0
        lower: NDArray[np.float64] = np.linalg.cholesky(np.linalg.inv(squares))
        return np.asarray(lower.T, np.float32)

    def error(self, difference: Floats) -> float:
        """Squares of what `difference` (N, K) of weights adds to the outputs, over the text."""
        return float(np.einsum("nk,nk->", difference @ self._squares, difference))


def refine_channels(weight: Floats, scale: Floats, curvature: Curvature) -> NDArray[np.int8]:
    """int8 (N, K) for `weight` by output channel, to be multiplied by `scale` (N,)."""
    scales, minima = scale[None], np.zeros((1, 1), np.float32)
    return _round(weight, scales, minima, (-127, 127), curvature).astype(np.int8)


def refine_blocks(weight: Floats, blocks: Blocks, curvature: Curvature) -> Blocks:
    """`blocks` with other quants for `weight` (N, K); scales and minima stay."""
    minimum = np.zeros_like(blocks.scale) if blocks.minimum is None else blocks.minimum
    least, most = {"Q4_1": (0, 15), "Q4_0": (-8, 7), "Q8_0": (-127, 127)}[blocks.kind]
    spread = np.arange(weight.shape[1]) // BLOCK
    quants = _round(weight, blocks.scale.T[spread], minimum.T[spread], (least, most), curvature)
    return replace(blocks, quants=quants.astype(np.uint8) if blocks.kind == "Q4_1" else quants.astype(np.int8))


def _round(weight: Floats, scale: Floats, minimum: Floats, bounds: tuple[int, int], curvature: Curvature) -> Floats:
    """Quants (N, K). Scale and minimum are (K, N) or broadcast to it; a bounded number of outputs at a time."""
    outputs, inputs = weight.shape
    shape, order = (inputs, outputs), curvature.order
    scale, minimum = np.broadcast_to(np.where(scale == 0, 1, scale), shape), np.broadcast_to(minimum, shape)
    quants = np.empty(weight.shape, np.float32)
    step = max(1, _VALUES_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        here = slice(start, start + step)
        columns = np.ascontiguousarray(weight[here].T[order], np.float32)
        rounded = _round_columns(columns, scale[order, here], minimum[order, here], bounds, curvature.factor)
        quants[here, order] = rounded.T
    return quants


def _round_columns(columns: Floats, scale: Floats, minimum: Floats, bounds: tuple[int, int], factor: Floats) -> Floats:
    """Round `columns` (K, N) in place from the first on. Columns near by are corrected at once, others in blocks."""
    count = len(columns)
    rounded = np.empty_like(columns)
    for start in range(0, count, _COLUMNS_AT_ONCE):
        end = min(start + _COLUMNS_AT_ONCE, count)
        errors = np.empty((end - start, columns.shape[1]), np.float32)
        for i in range(start, end):
            above = columns[i] - minimum[i]
            rounded[i] = np.clip(np.rint(above / scale[i]), *bounds)
            error = (above - rounded[i] * scale[i]) / factor[i, i]
            columns[i + 1 : end] -= factor[i, i + 1 : end, None] * error
            errors[i - start] = error
        columns[end:] -= factor[start:end, end:].T @ errors
    return rounded

"""Rounding weights to few bits, by groups of 32 or by output channel, with the scale that loses least.

A group's scale is searched among shrunken ranges: clipping the largest value a little often costs less than the finer
grid gains. Everything is vectorised over the matrix, a bounded number of rows at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf import BLOCK, Blocks
from starsd.shared.errors import UnsupportedModelError

_SHRINK = np.linspace(1.0, 0.72, 15, dtype=np.float32)  # fractions of a group's range that are tried
_VALUES_AT_ONCE = 1 << 22
_TINY = np.float32(1e-12)

Floats = NDArray[np.float32]


def blocks_of(weight: Floats, bits: int) -> Blocks:
    """`weight` (N, K) in groups of 32: d·q + m at 4 bits (Q4_1's form), d·q at 8 bits (Q8_0's).

    Raises UnsupportedModelError when K is no multiple of 32.
    """
    rows, width = weight.shape
    if width % BLOCK:
        raise UnsupportedModelError(
            f"a weight has rows of {width} values, expected a multiple of {BLOCK} for int{bits}"
        )
    grouped = weight.reshape(rows, width // BLOCK, BLOCK)
    step = max(1, _VALUES_AT_ONCE // width)
    fit = _fit_offset if bits == 4 else _fit_symmetric
    parts = [fit(grouped[start : start + step]) for start in range(0, rows, step)]
    scale, minimum, quants = (np.concatenate(column) for column in zip(*parts, strict=True))
    quants = quants.reshape(rows, width)
    return Blocks("Q4_1", scale, minimum, quants) if bits == 4 else Blocks("Q8_0", scale, None, quants)


def channels_of(weight: Floats) -> tuple[Floats, NDArray[np.int8]]:
    """`weight` (N, K) as scale (N,) times int8 (N, K), the scale searched by channel."""
    step = max(1, _VALUES_AT_ONCE // weight.shape[1])
    parts = [_fit_symmetric(weight[start : start + step]) for start in range(0, len(weight), step)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[2] for part in parts])


def _fit_symmetric(groups: Floats) -> tuple[Floats, Floats, NDArray[np.int8]]:
    """int8 by the last axis, zero kept: scale, an unused minimum, quants."""
    peak = np.maximum(np.abs(groups).max(-1), _TINY)
    best_scale, best_error = peak / 127, np.full(peak.shape, np.inf, np.float32)
    for shrink in _SHRINK[:6]:
        scale = peak * (shrink / 127)
        rounded = np.clip(np.rint(groups / scale[..., None]), -127, 127)
        scale, error = _refit(groups, rounded, scale)
        best_scale = np.where(error < best_error, scale, best_scale)
        best_error = np.minimum(error, best_error)
    quants = np.clip(np.rint(groups / best_scale[..., None]), -127, 127).astype(np.int8)
    return best_scale, best_scale, quants


def _refit(groups: Floats, rounded: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """The least-squares scale for these roundings, and what it leaves."""
    power = np.einsum("...k,...k->...", rounded, rounded)
    product = np.einsum("...k,...k->...", rounded, groups)
    scale = np.where(product > 0, product / np.maximum(power, 1), scale).astype(np.float32)
    rest = groups - rounded * scale[..., None]
    return scale, np.einsum("...k,...k->...", rest, rest)


def _fit_offset(groups: Floats) -> tuple[Floats, Floats, NDArray[np.uint8]]:
    """4 bits by the last axis with a free minimum: scale, minimum, quants 0 to 15."""
    low, high = groups.min(-1), groups.max(-1)
    middle, half = (low + high) / 2, np.maximum((high - low) / 2, _TINY)
    best = (half / 7.5, low, np.full(low.shape, np.inf, np.float32))
    for shrink in _SHRINK:
        scale, minimum = half * (shrink / 7.5), middle - half * shrink
        rounded = np.clip(np.rint((groups - minimum[..., None]) / scale[..., None]), 0, 15)
        scale, minimum, error = _regress(groups, rounded, scale, minimum)
        better = error < best[2]
        best = (np.where(better, scale, best[0]), np.where(better, minimum, best[1]), np.minimum(error, best[2]))
    scale, minimum = best[0].astype(np.float32), best[1].astype(np.float32)
    quants = np.clip(np.rint((groups - minimum[..., None]) / scale[..., None]), 0, 15).astype(np.uint8)
    return scale, minimum, quants


def _regress(groups: Floats, rounded: Floats, scale: Floats, minimum: Floats) -> tuple[Floats, Floats, Floats]:
    """The line through (rounded, groups) that leaves least: slope, intercept, and what is left."""
    mean_x, mean_y = rounded.mean(-1), groups.mean(-1)
    centred = rounded - mean_x[..., None]
    spread = np.einsum("...k,...k->...", centred, centred)
    slope = np.einsum("...k,...k->...", centred, groups) / np.maximum(spread, 1e-6)
    slope = np.where(slope > 0, slope, scale).astype(np.float32)
    intercept = np.where(spread > 0, mean_y - slope * mean_x, minimum).astype(np.float32)
    rest = groups - rounded * slope[..., None] - intercept[..., None]
    return slope, intercept, np.einsum("...k,...k->...", rest, rest)

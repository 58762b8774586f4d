"""Tensors of safetensors files as arrays that stay on disk until they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.weights import TensorEntry

FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WORDS: Mapping[str, Any] = {"I32": np.int32}  # that hold several small numbers each
_EXPONENTS: Mapping[Any, Any] = {  # the bits that are all ones in an infinity or a NaN
    np.dtype(np.float32): np.uint32(0x7F80_0000),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}
_VALUES_AT_ONCE = 1 << 22


def mapped(name: str, entry: TensorEntry, types: Mapping[str, Any] = FLOATS) -> NDArray[Any]:
    """The tensor as it lies on disk: mapped, not read. Raises UnsupportedModelError for a type that is not in `types`.
    `name` is for that message."""
    if entry.dtype not in types:
        expected = f"one of {', '.join(types)}" if len(types) > 1 else next(iter(types))
        raise UnsupportedModelError(f"tensor {name} has type {entry.dtype}, expected {expected}")
    return np.memmap(entry.file, types[entry.dtype], "r", entry.start, entry.shape)


def require_finite(what: str, values: NDArray[Any], why: str) -> None:
    """Raise ModelError when a contiguous array of one of `FLOATS` holds an infinity or a NaN. `what` begins the
    message, `why` ends it.

    Bits are looked at, a bounded number at a time, since bfloat16 has no test of its own.
    """
    exponent = _EXPONENTS[values.dtype]
    words = values.reshape(-1).view(exponent.dtype)
    for start in range(0, words.size, _VALUES_AT_ONCE):
        if ((words[start : start + _VALUES_AT_ONCE] & exponent) == exponent).any():
            raise ModelError(f"{what} holds values that are not finite, {why}")

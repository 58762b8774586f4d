"""Tensors of safetensors files as arrays that stay on disk until they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import UnsupportedModelError
from starsd.shared.weights import TensorEntry

FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WORDS: Mapping[str, Any] = {"I32": np.int32}  # that hold several small numbers each


def mapped(name: str, entry: TensorEntry, types: Mapping[str, Any] = FLOATS) -> NDArray[Any]:
    """The tensor as it lies on disk: mapped, not read. Raises UnsupportedModelError for a type that is not in `types`.
    `name` is for that message."""
    if entry.dtype not in types:
        expected = f"one of {', '.join(types)}" if len(types) > 1 else next(iter(types))
        raise UnsupportedModelError(f"tensor {name} has type {entry.dtype}, expected {expected}")
    return np.memmap(entry.file, types[entry.dtype], "r", entry.start, entry.shape)

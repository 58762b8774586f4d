"""Writes a safetensors file as its values come, holding no more than one piece of one tensor.

Format: eight bytes of header length, a JSON header, then the tensors back to back (safetensors' README).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from starsd.export.staging import storage_errors

_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


class TensorSpec(NamedTuple):
    name: str
    dtype: str  # F32, F16 or BF16
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return _WIDTHS[self.dtype] * math.prod(self.shape)


def write_safetensors(path: Path, specs: Sequence[TensorSpec], pieces: Iterable[NDArray[Any]]) -> None:
    """Write the tensors of `specs`; `pieces` brings their values in that order, in rows or whole, already in the
    tensor's dtype. Raises ValueError when they are not as many as the tensors hold, StorageError on a full disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end := end + spec.size],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values start aligned
    written = 0
    with storage_errors(path, bytes_needed=end), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            values = np.ascontiguousarray(piece)
            written += values.nbytes
            file.write(values.reshape(-1).view(np.uint8).data)
    if written != end:
        raise ValueError(f"{path} got {written} bytes of values, expected {end}")

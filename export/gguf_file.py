"""Reads the layout of a GGUF file: metadata, and where each tensor lies. Nothing is copied but the metadata.

Format: GGUF version 2 and 3, little endian (docs/gguf.md of the ggml project). Every length is checked against the
bytes that are there before it is used, so that a truncated or hostile file gives a ModelError and no wild allocation.
Own code rather than gguf.GGUFReader: that one slices past the end without noticing and takes seconds for a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import MissingExtraError, ModelError, UnsupportedModelError

try:
    import gguf
except ImportError as error:
    raise MissingExtraError("gguf", "export") from error

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as stored: `shape` in numpy's order (rows first), `start` and `size` in bytes of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensor layout of one file; `raw` maps its bytes, read only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    raw: NDArray[np.uint8]

    def data(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, one row per row of the matrix. Shape (rows, bytes a row); a view."""
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        return self.raw[tensor.start : tensor.start + tensor.size].reshape(rows, -1)


def open_gguf(path: Path) -> GGUFFile:
    """Read the layout of `path`. Raises ModelError when the file is broken or truncated, UnsupportedModelError when it
    is of a version or holds a tensor type that cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise ModelError(f"{path} has {size} bytes, expected a GGUF file of at least 24")
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(path, view)
    if (magic := reader.take(4)) != b"GGUF":
        raise ModelError(f"{path} starts with {magic!r}, expected b'GGUF'")
    if (version := reader.number("<I")) not in (2, 3):
        raise UnsupportedModelError(f"{path} is GGUF version {version}, expected 2 or 3 (little endian)")
    tensor_count, entry_count = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    layout = [reader.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path} has alignment {alignment!r}, expected a positive number")
    data_start = -(-reader.offset // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in layout:
        try:
            tensors[name] = _place(name, kind, shape, data_start + offset)
        except ModelError as error:
            raise type(error)(f"{path}: tensor {name} {error}") from None
        end = tensors[name].start + tensors[name].size
        if end > size:
            raise ModelError(f"{path} has {size} bytes, expected at least {end} for tensor {name}: truncated")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModelError(f"{path} is one of {parts!r:.80} parts, expected a whole GGUF: merge them first")
    return GGUFFile(path, metadata, tensors, np.frombuffer(view, np.uint8))


def _place(name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorInfo:
    try:
        tensor_type = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModelError(f"has the unknown type {kind}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block:
        raise ModelError(f"has rows of {shape[-1]} values, expected a multiple of {block}")
    return TensorInfo(name, tensor_type.name, shape, start, math.prod(shape) // block * block_bytes)


def dequantise(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Raw rows of a tensor as float32. Raises UnsupportedModelError for types that the gguf package cannot decode."""
    if kind == "F32":
        return raw.view(np.float32)
    if kind == "F16":
        return raw.view(np.float16).astype(np.float32)
    try:
        values: NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise UnsupportedModelError(
            f"GGUF tensor type {kind} cannot be decoded, expected one of F32, F16, BF16, Q4_0 to Q8_0 or a k-quant"
        ) from None
    return values


class _Reader:
    """Takes values off the front of the file, never past its end."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.offset = path, view, 0

    def take(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self.view):
            raise ModelError(f"{self.path} has {len(self.view)} bytes, expected at least {end}: truncated or broken")
        taken = self.view[self.offset : end]
        self.offset = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        start = self.offset
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path} has a string at byte {start} that is not UTF-8: broken") from None

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or nested:
            raise ModelError(f"{self.path} has a value of kind {kind} at byte {self.offset}, expected 0 to 12: broken")
        kind, count = self.number("<I"), self.number("<Q")
        if form := _SCALARS.get(kind):
            raw = self.take(count * struct.calcsize(form))
            return [item for (item,) in struct.iter_unpack(form, raw)]
        return [self.value(kind, nested=True) for _ in range(count)]

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self.text(), self.number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: tensor {name} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        if min(shape) < 1:
            raise ModelError(f"{self.path}: tensor {name} has shape {list(shape)}, expected sizes of 1 and more")
        return name, self.number("<I"), shape, self.number("<Q")

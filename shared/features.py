"""Features on the wire: rows of float32 as fp16, int8 or int4.

Each row stands alone, so that rows can be sent in any order and cut anywhere between two of them. Little-endian:

    fp16   width × float16                                                       2 · width bytes
    int8   ⌈width / 512⌉ × float16 scale, then width × int8                      2 · ⌈width / 512⌉ + width
    int4   ⌈width / 128⌉ × float16 scale, then pairs of values, first one low    2 · ⌈width / 128⌉ + ⌈width / 2⌉

A value is scale × q with q in -127 … 127, or -7 … 7 stored as q + 8 (an odd row ends with a zero). A scale is the
smallest float16 that lets its group's largest value through unclipped, hence every value is off by at most half of it.
A row 4,096 wide takes 8,192, 4,112 or 2,112 bytes.

What is not a finite number is refused on both sides: it would poison the drafter's cache for the rest of a session.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import UsageError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Codec:
    """One way to write rows; `bits` a value, `group` values sharing a scale (0: none)."""

    name: str
    bits: int
    group: int = 0

    def row_bytes(self, width: int) -> int:
        """Exact bytes of one row."""
        return 2 * self._groups(width) + (width * self.bits + 7) // 8

    def encode(self, rows: Floats) -> bytes:
        """Rows (n, width) as n · row_bytes(width) bytes. Raises ValueError when a value is not finite or too large."""
        if rows.ndim != 2:
            raise ValueError(f"features have shape {list(rows.shape)}, expected rows and width")
        rows = np.asarray(rows, np.float32)
        largest = float(np.abs(rows).max(initial=0.0))
        limit = _LARGEST_HALF * (self._steps if self.group else 1)
        if not largest <= limit:
            raise ValueError(f"features reach {largest:g}, {self.name} holds finite values up to {limit:g}")
        if not self.group:
            return rows.astype("<f2").tobytes()
        count, width = rows.shape
        grouped = self._in_groups(rows)
        scales = self._scales(grouped)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        # halves round to even; clipping matters only where the division itself rounded up
        steps = np.clip(np.rint(grouped * inverse[:, :, None]), -self._steps, self._steps)
        values = steps.astype(np.int8).reshape(count, grouped.shape[1] * self.group)[:, :width]
        halves = np.ascontiguousarray(scales.astype("<f2"))
        packed = values.view(np.uint8) if self.bits == 8 else _pack(values)
        return np.concatenate([halves.view(np.uint8), packed], axis=1).tobytes()

    def decode(self, data: bytes | memoryview, width: int) -> Floats:
        """Rows (n, width) of what `encode` wrote. Raises ValueError for a wrong length or what is not finite."""
        size = self.row_bytes(width)
        if width < 1 or len(data) % size:
            raise ValueError(f"features take {len(data)} bytes, expected a multiple of {size}")
        raw = np.frombuffer(data, np.uint8).reshape(-1, size)
        head = 2 * self._groups(width) if self.group else size
        halves = np.ascontiguousarray(raw[:, :head]).view("<f2").astype(np.float32)
        if not np.isfinite(halves).all():
            raise ValueError("features are not finite")
        if not self.group:
            return halves
        values = raw[:, head:].view(np.int8) if self.bits == 8 else _unpack(raw[:, head:], width)
        out = self._in_groups(values.astype(np.float32)) * halves[:, :, None]
        return np.ascontiguousarray(out.reshape(len(raw), out.shape[1] * self.group)[:, :width])

    @property
    def _steps(self) -> int:
        """Largest q."""
        return int(2 ** (self.bits - 1)) - 1

    def _groups(self, width: int) -> int:
        return -(-width // self.group) if self.group else 0

    def _in_groups(self, rows: Floats) -> Floats:
        """(n, groups, group), the last group filled up with zeros."""
        count, width = rows.shape
        groups = self._groups(width)
        if padding := groups * self.group - width:
            rows = np.pad(rows, ((0, 0), (0, padding)))
        return rows.reshape(count, groups, self.group)

    def _scales(self, grouped: Floats) -> Floats:
        """(n, groups), exactly representable in float16, never too small for the group's largest value."""
        largest = np.abs(grouped).max(axis=2)
        near = (largest / np.float32(self._steps)).astype(np.float16)
        too_small = near.astype(np.float32) * np.float32(self._steps) < largest
        scales: Floats = np.where(too_small, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)
        return scales


CODECS = {codec.name: codec for codec in (Codec("fp16", 16), Codec("int8", 8, 512), Codec("int4", 4, 128))}


def codec(name: str) -> Codec:
    """The codec of this name. Raises UsageError naming those that exist."""
    if name not in CODECS:
        raise UsageError(f"codec {name!r} is unknown, expected one of {', '.join(CODECS)}")
    return CODECS[name]


def _pack(values: NDArray[np.int8]) -> Bytes:
    """Two values a byte, the first in the low half."""
    nibbles = np.pad((values + 8).astype(np.uint8), ((0, 0), (0, values.shape[1] % 2)), constant_values=8)
    packed: Bytes = nibbles[:, ::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed


def _unpack(packed: Bytes, width: int) -> NDArray[np.int8]:
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), 2 * packed.shape[1])[:, :width]
    values: NDArray[np.int8] = nibbles.astype(np.int8) - np.int8(8)
    return values

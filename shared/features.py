"""Features on the wire: rows of float32 as fp16, int8, int4, or rotated in 4, 3 or 2 bits a value.

Each row stands alone, so that rows can be sent in any order and cut anywhere between two of them. Little-endian:

    fp16   width × float16                                                       2 · width bytes
    int8   ⌈width / 512⌉ × float16 scale, then width × int8                      2 · ⌈width / 512⌉ + width
    int4   ⌈width / 128⌉ × float16 scale, then pairs of values, first one low    2 · ⌈width / 128⌉ + ⌈width / 2⌉

A value is scale × q with q in -127 … 127, or -7 … 7 stored as q + 8 (an odd row ends with a zero). A scale is the
smallest float16 that lets its group's largest value through unclipped, hence every value is off by at most half of it.
A row 4,096 wide takes 8,192, 4,112 or 2,112 bytes.

A few channels of a target are a hundred times larger than the rest, and one of them in a group of int4 leaves its
neighbours nothing. So blocks of 64 values, the last one filled up with zeros, go through a fixed orthogonal map, which
shares such a value out. They come out nearly normally distributed and are rounded to the levels that suit this best:

    rot4, rot3, rot2   ⌈width / 64⌉ × float16 scale, then 8 codes in 4, 3 or 2 bytes     ⌈width / 64⌉ · (2 + 8 · bits)

`docs/features.md` has the map and the levels. The scale is near a block's root mean square, the best one for the codes
chosen. An error is never longer than its block; of normally distributed values it is 9, 18 or 33 % as long. A row 4,096
wide takes 2,176, 1,664 or 1,152 bytes.

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
_BLOCK = 64
_SIGNS = np.array([-1.0 if 0x9E3779B97F4A7C15 >> bit & 1 else 1.0 for bit in range(_BLOCK)], np.float32)
# J. Max, Quantizing for Minimum Distortion, 1960, table I: the positive half of 2^bits levels
_LEVELS = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


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
        rows = self._checked(rows, _LARGEST_HALF * (self._steps if self.group else 1))
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
        halves, rest = self._parts(data, width)
        if not self.group:
            return halves
        values = rest.view(np.int8) if self.bits == 8 else _unpack(rest, width)
        out = self._in_groups(values.astype(np.float32)) * halves[:, :, None]
        return np.ascontiguousarray(out.reshape(len(rest), out.shape[1] * self.group)[:, :width])

    @property
    def _steps(self) -> int:
        """Largest q."""
        return int(2 ** (self.bits - 1)) - 1

    def _checked(self, rows: Floats, limit: float) -> Floats:
        if rows.ndim != 2:
            raise ValueError(f"features have shape {list(rows.shape)}, expected rows and width")
        rows = np.asarray(rows, np.float32)
        largest = float(np.abs(rows).max(initial=0.0))
        if not largest <= limit:
            raise ValueError(f"features reach {largest:g}, {self.name} holds finite values up to {limit:g}")
        return rows

    def _parts(self, data: bytes | memoryview, width: int) -> tuple[Floats, Bytes]:
        """What is float16 in each row, and the bytes behind it."""
        size = self.row_bytes(width)
        if width < 1 or len(data) % size:
            raise ValueError(f"features take {len(data)} bytes, expected a multiple of {size}")
        raw = np.frombuffer(data, np.uint8).reshape(-1, size)
        head = 2 * self._groups(width) if self.group else size
        halves = np.ascontiguousarray(raw[:, :head]).view("<f2").astype(np.float32)
        if not np.isfinite(halves).all():
            raise ValueError("features are not finite")
        return halves, raw[:, head:]

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


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """Blocks of 64 values through an orthogonal map, then the nearest of 2^bits levels."""

    group: int = _BLOCK

    def row_bytes(self, width: int) -> int:
        return self._groups(width) * (2 + _BLOCK // 8 * self.bits)

    def encode(self, rows: Floats) -> bytes:
        rows = self._checked(rows, _LARGEST_HALF)
        blocks = _hadamard(self._in_groups(rows) * _SIGNS)
        levels = self._levels
        scales = np.sqrt(np.square(blocks).mean(axis=2))
        for _ in range(2):  # a third would bring less than half a percent
            guess = levels[self._nearest(blocks, scales)]
            scales = (blocks * guess).sum(axis=2) / np.square(guess).sum(axis=2)
        # that of equal values is above them, and may be beyond float16
        halves = np.clip(scales, 0, _LARGEST_HALF).astype("<f2")
        codes = self._nearest(blocks, halves.astype(np.float32)).astype(np.uint32)
        shifts = np.arange(0, 8 * self.bits, self.bits, dtype=np.uint32)
        words = np.bitwise_or.reduce(codes.reshape(len(rows), halves.shape[1] * 8, 8) << shifts, axis=2)
        packed = words.astype("<u4")[:, :, None].view(np.uint8)[:, :, : self.bits]
        head = np.ascontiguousarray(halves).view(np.uint8)
        return np.concatenate([head, packed.reshape(len(rows), packed.shape[1] * self.bits)], axis=1).tobytes()

    def decode(self, data: bytes | memoryview, width: int) -> Floats:
        scales, rest = self._parts(data, width)
        count, groups = scales.shape
        wide = np.zeros((count, groups * 8, 4), np.uint8)
        wide[:, :, : self.bits] = rest.reshape(count, groups * 8, self.bits)
        shifts = np.arange(0, 8 * self.bits, self.bits, dtype=np.uint32)
        codes = (wide.view("<u4") >> shifts) & np.uint32(2**self.bits - 1)
        blocks = self._levels[codes.reshape(count, groups, _BLOCK)] * scales[:, :, None]
        out = _hadamard(blocks) * _SIGNS
        return np.ascontiguousarray(out.reshape(count, groups * _BLOCK)[:, :width])

    @property
    def _levels(self) -> Floats:
        half = np.array(_LEVELS[self.bits], np.float32)
        return np.concatenate([-half[::-1], half])

    def _nearest(self, blocks: Floats, scales: Floats) -> NDArray[np.intp]:
        levels = self._levels
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales >= 2**-25)  # below, float16 has 0
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, blocks * inverse[:, :, None])


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp16", 16),
        Codec("int8", 8, 512),
        Codec("int4", 4, 128),
        RotatedCodec("rot4", 4),
        RotatedCodec("rot3", 3),
        RotatedCodec("rot2", 2),
    )
}


def codec(name: str) -> Codec:
    """The codec of this name. Raises UsageError naming those that exist."""
    if name not in CODECS:
        raise UsageError(f"codec {name!r} is unknown, expected one of {', '.join(CODECS)}")
    return CODECS[name]


def _hadamard(blocks: Floats) -> Floats:
    """H / 8 times each block (n, groups, 64); its own inverse.

    By additions alone, not as a product of matrices, whose rounding may depend on how many rows there are.
    """
    shape = blocks.shape
    for half in (1, 2, 4, 8, 16, 32):
        pairs = blocks.reshape(*shape[:2], _BLOCK // (2 * half), 2, half)
        low, high = pairs[:, :, :, 0], pairs[:, :, :, 1]
        blocks = np.stack([low + high, low - high], axis=3).reshape(shape)
    return blocks * np.float32(1 / 8)


def _pack(values: NDArray[np.int8]) -> Bytes:
    """Two values a byte, the first in the low half."""
    nibbles = np.pad((values + 8).astype(np.uint8), ((0, 0), (0, values.shape[1] % 2)), constant_values=8)
    packed: Bytes = nibbles[:, ::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed


def _unpack(packed: Bytes, width: int) -> NDArray[np.int8]:
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), 2 * packed.shape[1])[:, :width]
    values: NDArray[np.int8] = nibbles.astype(np.int8) - np.int8(8)
    return values


def holdable(rows: Floats) -> Floats:
    """What float16 holds: a drafter fed a clipped value guesses a little worse, one fed infinity never again."""
    return np.nan_to_num(rows, nan=0.0, posinf=_LARGEST_HALF, neginf=-_LARGEST_HALF).clip(-_LARGEST_HALF, _LARGEST_HALF)

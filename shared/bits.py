"""Columns of small whole numbers as a string of bits: record after record, in each its values one after the other.

Every value has its lowest bit first, and the first bit of the string is the lowest of the first byte. The last byte is
filled up with zeros; that they are zeros is checked, so that the same numbers have one form only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ProtocolError

Ints = NDArray[np.int64]


def width_of(largest: int) -> int:
    """Bits that hold 0 to `largest`."""
    return largest.bit_length()


def packed_bytes(records: int, bits: int) -> int:
    """Bytes of so many records of so many bits."""
    return (records * bits + 7) // 8


def pack(columns: Sequence[tuple[Ints, int]]) -> bytes:
    """Columns of the same length with their widths in bits; values must fit, which is the caller's to check."""
    records = len(columns[0][0])
    bits = np.zeros((records, sum(width for _, width in columns)), np.uint8)
    at = 0
    for values, width in columns:
        for bit in range(width):
            bits[:, at] = (values >> bit) & 1
            at += 1
    return np.packbits(bits.ravel(), bitorder="little").tobytes()


def unpack(data: bytes | memoryview, records: int, widths: Sequence[int]) -> list[Ints]:
    """The columns, int64 (records,), of what `pack` wrote; `data` has `packed_bytes` bytes.

    Raises ProtocolError when bits after the last record are set.
    """
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    used = records * sum(widths)
    if flat[used:].any():
        raise ProtocolError("bits after the last value are set, expected zeros")
    bits = flat[:used].reshape(records, sum(widths))
    columns, at = [], 0
    for width in widths:
        values = np.zeros(records, np.int64)
        for bit in range(width):
            values |= bits[:, at].astype(np.int64) << bit
            at += 1
        columns.append(values)
    return columns

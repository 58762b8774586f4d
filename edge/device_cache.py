"""One conversation's K/V in a GPU's memory: layers × {K, V} × heads, each of `capacity` rows, in one piece.

In every one of these parts a row lies at the same place, so whatever happens to rows is one copy over all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starsd.edge.cuda import Cuda
from starsd.edge.device_io import release_with


class DeviceCache:
    """`layers` · 2 tensors of (heads, capacity, row), K before V, with `row_bytes` bytes a row.

    Raises DeviceError when the device has no room for it. The memory is freed with the object, by `release` where
    not every moment is right for it.
    """

    def __init__(
        self,
        cuda: Cuda,
        stream: int,
        layers: int,
        heads: int,
        capacity: int,
        row_bytes: int,
        release: Callable[[int], None] | None = None,
    ) -> None:
        self._cuda, self._stream = cuda, stream
        self._row, self._pitch, self._parts = row_bytes, capacity * row_bytes, 2 * layers * heads
        self._heads = heads
        self.capacity = capacity
        self.bytes = self._pitch * self._parts
        self._start = cuda.allocate(self.bytes)
        release_with(self, release or cuda.release, self._start)

    def address(self, layer: int, kind: str) -> int:
        """Of the K ("k") or V ("v") of a layer, (heads, capacity, row)."""
        return self._start + (2 * layer + "kv".index(kind)) * self._heads * self._pitch

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows from `start` on keep these, ascending, one behind the other.

        A row moves towards the front and never onto one that is still to move, so they may go one by one.
        """
        for place, row in enumerate(rows):
            if row != place:
                self._move(start + place, self, start + row, 1)

    def copy(self, other: DeviceCache, length: int) -> None:
        """Take over the first `length` rows of a cache of the same sizes."""
        if length:
            self._move(0, other, 0, length)

    def place(self, start: int, source: int, rows: int, source_rows: int) -> None:
        """Write at `start` the first `rows` of a buffer of the same parts that has `source_rows` in each."""
        to, width = self._start + start * self._row, rows * self._row
        self._cuda.move(to, self._pitch, source, source_rows * self._row, width, self._parts, self._stream)

    def _move(self, to: int, other: DeviceCache, source: int, rows: int) -> None:
        target, origin = self._start + to * self._row, other._start + source * self._row
        width = rows * self._row
        self._cuda.move(target, self._pitch, origin, other._pitch, width, self._parts, self._stream)

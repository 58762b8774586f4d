"""What goes to a GPU and what comes back: a buffer there, and one in pinned memory here, through which it is copied."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.edge.cuda import Cuda


def release_with(owner: object, release: Callable[[int], None], address: int) -> None:
    """Free memory or a handle when `owner` goes; at the end of the process all goes by itself."""
    weakref.finalize(owner, release, address).atexit = False


class Staging:
    """An input of at most `size` bytes. What was uploaded must be over before the next one: a pass's results say so."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda, self._size = cuda, size
        self.address = cuda.allocate(size)
        release_with(self, cuda.release, self.address)
        self._pinned = cuda.allocate_pinned(size)
        release_with(self, cuda.release_pinned, self._pinned)

    def upload(self, array: NDArray[Any], stream: int) -> None:
        assert array.nbytes <= self._size, f"{array.nbytes} bytes do not fit into {self._size}"
        source = np.ascontiguousarray(array)
        ctypes.memmove(self._pinned, source.ctypes.data, source.nbytes)
        self._cuda.upload(self.address, self._pinned, source.nbytes, stream)


class Results:
    """A float32 output of at most `rows` rows of `width` values."""

    def __init__(self, cuda: Cuda, rows: int, width: int) -> None:
        self._cuda, self._width = cuda, width
        size = rows * width * 4
        self.address = cuda.allocate(size)
        release_with(self, cuda.release, self.address)
        self._pinned = cuda.allocate_pinned(size)
        release_with(self, cuda.release_pinned, self._pinned)
        here = memoryview((ctypes.c_char * size).from_address(self._pinned))
        self._view: NDArray[np.float32] = np.ndarray((rows, width), np.float32, here)

    def fetch(self, rows: int, stream: int) -> NDArray[np.float32]:
        """A copy of the first `rows` rows, once the stream has come to them."""
        self._cuda.download(self._pinned, self.address, rows * self._width * 4, stream)
        self._cuda.wait(stream)
        return self._view[:rows].copy()

"""A CUDA device that is host memory. A stream does what it was told when somebody waits for it, and not before.

So whoever reads results without waiting, or overwrites what is still to be copied, gets wrong numbers, as on a device.
Copies outside of what was allocated, and launches of what was never captured, fail the test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from starsd.shared.cuda_runtime import Gpu
from starsd.shared.errors import DeviceError

Work = Callable[[], None]


class FakeCuda:
    """See `starsd.edge.cuda.Cuda`."""

    def __init__(self, capability: tuple[int, int] = (8, 7), memory: int = 1 << 34) -> None:
        self.capability, self.memory = capability, memory
        self.blocks: dict[int, NDArray[np.uint8]] = {}  # by address
        self.pinned: dict[int, NDArray[np.uint8]] = {}
        self._released: list[NDArray[np.uint8]] = []  # kept, so that no address comes twice: which do is chance
        self.streams: dict[int, list[Work]] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.capturing: dict[int, list[Work]] = {}
        self.calls: list[str] = []
        self.refuses_capture = False

    def gpu(self) -> Gpu:
        return Gpu(self.capability, self.memory, self.memory - sum(block.nbytes for block in self.blocks.values()))

    def allocate(self, size: int) -> int:
        if size > self.gpu().free:
            raise DeviceError("cudaMalloc failed: out of memory (2)")
        return self._keep(self.blocks, np.zeros(size, np.uint8))

    def release(self, address: int) -> None:
        self._released.append(self.blocks.pop(address))

    def allocate_pinned(self, size: int) -> int:
        return self._keep(self.pinned, np.zeros(size, np.uint8))

    def release_pinned(self, address: int) -> None:
        del self.pinned[address]

    def make_stream(self) -> int:
        self.streams[len(self.streams) + 1] = []
        return len(self.streams)

    def wait(self, stream: int) -> None:
        work, self.streams[stream] = self.streams[stream], []
        for one in work:
            one()

    def upload(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, self.blocks, source, self.pinned, size, stream)

    def download(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, self.pinned, source, self.blocks, size, stream)

    def move(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        assert width <= min(to_pitch, source_pitch)
        self.inside(to, to_pitch * (height - 1) + width)
        self.inside(source, source_pitch * (height - 1) + width)
        assert abs(to - source) >= width or to_pitch != source_pitch, "a copy onto itself has no defined result"

        def work() -> None:
            for i in range(height):
                ctypes.memmove(to + i * to_pitch, source + i * source_pitch, width)

        self.tell(stream, work, "move")

    def begin_capture(self, stream: int) -> None:
        if self.refuses_capture:
            raise DeviceError("cudaStreamBeginCapture failed: operation not permitted (800)")
        self.capturing[stream] = []

    def end_capture(self, stream: int) -> int:
        graph = len(self.graphs) + 1
        self.graphs[graph] = self.capturing.pop(stream)
        self.calls.append("capture")
        return graph

    def launch(self, graph: int, stream: int) -> None:
        work = self.graphs[graph]
        self.tell(stream, lambda: [one() for one in work] and None, "launch")

    def release_graph(self, graph: int) -> None:
        self.graphs[graph] = []

    def tell(self, stream: int, work: Work, name: str) -> None:
        """The stream shall do this; while it is captured it only remembers."""
        if stream in self.capturing:
            self.capturing[stream].append(work)
            return
        self.calls.append(name)
        self.streams[stream].append(work)

    def inside(self, address: int, size: int) -> None:
        """Fail unless these bytes are of one allocation on the device."""
        self._inside(self.blocks, address, size)

    @staticmethod
    def _inside(blocks: dict[int, NDArray[np.uint8]], address: int, size: int) -> None:
        assert any(start <= address and address + size <= start + len(block) for start, block in blocks.items()), (
            f"{size} bytes at {address} are in no allocation"
        )

    @staticmethod
    def _keep(blocks: dict[int, NDArray[np.uint8]], block: NDArray[np.uint8]) -> int:
        blocks[block.ctypes.data] = block
        return block.ctypes.data

    def _copy(
        self,
        to: int,
        targets: dict[int, NDArray[np.uint8]],
        source: int,
        sources: dict[int, NDArray[np.uint8]],
        size: int,
        stream: int,
    ) -> None:
        self._inside(targets, to, size)
        self._inside(sources, source, size)
        self.tell(stream, lambda: ctypes.memmove(to, source, size) and None, "copy")

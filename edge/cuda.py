"""The dozen calls of CUDA that an engine needs: memory, copies in a stream, and graphs of what a stream is told.

Addresses, streams and graphs are plain integers, as TensorRT and onnxruntime take them. Calls raise DeviceError.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from starsd.shared.cuda_runtime import Gpu, check, gpu, load_cudart

_UP, _DOWN, _ACROSS = 1, 2, 3  # cudaMemcpyKind: host to device, device to host, device to device
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads may go on allocating
_NON_BLOCKING = 1  # cudaStreamNonBlocking: capturing does not work in the default stream


class Cuda(Protocol):
    """What `CudaRuntime` does, and a test's stand-in."""

    def gpu(self) -> Gpu: ...

    def allocate(self, size: int) -> int:
        """The address of `size` bytes on the device, all zero."""
        ...

    def release(self, address: int) -> None: ...

    def allocate_pinned(self, size: int) -> int:
        """The address of `size` bytes of host memory that copies reach at full speed and without waiting."""
        ...

    def release_pinned(self, address: int) -> None: ...

    def make_stream(self) -> int: ...

    def wait(self, stream: int) -> None:
        """Return when the stream has done all that it was told."""
        ...

    def upload(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes of pinned memory to the device."""
        ...

    def download(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes of the device to pinned memory."""
        ...

    def move(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy `height` stretches of `width` bytes within the device; each begins a pitch after the one before."""
        ...

    def begin_capture(self, stream: int) -> None:
        """From now on the stream remembers what it is told, and does nothing."""
        ...

    def end_capture(self, stream: int) -> int:
        """What it remembered, as a graph to be launched."""
        ...

    def launch(self, graph: int, stream: int) -> None: ...

    def release_graph(self, graph: int) -> None: ...


def open_cuda() -> Cuda:
    """The first device. Raises DeviceError, saying why there is none."""
    return CudaRuntime(load_cudart())


class CudaRuntime:
    """See `Cuda`. Any thread may call; all are of the same device."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def gpu(self) -> Gpu:
        return gpu(self._library)

    def allocate(self, size: int) -> int:
        address = self._made("cudaMalloc", ctypes.c_size_t(size))
        self._call("cudaMemset", _pointer(address), 0, ctypes.c_size_t(size))
        return address

    def release(self, address: int) -> None:
        self._call("cudaFree", _pointer(address))

    def allocate_pinned(self, size: int) -> int:
        return self._made("cudaMallocHost", ctypes.c_size_t(size))

    def release_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", _pointer(address))

    def make_stream(self) -> int:
        return self._made("cudaStreamCreateWithFlags", ctypes.c_uint(_NON_BLOCKING))

    def wait(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", _pointer(stream))

    def upload(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, source, size, _UP, stream)

    def download(self, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, source, size, _DOWN, stream)

    def move(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        sizes = [ctypes.c_size_t(size) for size in (to_pitch, source_pitch, width, height)]
        self._call(
            "cudaMemcpy2DAsync",
            *(_pointer(to), sizes[0], _pointer(source), sizes[1], sizes[2], sizes[3]),
            *(_ACROSS, _pointer(stream)),
        )

    def begin_capture(self, stream: int) -> None:
        self._call("cudaStreamBeginCapture", _pointer(stream), _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        recorded = ctypes.c_void_p()
        self._call("cudaStreamEndCapture", _pointer(stream), ctypes.byref(recorded))
        try:
            return self._made("cudaGraphInstantiateWithFlags", recorded, ctypes.c_ulonglong(0))
        finally:
            self._call("cudaGraphDestroy", recorded)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", _pointer(graph), _pointer(stream))

    def release_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", _pointer(graph))

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", _pointer(to), _pointer(source), ctypes.c_size_t(size), kind, _pointer(stream))

    def _made(self, call: str, *arguments: Any) -> int:
        """What a call writes to its first argument: an address, or a handle."""
        made = ctypes.c_void_p()
        self._call(call, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, call: str, *arguments: Any) -> None:
        check(self._library, call, *arguments)


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)

"""One conversation's K/V in a GPU's memory, and onnxruntime's passes over them: all buffers are ours, bound by address.

onnxruntime computes in our stream, so what a pass reads is uploaded before it, and of what it writes only wanted rows
come back. K/V are read and written in place; new rows that a graph hands out apart are copied behind the others there.

All that concerns the device happens in the graph's own thread: while onnxruntime captures a CUDA graph, memory can be
neither had nor freed by any other (it captures in CUDA's global mode). A graph is bound to addresses, so it belongs to
K/V at one place and to one number of rows. `ort` graphs cannot be captured: attention takes the number of its columns
from the host's memory, and launches kernels for as many as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from starsd.edge.cuda import Cuda
from starsd.edge.device_cache import DeviceCache
from starsd.edge.device_io import Results, Staging, release_with
from starsd.edge.onnx_graph import OnnxGraph
from starsd.edge.padded_target import BUCKETS
from starsd.edge.target import Floats
from starsd.shared.errors import CapacityError, DeviceError
from starsd.shared.graph_contract import Pass
from starsd.shared.tensorrt_key import MAX_ROWS

MOST_GRAPHS = 128  # which onnxruntime keeps until its session ends; later passes run without
_NO_GRAPH = "-1"


class OnnxGpu:
    """What conversations of one engine share on the device. `largest` is a pass of as many rows as there will be, at
    the end of the context. With `captures` passes over trees become CUDA graphs.

    Raises DeviceError when the device has no room.
    """

    def __init__(self, graph: OnnxGraph, cuda: Cuda, stream: int, largest: Pass, *, captures: bool) -> None:
        self.graph, self.cuda, self.stream, self.captures = graph, cuda, stream, captures
        shape, features, contract = graph.shape, graph.features, graph.contract
        feeds = contract.feeds(largest, shape.window)
        self.staging = {
            name: Staging(cuda, value.nbytes)
            for name, value in feeds.items()
            if name in graph.inputs and name not in contract.on_host
        }
        self.results = {"logits": Results(cuda, MAX_ROWS, shape.vocab)}
        if features.width:
            self.results["features"] = Results(cuda, largest.rows, features.width)
        self.row_bytes = shape.head_dim * int(np.dtype(graph.cache_type).itemsize)
        self.new_rows = 0
        if not contract.in_place:
            self.new_rows = cuda.allocate(largest.rows * 2 * shape.layers * shape.kv_heads * self.row_bytes)
            release_with(self, cuda.release, self.new_rows)
        self._numbers: dict[tuple[int, int, int], int] = {}

    def options(self, one: Pass, address: int) -> Any:
        """For a pass over K/V at this address: which CUDA graph it is, made on first use."""
        options = ort.RunOptions()
        if self.captures:
            options.add_run_config_entry("gpu_graph_id", self._graph_number(one, address))
        return options

    def release(self, address: int) -> None:
        """Free memory of K/V, once copies from it are over."""
        self.graph.later(partial(_free, self.cuda, self.stream), address)

    def _graph_number(self, one: Pass, address: int) -> str:
        if one.parents is None or one.rows not in BUCKETS:
            return _NO_GRAPH
        key = address, one.capacity, one.rows
        if key not in self._numbers and len(self._numbers) == MOST_GRAPHS:
            return _NO_GRAPH
        return str(self._numbers.setdefault(key, 1 + len(self._numbers)))


def _free(cuda: Cuda, stream: int, address: int) -> None:
    cuda.wait(stream)
    cuda.release(address)


class GpuCache:
    """Empty at first, without room. See `padded_target.Cache`."""

    def __init__(self, gpu: OnnxGpu) -> None:
        self._gpu, self._graph = gpu, gpu.graph
        self._binding = gpu.graph.session.io_binding()
        self._rows: DeviceCache | None = None
        self.room = 0  # tokens

    @property
    def capacity(self) -> int:
        """Rows of the buffers, those for dummies included."""
        return self.room + MAX_ROWS

    @property
    def bytes(self) -> int:
        return 0 if self._rows is None else self._rows.bytes

    def grow(self, room: int, length: int) -> None:
        """Move the first `length` rows into buffers for `room` tokens and the dummies; on any failure the old ones
        stay. Raises CapacityError when the device has no room for both."""
        self._graph.apart(self._grow, room, length)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        self._graph.apart(self._held.keep, start, rows)

    def copy(self, other: GpuCache, length: int) -> None:
        self._graph.apart(self._held.copy, other._held, length)

    def run(self, one: Pass) -> tuple[Floats, Floats]:
        """Logits and features of the rows that are no dummies; a stretch of text has no logits.

        Raises DeviceError when onnxruntime or CUDA fail.
        """
        made: tuple[Floats, Floats] = self._graph.apart(self._run, one)
        return made

    @property
    def _held(self) -> DeviceCache:
        assert self._rows is not None, "rows of a cache without room"
        return self._rows

    def _grow(self, room: int, length: int) -> None:
        gpu, shape, capacity = self._gpu, self._graph.shape, room + MAX_ROWS
        try:
            rows = DeviceCache(
                *(gpu.cuda, gpu.stream, shape.layers, shape.kv_heads, capacity, gpu.row_bytes), gpu.release
            )
        except DeviceError as error:
            size = 2 * shape.layers * shape.kv_heads * capacity * gpu.row_bytes
            raise CapacityError(
                f"the GPU has no room for {room} tokens of K/V, {size / 1e6:.0f} MB: end other conversations, "
                f"or give a smaller --max-context ({error})"
            ) from error
        if length:
            rows.copy(self._held, length)
        self._rows, self.room = rows, room
        for layer in range(shape.layers):
            for kind in "kv":
                self._bind_rows(f"past_{kind}_{layer}", rows.address(layer, kind), capacity)
                if self._graph.contract.in_place:
                    self._bind_rows(f"present_{kind}_{layer}", rows.address(layer, kind), capacity)

    def _bind_rows(self, name: str, address: int, rows: int) -> None:
        shape = self._graph.shape
        bind = self._binding.bind_input if name in self._graph.inputs else self._binding.bind_output
        bind(name, "cuda", 0, self._graph.cache_type, (1, shape.kv_heads, rows, shape.head_dim), address)

    def _run(self, one: Pass) -> tuple[Floats, Floats]:
        gpu, graph, count = self._gpu, self._graph, len(one.tokens)
        self._bind_feeds(one)
        self._bind_results(one)
        try:
            graph.session.run_with_iobinding(self._binding, gpu.options(one, self._held.address(0, "k")))
            if not graph.contract.in_place:
                self._held.place(one.start, gpu.new_rows, count, one.rows)
            logits = gpu.results["logits"].fetch(0 if one.parents is None else count, gpu.stream)
            if "features" not in gpu.results:
                return logits, np.empty((count, 0), np.float32)
            return logits, gpu.results["features"].fetch(count, gpu.stream)
        except DeviceError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base but this one
            message = f"onnxruntime failed in a pass of {one.rows} rows on provider {graph.provider}: {error}"
            raise DeviceError(message) from error
        finally:
            gpu.cuda.wait(gpu.stream)  # buffers are filled anew by the next pass, be this one interrupted or not

    def _bind_feeds(self, one: Pass) -> None:
        gpu, graph = self._gpu, self._graph
        feeds = graph.contract.feeds(one, graph.shape.window)
        for name in feeds.keys() & graph.inputs.keys():
            value = feeds[name]
            if name in graph.contract.on_host:
                self._binding.bind_cpu_input(name, value)
            else:
                staging = gpu.staging[name]
                staging.upload(value, gpu.stream)
                self._binding.bind_input(name, "cuda", 0, value.dtype.type, value.shape, staging.address)

    def _bind_results(self, one: Pass) -> None:
        gpu, graph, shape = self._gpu, self._graph, self._graph.shape
        for name, rows, width in (("logits", one.wanted, shape.vocab), ("features", one.rows, graph.features.width)):
            if name in gpu.results:
                self._binding.bind_output(name, "cuda", 0, np.float32, (rows, width), gpu.results[name].address)
        if graph.contract.in_place:
            return
        part = shape.kv_heads * one.rows * gpu.row_bytes
        for layer in range(shape.layers):
            for i, kind in enumerate("kv"):
                self._bind_rows(f"new_{kind}_{layer}", gpu.new_rows + (2 * layer + i) * part, one.rows)

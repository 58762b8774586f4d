"""One conversation's K/V in the host's memory, which most graphs write in place, and passes over them.

All K/V of all layers lie in one array, so that keeping the accepted rows of a pass is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.edge.onnx_graph import OnnxGraph
from starsd.edge.target import Floats
from starsd.shared.graph_contract import DUMMIES, Pass


class HostCache:
    """Empty at first, without room. See `padded_target.Cache`."""

    def __init__(self, graph: OnnxGraph) -> None:
        self._graph = graph
        self._binding = graph.session.io_binding()
        self._cache: NDArray[Any] = np.empty(0)
        self.room = 0  # tokens

    @property
    def capacity(self) -> int:
        """Rows of the buffers, those for dummies included."""
        return self.room + DUMMIES

    @property
    def bytes(self) -> int:
        return self._cache.nbytes

    def grow(self, room: int, length: int) -> None:
        """Move the first `length` rows into buffers for `room` tokens and the dummies; on any failure the old ones
        stay."""
        graph, shape, capacity = self._graph, self._graph.shape, room + DUMMIES
        cache: NDArray[Any] = np.zeros((2 * shape.layers, shape.kv_heads, capacity, shape.head_dim), graph.cache_type)
        if length:
            cache[:, :, :length] = self._cache[:, :, :length]
        # the runtime sees these arrays only through addresses: they live as long as self
        self._cache = cache
        self.room = room
        self._values = [ort.OrtValue.ortvalue_from_numpy(cache[i : i + 1]) for i in range(len(cache))]
        for i, value in enumerate(self._values):
            kind, layer = "kv"[i % 2], i // 2
            self._binding.bind_ortvalue_input(f"past_{kind}_{layer}", value)
            if graph.contract.in_place:
                self._binding.bind_ortvalue_output(f"present_{kind}_{layer}", value)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        self._cache[:, :, start : start + len(rows)] = self._cache[:, :, start + np.asarray(rows)]

    def copy(self, other: HostCache, length: int) -> None:
        self._cache[:, :, :length] = other._cache[:, :, :length]

    def run(self, one: Pass) -> tuple[Floats, Floats]:
        """Logits and features of the rows that are no dummies."""
        graph, count = self._graph, len(one.tokens)
        feeds = graph.contract.feeds(one, graph.shape.window)
        for name in feeds.keys() & graph.inputs.keys():  # each mask only where a layer needs it
            self._binding.bind_cpu_input(name, feeds[name])
        logits = self._bind_result("logits", one.wanted, graph.shape.vocab)
        features = self._bind_result("features", one.rows, graph.features.width)
        new = None if graph.contract.in_place else self._bind_new(one.rows)
        graph.apart(graph.session.run_with_iobinding, self._binding)
        if new is not None:
            self._cache[:, :, one.start : one.start + one.rows] = new
        return logits[:count], features[:count]

    def _bind_new(self, rows: int) -> NDArray[Any]:
        """Where the graph puts K/V of a pass when not into the cache: laid out as the cache is."""
        shape, dtype = self._graph.shape, self._graph.cache_type
        new = np.empty((2 * shape.layers, shape.kv_heads, rows, shape.head_dim), dtype)
        for i, part in enumerate(new):
            self._binding.bind_output(
                f"new_{'kv'[i % 2]}_{i // 2}", "cpu", 0, dtype, (1, *part.shape), part.ctypes.data
            )
        return new

    def _bind_result(self, name: str, rows: int, width: int) -> Floats:
        result = np.empty((rows, width), np.float32)
        if width:
            self._binding.bind_output(name, "cpu", 0, np.float32, result.shape, result.ctypes.data)
        return result

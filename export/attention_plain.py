"""Attention in plain operators, for runtimes whose own cannot do it.

Heads that share K/V are folded into rows, (kv heads, heads / kv heads · rows, head_dim), which lie in memory like that
already: nothing is repeated. Scores are capped, masked and normalised in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture

_END = np.iinfo(np.int64).max  # behind every column


class PlainAttention:
    """Of one graph; `dtype` is that of queries and K/V."""

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        self._graph, self._shape, self._dtype = graph, architecture.shape, dtype
        self._scale, self._cap = architecture.attention_scale, architecture.attention_cap

    def __call__(self, q: str, parts: Sequence[tuple[str, str]], mask: str, to: str) -> str:
        """`q` (1, heads, rows, head_dim) over K and V (1, kv heads, columns, head_dim), one behind the other where they
        come in two parts; `mask` (1, 1, rows, all columns) is float32. As large as `q`.
        """
        graph, shape = self._graph, self._shape
        scale = graph.constant("attention_scale", np.array(self._scale, self._dtype))
        folded = graph.ints(1, shape.kv_heads, -1, shape.head_dim)
        queries = graph.node("Reshape", graph.node("Mul", q, scale, to=to + "_scaled"), folded, to=to + "_queries")
        scores = []
        for i, (keys, _) in enumerate(parts):
            columns = graph.node("Transpose", keys, to=f"{to}_keys_{i}", perm=[0, 1, 3, 2])
            scores.append(graph.node("MatMul", queries, columns, to=f"{to}_scores_{i}"))
        joined = graph.node("Concat", *scores, to=to + "_scores", axis=-1) if len(scores) > 1 else scores[0]
        weights = self._weights(joined, mask, to)
        sums = [
            graph.node("MatMul", share, values, to=f"{to}_sum_{i}")
            for i, (share, (_, values)) in enumerate(zip(self._shares(weights, parts, to), parts, strict=True))
        ]
        whole = graph.node("Add", *sums, to=to + "_sum") if len(sums) > 1 else sums[0]
        return graph.node("Reshape", whole, graph.ints(1, shape.heads, -1, shape.head_dim), to=to)

    def _weights(self, scores: str, mask: str, to: str) -> str:
        """Softmax of scores (1, kv heads, heads / kv heads · rows, columns), of the same shape."""
        graph = self._graph
        apart = graph.node("Reshape", scores, graph.ints(1, self._shape.heads, -1, 0), to=to + "_apart")
        whole = self._typed(apart, np.float32, to=to + "_whole")
        if self._cap:
            bound = graph.constant("attention_cap", self._cap)
            bent = graph.node("Tanh", graph.node("Div", whole, bound, to=to + "_ratio"), to=to + "_bent")
            whole = graph.node("Mul", bent, bound, to=to + "_capped")
        masked = graph.node("Add", whole, mask, to=to + "_masked")
        weights = graph.node("Softmax", masked, to=to + "_weights", axis=-1)
        typed = self._typed(weights, self._dtype, to=to + "_weights_typed")
        return graph.node("Reshape", typed, graph.ints(1, self._shape.kv_heads, -1, 0), to=to + "_folded")

    def _shares(self, weights: str, parts: Sequence[tuple[str, str]], to: str) -> list[str]:
        """The columns of `weights` that belong to each part."""
        if len(parts) == 1:
            return [weights]
        graph, axis = self._graph, self._graph.ints(3)
        if not graph.has("first_columns"):
            graph.node("Shape", parts[0][0], to="first_columns", start=2, end=3)
        first = graph.node("Slice", weights, graph.ints(0), "first_columns", axis, to=to + "_share_0")
        return [first, graph.node("Slice", weights, "first_columns", graph.ints(int(_END)), axis, to=to + "_share_1")]

    def _typed(self, x: str, dtype: Any, to: str) -> str:
        return x if np.dtype(self._dtype) == np.float32 else self._graph.cast(x, dtype, to=to)

"""What all flavours have in common: rope tables, norms of heads, and which masks and ropes a model's layers need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture
from starsd.shared.rope import Rope

_SPARE_POSITIONS = 8  # rows of the rope tables past the context, for the dummy rows behind its last token

Tables = tuple[str, str]  # of cosines and of sines, (positions, head_dim / 2)


def mask_of(architecture: Architecture, layer: int) -> str:
    """The name of the mask that a layer adds."""
    return "local_mask" if architecture.is_windowed(layer) else "mask"


def masks_of(architecture: Architecture) -> list[str]:
    """Those that some layer adds."""
    needed = {mask_of(architecture, layer) for layer in range(architecture.shape.layers)}
    return [name for name in ("mask", "local_mask") if name in needed]


def rope_of(architecture: Architecture, layer: int) -> Rope:
    """What a layer turns queries and keys by."""
    return architecture.local_rope if architecture.is_local(layer) else architecture.rope


def write_tables(graph: GraphWriter, architecture: Architecture, dtype: Any) -> dict[Rope, Tables]:
    """Tables of every rope that some layer turns by, for all positions of the context and for dummies behind them."""
    layers = range(architecture.shape.layers)
    named = {architecture.local_rope: "local_rope"} if any(map(architecture.is_local, layers)) else {}
    if not all(map(architecture.is_local, layers)):
        named[architecture.rope] = "rope"
    return {rope: _table(graph, rope, name, architecture.shape.context, dtype) for rope, name in named.items()}


def _table(graph: GraphWriter, rope: Rope, name: str, context: int, dtype: Any) -> Tables:
    padded = (np.pad(table, ((0, _SPARE_POSITIONS), (0, 0)), "edge") for table in rope.tables(context))
    cos, sin = (table.astype(dtype) for table in padded)
    return graph.constant(f"{name}_cos", cos), graph.constant(f"{name}_sin", sin)


def head_norm(
    graph: GraphWriter, norm: Callable[[str, str, str], str], x: str, weight: str, heads: tuple[int, int], to: str
) -> str:
    """`norm` of each head of `x` (rows, heads · head_dim); `heads` are their number and their size."""
    count, size = heads
    apart = graph.node("Reshape", x, graph.ints(0, count, size), to=to + "_heads")
    normed = norm(apart, weight, to + "_normed")
    return graph.node("Reshape", normed, graph.ints(0, count * size), to=to)

"""What flavours without operators of a single runtime have in common: inputs, residual sums, heads, activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from starsd.export.flavour_parts import head_norm, masks_of, write_tables
from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture


class PlainFlavour(ABC):
    """All of a `Flavour` but norm and attention; it takes heads of any size that turns."""

    columns: ClassVar[str]  # of a mask

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        self.graph, self.architecture, self.dtype = graph, architecture, dtype
        graph.input("input_ids", np.int64, ["rows"])
        graph.input("position_ids", np.int64, [1, "rows"])
        for name in masks_of(architecture):
            graph.input(name, np.float32, [1, 1, "rows", self.columns])
        graph.input("logit_rows", np.int64, ["wanted"])
        self.tables = write_tables(graph, architecture, dtype)

    @abstractmethod
    def norm(self, x: str, weight: str, to: str) -> str: ...

    def add_and_norm(self, stream: str, update: str, weight: str, to: str) -> tuple[str, str]:
        self.graph.node("Add", stream, update, to=to)
        return to, self.norm(to, weight, to=to + "_normed")

    def head_norm(self, x: str, weight: str, heads: int, to: str) -> str:
        return head_norm(self.graph, self.norm, x, weight, (heads, self.architecture.shape.head_dim), to)

    def activate(self, gate: str, to: str) -> str:
        if self.architecture.activation == "silu":
            return self.graph.node("Mul", gate, self.graph.node("Sigmoid", gate, to=to + "_gate"), to=to)
        return self.graph.node("Gelu", gate, to=to, approximate="tanh")

    def heads_apart(self, layer: int, qkv: tuple[str, ...]) -> dict[str, str]:
        """q, k and v as (1, rows, heads, head_dim)."""
        graph, shape = self.graph, self.architecture.shape
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        if len(qkv) == 1:
            sizes = graph.ints(*(count * shape.head_dim for count in heads.values()))
            qkv = graph.nodes("Split", qkv[0], sizes, to=tuple(f"{name}_{layer}" for name in heads), axis=-1)
        return {
            name: graph.node("Reshape", x, graph.ints(1, -1, count, shape.head_dim), to=f"{name}_{layer}_heads")
            for (name, count), x in zip(heads.items(), qkv, strict=True)
        }

    def heads_first(self, x: str) -> str:
        """(1, rows, heads, head_dim) → (1, heads, rows, head_dim)."""
        return self.graph.node("Transpose", x, to=x + "_first", perm=[0, 2, 1, 3])

    def heads_joined(self, x: str, to: str) -> str:
        """(1, heads, rows, head_dim) → (rows, heads · head_dim)."""
        graph, shape = self.graph, self.architecture.shape
        rows_first = graph.node("Transpose", x, to=to + "_rows", perm=[0, 2, 1, 3])
        return graph.node("Reshape", rows_first, graph.ints(-1, shape.heads * shape.head_dim), to=to)

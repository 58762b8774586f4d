"""Flavour `decomposed`: operators that every runtime of recent years has, for TensorRT before 10.15.

Inputs   input_ids (rows,) · position_ids (1, rows) · logit_rows (wanted,): rows that go through the LM head
         mask (1, 1, rows, span) added to attention scores, of every column of K/V and then of the pass's own rows
         (span = capacity + rows) · local_mask: the same for layers with a window, each only where a layer needs it
         past_k_i, past_v_i (1, kv heads, capacity, head_dim), only read
Outputs  logits (wanted, vocab) · features (rows, width) · new_k_i, new_v_i (1, kv heads, rows, head_dim): the pass's
         own rows, which whoever runs the graph writes behind the past

Older TensorRT promises for no operator that past and present may lie at one address, and handing out a whole cache
anew would copy it in every pass. So attention multiplies past and new rows apart, and K/V are never moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from starsd.export.attention_plain import PlainAttention
from starsd.export.flavour_parts import mask_of, rope_of
from starsd.export.flavour_plain import PlainFlavour
from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture


class DecomposedFlavour(PlainFlavour):
    """See `Flavour`."""

    opsets: ClassVar[Mapping[str, int]] = {"": 20}
    ir_version: ClassVar[int] = 10
    columns: ClassVar[str] = "span"

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        super().__init__(graph, architecture, dtype)
        self._attention = PlainAttention(graph, architecture, dtype)
        self._angles = {rope: self._at_positions(*tables) for rope, tables in self.tables.items()}

    def _at_positions(self, *tables: str) -> tuple[str, ...]:
        """The rows of the tables for this pass, (1, rows, 1, head_dim / 2): alike for all heads."""
        graph = self.graph
        found = [graph.node("Gather", table, "position_ids", to=table + "_found") for table in tables]
        return tuple(graph.node("Unsqueeze", x, graph.ints(2), to=x + "_column") for x in found)

    def norm(self, x: str, weight: str, to: str) -> str:
        """In float32 but for the weight, as the operators of other flavours do it."""
        graph = self.graph
        dtype = graph.dtype(weight)
        whole = x if dtype == np.float32 else graph.cast(x, np.float32, to=to + "_whole")
        square = graph.node("Mul", whole, whole, to=to + "_square")
        mean = graph.node("ReduceMean", square, graph.ints(-1), to=to + "_mean", keepdims=1)
        raised = graph.node("Add", mean, graph.constant("epsilon", self.architecture.norm_epsilon), to=to + "_raised")
        scaled = graph.node("Div", whole, graph.node("Sqrt", raised, to=to + "_root"), to=to + "_scaled")
        typed = scaled if dtype == np.float32 else graph.cast(scaled, dtype, to=to + "_typed")
        return graph.node("Mul", typed, weight, to=to)

    def attend(self, layer: int, qkv: tuple[str, ...], to: str) -> str:
        graph, architecture, shape = self.graph, self.architecture, self.architecture.shape
        heads, parts = self.heads_apart(layer, qkv), []
        for name in "qk":
            heads[name] = self._turned(heads[name], *self._angles[rope_of(architecture, layer)])
        for name in "kv":
            past = graph.input(f"past_{name}_{layer}", self.dtype, [1, shape.kv_heads, "capacity", shape.head_dim])
            new = graph.node("Transpose", heads[name], to=f"new_{name}_{layer}", perm=[0, 2, 1, 3])
            graph.output(new, self.dtype, [1, shape.kv_heads, "rows", shape.head_dim])
            parts.append((past, new))
        (past_k, new_k), (past_v, new_v) = parts
        queries, mask = self.heads_first(heads["q"]), mask_of(architecture, layer)
        attended = self._attention(queries, [(past_k, past_v), (new_k, new_v)], mask, to=to + "_heads")
        return self.heads_joined(attended, to=to)

    def _turned(self, x: str, cos: str, sin: str) -> str:
        """`x` (1, rows, heads, head_dim) by the angles of its rows: the halves of a head are real and imaginary."""
        graph, to = self.graph, x + "_turned"
        real, imaginary = graph.nodes("Split", x, to=(to + "_real", to + "_imaginary"), axis=-1, num_outputs=2)
        by_cos = [graph.node("Mul", part, cos, to=part + "_cos") for part in (real, imaginary)]
        by_sin = [graph.node("Mul", part, sin, to=part + "_sin") for part in (real, imaginary)]
        low = graph.node("Sub", by_cos[0], by_sin[1], to=to + "_low")
        high = graph.node("Add", by_cos[1], by_sin[0], to=to + "_high")
        return graph.node("Concat", low, high, to=to, axis=-1)


class DecomposedFlavour21(DecomposedFlavour):
    """With the operator that four bits need."""

    opsets: ClassVar[Mapping[str, int]] = {"": 21}

"""Flavour `portable`: ONNX's own operators of opset 24, which TensorRT takes from 10.15 on.

Inputs   input_ids (rows,) · position_ids (1, rows) · logit_rows (wanted,): rows that go through the LM head
         mask (1, 1, rows, capacity) added to attention scores, of every column of K/V, used or not · local_mask: the
         same for layers with a window, each only where a layer needs it
         write (1,): where row 0 of the pass goes in K/V
         past_k_i, past_v_i (1, kv heads, capacity, head_dim)
Outputs  logits (wanted, vocab) · features (rows, width) · present_k_i, present_v_i: the same buffers as past

`capacity` is one symbol throughout: TensorRT wants a number in its place. Its Attention has no soft cap, takes no
boolean mask and ignores nonpad_kv_seqlen; models with a cap get attention in plain operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from starsd.export.attention_plain import PlainAttention
from starsd.export.flavour_parts import mask_of, masks_of, rope_of
from starsd.export.flavour_plain import PlainFlavour
from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture


class PortableFlavour(PlainFlavour):
    """See `Flavour`."""

    opsets: ClassVar[Mapping[str, int]] = {"": 24}
    ir_version: ClassVar[int] = 10
    columns: ClassVar[str] = "capacity"

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        super().__init__(graph, architecture, dtype)
        graph.input("write", np.int64, [1])
        cast = np.dtype(dtype) != np.float32 and not architecture.attention_cap
        self._masks = {m: graph.cast(m, dtype, to=m + "_typed") if cast else m for m in masks_of(architecture)}
        self._attention = PlainAttention(graph, architecture, dtype) if architecture.attention_cap else self._attend

    def norm(self, x: str, weight: str, to: str) -> str:
        epsilon = self.architecture.norm_epsilon
        return self.graph.node("RMSNormalization", x, weight, to=to, axis=-1, epsilon=epsilon, stash_type=1)

    def attend(self, layer: int, qkv: tuple[str, ...], to: str) -> str:
        graph, architecture, shape = self.graph, self.architecture, self.architecture.shape
        size: list[int | str] = [1, shape.kv_heads, "capacity", shape.head_dim]
        heads = {name: self.heads_first(x) for name, x in self.heads_apart(layer, qkv).items()}
        tables, present = self.tables[rope_of(architecture, layer)], []
        for name in "qk":
            heads[name] = graph.node(
                "RotaryEmbedding", heads[name], *tables, "position_ids", to=f"{name}_{layer}_turned"
            )
        for name in "kv":
            past = graph.input(f"past_{name}_{layer}", self.dtype, size)
            names = past, heads[name], "write"
            present.append(graph.node("TensorScatter", *names, to=f"present_{name}_{layer}", axis=2, mode="linear"))
            graph.output(present[-1], self.dtype, size)
        mask = self._masks[mask_of(architecture, layer)]
        attended = self._attention(heads["q"], [(present[0], present[1])], mask, to=to + "_heads")
        return self.heads_joined(attended, to=to)

    def _attend(self, q: str, parts: Any, mask: str, to: str) -> str:
        ((keys, values),) = parts
        scale = float(self.architecture.attention_scale)
        return self.graph.node("Attention", q, keys, values, mask, to=to, is_causal=0, scale=scale)

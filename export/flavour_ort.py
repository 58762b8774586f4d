"""Flavour `ort`: onnxruntime's own operators. GroupQueryAttention with an additive mask, K/V updated in place.

Inputs   input_ids (rows,) · logit_rows (wanted,): rows that go through the LM head
         attention_rows (1, attending): the rows that attention sees, the pass's own and perhaps a dummy behind them
         position_ids (1, attending) · own_rows (rows,)
         mask (1, 1, attending, total) added to attention scores · local_mask: the same for layers with a window,
         each only where a layer needs it
         last_row (1,) = total - 1 · total (): committed rows + attending
         past_k_i, past_v_i (1, kv heads, capacity, head_dim): rows before the pass; new ones are written behind them
Outputs  logits (wanted, vocab) · features (rows, width) · present_k_i, present_v_i: the same buffers as past

Attention alone rounds differently for one row than for several; with a dummy for it, all else stays at one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from starsd.export.flavour_parts import head_norm, mask_of, masks_of, rope_of, write_tables
from starsd.export.graph import CONTRIB, GraphWriter
from starsd.shared.architecture import Architecture
from starsd.shared.errors import UnsupportedModelError

_HEAD_MULTIPLE = 16  # what GroupQueryAttention's rotary embedding takes


class OrtFlavour:
    """See `Flavour`. Raises UnsupportedModelError for a head_dim that GroupQueryAttention refuses."""

    opsets: ClassVar[Mapping[str, int]] = {"": 21, CONTRIB: 1}
    ir_version: ClassVar[int] = 10  # what onnxruntime 1.23 reads

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        head_dim = architecture.shape.head_dim
        if head_dim % _HEAD_MULTIPLE:
            raise UnsupportedModelError(
                f"head_dim {head_dim} is not supported, expected a multiple of {_HEAD_MULTIPLE}"
            )
        self.graph, self.architecture, self.dtype = graph, architecture, dtype
        graph.input("input_ids", np.int64, ["rows"])
        graph.input("attention_rows", np.int64, [1, "attending"])
        graph.input("own_rows", np.int64, ["rows"])
        graph.input("position_ids", np.int64, [1, "attending"])
        for name in masks_of(architecture):
            graph.input(name, np.float32, [1, 1, "attending", "total"])
        graph.input("last_row", np.int32, [1])
        graph.input("total", np.int32, [])
        graph.input("logit_rows", np.int64, ["wanted"])
        self._tables = write_tables(graph, architecture, dtype)
        self._masks = {name: self._typed(name) for name in masks_of(architecture)}

    def _typed(self, mask: str) -> str:
        if np.dtype(self.dtype) == np.dtype(np.float32):
            return mask
        return self.graph.cast(mask, self.dtype, to=mask + "_typed")

    def norm(self, x: str, weight: str, to: str) -> str:
        epsilon = self.architecture.norm_epsilon
        return self.graph.node("SimplifiedLayerNormalization", x, weight, to=to, axis=-1, epsilon=epsilon, stash_type=1)

    def add_and_norm(self, stream: str, update: str, weight: str, to: str) -> tuple[str, str]:
        self.graph.nodes(
            "SkipSimplifiedLayerNormalization",
            stream,
            update,
            weight,
            to=(to + "_normed", "", "", to),
            domain=CONTRIB,
            epsilon=self.architecture.norm_epsilon,
        )
        return to, to + "_normed"

    def head_norm(self, x: str, weight: str, heads: int, to: str) -> str:
        return head_norm(self.graph, self.norm, x, weight, (heads, self.architecture.shape.head_dim), to)

    def attend(self, layer: int, qkv: tuple[str, ...], to: str) -> str:
        graph, architecture, shape = self.graph, self.architecture, self.architecture.shape
        past, present = (f"past_k_{layer}", f"past_v_{layer}"), (f"present_k_{layer}", f"present_v_{layer}")
        size: list[int | str] = [1, shape.kv_heads, "capacity", shape.head_dim]
        for tensor in past:
            graph.input(tensor, self.dtype, size)
        names = ("qkv",) if len(qkv) == 1 else ("q", "k", "v")
        batched = [
            graph.node("Gather", part, "attention_rows", to=f"{name}_{layer}_attending")
            for name, part in zip(names, qkv, strict=True)
        ]
        cap = {"softcap": architecture.attention_cap} if architecture.attention_cap else {}
        attended = (f"{to}_batch", *present)
        graph.nodes(
            "GroupQueryAttention",
            *batched,
            *([""] * (3 - len(batched))),
            *past,
            "last_row",
            "total",
            *self._tables[rope_of(architecture, layer)],
            "position_ids",
            self._masks[mask_of(architecture, layer)],
            to=attended,
            domain=CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            scale=float(architecture.attention_scale),
            **cap,
        )
        for tensor in present:
            graph.output(tensor, self.dtype, size)
        single = graph.node("Squeeze", attended[0], graph.ints(0), to=f"{to}_all")
        return graph.node("Gather", single, "own_rows", to=to)

    def activate(self, gate: str, to: str) -> str:
        if self.architecture.activation == "silu":
            return self.graph.node("QuickGelu", gate, to=to, domain=CONTRIB, alpha=1.0)
        return self.graph.node("Gelu", gate, to=to, approximate="tanh")

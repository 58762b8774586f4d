"""What a flavour is: how the operators that differ between runtimes are spelled.

`graph_decoder` says what a model computes and calls these; everything else in a graph (embedding, linear layers,
features, logits) is spelled alike everywhere. Values are named strings; `rows` are the pass's own rows, one a node.

A flavour declares its inputs when it is made, in one order: `input_ids` (rows,) and `logit_rows` (wanted,), int64, are
among them, for the builder reads those by name. The rest is between the flavour and the engine that feeds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from starsd.export.graph import GraphWriter
from starsd.shared.architecture import Architecture


class Flavour(Protocol):
    """`dtype` is that of K/V and of whatever attention reads; norms are also called on float32 beside float16."""

    opsets: ClassVar[Mapping[str, int]]  # domain → version, "" is ONNX's own
    ir_version: ClassVar[int]

    def __init__(self, graph: GraphWriter, architecture: Architecture, dtype: Any) -> None:
        """Declare inputs, write the rope tables of `architecture.shape.context` positions.

        Raises UnsupportedModelError for sizes that an operator refuses.
        """
        ...

    def norm(self, x: str, weight: str, to: str) -> str:
        """RMSNorm of rows (rows, hidden) with the weight (hidden,) of the same type."""
        ...

    def add_and_norm(self, stream: str, update: str, weight: str, to: str) -> tuple[str, str]:
        """stream + update, named `to`, and its RMSNorm; both (rows, hidden)."""
        ...

    def head_norm(self, x: str, weight: str, heads: int, to: str) -> str:
        """RMSNorm of each head of (rows, heads · head_dim) with the weight (head_dim,); as wide as `x`."""
        ...

    def attend(self, layer: int, qkv: tuple[str, ...], to: str) -> str:
        """Turn queries and keys, write K/V behind the past, attend: (rows, heads · head_dim), before `o_proj`.

        `qkv` is one value (rows, (heads + 2 · kv_heads) · head_dim), queries then keys then values, or these three.
        Declares past and present K/V of the layer. `architecture` says scale, cap, window and rope:
        `is_local(layer)` turns by `local_rope`, `is_windowed(layer)` masks by the window as well.
        """
        ...

    def activate(self, gate: str, to: str) -> str:
        """The MLP's activation, `architecture.activation`, of (rows, inner)."""
        ...

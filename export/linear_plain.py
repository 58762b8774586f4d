"""Linear layers of few bits in ONNX's own operators: weights are dequantised, activations stay as they are.

TensorRT reads DequantizeLinear before MatMul as one product with packed weights. It takes no zero points, so values 0
to 15 are stored as -8 to 7, and what that leaves of a group's minimum multiplies the sum of the group's inputs: a small
product beside the large one. So a Q4_1 GGUF, GPTQ and AWQ keep the weights that they store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from starsd.export.checkpoint import Checkpoint
from starsd.export.gguf import Blocks
from starsd.export.graph import GraphWriter
from starsd.export.linear import add_bias
from starsd.export.packed import Packed
from starsd.export.quantise import blocks_of, channels_of

_FOUR_BIT_BLOCKS = ("Q4_0", "Q4_1")


class Channels:
    """int8 by output channel; scales and products in `dtype`."""

    def __init__(self, checkpoint: Checkpoint, dtype: Any) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        scales, quants = zip(*(channels_of(self._checkpoint.tensor(name)) for name in weights), strict=True)
        stored = graph.constant(weights[0] + ".channels", np.concatenate(quants).T)
        least = np.finfo(self._dtype).smallest_subnormal  # TensorRT refuses a scale of 0, which a row of zeros has
        positive = np.maximum(np.concatenate(scales).astype(self._dtype), least)
        scale = graph.constant(weights[0] + ".channel_scale", positive)
        weight = graph.node("DequantizeLinear", stored, scale, to=to + "_weight", axis=1)
        y = graph.node("MatMul", x, weight, to=to)
        return add_bias(graph, self._checkpoint, y, weights, self._dtype)


@dataclass(frozen=True)
class Signed:
    """weight[n, order[k]] = scale[n, k // size] · quants[n, k] + rest[n, k // size].

    quants int8 (N, K), of `bits`; scale and rest float32 (N, K / size); order None leaves inputs where they are.
    """

    bits: int
    quants: NDArray[np.int8]
    scale: NDArray[np.float32]
    rest: NDArray[np.float32]
    order: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        return int(self.quants.shape[1] // self.scale.shape[1])

    def alike(self, other: Signed) -> bool:
        """Whether both can be one matrix, outputs side by side."""
        if self.order is None or other.order is None:
            same_order = self.order is other.order
        else:
            same_order = np.array_equal(self.order, other.order)
        return same_order and (self.bits, self.size) == (other.bits, other.size)


def signed(held: Blocks | Packed) -> Signed:
    """Values around the middle of their range, and what that leaves."""
    if isinstance(held, Packed):
        middle = 1 << (held.bits - 1)
        quants = (held.quants.astype(np.int16) - middle).astype(np.int8)
        return Signed(held.bits, quants, held.scale, held.scale * (middle - held.zero.astype(np.float32)), held.order)
    if held.minimum is None:
        return Signed(4, held.quants.astype(np.int8), held.scale, np.zeros_like(held.scale))
    return Signed(4, (held.quants.astype(np.int8) - np.int8(8)), held.scale, held.minimum + 8 * held.scale)


class Groups:
    """Four bits in groups: those that the checkpoint is made of, else rounded here in groups of 32. Scales and products
    in `dtype`. GPTQ's layers of eight bits keep them.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: Any) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        parts = [self._signed(name) for name in weights]
        if all(part.alike(parts[0]) for part in parts):
            y = self._multiply(graph, x, weights[0], _joined(parts), to)
        else:
            pieces = [
                self._multiply(graph, x, name, part, f"{to}_{i}")
                for i, (name, part) in enumerate(zip(weights, parts, strict=True))
            ]
            y = graph.node("Concat", *pieces, to=to, axis=-1)
        return add_bias(graph, self._checkpoint, y, weights, self._dtype)

    def _signed(self, name: str) -> Signed:
        if name in self._checkpoint.packed:
            return signed(self._checkpoint.packed[name])
        own = self._checkpoint.blocks.get(name)
        if own is not None and own.kind in _FOUR_BIT_BLOCKS:
            return signed(own)
        return signed(blocks_of(self._checkpoint.tensor(name), 4))

    def _multiply(self, graph: GraphWriter, x: str, name: str, part: Signed, to: str) -> str:
        """The constants are (K, N) and (K / size, N), as MatMul reads them."""
        if part.order is not None:
            x = graph.node("Gather", x, graph.constant(name + ".order", part.order), to=to + "_ordered", axis=-1)
        quants = part.quants.T.astype(ml_dtypes.int4 if part.bits == 4 else np.int8)
        stored = graph.constant(f"{name}.int{part.bits}", quants)
        scale = graph.constant(name + ".group_scale", part.scale.T.astype(self._dtype))
        weight = graph.node("DequantizeLinear", stored, scale, to=to + "_weight", axis=0, block_size=part.size)
        if not part.rest.any():
            return graph.node("MatMul", x, weight, to=to)
        product = graph.node("MatMul", x, weight, to=to + "_product")
        grouped = graph.node("Reshape", x, graph.ints(0, -1, part.size), to=to + "_groups")
        sums = graph.node("ReduceSum", grouped, graph.ints(-1), to=to + "_sums", keepdims=0)
        rest = graph.constant(name + ".group_rest", part.rest.T.astype(self._dtype))
        return graph.node("Add", product, graph.node("MatMul", sums, rest, to=to + "_rest"), to=to)


def _joined(parts: Sequence[Signed]) -> Signed:
    first = parts[0]
    quants, scale, rest = (
        np.concatenate(column) for column in zip(*((p.quants, p.scale, p.rest) for p in parts), strict=True)
    )
    return Signed(first.bits, quants, scale, rest, first.order)

"""How a linear layer becomes nodes, by precision. `x` is (rows, K); weights are (N, K), several fused along N.

Every form is row independent: what a row yields depends on that row alone.

- dense: one Gemm, fp32 or fp16.
- blocks (int4): weights d·q + m in groups of 32. MatMulNBits holds d·(q - z) with whole z; the rest of m multiplies the
  sum of the group's inputs, which is fed as further inputs (`absorb_minimum`). So a Q4_1 GGUF runs with the weights
  that it stores. Activations are rounded to int8 in groups of 32 inside the operator (accuracy_level 4).
  GPTQ's and AWQ's groups have whole zeros already: they run as they are, of their own size.
- rows (int8): weights int8 by output channel, activations int8 by row, one integer product: the only form that reaches
  the integer matrix units, so many rows cost little. Rounding a whole row with one scale needs inputs without outliers,
  which `rotate.py` sees to; where they remain (the MLP's inner values) a second int8 holds what the first left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from starsd.export.checkpoint import Checkpoint
from starsd.export.gguf import BLOCK, Blocks
from starsd.export.graph import CONTRIB, GraphWriter
from starsd.export.packed import Packed, join_packed
from starsd.export.quantise import blocks_of, channels_of
from starsd.export.rounding import refine_blocks, refine_channels

_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level
_TINY_STEP = 1e-30  # stands in for the step of rests that are all zero


class Linear(Protocol):
    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        """Add the nodes that multiply `x` by the named weights, outputs side by side; the name of the result."""
        ...


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def add_bias(graph: GraphWriter, checkpoint: Checkpoint, y: str, weights: Sequence[str], dtype: Any) -> str:
    if _bias_name(weights[0]) not in checkpoint:
        return y
    bias = np.concatenate([checkpoint.tensor(_bias_name(name)) for name in weights]).astype(dtype)
    return graph.node("Add", y, graph.constant(_bias_name(weights[0]), bias), to=y + "_biased")


class Dense:
    """Weights as they are, in fp32 or fp16."""

    def __init__(self, checkpoint: Checkpoint, dtype: Any) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        tensors = [self._checkpoint.stored(name).astype(self._dtype) for name in weights]
        weight = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        y = graph.node("Gemm", x, graph.constant(weights[0], weight), to=to, transB=1)
        return add_bias(graph, self._checkpoint, y, weights, self._dtype)


class GroupsOf32:
    """Weights of 4 or 8 bits in groups of 32, rounded here; or those that the checkpoint is made of: a GGUF's blocks of
    as many bits, GPTQ's and AWQ's groups of any."""

    def __init__(self, checkpoint: Checkpoint, bits: int) -> None:
        self._checkpoint, self._bits = checkpoint, bits
        self._kinds = ("Q4_0", "Q4_1") if bits == 4 else ("Q8_0",)

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        parts = [self._held(name) for name in weights]
        if (whole := _joined(parts)) is not None:
            y = self._multiply(graph, x, weights[0], whole, to)
        else:
            pieces = [
                self._multiply(graph, x, name, part, f"{to}_{i}")
                for i, (name, part) in enumerate(zip(weights, parts, strict=True))
            ]
            y = graph.node("Concat", *pieces, to=to, axis=-1)
        return add_bias(graph, self._checkpoint, y, weights, np.float32)

    def _held(self, name: str) -> Blocks | Packed:
        if name in self._checkpoint.packed:
            return self._checkpoint.packed[name]
        own = self._checkpoint.blocks.get(name)
        if own is not None and own.kind in self._kinds:
            return own
        weight = self._checkpoint.tensor(name)
        blocks = blocks_of(weight, self._bits)
        curvature = self._checkpoint.curvatures.get(name)
        return blocks if curvature is None else refine_blocks(weight, blocks, curvature)

    def _multiply(self, graph: GraphWriter, x: str, name: str, part: Blocks | Packed, to: str) -> str:
        if isinstance(part, Packed):
            return _multiply_packed(graph, x, name, part, to)
        return self._multiply_blocks(graph, x, name, part, to)

    def _multiply_blocks(self, graph: GraphWriter, x: str, name: str, blocks: Blocks, to: str) -> str:
        zeros: tuple[str, ...] = ()
        if blocks.minimum is not None:
            groups = blocks.scale.shape[1]
            blocks, zero_points = absorb_minimum(blocks)
            zeros = (graph.constant(name + ".group_zero", _nibbles(zero_points)),)
            x = _extend_by_sums(graph, x, groups, to)
        rows, groups = blocks.scale.shape
        packed, scale = packed_constants(graph, name, blocks)
        sizes = {"K": groups * BLOCK, "N": rows, "bits": self._bits, "block_size": BLOCK}
        return _matmul_nbits(graph, (x, packed, scale, *zeros), sizes, to)


def _matmul_nbits(graph: GraphWriter, inputs: tuple[str, ...], sizes: dict[str, int], to: str) -> str:
    return graph.node("MatMulNBits", *inputs, to=to, domain=CONTRIB, accuracy_level=_INT8_ACTIVATIONS, **sizes)


def _multiply_packed(graph: GraphWriter, x: str, name: str, packed: Packed, to: str) -> str:
    """GPTQ's and AWQ's groups are what the operator holds; only inputs may have to be put in their order."""
    if packed.order is not None:
        x = graph.node("Gather", x, graph.constant(name + ".order", packed.order), to=to + "_ordered", axis=-1)
    rows, groups = packed.scale.shape
    quants, zeros = packed.quants, packed.zero
    if packed.bits == 4:
        quants, zeros = _nibbles(quants), _nibbles(zeros)
    constants = (
        graph.constant(name + ".groups", quants.reshape(rows, groups, -1)),
        graph.constant(name + ".group_scale", packed.scale),
        graph.constant(name + ".group_zero", zeros),
    )
    sizes = {"K": groups * packed.size, "N": rows, "bits": packed.bits, "block_size": packed.size}
    return _matmul_nbits(graph, (x, *constants), sizes, to)


def absorb_minimum(blocks: Blocks) -> tuple[Blocks, NDArray[np.uint8]]:
    """d·q + m in the operator's own form, d·(q - z) with whole z, and what that leaves of m as further columns.

    The rest, at most d/2 where a group reaches across zero, multiplies the sum of the group's inputs; so it becomes a
    weight for that sum. Two columns hold it, of four bits each, the second in sixteenths of the first: to 1/120 of the
    largest rest among 32 groups, far finer than the grid d itself. Returns the wider blocks (kind Q4_1, no minimum)
    and z, uint8 (N, groups).
    """
    assert blocks.minimum is not None
    step = np.where(blocks.scale == 0, 1, blocks.scale)
    zero = np.clip(np.rint(-blocks.minimum / step), 0, 15)
    rest = blocks.minimum + zero * blocks.scale
    rows, groups = rest.shape
    spare = -groups % BLOCK
    grouped = np.pad(rest, ((0, 0), (0, spare))).reshape(rows, -1, BLOCK)
    coarse_step = np.maximum(np.abs(grouped).max(-1) / 7.5, _TINY_STEP).astype(np.float32)
    coarse = np.clip(np.rint(grouped / coarse_step[..., None]), -8, 7)
    fine_step = coarse_step / 16
    fine = np.clip(np.rint((grouped - coarse * coarse_step[..., None]) / fine_step[..., None]), -8, 7)
    columns = [(digit + 8).astype(np.uint8).reshape(rows, -1) for digit in (coarse, fine)]
    quants = np.concatenate([blocks.quants, *columns], axis=1)
    scale = np.concatenate([blocks.scale, coarse_step, fine_step], axis=1)
    middle = np.full((rows, scale.shape[1] - groups), 8)
    return Blocks("Q4_1", scale, None, quants), np.concatenate([zero, middle], axis=1).astype(np.uint8)


def _nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two values of four bits a byte, the first in the low half; an odd row ends with 0. (N, K) → (N, ⌈K / 2⌉)."""
    even: NDArray[np.uint8] = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return np.asarray(even[:, 0::2] | (even[:, 1::2] << 4), np.uint8)


def packed_constants(graph: GraphWriter, name: str, blocks: Blocks) -> tuple[str, str]:
    """Quants and scales as MatMulNBits wants them: uint8 (N, K / 32, bytes), zero at 8 or 128; float32 (N, K / 32)."""
    rows, groups = blocks.scale.shape
    quants: NDArray[Any] = blocks.quants.view(np.uint8)
    if blocks.kind == "Q8_0":
        stored: NDArray[Any] = quants ^ np.uint8(0x80)
    else:
        stored = _nibbles(quants if blocks.kind == "Q4_1" else quants + np.uint8(8))  # wraps: -8 to 7 become 0 to 15
    packed = graph.constant(name + ".groups", stored.reshape(rows, groups, -1))
    return packed, graph.constant(name + ".group_scale", blocks.scale)


def _joined(parts: Sequence[Blocks | Packed]) -> Blocks | Packed | None:
    """Several matrices as one, outputs side by side; None where their forms differ."""
    first = parts[0]
    if isinstance(first, Packed):
        packed = [part for part in parts if isinstance(part, Packed) and part.alike(first)]
        return join_packed(packed) if len(packed) == len(parts) else None
    blocks = [part for part in parts if isinstance(part, Blocks) and part.kind == first.kind]
    return _stack(blocks) if len(blocks) == len(parts) else None


def _stack(parts: Sequence[Blocks]) -> Blocks:
    if len(parts) == 1:
        return parts[0]
    minimum = None if parts[0].minimum is None else np.concatenate([p.minimum for p in parts if p.minimum is not None])
    quants: NDArray[Any] = np.concatenate([part.quants for part in parts])
    return Blocks(parts[0].kind, np.concatenate([part.scale for part in parts]), minimum, quants)


def _extend_by_sums(graph: GraphWriter, x: str, groups: int, to: str) -> str:
    """`x` with the columns behind it that `absorb_minimum` has weights for: each group's sum, once for each digit."""
    grouped = graph.node("Reshape", x, graph.ints(0, groups, BLOCK), to=to + "_groups")
    sums = graph.node("ReduceSum", grouped, graph.ints(-1), to=to + "_sums", keepdims=0)
    places = np.eye(groups, groups + -groups % BLOCK, dtype=np.float32)
    twice = graph.constant(f"place_{groups}_sums", np.concatenate([places, places], axis=1))
    return graph.node("Concat", x, graph.node("MatMul", sums, twice, to=to + "_placed"), to=to + "_extended", axis=-1)


class Rows:
    """int8 weights by output channel, int8 activations by row; `double` spends a second int8 on the activations.

    `like` names the graph input with as many rows as `x` has. Activations are stored as uint8 around 128, the form that
    every processor's integer kernels take; the products are exact integers in any order.
    """

    def __init__(self, checkpoint: Checkpoint, *, like: str = "input_ids", double: bool = False) -> None:
        self._checkpoint, self._like, self._double = checkpoint, like, double

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        weight = self._weight(graph, weights)
        step = self._step(graph, x, to)
        rounded = self._round(graph, x, step, to + "_q")
        if self._double:
            # what rounding left over, at most half a step, in 254ths of a step; stacked, so that weights are read once
            back = graph.node("DequantizeLinear", rounded, step, self._centres(graph), to=to + "_back", axis=0)
            rest = graph.node("Sub", x, back, to=to + "_rest")
            fine_step = graph.node("Mul", step, graph.constant("one_254th", 1 / 254), to=to + "_fine_step")
            fine = self._round(graph, rest, fine_step, to + "_fine_q")
            stacked = graph.node("Concat", rounded, fine, to=to + "_stacked", axis=0)
            product = self._multiply(graph, stacked, weight, to + "_both")
            coarse, fine = graph.nodes("Split", product, to=(to + "_coarse", to + "_fine"), axis=0, num_outputs=2)
            scaled = graph.node("Mul", fine, graph.constant("one_254th", 1 / 254), to=to + "_fine_steps")
            y = graph.node("Add", coarse, scaled, to=to + "_steps")
        else:
            y = self._multiply(graph, rounded, weight, to + "_steps")
        y = graph.node("Mul", y, graph.node("Unsqueeze", step, graph.ints(1), to=to + "_column"), to=to)
        return add_bias(graph, self._checkpoint, y, weights, np.float32)

    def _weight(self, graph: GraphWriter, weights: Sequence[str]) -> tuple[str, str]:
        """int8 (K, N) and float32 channel scales (N,)."""
        scales, quants = zip(*(self._channels(name) for name in weights), strict=True)
        stored = graph.constant(weights[0] + ".channels", np.ascontiguousarray(np.concatenate(quants).T))
        return stored, graph.constant(weights[0] + ".channel_scale", np.concatenate(scales))

    def _channels(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        weight = self._checkpoint.tensor(name)
        scale, quants = channels_of(weight)
        curvature = self._checkpoint.curvatures.get(name)
        return scale, quants if curvature is None else refine_channels(weight, scale, curvature)

    @staticmethod
    def _step(graph: GraphWriter, x: str, to: str) -> str:
        """One step a row, so that its largest value becomes ±127. Shape (rows,).

        A row of zeros has step 0: whatever it is rounded to, the product is multiplied by 0 again.
        """
        size = graph.node("Abs", x, to=to + "_abs")
        peak = graph.node("ReduceMax", size, graph.ints(-1), to=to + "_peak", keepdims=0)
        return graph.node("Mul", peak, graph.constant("one_127th", 1 / 127), to=to + "_step")

    def _centres(self, graph: GraphWriter) -> str:
        """128 for every row: the zero point, which must have the steps' shape."""
        name = f"centres_{self._like}"
        if graph.has(name):
            return name
        shape = graph.node("Shape", self._like, to=name + "_shape")
        value = numpy_helper.from_array(np.array([128], np.uint8))
        return graph.node("ConstantOfShape", shape, to=name, value=value)

    def _round(self, graph: GraphWriter, x: str, step: str, to: str) -> str:
        return graph.node("QuantizeLinear", x, step, self._centres(graph), to=to, axis=0)

    @staticmethod
    def _multiply(graph: GraphWriter, rounded: str, weight: tuple[str, str], to: str) -> str:
        """Integer product times the channel's scale: float32, in steps of the row."""
        one, centre = graph.constant("one", 1.0), graph.constant("centre", np.array(128, np.uint8))
        return graph.node("MatMulIntegerToFloat", rounded, weight[0], one, weight[1], centre, to=to, domain=CONTRIB)

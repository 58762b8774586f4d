"""GPTQ and AWQ checkpoints: layers whose weights lie in safetensors as small numbers, eight of four bits in an int32.

Both store scale · (quant - zero) in groups along the inputs; they differ in what lies beside what. With K inputs, N
outputs, G groups and `b` bits, as int32 unless said otherwise:

    GPTQ  qweight (K·b/32, N)  each number holds neighbouring inputs of one output, the first in its lowest bits
          qzeros (G, N·b/32)   likewise of outputs; less one in the format `gptq`, as they are in `gptq_v2`
          g_idx (K)            the group of each input, any order (`desc_act`); left out where it is k // group_size
    AWQ   qweight (K, N/8), qzeros (G, N/8)   each number holds neighbouring outputs, in the order `_AWQ_ORDER`
    both  scales (G, N) float

Sources: the packing code of AutoGPTQ, GPTQModel and AutoAWQ, whose files these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.stored import WORDS, mapped, require_finite
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.weights import TensorEntry

METHODS = ("gptq", "awq")
GPTQ_FORMATS = ("gptq", "gptq_v2")
_WORD = 32  # bits of a stored number
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}
_LEAST_GROUP = 16  # what the operator for quantised products takes
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits belong to, from the lowest
_NEEDED, _OPTIONAL = ("qweight", "qzeros", "scales"), "g_idx"

Index = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised; `group` 0 is one group for all inputs."""

    method: str
    bits: int
    group: int
    zero_offset: int  # what is missing from stored zeros
    shuffled: bool = False  # inputs belong to groups in an order that only the layer's index tells


@dataclass(frozen=True)
class Packed:
    """weight[n, order[k]] = scale[n, k // size] · (quants[n, k] - zero[n, k // size]).

    scale float32 and zero uint8 are (N, K / size), quants uint8 (N, K); order None leaves inputs where they are. `bits`
    are 4 or 8: what quants and zeros fit into.
    """

    bits: int
    size: int
    scale: NDArray[np.float32]
    zero: NDArray[np.uint8]
    quants: NDArray[np.uint8]
    order: NDArray[np.int64] | None

    def dequantise(self) -> NDArray[np.float32]:
        """The weight. Shape (N, K)."""
        centred = self.quants.reshape(*self.scale.shape, self.size).astype(np.float32) - self.zero[..., None]
        weight: NDArray[np.float32] = (centred * self.scale[..., None]).reshape(self.quants.shape)
        if self.order is None:
            return weight
        placed = np.empty_like(weight)
        placed[:, self.order] = weight
        return placed

    def alike(self, other: Packed) -> bool:
        """Whether both can be one matrix, outputs side by side."""
        same_order = self.order is other.order or (
            self.order is not None and other.order is not None and np.array_equal(self.order, other.order)
        )
        return (self.bits, self.size) == (other.bits, other.size) and same_order


def join_packed(parts: Sequence[Packed]) -> Packed:
    """Matrices that are `alike` as one, outputs side by side."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        scale=np.concatenate([part.scale for part in parts]),
        zero=np.concatenate([part.zero for part in parts]),
        quants=np.concatenate([part.quants for part in parts]),
    )


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """What `quantization_config` says; None without one. Raises UnsupportedModelError naming what is not supported."""
    options = config.get("quantization_config")
    if not options:
        return None
    if not isinstance(options, dict):
        raise UnsupportedModelError(f"quantization_config {options!r} is not supported, expected an object")
    method = options.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"quantisation method {method!r} is not supported, expected one of {', '.join(METHODS)}"
        )
    bits, group = options.get("bits"), options.get("group_size", 128)
    if not isinstance(bits, int) or bits not in _BITS[method]:  # 4.0 is equal to 4
        expected = ", ".join(map(str, _BITS[method]))
        raise UnsupportedModelError(f"{method} of {bits!r} bits is not supported, expected {expected}")
    if not isinstance(group, int) or (group != -1 and (group < 1 or group % _LEAST_GROUP)):
        raise UnsupportedModelError(
            f"{method} groups of {group!r} are not supported, expected a multiple of {_LEAST_GROUP}, or -1"
        )
    if method == "awq":
        _expect("awq version", str(options.get("version", "gemm")).lower(), ("gemm",))
        return Scheme(method, bits, max(group, 0), 0)
    layout = options.get("checkpoint_format") or options.get("format") or "gptq"
    _expect("gptq format", layout, GPTQ_FORMATS)
    _expect("gptq pack_dtype", options.get("pack_dtype", "int32"), ("int32",))
    return Scheme(method, bits, max(group, 0), int(layout == "gptq"), bool(options.get("desc_act", False)))


def _expect(what: str, got: Any, expected: tuple[str, ...]) -> None:
    if got not in expected:
        raise UnsupportedModelError(f"{what} {got!r} is not supported, expected {' or '.join(expected)}")


class PackedLayers(Mapping[str, Packed]):
    """The packed layers of an index, by the names their weights would have; each is unpacked when it is asked for.

    Raises ModelError when parts of a layer are missing or do not fit each other, judging by headers alone.
    """

    def __init__(self, scheme: Scheme | None, index: Index) -> None:
        self._scheme, self._layers = scheme, {}
        if scheme is None:
            return
        names = [name.removesuffix(".qweight") for name in index if name.endswith(".qweight")]
        if not names:
            raise ModelError(f"config says that weights are of {scheme.method}, but no tensor is named qweight")
        self._layers = {f"{name}.weight": _Layer(name, scheme, index) for name in names}

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __contains__(self, name: object) -> bool:
        return name in self._layers

    def __getitem__(self, name: str) -> Packed:
        return self._layers[name].unpack()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """(outputs, inputs) of every layer."""
        return {name: layer.shape for name, layer in self._layers.items()}

    @cached_property
    def parts(self) -> dict[str, TensorEntry]:
        """The tensors that make up the layers."""
        return {name: entry for layer in self._layers.values() for name, entry in layer.parts.items()}

    def idle_biases(self, index: Index, expected: Iterable[str]) -> set[str]:
        """Biases that the family has none of and that are zero: older files store one for every packed layer."""
        biases = {name.removesuffix("weight") + "bias" for name in self._layers} - set(expected)
        return {name for name in biases & index.keys() if not mapped(name, index[name]).any()}


class _Layer:
    """Where the parts of one layer are."""

    def __init__(self, name: str, scheme: Scheme, index: Index) -> None:
        self._name, self._scheme = name, scheme
        if missing := [part for part in _NEEDED if f"{name}.{part}" not in index]:
            raise ModelError(f"layer {name} lacks {', '.join(missing)}, expected {', '.join(_NEEDED)}")
        if f"{name}.weight" in index:
            raise ModelError(f"layer {name} has both weight and qweight, expected one of them")
        self._entries = {part: index[f"{name}.{part}"] for part in (*_NEEDED, _OPTIONAL) if f"{name}.{part}" in index}
        each = _WORD // scheme.bits
        rows, columns = self._matrix("qweight")
        inputs, outputs = (rows * each, columns) if scheme.method == "gptq" else (rows, columns * each)
        self.shape = (outputs, inputs)
        if outputs % each:
            raise ModelError(f"layer {name} has {outputs} outputs, expected a multiple of {each}")
        self._size = scheme.group or inputs
        groups = -(-inputs // self._size)
        if inputs % self._size:
            raise UnsupportedModelError(f"layer {name} has {inputs} inputs, expected a multiple of its {self._size}")
        if scheme.shuffled and groups > 1 and _OPTIONAL not in self._entries:
            raise ModelError(f"layer {name} lacks {_OPTIONAL}, expected it with desc_act")
        shapes = {"qzeros": (groups, outputs // each), "scales": (groups, outputs), "g_idx": (inputs,)}
        for part, expected in shapes.items():
            if part in self._entries and (got := self._entries[part].shape) != expected:
                raise ModelError(f"tensor {name}.{part} has shape {list(got)}, expected {list(expected)}")
        self._block = math.gcd(self._size, 128)
        if self._block < _LEAST_GROUP:
            raise UnsupportedModelError(
                f"layer {name} has groups of {self._size}, expected a multiple of {_LEAST_GROUP}"
            )

    @property
    def parts(self) -> dict[str, TensorEntry]:
        return {f"{self._name}.{part}": entry for part, entry in self._entries.items()}

    def _matrix(self, part: str) -> tuple[int, int]:
        shape = self._entries[part].shape
        if len(shape) != 2:
            raise ModelError(f"tensor {self._name}.{part} has shape {list(shape)}, expected two dimensions")
        return shape[0], shape[1]

    def unpack(self) -> Packed:
        """Groups are cut into the operator's blocks, at most 128 wide: cuts of one group repeat its scale and zero."""
        scheme = self._scheme
        words, zero_words = self._words("qweight"), self._words("qzeros")
        if scheme.method == "gptq":
            quants = _numbers(words.T, scheme.bits)
            zero = _numbers(zero_words, scheme.bits).T
        else:
            quants, zero = (_numbers(w, scheme.bits, _AWQ_ORDER).T for w in (words, zero_words))
        # a zero of -1 cannot be stored, so that the format's missing one wraps around
        zero = (zero + np.uint8(scheme.zero_offset)) & np.uint8((1 << scheme.bits) - 1)
        stored = mapped(f"{self._name}.scales", self._entries["scales"])
        require_finite(f"tensor {self._name}.scales", stored, "expected numbers")
        scale = np.asarray(stored.T, np.float32)
        order = self._order()
        if order is not None:
            quants = quants[:, order]
        cuts = self._size // self._block
        return Packed(
            max(scheme.bits, 4),
            self._block,
            np.repeat(scale, cuts, axis=1),
            np.repeat(zero, cuts, axis=1),
            np.ascontiguousarray(quants),
            order,
        )

    def _words(self, part: str) -> NDArray[np.uint32]:
        words: NDArray[np.uint32] = mapped(f"{self._name}.{part}", self._entries[part], WORDS).view(np.uint32)
        return words

    def _order(self) -> NDArray[np.int64] | None:
        """Inputs by group; None when they are so already."""
        if _OPTIONAL not in self._entries:
            return None
        group = mapped(f"{self._name}.{_OPTIONAL}", self._entries[_OPTIONAL], WORDS)
        order = np.argsort(group, kind="stable").astype(np.int64)
        even = np.arange(len(group)) // self._size
        if not np.array_equal(group[order], even):
            raise ModelError(
                f"tensor {self._name}.{_OPTIONAL} fills groups unevenly, "
                f"expected {self._size} inputs in each of {even[-1] + 1}"
            )
        return None if np.array_equal(group, even) else order


def _numbers(words: NDArray[np.uint32], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """(rows, columns) of words to (rows, columns · 32 / bits) of the numbers in them, from the lowest bits up."""
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[np.argsort(order)]
    numbers = np.empty((*words.shape, len(shifts)), np.uint8)
    for place, shift in enumerate(shifts):
        numbers[..., place] = (words >> shift) & np.uint32((1 << bits) - 1)
    return numbers.reshape(len(words), -1)

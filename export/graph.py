"""Writes an ONNX graph node by node, its weights streamed to one file beside it: no more than one tensor in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from starsd.export.stored import FLOATS, require_finite
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE

CONTRIB = "com.microsoft"
_ALIGNMENT = 4096  # lets the runtime map a tensor instead of copying it
_INLINE_BYTES = 1024  # smaller constants sit in the graph itself, where shape inference sees them

_FLOATS = {np.dtype(kind) for kind in FLOATS.values()}
_TOO_NARROW = "float16 reaches 65504: expected another precision for this model"
_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(ml_dtypes.int4): TensorProto.INT4,
}


class GraphWriter:
    """Nodes in call order; every value has the name its maker returned. `opsets` are versions by domain."""

    def __init__(self, folder: Path, opsets: Mapping[str, int], ir_version: int) -> None:
        self._folder, self._opsets, self._ir_version = folder, opsets, ir_version
        self._nodes: list[onnx.NodeProto] = []
        self._made: set[str] = set()
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._data = (folder / WEIGHTS_FILE).open("wb")

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._data.close()

    def input(self, name: str, dtype: Any, shape: list[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[np.dtype(dtype)], shape))
        return name

    def output(self, name: str, dtype: Any, shape: list[int | str]) -> None:
        """Declare `name`, made by some node, as an output of the graph."""
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[np.dtype(dtype)], shape))

    def constant(self, name: str, value: NDArray[Any] | float) -> str:
        """A weight, written to disk at once; a name that is there already is not written again.

        Raises ModelError when it holds values that are not finite.
        """
        if name in self._constants:
            return name
        array = np.ascontiguousarray(value if isinstance(value, np.ndarray) else np.float32(value))
        if not isinstance(value, np.ndarray) or not value.shape:
            array = array.reshape(())
        tensor = TensorProto(name=name, data_type=_TYPES[array.dtype], dims=array.shape)
        if array.dtype in _FLOATS:  # weights were finite; what they are computed to may be beyond the precision
            require_finite(f"constant {name}", array, _TOO_NARROW if array.dtype == np.float16 else "expected numbers")
        data = _stored(array)
        if data.nbytes <= _INLINE_BYTES:
            tensor.raw_data = data.tobytes()
        else:
            self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
            tensor.data_location = TensorProto.EXTERNAL
            for key, text in (("location", WEIGHTS_FILE), ("offset", self._data.tell()), ("length", data.nbytes)):
                tensor.external_data.add(key=key, value=str(text))
            self._data.write(data.data)
        self._constants[name] = tensor
        return name

    def dtype(self, name: str) -> Any:
        """The numpy type of a constant."""
        return helper.tensor_dtype_to_np_dtype(self._constants[name].data_type)

    def has(self, name: str) -> bool:
        """Whether a node makes `name` already."""
        return name in self._made

    def ints(self, *values: int) -> str:
        """A small int64 vector: a shape, axes, slice bounds."""
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def node(self, op: str, *inputs: str, to: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, `to`, and return that name."""
        return self.nodes(op, *inputs, to=(to,), domain=domain, **attributes)[0]

    def cast(self, value: str, dtype: Any, to: str) -> str:
        return self.node("Cast", value, to=to, to_=_TYPES[np.dtype(dtype)])

    def nodes(self, op: str, *inputs: str, to: tuple[str, ...], domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """Add a node with several outputs (an empty name skips one)."""
        named = {key.removesuffix("_"): value for key, value in attributes.items()}  # Cast's own attribute is `to`
        self._nodes.append(helper.make_node(op, inputs, to, name=to[0] or to[-1], domain=domain, **named))
        self._made.update(to)
        return to

    def save(self, name: str) -> None:
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self._ir_version, producer_name="starsd")
        onnx.save(model, str(self._folder / GRAPH_FILE))


def _stored(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a tensor: of four bits two values share one, the first in its low half."""
    data = array.reshape(-1).view(np.uint8)  # bfloat16 has no buffer of its own
    if array.dtype != ml_dtypes.int4:
        return data
    even: NDArray[np.uint8] = np.pad(data & 15, (0, data.size % 2))
    return np.asarray(even[0::2] | even[1::2] << 4, np.uint8)

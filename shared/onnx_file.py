"""Shapes of the constants in an ONNX file, read without a library and without their values.

A graph's own file is protobuf (https://protobuf.dev/programming-guides/encoding) and small, for weights lie in another.
Field numbers are those of onnx.proto: ModelProto.graph 7, GraphProto.initializer 5, TensorProto.dims 1 and name 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from starsd.shared.errors import BundleError

_GRAPH, _INITIALIZER, _DIMS, _NAME = 7, 5, 1, 8
_VARINT, _FIXED, _LENGTH = 0, {1: 8, 5: 4}, 2  # wire types; of fixed ones their sizes
_LONGEST_VARINT = 10  # bytes

Field = tuple[int, int | memoryview]


def constant_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Every initializer's shape by its name. Raises BundleError when the file is no such thing."""
    try:
        graphs = [value for number, value in _fields(memoryview(path.read_bytes())) if number == _GRAPH]
        return dict(_tensor(value) for graph in graphs for n, value in _fields(_part(graph)) if n == _INITIALIZER)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as an ONNX graph: {error}") from error


def _tensor(value: int | memoryview) -> tuple[str, tuple[int, ...]]:
    name, shape = "", list[int]()
    for number, found in _fields(_part(value)):
        if number == _NAME:
            name = bytes(_part(found)).decode()
        elif number == _DIMS and isinstance(found, int):
            shape.append(found)
        elif number == _DIMS:
            shape += _packed(_part(found))
    return name, tuple(shape)


def _fields(view: memoryview) -> Iterator[Field]:
    """Number and value of each field of a message, what is within it still encoded."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
            yield number, value
            continue
        if wire == _LENGTH:
            size, at = _varint(view, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise ValueError(f"a field has wire type {wire}")
        if at + size > len(view):
            raise ValueError(f"a field has {size} bytes, {len(view) - at} are left")
        yield number, view[at : at + size]
        at += size


def _packed(view: memoryview) -> Iterator[int]:
    at = 0
    while at < len(view):
        value, at = _varint(view, at)
        yield value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for place, byte in enumerate(view[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number does not end")


def _part(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a field is a number, expected a message")
    return value

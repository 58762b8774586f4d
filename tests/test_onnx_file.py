"""Shapes of constants off an ONNX file: what onnx itself wrote, and what nobody did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from starsd.shared.errors import BundleError
from starsd.shared.onnx_file import constant_shapes

SHAPES = {"rope_cos": (300, 8), "scalar": (), "empty": (0, 3), "größe": (1,)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in SHAPES.items()]
    value = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [300, 8])
    graph = helper.make_graph([helper.make_node("Identity", ["rope_cos"], ["y"])], "g", [], [value], made)
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


def test_shapes_are_those_that_were_written(path: Path) -> None:
    assert constant_shapes(path) == SHAPES


def test_dimensions_may_be_packed(path: Path) -> None:
    """As other writers do it: one field that holds them all."""
    tensor = bytes([0x0A, 3, 0xAC, 0x02, 8, 0x42, 1]) + b"x"  # dims 300 and 8, the name x
    graph = bytes([0x2A, len(tensor)]) + tensor
    path.write_bytes(bytes([0x3A, len(graph)]) + graph)
    assert constant_shapes(path) == {"x": (300, 8)}


def test_every_file_that_ends_early_is_told(path: Path) -> None:
    whole = path.read_bytes()
    told = 0
    for size in range(1, len(whole), 97):
        path.write_bytes(whole[:size])
        try:
            constant_shapes(path)
        except BundleError as error:
            told += "cannot be read as an ONNX graph: " in str(error)
    assert told >= len(range(1, len(whole), 97)) - 3  # a cut between fields leaves a file


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff" * 20, "a number does not end"),
        (b"\x0b", "a field has wire type 3"),
        (b"\x3a\x05a", "a field has 5 bytes, 1 are left"),
        (b"\x38\x05", "a field is a number, expected a message"),
    ],
)
def test_files_that_are_none(path: Path, raw: bytes, message: str) -> None:
    path.write_bytes(raw)
    with pytest.raises(BundleError, match=rf"model\.onnx cannot be read as an ONNX graph: {message}$"):
        constant_shapes(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read as an ONNX graph"):
        constant_shapes(tmp_path / "model.onnx")

"""Constants as they lie in a graph's files, read back by onnx itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from starsd.export.graph import GraphWriter
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE

DTYPES: list[Any] = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int64, ml_dtypes.int4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (4, 5), (65, 129)], ids=str)
def test_constants_come_back(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Small ones from the graph, large ones from the file beside it; of four bits an odd number too."""
    values = (np.arange(np.prod(shape)) * 5 % 16 - 8 * (dtype is not np.uint8)).reshape(shape).astype(dtype)
    with GraphWriter(tmp_path, {"": 21}, 10) as graph:
        assert graph.constant("c", values) == "c"
        assert graph.constant("c", np.zeros(7, np.float32)) == "c"  # a name that is there is not written again
        assert graph.dtype("c") == np.dtype(dtype)
        graph.output(graph.node("Identity", "c", to="y"), dtype, list(shape))
        graph.save("constants")
    bits = 4 if dtype is ml_dtypes.int4 else 8 * np.dtype(dtype).itemsize
    size = -(-values.size * bits // 8)
    assert (tmp_path / WEIGHTS_FILE).stat().st_size == (size if size > 1024 else 0)
    (stored,) = onnx.load(tmp_path / GRAPH_FILE).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(stored).astype(np.float32), values.astype(np.float32))
    onnx.checker.check_model(str(tmp_path / GRAPH_FILE))

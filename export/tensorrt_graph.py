"""A bundle's graph as TensorRT's parser wants it: a cache of K/V has a fixed number of rows there."""

from __future__ import annotations

from pathlib import Path

import onnx

_FIXED = "capacity"  # the dimension's name in every flavour


def with_capacity(graph_file: Path, capacity: int) -> bytes:
    """The graph with K/V (and masks) for `capacity` rows, serialised; its weights stay beside `graph_file`."""
    model = onnx.load(str(graph_file), load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == _FIXED:
                dimension.dim_value = capacity
    serialised: bytes = model.SerializeToString()
    return serialised

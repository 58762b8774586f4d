"""TensorRT-RTX parses and builds, without a GPU, what `starsd-export tensorrt` gives to TensorRT on a device.

    pip install tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs && pytest -m tensorrt_rtx

Its engines are for graphics cards of a PC and are not run here. It has the same parser and the same layers, K/V updated
in place among them, so a graph that it refuses is wrong.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_families import write_family
from tiny_model import export

from starsd.export.tensorrt_builder import build_plan
from starsd.export.tensorrt_engine import profile_shapes
from starsd.export.tensorrt_graph import with_capacity
from starsd.shared.errors import BundleError
from starsd.shared.manifest import GRAPH_FILE, read
from starsd.shared.tensorrt_key import Machine, key_for

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning"),  # timing caches do nothing
]

CONTEXT, CHUNK = 128, 64
MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "gemma2": MIXED,
    "gemma3": MIXED,
}


@pytest.fixture(scope="module")
def trt() -> Any:
    try:
        return import_module("tensorrt_rtx_bindings")
    except (ImportError, OSError) as error:
        pytest.skip(f"TensorRT-RTX cannot be imported ({error}): pip install tensorrt-rtx-cu13-bindings and -libs")


def plan_size(trt: Any, bundle: Path) -> int:
    about = read(bundle)
    key = key_for(about, Machine(tensorrt=trt.__version__, l4t="", gpu=""), CONTEXT, CHUNK)
    shapes = [profile_shapes(about, key.capacity, point) for point in key.profiles]
    graph = bundle / GRAPH_FILE
    steps: list[int] = []
    built = build_plan(trt, with_capacity(graph, key.capacity), graph, shapes, b"", lambda *step: steps.append(step[1]))
    assert steps
    return len(memoryview(built.plan))


BUILT = [*((case, precision) for case in CASES for precision in ("fp16", "int4")), ("llama", "int8")]


@pytest.mark.parametrize(("case", "precision"), BUILT)
def test_every_family_builds(case: str, precision: str, trt: Any, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", case, **CASES[case])
    bundle = export(source, tmp_path / "bundle", precision, flavour="portable", taps=(0, 1), last_hidden=True)
    assert plan_size(trt, bundle) > 1_000


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_the_decomposed_graph_builds(precision: str, trt: Any, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "llama", **CASES["llama"])
    assert plan_size(trt, export(source, tmp_path / "bundle", precision, flavour="decomposed")) > 1_000


def test_a_graph_for_onnxruntime_is_refused(trt: Any, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "llama", **CASES["llama"])
    bundle = export(source, tmp_path / "bundle", "fp16")
    with pytest.raises(BundleError, match=r"model.onnx does not parse in TensorRT .*GroupQueryAttention"):
        build_plan(trt, with_capacity(bundle / GRAPH_FILE, CONTEXT), bundle / GRAPH_FILE, [], b"", lambda *_: None)

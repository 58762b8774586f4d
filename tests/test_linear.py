"""Linear layers as graphs: the weights they hold, and what they compute against numpy doing the same rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from packing import config, pack
from safetensors.numpy import save_file
from tiny_gguf import LAYERS, tiny_gguf

from starsd.export import gguf
from starsd.export.checkpoint import Checkpoint
from starsd.export.flavour_ort import OrtFlavour
from starsd.export.gguf import Blocks
from starsd.export.graph import GraphWriter
from starsd.export.linear import Dense, GroupsOf32, Linear, Rows, absorb_minimum
from starsd.export.packed import Packed, PackedLayers, read_scheme
from starsd.export.quantise import blocks_of, channels_of
from starsd.export.rounding import Curvature
from starsd.shared.manifest import GRAPH_FILE
from starsd.shared.weights import tensor_index

NAMES = ["q.weight", "k.weight", "v.weight"]


class Held:
    """Tensors by name, as a checkpoint gives them."""

    def __init__(self, tensors: Mapping[str, np.ndarray], blocks: Mapping[str, Blocks] | None = None) -> None:
        self.tensors, self.blocks = tensors, blocks or {}
        self.packed: dict[str, Packed] = {}
        self.curvatures: dict[str, Curvature] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def stored(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float32)


def held(*, bias: bool = False, width: int = 96, blocks: Mapping[str, Blocks] | None = None) -> Any:
    values = np.random.default_rng(5)
    tensors = {
        name: values.normal(0, 0.2, (rows, width)).astype(np.float32)
        for name, rows in zip(NAMES, (64, 32, 48), strict=True)
    }
    if bias:
        tensors |= {name.replace("weight", "bias"): values.normal(0, 1, len(tensors[name])) for name in NAMES}
    return Held(tensors, blocks)


def activations(rows: int, width: int = 96) -> np.ndarray:
    return np.random.default_rng(rows).normal(0, 1, (rows, width)).astype(np.float32)


class Layer:
    """One linear layer as a graph of its own."""

    def __init__(
        self,
        folder: Path,
        linear: Linear,
        names: list[str],
        width: int = 96,
        dtype: Any = np.float32,
        entries: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        with GraphWriter(folder, OrtFlavour.opsets, OrtFlavour.ir_version) as graph:
            graph.input("x", dtype, ["rows", width])
            graph.input("ids", np.int64, ["rows"])
            y = linear(graph, "x", names, to="y")
            graph.output(y, dtype, ["rows", "outputs"])
            graph.save("layer")
        self.model = onnx.load(folder / GRAPH_FILE)
        self.constants = {c.name: numpy_helper.to_array(c) for c in self.model.graph.initializer}
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        for name, value in (entries or {}).items():
            options.add_session_config_entry(name, value)
        self._session = ort.InferenceSession(str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"])
        self._used = {i.name for i in self._session.get_inputs()}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        feeds = {"x": x, "ids": np.zeros(len(x), np.int64)}
        return self._session.run(None, {name: v for name, v in feeds.items() if name in self._used})[0]

    def held(self, name: str) -> np.ndarray:
        """The matrix that the constants under this name stand for, in float64; columns past x multiply group sums."""
        packed, scale = self.constants[name + ".groups"], self.constants[name + ".group_scale"].astype(np.float64)
        if packed.shape[-1] == 32:
            return ((packed.astype(np.float64) - 128) * scale[..., None]).reshape(len(scale), -1)
        quants = _halves(packed).reshape(*scale.shape, 32)
        zeros = 8.0
        if name + ".group_zero" in self.constants:
            zeros = _halves(self.constants[name + ".group_zero"])[:, : scale.shape[1], None]
        return ((quants - zeros) * scale[..., None]).reshape(len(scale), -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).astype(np.float64)


def extended(x: np.ndarray, columns: int) -> np.ndarray:
    """`x` with the sum of each group behind it, twice, each time padded to whole groups: `columns` in all."""
    sums = x.reshape(len(x), -1, 32).sum(-1)
    padded = np.pad(sums, ((0, 0), (0, -sums.shape[1] % 32)))
    whole = np.concatenate([x, padded, padded], axis=1) if columns > x.shape[1] else x
    assert whole.shape[1] == columns
    return whole


def folded(weight: np.ndarray, width: int = 96) -> np.ndarray:
    """The weight on `x` alone: what multiplies a group's sum is added to each of the group's weights."""
    return weight @ extended(np.eye(width), weight.shape[1]).T


def rounded_groups(x: np.ndarray, size: int = 32) -> np.ndarray:
    """What MatMulNBits makes of its input at accuracy level 4: int8 in groups, the largest value at ±127."""
    grouped = x.astype(np.float64).reshape(len(x), -1, size)
    step = np.abs(grouped).max(-1, keepdims=True) / 127
    return (np.rint(grouped / np.where(step, step, 1)) * step).reshape(x.shape)


def rounded_rows(x: np.ndarray, *, double: bool) -> np.ndarray:
    step = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    step = np.where(step, step, 1)
    coarse = np.rint(x / step) * step
    return coarse + np.rint((x - coarse) / (step / 254)) * (step / 254) if double else coarse


def biases(checkpoint: Any) -> Any:
    names = [name.replace("weight", "bias") for name in NAMES]
    return np.concatenate([checkpoint.tensor(name) for name in names]) if names[0] in checkpoint else 0.0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dense(dtype: Any, bias: bool, tmp_path: Path) -> None:
    checkpoint, x = held(bias=bias), activations(5).astype(dtype)
    weights = np.concatenate([checkpoint.tensor(name) for name in NAMES])
    got = Layer(tmp_path, Dense(checkpoint, dtype), NAMES, dtype=dtype)(x)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got, (x.astype(np.float64) @ weights.T + biases(checkpoint)), atol=1e-5 if dtype == np.float32 else 0.02
    )


@pytest.mark.parametrize("kinds", [("Q4_1",) * 3, ("Q4_0",) * 3, ("Q8_0",) * 3, ("Q4_1", "Q4_0", "Q4_1")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_ggufs_own_blocks_run_as_they_are(kinds: tuple[str, ...], bias: bool, tmp_path: Path) -> None:
    """The graph stands for the very weights of the file; the product differs by the rounding of activations alone."""
    blocks = {}
    for name, kind, rows in zip(NAMES, kinds, (64, 32, 48), strict=True):
        (tmp_path / name).mkdir()
        gguf_path = tiny_gguf(tmp_path / name / "source.gguf", kind=kind)
        every = gguf.read_blocks(gguf_path)
        source = every["model.layers.0.mlp.down_proj.weight"]  # (64, 96)
        cut = slice(0, rows)
        minimum = None if source.minimum is None else source.minimum[cut]
        blocks[name] = Blocks(source.kind, source.scale[cut], minimum, source.quants[cut])
    checkpoint, x = held(bias=bias, blocks=blocks), activations(6)
    layer = Layer(tmp_path, GroupsOf32(checkpoint, 8 if kinds[0] == "Q8_0" else 4), NAMES)
    exact = np.concatenate([blocks[name].dequantise() for name in NAMES])
    stored = NAMES if len(set(kinds)) > 1 else NAMES[:1]
    held_by = [layer.held(name) for name in stored]
    represented = np.concatenate([folded(weight) for weight in held_by])
    if kinds[0] == kinds[1] != "Q4_1":
        np.testing.assert_array_equal(represented.astype(np.float32), exact)
    rests = np.abs(exact).max() / 15 / 2  # a minimum that is no whole number of steps; d is at most the range / 15
    assert np.abs(represented - exact).max() < 2 * rests / 119
    simulated = np.concatenate([rounded_groups(extended(x, len(weight.T))) @ weight.T for weight in held_by], axis=1)
    got = layer(x)
    np.testing.assert_allclose(got, simulated + biases(checkpoint), atol=1e-4)
    assert np.abs(got - x @ exact.T - biases(checkpoint)).max() < 0.1


def test_a_whole_ggufs_matrices_reach_the_graph(tmp_path: Path) -> None:
    """Through the checkpoint: fused, in Hugging Face's row order, down to the last layer."""
    gguf.convert(tiny_gguf(tmp_path / "source.gguf", kind="Q4_1"), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    prefix = f"model.layers.{LAYERS - 1}.self_attn."
    names = [f"{prefix}{part}_proj.weight" for part in "qkv"]
    layer = Layer(tmp_path / "graph", GroupsOf32(checkpoint, 4), names, width=64)
    exact = np.concatenate([checkpoint.tensor(name) for name in names])
    np.testing.assert_allclose(folded(layer.held(names[0]), 64), exact, rtol=0, atol=np.abs(exact).max() / 15 / 128)


@settings(max_examples=40, deadline=None)
@given(
    low=st.floats(-10, 10, width=32, allow_subnormal=False),
    step=st.floats(2**-10, 1, width=32),
    groups=st.sampled_from([1, 3, 32, 33, 70]),
)
def test_minima_are_absorbed(low: float, step: float, groups: int) -> None:
    """Whatever the minima, what is lost of them is 1/120 of the largest rest among 32 groups."""
    values = np.random.default_rng(groups)
    minimum = (low + values.normal(0, step, (3, groups))).astype(np.float32)
    scale = np.full((3, groups), step, np.float32)
    scale[0, 0] = 0  # a group of equal weights
    blocks = Blocks("Q4_1", scale, minimum, values.integers(0, 16, (3, 32 * groups)).astype(np.uint8))
    wide, zeros = absorb_minimum(blocks)
    assert (wide.kind, wide.minimum, zeros.dtype) == ("Q4_1", None, np.uint8)
    assert wide.quants.max() <= 15
    assert zeros.max() <= 15
    quants = wide.quants.reshape(3, -1, 32).astype(np.float64) - zeros[..., None]
    got = folded((quants * wide.scale[..., None]).reshape(3, -1), 32 * groups)
    rest = np.abs(minimum + zeros[:, :groups] * scale.astype(np.float64)).max()
    assert np.abs(got - blocks.dequantise()).max() <= rest / 119 + 1e-6 * np.abs(minimum).max() + 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_groups_without_a_gguf(bits: int, bias: bool, tmp_path: Path) -> None:
    """Blocks of the wrong width are no use: an 8-bit block is not rounded to 4 bits unseen, but from the weights."""
    other = blocks_of(held().tensor("q.weight"), 12 - bits)
    checkpoint, x = held(bias=bias, blocks={"q.weight": other}), activations(7)
    layer = Layer(tmp_path, GroupsOf32(checkpoint, bits), NAMES)
    exact = np.concatenate([blocks_of(checkpoint.tensor(name), bits).dequantise() for name in NAMES])
    weight = layer.held("q.weight")
    np.testing.assert_allclose(folded(weight), exact, atol=1e-6 if bits == 8 else np.abs(exact).max() / 15 / 128)
    simulated = rounded_groups(extended(x, len(weight.T))) @ weight.T + biases(checkpoint)
    np.testing.assert_allclose(layer(x), simulated, atol=1e-4)


def packed_layers(folder: Path, forms: Sequence[dict[str, Any]], width: int) -> dict[str, Packed]:
    """A packed layer for each name."""
    found = {}
    for name, rows, form in zip(NAMES, (64, 32, 48), forms, strict=True):
        base = name.removesuffix(".weight")
        layer = pack(rows, width, **form)
        save_file({f"{base}.{part}": tensor for part, tensor in layer.tensors.items()}, folder / "model.safetensors")
        options = config(form.get("method", "gptq"), form.get("bits", 4), form.get("group", 32))
        found[name] = PackedLayers(read_scheme(options), tensor_index(folder))[name]
        np.testing.assert_array_equal(found[name].dequantise(), layer.weight)
    return found


@pytest.mark.parametrize(
    ("forms", "pieces"),
    [
        ([{}] * 3, 1),
        ([{"group": 128, "symmetric": True}] * 3, 1),
        ([{"group": 64, "shuffled": True, "seed": 3}] * 3, 1),
        ([{"shuffled": True, "seed": seed} for seed in (1, 2, 3)], 3),
        ([{"shuffled": True}, {}, {}], 3),
        ([{"bits": 8, "size": 0.002}] * 3, 1),
        ([{"bits": 8, "group": 128, "size": 0.002}] * 3, 1),
        ([{"bits": 8}, {}, {"bits": 2}], 3),
        ([{"method": "awq", "group": 128}] * 3, 1),
        ([{"method": "awq", "group": -1}] * 3, 1),
        ([{"group": 32}, {"group": 128}, {"method": "awq"}], 3),
    ],
)
def test_packed_groups_run_as_they_are(forms: list[dict[str, Any]], pieces: int, tmp_path: Path) -> None:
    """Scales and zeros reach the operator unchanged; only activations are rounded, in groups of the same size."""
    width = 384
    checkpoint, x = held(bias=True, width=width), activations(5, width)
    checkpoint.packed = packed_layers(tmp_path, forms, width)
    layer = Layer(tmp_path / "graph", GroupsOf32(checkpoint, 4), NAMES, width)
    products = []
    for part in checkpoint.packed.values():
        order = np.arange(width) if part.order is None else part.order
        products.append(rounded_groups(x[:, order], part.size) @ part.dequantise()[:, order].T.astype(np.float64))
    expected = np.concatenate(products, axis=1) + biases(checkpoint)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert sum(node.op_type == "MatMulNBits" for node in layer.model.graph.node) == pieces
    scales = [tensor for name, tensor in layer.constants.items() if name.endswith(".group_scale")]
    stored = [part.scale for part in checkpoint.packed.values()]
    np.testing.assert_array_equal(
        np.concatenate([s.ravel() for s in scales]), np.concatenate([s.ravel() for s in stored])
    )


def test_a_packed_layer_is_taken_over_by_the_head_too(tmp_path: Path) -> None:
    """Which rounds to eight bits what comes unpacked."""
    checkpoint, x = held(width=128), activations(3, 128)
    checkpoint.packed = packed_layers(tmp_path, [{}] * 3, 128)
    layer = Layer(tmp_path / "graph", GroupsOf32(checkpoint, 8), NAMES[:1], 128)
    expected = rounded_groups(x) @ checkpoint.packed[NAMES[0]].dequantise().T.astype(np.float64)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows(double: bool, bias: bool, tmp_path: Path) -> None:
    checkpoint, x = held(bias=bias), activations(7)
    layer = Layer(tmp_path, Rows(checkpoint, like="ids", double=double), NAMES)
    scales, quants = zip(*(channels_of(checkpoint.tensor(name)) for name in NAMES), strict=True)
    represented = np.concatenate(quants) * np.concatenate(scales).astype(np.float64)[:, None]
    got = layer(x)
    np.testing.assert_allclose(got, (rounded_rows(x, double=double) @ represented.T + biases(checkpoint)), atol=2e-5)
    error = np.abs(got - (x.astype(np.float64) @ represented.T + biases(checkpoint))).max()
    assert error < (2e-4 if double else 0.1)
    assert error > (0 if double else 1e-3)


@pytest.mark.parametrize("double", [False, True])
def test_rows_of_every_size(double: bool, tmp_path: Path) -> None:
    """Zeros, rows a million times larger or smaller than their neighbours, and one with an outlier."""
    checkpoint, x = held(), activations(6)
    x *= np.array([1, 0, 1e6, 1e-6, 1e-20, 1], np.float32)[:, None]
    x[5, 3] = 500
    got = Layer(tmp_path, Rows(checkpoint, like="ids", double=double), NAMES)(x)
    weights = np.concatenate([checkpoint.tensor(name) for name in NAMES]).astype(np.float64)
    np.testing.assert_array_equal(got[1], 0)
    error = np.abs(got - x @ weights.T).max(-1) / np.where(np.abs(x).max(-1), np.abs(x).max(-1), 1)
    assert (error < 0.03).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 17])
@pytest.mark.parametrize("form", ["rows", "double", "int4", "int8", "packed"])
def test_a_row_does_not_depend_on_its_neighbours(form: str, count: int, tmp_path: Path) -> None:
    checkpoint = held(bias=True)
    bits = 8 if form == "int8" else 4
    if form == "packed":
        checkpoint.packed = packed_layers(tmp_path, [{"shuffled": True}] * 3, 96)
    linear = (
        Rows(checkpoint, like="ids", double=form == "double")
        if form in ("rows", "double")
        else GroupsOf32(checkpoint, bits)
    )
    layer, x = Layer(tmp_path, linear, NAMES), activations(40)
    whole = layer(x)
    np.testing.assert_array_equal(layer(x[:count]), whole[:count])
    np.testing.assert_array_equal(layer(x[40 - count :]), whole[40 - count :])

"""Linear layers in ONNX's own operators: the weights they hold, what they compute, and in which form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_linear import NAMES, Layer, activations, biases, held, packed_layers
from tiny_gguf import tiny_gguf

from starsd.export import gguf
from starsd.export.linear import Linear
from starsd.export.linear_plain import Channels, Groups, Signed, signed
from starsd.export.quantise import blocks_of, channels_of
from starsd.shared.graph_contract import PortableContract

DTYPES: list[Any] = [np.float32, np.float16]
SHARE = {np.float32: 1e-6, np.float16: 2e-3}  # of the largest result, lost to rounding


def made(folder: Path, linear: Linear, width: int = 96, dtype: Any = np.float32) -> Layer:
    """Run as the engine runs it: with activations as they are."""
    return Layer(folder, linear, NAMES, width, dtype, PortableContract.options)


def check(layer: Layer, checkpoint: Any, weights: list[np.ndarray], x: np.ndarray) -> None:
    """Against the dequantised weights in float64."""
    dtype = x.dtype.type
    expected = np.concatenate([x.astype(np.float64) @ weight.T.astype(np.float64) for weight in weights], axis=1)
    expected += biases(checkpoint)
    got = layer(x)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=SHARE[dtype] * np.abs(expected).max())


def operators(layer: Layer) -> list[str]:
    assert all(not node.domain for node in layer.model.graph.node)
    return [node.op_type for node in layer.model.graph.node]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_channels(bias: bool, dtype: Any, tmp_path: Path) -> None:
    checkpoint = held(bias=bias)
    layer = made(tmp_path, Channels(checkpoint, dtype), dtype=dtype)
    weights = [scale[:, None] * quants for scale, quants in (channels_of(checkpoint.tensor(n)) for n in NAMES)]
    check(layer, checkpoint, weights, activations(5).astype(dtype))
    assert operators(layer) == ["DequantizeLinear", "MatMul", *(["Add"] if bias else [])]
    stored = layer.constants[NAMES[0] + ".channels"]
    assert (stored.dtype, stored.shape) == (np.int8, (96, 144))
    assert layer.constants[NAMES[0] + ".channel_scale"].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_groups_of_what_is_not_quantised(bias: bool, dtype: Any, tmp_path: Path) -> None:
    checkpoint = held(bias=bias)
    layer = made(tmp_path, Groups(checkpoint, dtype), dtype=dtype)
    weights = [blocks_of(checkpoint.tensor(name), 4).dequantise() for name in NAMES]
    check(layer, checkpoint, weights, activations(5).astype(dtype))
    stored = next(c for c in layer.model.graph.initializer if c.name == NAMES[0] + ".int4")
    assert stored.data_type == stored.INT4
    assert list(stored.dims) == [96, 144]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_gguf_keeps_its_weights(kind: str, tmp_path: Path) -> None:
    """To float32's last bits: neither scales nor minima are rounded."""
    tiny_gguf(tmp_path / "m.gguf", kind=kind)
    found = gguf.read_blocks(tmp_path / "m.gguf")
    own = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    checkpoint = held(width=64, blocks=dict(zip(NAMES, (found[name] for name in own), strict=True)))
    layer = made(tmp_path, Groups(checkpoint, np.float32), 64)
    check(layer, checkpoint, [found[name].dequantise() for name in own], activations(5, 64))
    plain = ["DequantizeLinear", "MatMul"]
    sums = ["Reshape", "ReduceSum", "MatMul", "Add"]
    assert operators(layer) == (plain if kind == "Q4_0" else plain + sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("forms", "pieces"),
    [
        ([{}] * 3, 1),
        ([{"group": 128, "symmetric": True}] * 3, 1),
        ([{"group": 64, "shuffled": True, "seed": 3}] * 3, 1),
        ([{"shuffled": True, "seed": seed} for seed in (1, 2, 3)], 3),
        ([{"shuffled": True}, {}, {}], 3),
        ([{"bits": 8, "size": 0.002}] * 3, 1),
        ([{"method": "awq", "group": 128}] * 3, 1),
        ([{"group": 32}, {"group": 128}, {"bits": 8}], 3),
    ],
)
def test_packed_groups_keep_their_weights(forms: list[dict[str, Any]], pieces: int, dtype: Any, tmp_path: Path) -> None:
    checkpoint = held(bias=True, width=384)
    checkpoint.packed = packed_layers(tmp_path, forms, 384)
    layer = made(tmp_path / "graph", Groups(checkpoint, dtype), 384, dtype)
    check(layer, checkpoint, [p.dequantise() for p in checkpoint.packed.values()], activations(5, 384).astype(dtype))
    assert operators(layer).count("DequantizeLinear") == pieces
    assert ("ReduceSum" in operators(layer)) == (not forms[0].get("symmetric", False))


def test_values_are_signed(tmp_path: Path) -> None:
    values = np.random.default_rng(2).normal(0.1, 0.2, (8, 64)).astype(np.float32)
    blocks = blocks_of(values, 4)
    packed = packed_layers(tmp_path, [{"shuffled": True}, {"bits": 8}, {"symmetric": True}], 64)
    for what in (blocks, *packed.values()):
        found = signed(what)
        order = np.arange(64) if found.order is None else found.order
        assert found.quants.min() >= -(1 << (found.bits - 1))
        assert found.quants.max() < 1 << (found.bits - 1)
        weight = found.quants * np.repeat(found.scale, found.size, 1) + np.repeat(found.rest, found.size, 1)
        np.testing.assert_allclose(weight, what.dequantise()[:, order], atol=1e-5)
    assert not signed(packed[NAMES[2]]).rest.any()


def test_layers_are_joined_when_they_are_alike() -> None:
    scale = np.ones((2, 2), np.float32)
    plain = Signed(4, np.zeros((2, 64), np.int8), scale, scale)
    order = np.arange(64)[::-1]
    others = [
        Signed(8, np.zeros((2, 64), np.int8), scale, scale),
        Signed(4, np.zeros((2, 128), np.int8), scale, scale),
        Signed(4, np.zeros((2, 64), np.int8), scale, scale, order),
    ]
    assert plain.alike(plain)
    assert not any(plain.alike(other) or other.alike(plain) for other in others)
    assert others[2].alike(Signed(4, np.zeros((5, 64), np.int8), scale, scale, order.copy()))

"""A rotated model computes the same function: in exact arithmetic nothing tells it from the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import write_family
from tiny_gguf import tiny_gguf
from tiny_model import VOCAB, write_folder
from torch_helpers import tokens

from starsd.export import gguf
from starsd.export.check import Runner
from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.export.flavour_ort import OrtFlavour
from starsd.export.graph import GraphWriter
from starsd.export.graph_decoder import build
from starsd.export.linear import Dense
from starsd.export.recipe import Recipe
from starsd.export.rotate import RotatedCheckpoint, hadamard, rotation
from starsd.shared.manifest import FeatureSpec


def outputs(checkpoint: Checkpoint, place: Path, ids: list[int]) -> dict[str, np.ndarray]:
    """Logits and features of the checkpoint with dense fp32 layers."""
    place.mkdir()
    dense = Dense(checkpoint, np.float32)
    if isinstance(checkpoint, RotatedCheckpoint):
        dense = _Turned(checkpoint)
    taps = (0, 1) if checkpoint.shape.layers == 2 else (0, 3, 6)
    with GraphWriter(place, OrtFlavour.opsets, OrtFlavour.ir_version) as graph:
        spec = FeatureSpec(taps, True, checkpoint.shape.hidden)
        build(graph, checkpoint, Recipe(OrtFlavour, np.float32, dense, dense, dense, np.float32), spec, 128)
        graph.save("tiny")
    return Runner(place, checkpoint.shape, 128).run(ids, 0)


class _Turned(Dense):
    """Dense takes weights as stored; here they are wanted rotated."""

    def __init__(self, checkpoint: RotatedCheckpoint) -> None:
        super().__init__(_AsStored(checkpoint), np.float32)  # type: ignore[arg-type]


class _AsStored:
    def __init__(self, checkpoint: RotatedCheckpoint) -> None:
        self.stored = self.tensor = checkpoint.tensor
        self._names = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._names


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 48},  # no power of two: values are not turned within heads
        {"hidden_size": 40, "head_dim": 32},  # 5 · 8: the odd part is a random rotation
    ],
)
def test_rotation_alone_changes_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same_outputs(write_folder(tmp_path / "m", **changes), tmp_path)


@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3", "qwen3, windows by name"])
def test_rotation_of_other_families(case: str, tmp_path: Path) -> None:
    assert_same_outputs(write_family(tmp_path / "m", case), tmp_path)


def assert_same_outputs(source: Path, tmp_path: Path) -> None:
    ids = tokens(60, VOCAB)
    plain = outputs(Checkpoint(source), tmp_path / "plain", ids)
    rotated = outputs(RotatedCheckpoint(source), tmp_path / "rotated", ids)
    assert plain.keys() == rotated.keys() == {"logits", "features"}
    for name, values in plain.items():
        np.testing.assert_allclose(rotated[name], values, atol=1e-4)
        assert np.abs(values).max() > 1


def test_rotation_of_a_gguf(tmp_path: Path) -> None:
    """Its own blocks serve the embedding, which is not turned, and nothing else."""
    gguf.convert(tiny_gguf(tmp_path / "source.gguf"), tmp_path)
    plain, rotated = Checkpoint(tmp_path), RotatedCheckpoint(tmp_path)
    assert list(rotated.blocks) == [EMBEDDING]
    ids = tokens(30, plain.shape.vocab)
    expected, got = outputs(plain, tmp_path / "plain", ids), outputs(rotated, tmp_path / "rotated", ids)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, atol=1e-4)


def test_the_weights_are_turned(tmp_path: Path) -> None:
    """The comparison above would pass with no rotation at all."""
    source = write_folder(tmp_path / "m", attention_bias=True)
    plain, rotated = Checkpoint(source), RotatedCheckpoint(source)
    layer = "model.layers.3."
    names = [f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"] + [f"{layer}self_attn.v_proj.bias"]
    names += [f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")] + ["lm_head.weight"]
    for name in names:
        assert np.abs(plain.tensor(name) - rotated.tensor(name)).max() > 0.1, name
    for name in (EMBEDDING, f"{layer}self_attn.q_proj.bias", f"{layer}self_attn.k_proj.bias"):
        np.testing.assert_array_equal(plain.tensor(name), rotated.tensor(name))


@pytest.mark.parametrize("size", [1, 7, 32, 40, 576])
def test_rotations_are_orthogonal_and_spread_an_outlier(size: int) -> None:
    basis = rotation(size)
    np.testing.assert_allclose(basis @ basis.T, np.eye(size), atol=1e-5)
    np.testing.assert_array_equal(basis, rotation.__wrapped__(size))
    if size >= 32:
        outlier = np.zeros(size, np.float32)
        outlier[size // 3] = 100
        assert np.abs(outlier @ basis).max() < 100 * (0.25 if size == 32 else 0.4)


def test_hadamard() -> None:
    np.testing.assert_allclose(hadamard(16) @ hadamard(16).T, np.eye(16), atol=1e-6)
    assert set(np.abs(hadamard(16)).ravel().tolist()) == {0.25}

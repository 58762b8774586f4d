"""The exported graph against eager transformers, for every option a Llama config has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tiny_model import ENGINE, VOCAB, export, open_pair, write_folder
from torch_helpers import ROPES, tokens
from transformers import LlamaForCausalLM

from starsd.edge.target_onnx import open_bundle
from starsd.export.check import Runner
from starsd.shared import tree
from starsd.shared.config import Engine
from starsd.shared.errors import UnsupportedModelError
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE

CONTEXT = 512
TAPS = (0, 2, 3, 6)
OPTIONS: dict[str, dict[str, Any]] = {
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "tied head": {"tie_word_embeddings": True},
    "a head of K/V for each": {"num_key_value_heads": 4},
    "one head of K/V": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"hidden_size": 96, "head_dim": 16, "initializer_range": 0.1},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 52, "vocab_size": 301},
    "other epsilon": {"rms_norm_eps": 0.3},
}
CASES = [(rope, {}) for rope in ROPES] + [("default", changes) for changes in OPTIONS.values()]
IDS = [*ROPES, *OPTIONS]


def eager(folder: Path, ids: list[int], taps: tuple[int, ...] = TAPS) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features (taps, then the last hidden state) of transformers in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    features = [out.hidden_states[tap][0].numpy() for tap in (*taps, model.config.num_hidden_layers)]
    return out.logits[0].numpy(), np.concatenate(features, axis=1)


def run(bundle: Path, ids: list[int], scored: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The engine over the same text: chunks of prompt, then a chain; logits of the chain and features of all."""
    target = open_bundle(bundle, ENGINE)
    features = target.prefill(ids[:-scored])
    logits = target.score(ids[-scored:], tree.chain(scored))
    return logits, np.concatenate([features, target.commit(range(scored))])


@pytest.mark.parametrize(("rope", "changes"), CASES, ids=IDS)
def test_fp32_equals_transformers(rope: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A text as long as the context: ropes that depend on length are then in the same state on both sides."""
    source = write_folder(tmp_path / "m", rope, **changes)
    ids = tokens(CONTEXT, VOCAB)
    expected, hidden = eager(source, ids)
    logits, features = run(export(source, tmp_path / "b", taps=TAPS, last_hidden=True), ids)
    np.testing.assert_allclose(logits, expected[-5:], atol=1e-4)
    np.testing.assert_allclose(features, hidden, atol=1e-4)
    assert np.abs(expected[-5:]).max() > 1
    assert np.abs(hidden).max() > 1


@pytest.mark.parametrize(("rope", "changes"), CASES, ids=IDS)
def test_fp16_is_close(rope: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", rope, **changes)
    ids = tokens(CONTEXT, VOCAB)
    expected, hidden = eager(source, ids)
    logits, features = run(export(source, tmp_path / "b", "fp16", taps=TAPS, last_hidden=True), ids)
    # 2**-11 a rounding, some ten of them in each of seven layers
    np.testing.assert_allclose(logits, expected[-5:], atol=0.02 * np.abs(expected).max())
    np.testing.assert_allclose(features, hidden, atol=0.02 * np.abs(hidden).max())
    assert np.abs(logits - expected[-5:]).max() > 1e-4  # it is not fp32 under another name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_stored_in_half_precision(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", dtype=dtype, tie_word_embeddings=tied)
    ids = tokens(60, VOCAB)
    expected, hidden = eager(source, ids)
    logits, features = run(export(source, tmp_path / "b", taps=TAPS, last_hidden=True), ids)
    np.testing.assert_allclose(logits, expected[-5:], atol=1e-4)
    np.testing.assert_allclose(features, hidden, atol=1e-4)


def test_shards_give_the_same_graph(tmp_path: Path) -> None:
    whole, shards = write_folder(tmp_path / "a" / "m"), write_folder(tmp_path / "b" / "m", shard="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    bundles = [export(whole, tmp_path / "whole"), export(shards, tmp_path / "shards")]
    for name in (GRAPH_FILE, WEIGHTS_FILE):
        assert (bundles[0] / name).read_bytes() == (bundles[1] / name).read_bytes()


@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_a_tree_behind_chunks_of_prompt(rope: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", rope, attention_bias=True)
    bundle = export(source, tmp_path / "b", taps=TAPS, last_hidden=True)
    target, reference = open_pair(source, bundle, Engine(threads=1, prefill_chunk=7))
    parents = [-1, 0, 0, 1, 2, 2, 5, 0, 6]
    for count in (0, 1, 30, 100):
        ids = tokens(count, VOCAB, seed=count)
        np.testing.assert_allclose(target.prefill(ids), reference.prefill(ids), atol=1e-4)
        drafted = tokens(len(parents), VOCAB, seed=count + 1)
        np.testing.assert_allclose(target.score(drafted, parents), reference.score(drafted, parents), atol=1e-4)
        np.testing.assert_allclose(target.commit([0, 2, 5, 6]), reference.commit([0, 2, 5, 6]), atol=1e-4)


@pytest.mark.parametrize(
    ("taps", "last_hidden"), [((), True), ((0,), False), ((6,), False), ((0, 1, 2, 3, 4, 5, 6), True), ((), False)]
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_any_list_of_taps(precision: str, taps: tuple[int, ...], last_hidden: bool, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m")
    bundle = export(source, tmp_path / "b", precision, taps=taps, last_hidden=last_hidden)
    outputs = [output.name for output in onnx.load(bundle / GRAPH_FILE, load_external_data=False).graph.output]
    assert ("features" in outputs) == bool(taps or last_hidden)
    ids = tokens(40, VOCAB)
    _, hidden = eager(source, ids, taps)
    wanted = hidden if last_hidden else hidden[:, : 32 * len(taps)]
    error = run(bundle, ids)[1] - wanted
    # int8 computes in a rotated basis, in which these would be other numbers altogether
    assert np.linalg.norm(error) <= (1e-5 if precision == "fp32" else 0.1) * np.linalg.norm(wanted)


def test_only_wanted_rows_reach_the_head(tmp_path: Path) -> None:
    bundle = export(write_folder(tmp_path / "m"), tmp_path / "b", "int8")
    session = ort.InferenceSession(str(bundle / GRAPH_FILE), providers=["CPUExecutionProvider"])
    target, rows = open_bundle(bundle, ENGINE), np.arange(6)
    feeds: dict[str, Any] = {
        "input_ids": np.array(tokens(6, VOCAB)),
        "attention_rows": rows[None],
        "own_rows": rows,
        "position_ids": rows[None],
        "mask": np.zeros((1, 1, 6, 6), np.float32),
        "last_row": np.array([5], np.int32),
        "total": np.array(6, np.int32),
    }
    shape = target.shape
    for layer in range(shape.layers):
        for kind in "kv":
            feeds[f"past_{kind}_{layer}"] = np.zeros((1, shape.kv_heads, 8, shape.head_dim), np.float32)
    every = session.run(["logits"], {**feeds, "logit_rows": rows})[0]
    some = session.run(["logits"], {**feeds, "logit_rows": np.array([4, 1])})[0]
    np.testing.assert_array_equal(some, every[[4, 1]])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_the_last_token_of_the_context_is_reached(precision: str, tmp_path: Path) -> None:
    """Dummy rows lie behind it: the rope tables must reach further than the context."""
    bundle = export(write_folder(tmp_path / "m", max_position_embeddings=64), tmp_path / "b", precision)
    target, ids = open_bundle(bundle, ENGINE), tokens(64, VOCAB)
    target.prefill(ids[:63])
    logits = target.score(ids[63:], [-1])
    runner = Runner(bundle, target.shape, 64)
    np.testing.assert_allclose(logits[0], runner.run(ids, 0)["logits"][-1], atol=1e-4 if precision == "fp32" else 0.2)
    target.commit([0])
    assert target.length == target.context == 64


@pytest.mark.parametrize("head_dim", [8, 24])
def test_heads_that_the_operator_refuses(head_dim: int, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", head_dim=head_dim)
    with pytest.raises(
        UnsupportedModelError, match=rf"^head_dim {head_dim} is not supported, expected a multiple of 16$"
    ):
        export(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()

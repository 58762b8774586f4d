"""The reference target against transformers, against the recorded fixtures, and against itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch_helpers import ROPES, VARIANTS, golden_target, recording, tiny_llama, tokens

from starsd.edge.target import open_target
from starsd.edge.target_torch import TorchTarget, open_folder
from starsd.shared import tree
from starsd.shared.config import Engine
from starsd.shared.errors import (
    ContextOverflowError,
    EngineError,
    ModelError,
    UsageError,
)

ENGINE = Engine(initial_context=4, prefill_chunk=50)
PLAIN = {"attention_bias": False, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture
def target(folder: Path) -> TorchTarget:
    return open_folder(folder, ENGINE, last_hidden=True)


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        *((rope, PLAIN) for rope in ROPES),
        ("default", {"attention_bias": True, "mlp_bias": True}),
        ("default", {"tie_word_embeddings": True}),
        ("default", {"num_key_value_heads": 4, "head_dim": 8}),
        ("default", {"max_position_embeddings": 4096}),
    ],
)
def test_logits_and_features_equal_transformers(rope: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A text as long as the context: the ropes that depend on length are then in the same state on both sides."""
    model = tiny_llama(rope, **changes)
    model.save_pretrained(tmp_path)
    length = min(model.config.max_position_embeddings, 2000)
    ids = tokens(length)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True)
    target = open_folder(tmp_path, ENGINE, taps=(0, 2, 3, 4), last_hidden=True)
    features = target.prefill(ids[:-3])
    logits = target.score(ids[-3:], tree.chain(3))
    features = np.concatenate([features, target.commit([0, 1, 2])])
    hidden = [expected.hidden_states[tap][0].numpy() for tap in (0, 2, 3, 4, 7)]
    np.testing.assert_allclose(logits, expected.logits[0, -3:].numpy(), atol=1e-5 * expected.logits.abs().max().item())
    np.testing.assert_allclose(features, np.concatenate(hidden, axis=1), atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_prefill(variant: str) -> None:
    arrays = recording(variant, "prefill")
    prompt = arrays["prompt"].tolist()
    target = open_folder(golden_target(variant), ENGINE, last_hidden=True)
    taps, last = np.split(target.prefill(prompt), [3 * target.shape.hidden], axis=1)
    np.testing.assert_allclose(last, arrays["target_last_hidden"], atol=3e-5)
    if "target_taps" in arrays:
        np.testing.assert_allclose(taps, arrays["target_taps"], atol=3e-5)
    target.truncate(0)
    logits = target.score(prompt, tree.chain(len(prompt)))
    np.testing.assert_allclose(logits, arrays["target_logits"], atol=1e-4)
    assert logits[-1].argmax() == arrays["root0"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_path_of_a_tree_is_plain_decoding(folder: Path, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    parents = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, size))]
    ids = data.draw(st.lists(st.integers(0, 95), min_size=size, max_size=size))
    prompt = tokens(data.draw(st.integers(0, 9)))
    target = open_folder(folder, ENGINE, last_hidden=True)
    target.prefill(prompt)
    logits = target.score(ids, parents)
    kept = tree.path_to(parents, data.draw(st.integers(0, size - 1)))
    features = target.commit(kept)
    following = target.score([5], [-1])

    plain = open_folder(folder, ENGINE, last_hidden=True)
    plain.prefill(prompt)
    for position, row in enumerate(kept):
        np.testing.assert_allclose(plain.score([ids[row]], [-1])[0], logits[row], atol=2e-5)
        np.testing.assert_allclose(plain.commit([0])[0], features[position], atol=2e-5)
    assert plain.length == target.length == len(prompt) + len(kept)
    np.testing.assert_allclose(following, plain.score([5], [-1]), atol=2e-5)


def test_chunks_and_growth_change_nothing(folder: Path) -> None:
    ids = tokens(90)
    seen: list[tuple[str, int, int]] = []
    chunked = open_folder(folder, Engine(initial_context=1, prefill_chunk=32))
    rows = chunked.prefill(ids, lambda *event: seen.append(event))
    whole = open_folder(folder, Engine(initial_context=512, prefill_chunk=512)).prefill(ids)
    np.testing.assert_allclose(rows, whole, atol=2e-5)
    assert [event[1:] for event in seen] == [(32, 90), (64, 90), (90, 90)]


def test_truncate_forgets(folder: Path, target: TorchTarget) -> None:
    target.prefill(tokens(20))
    target.truncate(8)
    again = target.score([1, 2], tree.chain(2))
    fresh = open_folder(folder, ENGINE)
    fresh.prefill(tokens(20)[:8])
    np.testing.assert_allclose(again, fresh.score([1, 2], tree.chain(2)), atol=2e-5)


def test_second_score_replaces_the_first_and_commits_its_own_rows(target: TorchTarget) -> None:
    target.prefill(tokens(5))
    target.score([1, 2, 3], [-1, 0, 0])
    logits = target.score([9, 8], [-1, 0])
    target.commit([0, 1])
    target.truncate(5)
    np.testing.assert_allclose(target.score([9, 8], [-1, 0]), logits, atol=2e-5)


def test_features_follow_the_spec(folder: Path) -> None:
    assert open_folder(folder, ENGINE).features.taps == (2, 3, 4)
    last = open_folder(folder, ENGINE, taps=(), last_hidden=True)
    assert last.prefill([1, 2]).shape == (2, 32)
    assert last.prefill([]).shape == (0, 32)
    assert last.length == 2
    everything = open_folder(folder, ENGINE, taps=(0, 7))
    assert everything.prefill([4]).shape == (1, 64)


def test_shards_are_one_model(folder: Path, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    np.testing.assert_array_equal(
        open_folder(tmp_path, ENGINE).prefill([1, 2]), open_folder(folder, ENGINE).prefill([1, 2])
    )


def test_the_registry_opens_it(folder: Path) -> None:
    assert open_target("torch", folder, ENGINE).shape.layers == 7


@pytest.mark.parametrize("rows", [[1], [0, 2], [0, 1, 1], [0, 9], [0, -1], []])
def test_commit_refuses_what_is_no_path(target: TorchTarget, rows: list[int]) -> None:
    target.score([1, 2, 3], [-1, 0, 1])
    with pytest.raises(EngineError, match="are not a path from the root of the newest pass"):
        target.commit(rows)
    target.commit([0, 1])
    assert target.length == 2


def test_out_of_order_calls_are_refused(target: TorchTarget) -> None:
    with pytest.raises(EngineError, match="commit without a pass"):
        target.commit([0])
    target.score([1], [-1])
    target.prefill([1])
    with pytest.raises(EngineError, match="commit without a pass"):
        target.commit([0])
    with pytest.raises(EngineError, match="truncate to 2 rows, expected 0 to 1"):
        target.truncate(2)
    with pytest.raises(EngineError, match="2 tokens and 1 parents"):
        target.score([1, 2], [-1])
    with pytest.raises(EngineError, match="node 1 has parent 1"):
        target.score([1, 2], [-1, 1])


def test_overflow_and_bad_ids_leave_the_cache_whole(folder: Path) -> None:
    target = open_folder(folder, Engine(max_context=10))
    target.prefill(tokens(8))
    before = target.score([1, 2], [-1, 0])
    with pytest.raises(ContextOverflowError, match="11 tokens do not fit, the context holds 10"):
        target.score([1, 2, 3], [-1, 0, 1])
    with pytest.raises(ContextOverflowError):
        target.prefill(tokens(3))
    with pytest.raises(UsageError, match="token id 96 is outside the vocabulary, expected 0 to 95"):
        target.prefill([96])
    assert (target.length, target.context) == (8, 10)
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


def rewrite(folder: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a folder with some config values changed and some tensors replaced, added, or (None) removed."""
    shutil.copytree(folder, tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**raw, **config}))
    merged = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({k: v for k, v in merged.items() if v is not None}, tmp_path / "copy" / "model.safetensors")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"model.norm.weight": None}, r"lacks model.norm.weight \[32\]"),
        ({}, {"extra.weight": torch.zeros(3)}, r"has extra.weight \[3\] that nothing uses"),
        ({"head_dim": 4}, {}, r"q_proj.weight has shape \[64, 32\], expected \[16, 32\]"),
        ({"attention_bias": True}, {}, r"lacks model.layers.0.self_attn.q_proj.bias \[64\]"),
        ({"model_type": "mamba"}, {}, "model type 'mamba' is not supported, expected one of llama"),
        ({"hidden_size": "wide"}, {}, "config has a size that is no number"),
        ({"hidden_act": "gelu"}, {}, "activation 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, {}, "quantised safetensors are not supported"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        open_folder(rewrite(folder, tmp_path, config, tensors), ENGINE)


def test_old_rotary_buffers_are_ignored(folder: Path, tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert open_folder(rewrite(folder, tmp_path, {}, buffer), ENGINE).shape.layers == 7


@pytest.mark.parametrize("taps", [(3, 2), (2, 2), (8,), (-1,)])
def test_impossible_taps_are_refused(folder: Path, taps: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected ascending layers 0 to 7"):
        open_folder(folder, ENGINE, taps=taps)


def test_a_folder_without_weights_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is missing"):
        open_folder(tmp_path, ENGINE)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        open_folder(tmp_path, ENGINE)

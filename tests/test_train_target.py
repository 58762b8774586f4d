"""Batches of chats through the target, against the reference target one chat at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import ENGINE
from train_helpers import random_chats, target_folder

from starsd.edge.target_torch import open_folder
from starsd.export.checkpoint import Checkpoint
from starsd.export.train_drafter import read_through
from starsd.export.train_store import Store
from starsd.export.train_target import BatchTarget, best, eagle3_taps, fingerprint
from starsd.shared.errors import UsageError

CPU = torch.device("cpu")
BIASED = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.2}


@pytest.fixture(scope="module", params=[{}, BIASED, {"tie_word_embeddings": True}], ids=["plain", "biased", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes: dict[str, Any] = request.param
    return target_folder(tmp_path_factory.mktemp("target"), **changes)


def test_stored_rows_are_the_reference_targets(folder: Path, tmp_path: Path) -> None:
    target, chats = BatchTarget(folder, CPU, torch.float32), random_chats(7)
    store = Store(tmp_path / "cache", "x", target.width, 9, 1 << 30)
    read_through(target, store, chats)
    rows = store.load()
    assert rows.chats.tokens.tolist() == chats.tokens.tolist()
    assert rows.chats.roles.tolist() == chats.roles.tolist()
    for chat in range(7):
        place = chats.rows(chat)
        reference = open_folder(folder, ENGINE)
        tokens = chats.tokens[place].tolist()
        logits = torch.from_numpy(reference.score(tokens, list(range(-1, len(tokens) - 1))))
        features = reference.commit(range(len(tokens)))
        np.testing.assert_allclose(rows.taps[place].float(), features, rtol=5e-3, atol=1e-3)  # bfloat16
        probs, ids = logits.softmax(-1).topk(9)
        assert rows.top_ids[place].tolist() == ids.tolist()
        np.testing.assert_allclose(rows.top_probs[place].float(), probs, rtol=2e-3)


def test_one_token_at_a_time_is_the_same(folder: Path) -> None:
    """Two chats of different progress in one static cache."""
    target = BatchTarget(folder, CPU, torch.float32)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 300, (2, 12)))
    taps, last = target.forward(ids)
    decoder = target.decoder(2, 70)
    for step in range(12):
        at = torch.tensor([step, max(0, step - 3)])
        some_taps, some_last = decoder.step(ids[[0, 1], at], at, step)
        np.testing.assert_allclose(some_taps, taps[[0, 1], at], atol=2e-5)
        np.testing.assert_allclose(some_last, last[[0, 1], at], atol=2e-5)


@pytest.mark.parametrize(("vocab", "count"), [(300, 8), (2048, 8), (2048, 16), (2048, 17)])
def test_best_is_the_softmax_of_the_whole_vocabulary(vocab: int, count: int) -> None:
    logits = 4 * torch.randn(11, vocab, generator=torch.Generator().manual_seed(vocab + count))
    kept = logits.clone()
    ids, probs = best(logits, count)
    expected = kept.softmax(-1).topk(count)
    assert ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(probs.float(), expected.values, rtol=2e-3, atol=1e-7)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27))])
def test_taps_are_the_official_ones(layers: int, taps: tuple[int, ...]) -> None:
    assert eagle3_taps(layers) == taps


def test_a_shallow_target_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^target has 6 layers, expected at least 7: EAGLE-3 taps \(2, 3, 3\)"):
        eagle3_taps(6)


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    a = target_folder(tmp_path / "a")
    b = target_folder(tmp_path / "b", initializer_range=0.09)
    assert fingerprint(Checkpoint(a)) == fingerprint(Checkpoint(a)) != fingerprint(Checkpoint(b))

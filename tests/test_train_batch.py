"""Labels, weights and losses against loops that spell them out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_session import VOCAB
from train_helpers import fresh_head, random_chats, target_folder

from starsd.export.train_batch import Feeder, accepted, draft_ids, losses, soft_loss
from starsd.export.train_data import Role, joined
from starsd.export.train_drafter import read_through
from starsd.export.train_store import Store
from starsd.export.train_target import BatchTarget

DRAFT = np.array([*range(0, 220, 2), 299])
STEPS, TOP, USER = 3, 8, 0.25
WEIGHTS = {Role.TEMPLATE: 0.0, Role.USER: USER, Role.ANSWER: 1.0}


@pytest.fixture(scope="module")
def feeder(tmp_path_factory: pytest.TempPathFactory) -> Feeder:
    base = tmp_path_factory.mktemp("batch")
    target = BatchTarget(target_folder(base / "target", initializer_range=0.2), torch.device("cpu"), torch.float32)
    store = Store(base / "cache", "x", target.width, TOP, 1 << 30)
    read_through(target, store, random_chats(9))
    return Feeder(store.load(), target, DRAFT, STEPS, USER)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rows_are_paired_with_what_the_target_foretold(feeder: Feeder, share: float) -> None:
    chosen, chats = np.array([4, 1]), feeder.chats
    batch = feeder.batch(chosen, share, np.random.default_rng(3))
    longest = int(chats.lengths[chosen].max())
    later = list(range(longest)) if batch.later is None else batch.later.tolist()
    assert later == sorted(set(later))
    assert (len(later), batch.later is None) == (round(share * longest), share == 1)
    for depth in range(STEPS):
        expected, columns = [], later if depth else list(range(longest))
        for slot, chat in enumerate(chosen):
            start, length = int(chats.offsets[chat]), int(chats.lengths[chat])
            for place, row in enumerate(columns):
                said = row + 2 + depth  # the token that this row predicts
                if said < length and (weight := WEIGHTS[Role(chats.roles[start + said])]):
                    expected.append((slot * len(columns) + place, start + said - 1, weight, weight == 1))
        rows = batch.depths[depth]
        parts = (rows.places, rows.labels, rows.weights, rows.answers)
        assert list(zip(*(part.tolist() for part in parts), strict=True)) == expected


def test_taps_and_embeddings_are_the_chats_own(feeder: Feeder) -> None:
    rows, chats = feeder._taps, feeder.chats
    batch = feeder.batch(np.array([4, 1]))
    for slot, chat in enumerate((4, 1)):
        place = chats.rows(chat)
        length = place.stop - place.start
        assert torch.equal(batch.taps[slot, :length], rows[place].float())
        embedded = feeder._target.embedding[torch.from_numpy(chats.tokens[place])]
        assert torch.equal(batch.embedded[slot, :length], embedded)


def test_labels_are_mapped_and_renormalised(feeder: Feeder) -> None:
    depth = feeder.batch(np.arange(9)).depths[0]
    ids, probs = feeder.labels(depth)
    place = {int(target): draft for draft, target in enumerate(DRAFT)}
    misses = 0
    for row, stored in enumerate(depth.labels.tolist()):
        targets, said = feeder._top_ids[stored].tolist(), feeder._top_probs[stored].double().tolist()
        mass = sum(p for t, p in zip(targets, said, strict=True) if t in place)
        for k, target in enumerate(targets):
            known = target in place
            misses += k == 0 and not known
            assert ids[row, k] == place.get(target, -1 if k == 0 else 0)
            assert probs[row, k] == pytest.approx(said[k] / mass if known else 0.0, abs=1e-5)
    assert 0 < misses < len(ids)


def test_the_loss_is_a_weighted_mean_of_cross_entropies() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 20, generator=draw)
    ids = torch.stack([torch.randperm(20, generator=draw)[:4] for _ in range(6)])
    ids[2, 0] = -1
    probs = torch.rand(6, 4, generator=draw)
    weights = torch.tensor([1, 0.2, 1, 0.5, 1, 1])
    total = mass = 0.0
    for row in range(6):
        if ids[row, 0] < 0:
            continue
        norm = math.log(sum(math.exp(x) for x in logits[row].tolist()))
        cross = -sum(float(p) * (float(logits[row, i]) - norm) for p, i in zip(probs[row], ids[row], strict=True))
        total, mass = total + float(weights[row]) * cross, mass + float(weights[row])
    assert float(soft_loss(logits, ids, probs, weights)) == pytest.approx(total / mass, rel=1e-5)


def test_a_batch_without_labels_costs_nothing() -> None:
    empty = soft_loss(torch.zeros(0, 5), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), torch.zeros(0))
    assert float(empty) == 0


def test_every_depth_is_trained(feeder: Feeder) -> None:
    head = fresh_head(feeder._target.checkpoint.folder, DRAFT.tolist())
    found = losses(head, feeder, feeder.batch(np.arange(4)))
    assert len(found) == STEPS
    for loss in found:
        head.zero_grad()
        loss.backward(retain_graph=True)
        assert all(float(p.grad.abs().max()) > 0 for p in head.parameters() if p.grad is not None)
        assert sum(p.grad is None for p in head.parameters()) == 0


def test_the_rows_drawn_change_with_the_generator_only(feeder: Feeder) -> None:
    drawn = [feeder.batch(np.arange(4), 0.4, np.random.default_rng(seed)).later for seed in (1, 1, 2)]
    a, b, c = (part.tolist() for part in drawn if part is not None)
    assert a == b != c


def test_some_rows_cost_what_they_cost_among_all(feeder: Feeder) -> None:
    head, chosen = fresh_head(feeder._target.checkpoint.folder, DRAFT.tolist()), np.arange(4)
    every, some = feeder.batch(chosen), feeder.batch(chosen, 0.4, np.random.default_rng(5))
    assert some.later is not None
    outputs = list(head.unroll(every.embedded, every.taps, STEPS))
    for number, loss in enumerate(losses(head, feeder, some)):
        rows, columns = some.depths[number], some.later if number else torch.arange(every.taps.shape[1])
        output = outputs[number][:, columns].flatten(0, 1)[rows.places]
        torch.testing.assert_close(loss, soft_loss(head.logits(output), *feeder.labels(rows), rows.weights))


def test_accepted_counts_runs_of_hits(feeder: Feeder) -> None:
    """A row's run ends at the first draft that is not the target's likeliest token."""
    head = fresh_head(feeder._target.checkpoint.folder, DRAFT.tolist())
    with torch.no_grad():  # so that hits occur: favour what the target often says
        head.lm_head.weight[:] *= 0.05
    batch, chats = feeder.batch(np.arange(9)), feeder.chats
    longest = int(chats.lengths.max())
    outputs = list(head.unroll(batch.embedded, batch.taps, STEPS))
    reached, hit = [0] * STEPS, [0] * STEPS
    for chat in range(9):
        start, length = int(chats.offsets[chat]), int(chats.lengths[chat])
        for row in range(length - 1 - STEPS):
            if any(chats.roles[start + row + 2 + depth] != Role.ANSWER for depth in range(STEPS)):
                continue
            for depth in range(STEPS):
                reached[depth] += 1
                guess = DRAFT[int(head.logits(outputs[depth][chat, row]).argmax())]
                if guess != int(feeder._top_ids[start + row + 1 + depth, 0]):
                    break
                hit[depth] += 1
    assert longest == batch.taps.shape[1]
    got = accepted(head, feeder, batch)
    assert [part.tolist() for part in got] == [reached, hit]
    assert hit[0] > 0


def test_the_draft_vocabulary_is_the_most_frequent_ids() -> None:
    tokens = [9, 9, 4, 4, 7, 7, 7, 2, 2, 2, 2, 5]
    roles = [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 2]
    chats = joined([(tokens, roles)])
    assert draft_ids(chats, 3, 12, 0.2).tolist() == [4, 5, 7]  # 4: 2, 7: 1.4, 5: 1, 2: 0.8, 9: 0
    assert draft_ids(chats, 3, 12, 1.0).tolist() == [2, 4, 7]
    assert draft_ids(chats, 6, 12, 0.2).tolist() == [0, 1, 2, 4, 5, 7]  # among equals the smaller
    assert draft_ids(chats, 12, 12, 0.2).tolist() == list(range(12))
    assert draft_ids(chats, VOCAB, 12, 0.2).tolist() == list(range(12))

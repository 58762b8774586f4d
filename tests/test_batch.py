"""Batched passes: the same trees as alone, whoever else is in the pass; rows and features in any order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from head_builder import base_config, random_tensors, rows, write_head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_helpers import GOLDEN, VARIANTS, golden_target, recording, tiny_llama, tokens

from starsd.server.batch import BatchDrafter
from starsd.server.drafter import Draft, DynamicTree, SlotLimits
from starsd.server.drafter_eagle import EagleDrafter, open_drafter
from starsd.server.eagle_layer import EagleLayer
from starsd.server.live_session import CATCH_UP, LiveSession
from starsd.server.recording import read_recording
from starsd.shared.errors import CapacityError, ModelError, UsageError

WIDTH, VOCAB = 96, 96
SHAPE = DynamicTree(24, 4, 5)
LIMITS = SlotLimits(slots=6, window=64, entries=80)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> EagleDrafter:
    base = tmp_path_factory.mktemp("batch")
    tiny_llama().save_pretrained(base / "target")
    write_head(base / "head", base_config(draft_vocab_size=48), random_tensors())
    return open_drafter(str(base / "head"), str(base / "target"))


@pytest.fixture
def batch(alone: EagleDrafter) -> BatchDrafter:
    return BatchDrafter(alone.layer, LIMITS, SHAPE)


@pytest.fixture(scope="module")
def golden() -> dict[str, EagleLayer]:
    return {v: open_drafter(str(GOLDEN / v / "head"), str(golden_target(v))).layer for v in VARIANTS}


def fill(session: LiveSession, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Commit count + 1 tokens and feed the features of all rows."""
    features, following = rows(count, WIDTH, seed)
    session.commit([0, *following.tolist()])
    session.feed(0, features)
    return features, following


def rest(batch: BatchDrafter, *sessions: LiveSession, budget: int = 7, official: bool = False) -> None:
    for _ in range(400):
        if not batch.advance([(session, budget) for session in sessions], official=official):
            break
    assert all(session.at_rest(SHAPE.total, official=official) for session in sessions)


def same(a: Draft, b: Draft) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.parents.tolist() == b.parents.tolist()
    np.testing.assert_allclose(a.scores, b.scores, atol=3e-5)


def expected(alone: EagleDrafter, features: np.ndarray, following: np.ndarray, shape: DynamicTree = SHAPE) -> Draft:
    session = alone.open()
    session.extend(features, following)
    return session.draft(shape)


TREES = [(variant, path.stem) for variant in VARIANTS for path in sorted((GOLDEN / variant).glob("trees_*.npz"))]


@pytest.mark.parametrize(("variant", "name"), TREES)
def test_recorded_trees_grow_live_and_in_company(golden: dict[str, EagleLayer], variant: str, name: str) -> None:
    """The official implementation's rounds, by both ways, while another session is in every pass."""
    arrays, layer = recording(variant, name), golden[variant]
    shape = DynamicTree(*map(int, re.findall(r"\d+", name)))
    batch = BatchDrafter(layer, SlotLimits(3, 64, 80), shape)
    session, other = batch.open(), batch.open()
    other.commit(tokens(40, layer.spec.vocab))
    other.feed(0, np.random.default_rng(0).normal(size=(39, layer.spec.features.width)).astype(np.float32))
    session.commit([int(arrays["prompt"][0])])
    path = GOLDEN / variant / f"{name}.npz"
    for number, step in enumerate(read_recording(path, layer.spec.features.width, layer.spec.vocab)):
        wanted = Draft(*(arrays[f"r{number}_{key}"] for key in ("draft_tokens", "parents", "node_logprob")))
        start = session.rows.count
        session.commit(step.next_tokens.tolist())
        session.feed(start, step.features)
        for budget in (3, shape.top_k):
            while batch.advance([(session, budget), (other, 4)], shape.total, official=True):
                pass
            assert session.at_rest(shape.total, official=True)
            same(session.tree.best(shape.total, official=True), wanted)
            session.restart()
        same(batch.trees([other, session], shape)[1], wanted)


def test_a_batch_of_ragged_sessions_equals_each_alone(alone: EagleDrafter, batch: BatchDrafter) -> None:
    counts = [3, 40, 17, 50, 9]
    sessions = [batch.open() for _ in counts]
    wanted = []
    for seed, (session, count) in enumerate(zip(sessions, counts, strict=True)):
        wanted.append(expected(alone, *fill(session, count, seed)))
    for draft, tree in zip(batch.trees(sessions, SHAPE), wanted, strict=True):
        same(draft, tree)
    some = [sessions[4], sessions[0], sessions[3]]  # slots that are not side by side, in any order
    for draft, tree in zip(batch.trees(some, SHAPE), [wanted[4], wanted[0], wanted[3]], strict=True):
        same(draft, tree)
    for session, budget in zip(sessions, [1, 5, 2, 9, 3], strict=True):
        session.restart()
        batch.advance([(session, budget)], official=True)
    rest(batch, *sessions, official=True)
    for session, tree in zip(sessions, wanted, strict=True):
        same(session.tree.best(SHAPE.total, official=True), tree)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_session_changes_another(alone: EagleDrafter, data: st.DataObject) -> None:
    """Whatever happens in other slots, and whoever had a slot before, a session's best tree is its own."""
    batch = BatchDrafter(alone.layer, SlotLimits(3, 32, 40), SHAPE)
    mine = batch.open()
    features, following = rows(20, WIDTH, 1)
    mine.commit([0])
    others: list[LiveSession] = []
    fed = 0
    while fed < 20:
        step = data.draw(st.integers(1, 8))
        mine.commit(following[fed : fed + step].tolist())
        mine.feed(fed, features[fed : fed + step])
        fed += step
        match data.draw(st.sampled_from(["open", "close", "commit", "nothing"])):
            case "open" if batch.pool.free:
                others.append(batch.open())
                fill(others[-1], data.draw(st.integers(1, 40)), data.draw(st.integers(2, 50)))
            case "close" if others:
                others.pop(data.draw(st.integers(0, len(others) - 1))).close()
            case "commit" if others:
                others[0].commit(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)))
        batch.advance([(mine, data.draw(st.integers(1, 9))), *((o, data.draw(st.integers(0, 9))) for o in others)])
    rest(batch, mine, *others)
    fresh = BatchDrafter(alone.layer, SlotLimits(1, 32, 40), SHAPE)
    single = fresh.open()
    single.commit([0, *following.tolist()])
    single.feed(0, features)
    rest(fresh, single)
    same(mine.tree.best(SHAPE.total), single.tree.best(SHAPE.total))
    assert min(gaps(single.tree.best(SHAPE.total))) > 0  # else `same` could not fail


def gaps(draft: Draft) -> np.ndarray:
    return np.diff(np.unique(draft.scores))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_features_in_any_order_give_the_same_tree(alone: EagleDrafter, data: st.DataObject) -> None:
    batch = BatchDrafter(alone.layer, LIMITS, SHAPE)
    session = batch.open()
    features, following = rows(30, WIDTH, 4)
    session.commit([0, *following[:22].tolist()])
    cuts = sorted(data.draw(st.sets(st.integers(1, 21), max_size=5)))
    chunks = list(zip([0, *cuts], [*cuts, 22], strict=True))
    for start, end in data.draw(st.permutations(chunks)):
        session.feed(start, features[start:end])
        for _ in range(data.draw(st.integers(0, 3))):
            batch.advance([(session, data.draw(st.integers(1, 6)))])
    session.commit(following[22:].tolist())
    batch.advance([(session, 5)])
    for row in data.draw(st.permutations(range(22, 30))):
        session.feed(row, features[row : row + 1])
        batch.advance([(session, data.draw(st.integers(0, 6)))])
    rest(batch, session)
    rest(batch, session, official=True)
    same(session.tree.best(SHAPE.total, official=True), expected(alone, features, following))
    assert session.rows.missing == 0


def test_the_best_first_tree_is_at_least_as_good(alone: EagleDrafter, batch: BatchDrafter) -> None:
    better = 0
    for seed in range(5):
        session = batch.open()
        official = expected(alone, *fill(session, 12, seed))
        rest(batch, session)
        best = session.tree.best(SHAPE.total)
        assert best.scores.sum() >= official.scores.sum() - 1e-4
        better += best.scores.sum() > official.scores.sum() + 1e-4
        session.close()
    assert better < 5  # mostly they are the same tree


def test_a_verdict_inside_the_tree_keeps_it_growing(alone: EagleDrafter, batch: BatchDrafter) -> None:
    """Tokens before features: rows that ran as nodes become provisional, and nothing below the tip is lost."""
    session = batch.open()
    features, following = fill(session, 12, 3)
    rest(batch, session)
    sent = session.delta(SHAPE.total)
    tree = session.tree.best(SHAPE.total)
    first = int(np.flatnonzero(tree.parents == 0)[0])
    second = int(np.flatnonzero(tree.parents == first)[0])
    committed = [int(tree.tokens[first]), int(tree.tokens[second])]
    below = tree.tokens[tree.parents == second].tolist()
    session.commit(committed)
    assert not session.behind
    assert session.base == 15
    assert session.tree.best(SHAPE.total).tokens.tolist()[0] == committed[-1]
    assert set(below) <= set(session.tree.best(SHAPE.total).tokens.tolist())
    rest(batch, session)
    delta = session.delta(SHAPE.total)
    assert (sent.first, delta.first) == (0, len(sent))
    assert len(delta) > 0
    # fed its own outputs row by row, a session that never had a tree gets the same one
    other = batch.open()
    other.commit([0, *following.tolist(), committed[0]])
    other.feed(0, features)
    other.commit(committed[1:])
    rest(batch, other)
    same(session.tree.best(SHAPE.total), other.tree.best(SHAPE.total))
    assert session.rows.missing == other.rows.missing == 2
    # also when the newest row has to run once more on what it was fed
    same(*batch.trees([session, other], SHAPE))
    rest(batch, session, other)
    same(session.tree.best(SHAPE.total), other.tree.best(SHAPE.total))
    # and with true features both are what the official tree is
    true, _ = rows(2, WIDTH, 77)
    for one in (session, other):
        one.feed(12, true)
        rest(batch, one)
        rest(batch, one, official=True)
        wanted = expected(alone, np.concatenate([features, true]), np.append(following, committed))
        same(one.tree.best(SHAPE.total, official=True), wanted)


def test_a_verdict_outside_the_tree_starts_anew(alone: EagleDrafter, batch: BatchDrafter) -> None:
    session = batch.open()
    features, following = fill(session, 12, 3)
    rest(batch, session)
    tree = session.tree.best(SHAPE.total)
    first = int(tree.tokens[1])
    outside = next(token for token in range(VOCAB) if token not in tree.tokens)
    session.commit([first, outside, 5])
    assert len(session.tree) == 1
    assert batch.advance([(session, 9)]) == 1  # the first row had run as a node: two are left
    assert batch.advance([(session, 9)]) == 1
    assert batch.advance([(session, 9)]) > 1
    true, _ = rows(3, WIDTH, 8)
    session.feed(12, true)
    rest(batch, session, official=True)
    wanted = expected(alone, np.concatenate([features, true]), np.array([*following, first, outside, 5]))
    same(session.tree.best(SHAPE.total, official=True), wanted)


def test_two_verdicts_between_passes(alone: EagleDrafter, batch: BatchDrafter) -> None:
    one, other = batch.open(), batch.open()
    for session in (one, other):
        fill(session, 12, 3)
        rest(batch, session)
    tree = one.tree.best(SHAPE.total)
    deepest = int(np.flatnonzero(tree.parents > 0)[-1])
    path = []
    while deepest > 0:
        path.insert(0, int(tree.tokens[deepest]))
        deepest = int(tree.parents[deepest])
    assert len(path) > 1
    one.commit(path)
    for token in path:
        other.commit([token])
    rest(batch, one, other)
    same(one.tree.best(SHAPE.total), other.tree.best(SHAPE.total))


def test_long_gaps_are_skipped_and_filled_later(alone: EagleDrafter, batch: BatchDrafter) -> None:
    features, following = rows(50, WIDTH, 6)
    session = batch.open()
    session.commit([0, *following.tolist()])
    assert batch.advance([(session, 9)]) == 0
    assert not session.ready
    session.feed(0, features[:4])
    ran = 0
    while session.behind:
        ran += batch.advance([(session, 9)])
    assert ran == 1 + CATCH_UP
    assert session.rows.missing == 46
    session.feed(4, features[4:])
    rest(batch, session, official=True)
    same(session.tree.best(SHAPE.total, official=True), expected(alone, features, following))


def test_old_rows_leave_the_window(tmp_path: Path, alone: EagleDrafter) -> None:
    """A slot of 16 rows draws what a head with a sliding window of 16 draws."""
    tensors = random_tensors()
    write_head(tmp_path / "head", base_config(draft_vocab_size=48, use_sliding_window=True, sliding_window=16), tensors)
    tiny_llama().save_pretrained(tmp_path / "target")
    sliding = open_drafter(str(tmp_path / "head"), str(tmp_path / "target"))
    assert sliding.layer.spec.window == 16
    for layer in (alone.layer, sliding.layer):
        batch = BatchDrafter(layer, SlotLimits(2, 16 if layer is alone.layer else 64, 80), SHAPE)
        session = batch.open()
        features, following = rows(45, WIDTH, 2)
        session.commit([0])
        for start in range(0, 45, 9):
            session.commit(following[start : start + 9].tolist())
            session.feed(start, features[start : start + 9])
            rest(batch, session, official=True)
        wanted = expected(sliding, features, following)
        same(session.tree.best(SHAPE.total, official=True), wanted)
        same(batch.trees([session], SHAPE)[0], wanted)


def test_features_that_come_too_late_for_the_window_are_left_out(alone: EagleDrafter) -> None:
    batch = BatchDrafter(alone.layer, SlotLimits(1, 16, 80), SHAPE)
    session = batch.open()
    features, following = rows(30, WIDTH, 2)
    session.commit([0, *following[:20].tolist()])
    session.feed(0, features[:20])
    session.commit(following[20:].tolist())
    batch.advance([(session, 1)])
    assert session.rows.missing == 10
    assert session.rows.newest_true == 19


def test_truncating_what_no_pass_has_seen(alone: EagleDrafter, batch: BatchDrafter) -> None:
    """Tokens that the tree held, taken back at once, then committed again with their features."""
    session = batch.open()
    features, following = fill(session, 12, 3)
    rest(batch, session)
    tree = session.tree.best(SHAPE.total)
    child = int(np.flatnonzero(tree.parents > 0)[0])
    path = [int(tree.tokens[tree.parents[child]]), int(tree.tokens[child])]
    session.commit(path)
    true, _ = rows(2, WIDTH, 8)
    session.feed(12, true)
    session.truncate(13)
    assert not session.waiting
    session.commit(path)
    session.feed(12, true)
    rest(batch, session, official=True)
    wanted = expected(alone, np.concatenate([features, true]), np.append(following, path))
    same(session.tree.best(SHAPE.total, official=True), wanted)


def test_truncate_goes_back(alone: EagleDrafter, batch: BatchDrafter) -> None:
    session = batch.open()
    features, following = fill(session, 30, 5)
    rest(batch, session)
    session.truncate(11)
    assert (session.rows.count, session.rows.tip) == (10, int(following[9]))
    session.feed(2, features[2:5])  # older ones, once more: nothing to draft from yet
    assert batch.advance([(session, 5)]) == 0
    assert not session.ready
    other, after = rows(4, WIDTH, 9)
    session.commit(after.tolist())
    session.feed(10, other)
    rest(batch, session, official=True)
    wanted = expected(alone, np.concatenate([features[:10], other]), np.append(following[:10], after))
    same(session.tree.best(SHAPE.total, official=True), wanted)
    session.truncate(0)
    session.commit([0, *following[:3].tolist()])
    session.feed(0, features[:3])
    rest(batch, session, official=True)
    same(session.tree.best(SHAPE.total, official=True), expected(alone, features[:3], following[:3]))
    with pytest.raises(UsageError, match="truncate to 5 tokens, expected 0 to 4"):
        session.truncate(5)


def test_slots_are_bounded_and_zeroed(batch: BatchDrafter) -> None:
    sessions = [batch.open() for _ in range(6)]
    with pytest.raises(CapacityError, match="all 6 drafter slots are taken: close a session or raise the limit"):
        batch.open()
    fill(sessions[2], 20, 1)
    rest(batch, sessions[2])
    pool = batch.pool
    assert pool.keys[2].any()
    assert pool.values[2].any()
    assert pool.hidden[2].any()
    held = pool.bytes
    sessions[2].close()
    sessions[2].close()
    assert not pool.keys[2].any()
    assert not pool.values[2].any()
    assert not pool.hidden[2].any()
    assert (pool.free, pool.bytes) == (1, held)
    with pytest.raises(UsageError, match="session is closed"):
        sessions[2].commit([1])
    assert batch.advance([(sessions[2], 5)]) == 0
    assert batch.open().slot == 2


def test_growth_stops_when_entries_run_out(alone: EagleDrafter) -> None:
    batch = BatchDrafter(alone.layer, SlotLimits(1, 64, 7), SHAPE)
    session = batch.open()
    fill(session, 10, 1)
    ran = 0
    while count := batch.advance([(session, 5)]):
        ran += count
    assert ran == 8  # the root's row and seven nodes
    assert session.tree.entries == 7
    with pytest.raises(UsageError, match="tree expands 20 nodes, expected at most the 7 entries of a slot"):
        batch.trees([session], SHAPE)


def test_bad_input_is_refused_and_harms_nothing(alone: EagleDrafter, batch: BatchDrafter) -> None:
    session = batch.open()
    features, following = fill(session, 10, 1)
    with pytest.raises(UsageError, match=r"token ids run from 96 to 96, expected 0 to 95"):
        session.commit([96])
    with pytest.raises(UsageError, match="features are for rows 8 to 11, expected rows below 10"):
        session.feed(8, features[:4])
    with pytest.raises(UsageError, match=r"features have shape \[3, 95\], expected \[rows, 96\]"):
        session.feed(0, features[:3, 1:])
    with pytest.raises(UsageError, match="features are not finite"):
        session.feed(0, features[:3] * np.float32(np.inf))
    for _ in range(6):
        session.feed(0, features[:8])
    with pytest.raises(UsageError, match="66 rows of features wait, expected at most 64"):
        session.feed(0, features[:8])
    rest(batch, session, official=True)
    same(session.tree.best(SHAPE.total, official=True), expected(alone, features, following))
    with pytest.raises(UsageError, match="nothing to draft from"):
        batch.trees([session, batch.open()], SHAPE)


def test_overflow_breaks_only_its_own_session(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["layers.0.mlp.down_proj.weight"] *= 1e5
    write_head(tmp_path / "head", base_config(draft_vocab_size=48), tensors)
    tiny_llama().save_pretrained(tmp_path / "target")
    layer = open_drafter(str(tmp_path / "head"), str(tmp_path / "target"), dtype="fp16").layer
    batch = BatchDrafter(layer, LIMITS, SHAPE)
    broken, calm = batch.open(), batch.open()
    fill(broken, 5, 1)
    assert batch.advance([(broken, 3), (calm, 3)]) == 1
    with pytest.raises(ModelError, match="the head's outputs are not numbers: load it as bf16 or fp32"):
        broken.commit([1])
    assert batch.advance([(broken, 3)]) == 0
    calm.commit([1, 2])


def test_int8_rows_do_not_depend_on_their_neighbours(tmp_path: Path, golden: dict[str, EagleLayer]) -> None:
    variant = "e3_gqa_d2t"
    layer = open_drafter(str(GOLDEN / variant / "head"), str(golden_target(variant)), dtype="int8").layer
    assert layer.precision == "int8"
    x = torch.randn(40, layer.spec.hidden, generator=torch.Generator().manual_seed(1))
    x[7] *= 1000
    together = layer.best(x, 10)[0]
    for row in range(40):
        assert torch.equal(layer.best(x[row : row + 1], 10)[0][0], together[row])
    name = "trees_T60_D7_K10"
    step = read_recording(GOLDEN / variant / f"{name}.npz", layer.spec.features.width, layer.spec.vocab)[0]
    trees = []
    for one in (layer, golden[variant]):
        batch = BatchDrafter(one, SlotLimits(1, 64, 80))
        session = batch.open()
        session.commit([0, *step.next_tokens.tolist()])
        session.feed(0, step.features)
        trees.append(batch.trees([session], DynamicTree())[0])
    shared = set(paths(trees[0])) & set(paths(trees[1]))
    assert len(shared) >= 50  # of 60: coarse, not wrong
    with pytest.raises(UsageError, match="int8 runs on the cpu only"):
        open_drafter("", "", dtype="int8", device="meta")


def paths(draft: Draft) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out

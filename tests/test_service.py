"""The loop on fake messages: who is served, in which order, and what the two schedules send."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from head_builder import VOCAB, base_config, random_tensors, write_head
from server_helpers import (
    SMALL,
    TARGET,
    Local,
    Receiver,
    as_paths,
    best_paths,
    opening,
    text,
    tiny_drafter,
    write_models,
)

from starsd.server.batch import BatchDrafter
from starsd.server.eagle_heads import load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.limits import PAPER_TREE
from starsd.server.metrics import Metrics
from starsd.server.schedules import schedule
from starsd.server.served import Head
from starsd.server.sessions import GONE
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.messages import Draft, Error, Features, HeadInfo, Prefix, Stats, Verdict


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> BatchDrafter:
    return tiny_drafter(tmp_path_factory.mktemp("service"))


def begin(local: Local, peer: bytes, count: int, seed: int) -> np.ndarray:
    """Open session 1 of a peer with a text, both in the inbox and not yet looked at."""
    tokens, data, features = text(count, seed)
    local.say(peer, opening())
    local.turn()
    local.say(peer, Prefix(1, 1, 0, tokens), Features(1, 1, 0, data))
    return features


def receiver(local: Local, peer: bytes, tokens: np.ndarray) -> Receiver:
    out = Receiver()
    out.begin(tokens)
    for draft in local.of(Draft, peer):
        out.take(draft)
    return out


def leave(local: Local) -> None:
    for peer in local.sessions.peers:
        local.say(peer, GONE)
    local.turn()


def test_everybody_comes_to_rest_with_the_best_tree(drafter: BatchDrafter) -> None:
    local = Local(drafter, msgspec.structs.replace(SMALL, rows_per_pass=5, quantum=2))
    texts = {peer: (4 + 7 * number, number) for number, peer in enumerate((b"a", b"b", b"c", b"d"))}
    features = {peer: begin(local, peer, *shape) for peer, shape in texts.items()}
    local.turn(60)
    for peer, shape in texts.items():
        tokens = text(*shape)[0]
        found = receiver(local, peer, tokens).below(len(tokens))
        # a slot of its own, so as not to have more than there are
        leave_one = best_paths(drafter, tokens, features[peer], SMALL.nodes)
        assert leave_one <= found
    assert local.service._hungry() == {}
    leave(local)


def test_a_greedy_session_takes_no_more_than_its_share(drafter: BatchDrafter) -> None:
    """One sends verdicts without end, so that its tree never rests; the others get their first nodes all the same."""
    limits = msgspec.structs.replace(SMALL, rows_per_pass=4, quantum=2, max_nodes=1_000_000)
    local = Local(drafter, limits)
    begin(local, b"greedy", 12, 1)
    local.turn(5)
    for peer in (b"b", b"c"):
        begin(local, peer, 9, 2)
    start, turns = 13, 0
    while len({peer for peer, message in local.heard if isinstance(message, Draft)}) < 3:
        local.say(b"greedy", Verdict(1, 1, start - 12, start, 0, 0, np.array([start % VOCAB])))
        start, turns = start + 1, turns + 1
        local.turn()
        assert turns <= 4
    leave(local)


def test_growing_trees_send_their_first_level_at_once_and_then_by_the_dozen(drafter: BatchDrafter) -> None:
    local = Local(drafter, msgspec.structs.replace(SMALL, rows_per_pass=2, quantum=2, nodes_per_draft=9))
    begin(local, b"a", 12, 1)
    sizes = []
    for _ in range(40):
        before = len(local.of(Draft))
        local.turn()
        sizes += [(len(draft.tokens), bool(local.service._hungry())) for draft in local.of(Draft)[before:]]
    assert sizes[0][0] == SMALL.top_k
    assert all(count >= 9 for count, growing in sizes[1:] if growing)
    assert len(sizes) > 2
    leave(local)


def test_a_pass_is_not_run_for_nobody(drafter: BatchDrafter) -> None:
    local = Local(drafter)
    begin(local, b"a", 12, 1)
    local.turn(20)
    calls: list[Any] = []
    local.head.drafter.advance, original = lambda *a, **k: calls.append(a) or 0, drafter.advance  # type: ignore
    try:
        local.turn(3)
        assert not calls
        local.say(b"a", Verdict(1, 1, 1, 13, 0, 0, np.array([1])))
        local.turn()
        assert len(calls) == 1
    finally:
        drafter.advance = original  # type: ignore[method-assign]
    leave(local)


def test_the_papers_schedule_sends_official_trees_in_order_of_arrival(drafter: BatchDrafter) -> None:
    local = Local(drafter, name="fifo")
    features = {}
    for peer in (b"b", b"a"):
        local.say(peer, opening())
        local.turn()
    for peer, count in ((b"b", 12), (b"a", 9)):
        tokens, data, features[peer] = text(count, count)
        local.say(peer, Prefix(1, 1, 0, tokens), Features(1, 1, 0, data))
    local.turn()
    assert [(peer, len(m.tokens)) for peer, m in local.heard if isinstance(m, Draft)] == [(b"b", PAPER_TREE.total - 1)]
    local.turn()
    assert [peer for peer, m in local.heard if isinstance(m, Draft)] == [b"b", b"a"]
    local.turn(3)
    for peer, count in ((b"b", 12), (b"a", 9)):
        tokens = text(count, count)[0]
        alone = drafter.open()
        alone.commit(tokens)
        alone.feed(0, features[peer])
        (tree,) = drafter.trees([alone], PAPER_TREE)
        alone.close()
        (draft,) = local.of(Draft, peer)
        assert draft.tokens.tolist() == tree.tokens[1:].tolist()
        assert draft.parents.tolist() == (tree.parents[1:] - 1).tolist()
        np.testing.assert_allclose(draft.steps, (tree.scores - tree.scores[tree.parents])[1:], atol=1e-5)
        assert receiver(local, peer, tokens).below(len(tokens)) == as_paths(tree.tokens, tree.parents)
    leave(local)


def test_the_papers_schedule_waits_for_features_and_credit(drafter: BatchDrafter) -> None:
    local = Local(drafter, name="fifo")
    begin(local, b"a", 12, 1)
    local.turn(3)
    assert len(local.of(Draft)) == 1
    fresh = text(1, 5)[1]
    local.say(b"a", Verdict(1, 1, 1, 13, 0, 0, np.array([4])))
    local.turn(3)
    assert len(local.of(Draft)) == 1  # the newest row has no true feature
    local.say(b"a", Features(1, 1, 12, fresh))
    local.turn(3)
    assert len(local.of(Draft)) == 1  # 59 of 100 nodes are under way, 60 more would be too many
    local.say(b"a", Verdict(1, 1, 2, 14, 59, 0, np.array([4])), Features(1, 1, 13, fresh))
    local.turn(3)
    draft = local.of(Draft)[1]
    assert (draft.first, draft.base, draft.seq, len(draft.tokens)) == (59, 15, 2, 59)
    assert draft.parents[0] == -1
    assert draft.parents.max() > 59
    local.turn(3)
    assert len(local.of(Draft)) == 2  # nothing has changed since
    leave(local)


def test_overflow_ends_only_its_own_session(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["layers.0.mlp.down_proj.weight"] *= 1e5
    model = write_models(tmp_path)
    write_head(tmp_path / "head", base_config(draft_vocab_size=48), tensors)
    broken = BatchDrafter(EagleLayer(load_head(model.head, model.model, dtype="fp16")), SMALL.slot_limits, SMALL.tree)
    for name in ("batched", "fifo"):
        local = Local(broken, name=name)
        local.say(b"b", opening())
        begin(local, b"a", 12, 1)
        local.turn(6)
        assert [error.message for error in local.of(Error)] == [
            "the head's outputs are not numbers: load it as bf16 or fp32"
        ]
        assert [session.peer for session in local.sessions] == [b"b"]
        leave(local)
        assert broken.pool.free == SMALL.slots


def test_heads_take_turns(drafter: BatchDrafter, tmp_path: Path) -> None:
    second = Head(HeadInfo("e" * 64, "cd", "other"), tiny_drafter(tmp_path), VOCAB, True)
    local = Local(drafter)
    local.sessions.heads["e" * 64] = second
    tokens, data, _features = text(12)
    local.say(b"a", opening(1), opening(2, fingerprint="e" * 64))
    local.turn()
    for number in (1, 2):
        local.say(b"a", Prefix(number, 1, 0, tokens), Features(number, 1, 0, data))
    local.turn()
    assert {draft.session for draft in local.of(Draft)} == {1, 2}  # one pass of each
    assert local.sessions.count(local.head) == local.sessions.count(second) == 1
    leave(local)


def test_figures_are_told_to_everybody(drafter: BatchDrafter) -> None:
    local = Local(drafter, msgspec.structs.replace(SMALL, stats_seconds=1e-9))
    begin(local, b"a", 12, 1)
    local.turn()
    values = local.of(Stats)[-1].values
    assert values["sessions"] == 1
    assert values["passes_per_s"] > 0
    assert values["rows_per_s"] > 0
    assert values["nodes_per_s"] > 0
    assert 0 <= values["drafter_idle"] < 1
    leave(local)


def test_figures_are_of_the_time_since_the_last() -> None:
    metrics = Metrics(10.0, 2.0)
    heard: list[dict[str, float]] = []
    metrics.listener = heard.append
    metrics.passed(30, 0.25)
    metrics.passed(10, 0.25)
    metrics.told(8)
    assert metrics.due(11.9, 3) is None
    expected = {"sessions": 3.0, "drafter_idle": 0.75, "passes_per_s": 1.0, "rows_per_s": 20.0, "nodes_per_s": 4.0}
    assert metrics.due(12.0, 3) == {**expected, "pass_ms": 250.0}
    assert metrics.due(14.0, 0) == {**dict.fromkeys(expected, 0.0), "drafter_idle": 1.0, "pass_ms": 0.0}
    assert len(heard) == 2


def test_the_loop_ends_when_told(drafter: BatchDrafter) -> None:
    local = Local(drafter)
    turns = iter([False, False, True])
    local.say(b"a", opening())
    local.service.run(until=lambda: next(turns))
    assert len(local.sessions) == 1
    leave(local)


def test_schedules_by_name() -> None:
    with pytest.raises(UsageError, match="schedule 'lifo' is unknown, expected one of batched, fifo"):
        schedule("lifo", SMALL)


def test_heads_that_are_replaced_are_let_go(drafter: BatchDrafter) -> None:
    for name in ("batched", "fifo"):
        local = Local(drafter, name=name)
        begin(local, b"a", 12, 1)
        local.turn(3)
        old = weakref.ref(local.head)
        local.head = Head(msgspec.structs.replace(local.head.info, head="cd"), drafter, VOCAB, True)
        local.sessions.replace([local.head], "the head was replaced: open the session again")
        local.turn()
        gc.collect()
        assert old() is None
        leave(local)


def test_a_pass_that_fails_ends_its_sessions_once(drafter: BatchDrafter) -> None:
    class Broken:
        """Passes fail; everything else is the drafter's."""

        open, trees = drafter.open, drafter.trees

        def advance(self, *arguments: object) -> int:
            raise ModelError("out of order")

    local = Local(drafter)
    local.sessions.heads[TARGET] = Head(local.head.info, Broken(), VOCAB, True)
    begin(local, b"a", 12, 1)
    local.turn(3)
    assert local.of(Error) == [Error(1, "out of order", -1.0)]
    assert drafter.pool.free == SMALL.slots

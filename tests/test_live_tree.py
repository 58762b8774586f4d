"""Live trees against trees that are grown node by node from a made-up drafter. No head, no tensors."""

from __future__ import annotations

import heapq
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd.server.drafter import Draft
from starsd.server.live_tree import Delta, LiveTree
from starsd.shared import tree

Path = tuple[int, ...]
VOCAB = 50


def children(world: int, path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The best `count` tokens after a path and their log-probabilities, the same whenever asked."""
    draw = np.random.default_rng(zlib.crc32(repr((world, path)).encode()))
    logits = draw.normal(scale=2.5, size=VOCAB)
    logp = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    order = np.argsort(-logp)[:count]
    return order.astype(np.int64), logp[order]


@dataclass
class Grower:
    """Runs a LiveTree's plans; `world` is what the rows under the tree say."""

    tree: LiveTree
    world: int
    past: Path
    entries: dict[int, Path] = field(default_factory=dict)
    calls: int = 0

    def path(self, node: int) -> Path:
        out: list[int] = []
        while node > 0:
            out.insert(0, int(self.tree.nodes.token[node]))
            node = int(self.tree.nodes.parent[node])
        return (*self.past, *out)

    def step(self, budget: int, total: int, official: bool = False) -> int:
        nodes = self.tree.frontier(budget, total, official=official)
        if len(nodes):
            entries = self.tree.claim(nodes)
            paths = [self.path(int(node)) for node in nodes]
            self.entries |= dict(zip(entries.tolist(), paths, strict=True))
            seen = self.tree.seen(entries, self.tree.entries)
            for entry, path, row in zip(entries.tolist(), paths, seen, strict=True):
                above = [self.entries[int(column)] for column in np.flatnonzero(row)]
                below_root = [path[:end] for end in range(len(self.past) + 1, len(path) + 1)]
                assert sorted(above) == below_root, entry
            found = [children(self.world, path, self.tree.top_k) for path in paths]
            self.tree.expand(nodes, np.stack([f[0] for f in found]), np.stack([f[1] for f in found]))
            self.calls += len(nodes)
        return len(nodes)

    def rest(self, budget: int, total: int, official: bool = False) -> None:
        while self.step(budget, total, official):
            pass
        assert self.tree.at_rest(total, official=official)


def best_first(world: int, past: Path, total: int, depth: int, top_k: int) -> dict[Path, np.float32]:
    """The best tree there is, one node at a time."""
    kept: dict[Path, np.float32] = {}
    heap: list[tuple[float, Path]] = [(0.0, ())]
    while heap and len(kept) < total:
        score, path = heapq.heappop(heap)
        kept[path] = np.float32(-score)
        if len(path) <= depth:
            for token, logp in zip(*children(world, past + path, top_k), strict=True):
                heapq.heappush(heap, (-float(np.float32(kept[path] + logp)), (*path, int(token))))
    return kept


def official_tree(world: int, past: Path, total: int, depth: int, top_k: int) -> list[tuple[Path, np.float32]]:
    """Level by level, `top_k` nodes each; then the best of all candidates, in generation order."""
    frontier: list[tuple[Path, np.float32]] = [((), np.float32(0))]
    everything: list[tuple[Path, np.float32]] = []
    for _ in range(depth + 1):
        level = [
            ((*path, int(token)), np.float32(score + logp))
            for path, score in frontier
            for token, logp in zip(*children(world, past + path, top_k), strict=True)
        ]
        everything += level
        frontier = sorted(level, key=lambda item: -item[1])[:top_k]
    best = sorted(range(len(everything)), key=lambda i: -everything[i][1])[: total - 1]
    return [((), np.float32(0)), *(everything[i] for i in sorted(best))]


def as_paths(draft: Draft) -> list[tuple[Path, np.float32]]:
    tree.check(draft.parents.tolist())
    out: list[Path] = [()]
    for token, parent in zip(draft.tokens[1:].tolist(), draft.parents[1:].tolist(), strict=True):
        out.append((*out[parent], token))
    return list(zip(out, draft.scores, strict=True))


sizes = st.tuples(st.integers(1, 6), st.integers(0, 4)).flatmap(
    lambda kd: st.tuples(st.just(kd[0]), st.just(kd[1]), st.integers(1, min(40, 1 + kd[0] + kd[1] * kd[0] ** 2)))
)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, world=st.integers(0, 999), budget=st.integers(1, 9))
def test_at_rest_it_is_the_best_tree(sizes: tuple[int, int, int], world: int, budget: int) -> None:
    top_k, depth, total = sizes
    grower = Grower(LiveTree(7, top_k=top_k, depth=depth, entries=60), world, (7,))
    grower.rest(budget, total)
    wanted = best_first(world, (7,), total, depth, top_k)
    assert dict(as_paths(grower.tree.best(total))) == wanted
    if budget == 1:
        assert grower.calls <= len(wanted)  # only nodes of the best tree were expanded


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, world=st.integers(0, 999), budget=st.integers(1, 9), live=st.integers(0, 20))
def test_grown_officially_it_is_the_official_tree(
    sizes: tuple[int, int, int], world: int, budget: int, live: int
) -> None:
    """Whatever else has grown before."""
    top_k, depth, total = sizes
    grower = Grower(LiveTree(7, top_k=top_k, depth=depth, entries=60), world, (7,))
    for _ in range(live):
        grower.step(2, 30)
    grower.rest(budget, total, official=True)
    assert as_paths(grower.tree.best(total, official=True)) == official_tree(world, (7,), total, depth, top_k)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), world=st.integers(0, 999))
def test_verdicts_and_features_in_between(data: st.DataObject, world: int) -> None:
    """After any history the tree at rest is the one that a new tree comes to; deltas build it at the receiver."""
    total, budget = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 6))
    grower = Grower(LiveTree(7, top_k=4, depth=3, entries=50), world, (7,))
    receiver = Receiver()
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            grower.step(budget, total)
            receiver.take(
                grower.tree.delta(total, least=data.draw(st.integers(0, 9)), most=data.draw(st.integers(0, 30)))
            )
        verdict = data.draw(st.sampled_from(["inside", "outside", "features", "nothing"]))
        if verdict == "features":
            grower.world += 1000
            grower.tree.invalidate()
        elif verdict == "outside":
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
            commit(grower, receiver, tokens)
        elif verdict == "inside" and len(grower.tree) > 1:
            node = data.draw(st.integers(1, len(grower.tree) - 1))
            path = grower.path(node)[len(grower.past) :]
            below = int(np.count_nonzero(grower.tree.nodes.parent == node))
            commit(grower, receiver, list(path))
            assert np.count_nonzero(grower.tree.nodes.parent == 0) == below
    grower.rest(budget, total)
    wanted = best_first(grower.world, grower.past, total, 3, 4)
    best = grower.tree.best(total)
    assert dict(as_paths(best)) == wanted
    fresh = Grower(LiveTree(grower.past[-1], top_k=4, depth=3, entries=50), grower.world, grower.past)
    fresh.rest(budget, total)
    assert as_paths(fresh.tree.best(total)) == as_paths(best)
    receiver.take(grower.tree.delta(total))
    assert {grower.past + path for path in wanted if path} <= receiver.known.keys()
    assert len(grower.tree.delta(total)) == 0


@dataclass
class Receiver:
    """An edge: it knows nodes by number and finds where they hang."""

    known: dict[Path, int] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)
    past: Path = (7,)

    def take(self, delta: Delta) -> None:
        assert delta.first == len(self.paths)
        for number, (parent, token) in enumerate(zip(delta.parents.tolist(), delta.tokens.tolist(), strict=True)):
            above = self.past if parent < 0 else self.paths[parent]
            self.paths[delta.first + number] = (*above, token)
            self.known[(*above, token)] = delta.first + number


def commit(grower: Grower, receiver: Receiver, tokens: list[int]) -> None:
    passed = grower.tree.reroot(tokens)
    ran = [grower.entries[int(entry)] for entry in passed]
    assert ran == [(*grower.past, *tokens[: end + 1]) for end in range(len(ran))]
    grower.past = receiver.past = (*grower.past, *tokens)


def test_growth_keeps_to_its_entries() -> None:
    grower = Grower(LiveTree(7, top_k=5, depth=9, entries=6), 1, (7,))
    while grower.step(4, 100):
        assert grower.tree.entries <= 6
    assert grower.calls == 7  # the root needs no entry
    assert not len(grower.tree.frontier(4, 100))
    token = int(grower.tree.nodes.token[1])
    grower.tree.reroot([token])
    grower.past = (7, token)
    assert grower.step(4, 100) > 0


def test_children_of_the_root_see_only_themselves() -> None:
    """Also while the last entry, which an index of -1 would mean, is in use."""
    live = LiveTree(7, top_k=2, depth=5, entries=2)
    for node in (0, 1, 3):  # the root, its best child, and that one's best child
        assert live.claim(np.array([node])).tolist() == [(-1, 0, None, 1)[node]]
        live.expand(np.array([node]), np.array([[3, 4]]), np.array([[-0.5, -1.0]], np.float32))
    assert live.reroot([3]).tolist() == [0]
    entries = live.claim(np.array([2]))
    assert entries.tolist() == [0]
    assert live.seen(entries, 2).tolist() == [[True, False]]
    assert live.seen(np.array([-1]), 2).tolist() == [[False, False]]


def test_a_verdict_keeps_what_hangs_below_it() -> None:
    live = LiveTree(7, top_k=2, depth=5, entries=10)
    root = np.array([0])
    live.claim(root)
    live.expand(root, np.array([[3, 4]]), np.array([[-0.5, -1.0]], np.float32))
    nodes = live.frontier(2, 10)
    assert nodes.tolist() == [1, 2]
    assert live.claim(nodes).tolist() == [0, 1]
    live.expand(nodes, np.array([[5, 6], [5, 8]]), np.array([[-0.25, -2.0], [-0.5, -3.0]], np.float32))
    first = live.delta(4)
    assert (first.first, first.parents.tolist()) == (0, [-1, -1, 0])
    assert first.tokens.tolist() == [3, 4, 5]
    assert first.steps.tolist() == [-0.5, -1.0, -0.25]
    assert live.reroot([4]).tolist() == [1]
    best = live.best(10)
    assert (best.tokens.tolist(), best.parents.tolist()) == ([4, 5, 8], [-1, 0, 0])
    assert best.scores.tolist() == [0.0, -0.5, -3.0]
    second = live.delta(10)
    assert (second.first, second.parents.tolist(), second.tokens.tolist()) == (3, [-1, -1], [5, 8])
    live.invalidate()
    assert len(live.delta(10)) == 0
    assert live.best(10).tokens.tolist() == [4]
    live.expand(root, np.array([[8, 9]]), np.array([[-0.125, -1.0]], np.float32))
    refined = live.best(10)
    assert (refined.tokens.tolist(), refined.scores.tolist()) == ([4, 8, 9], [0.0, -0.125, -1.0])
    assert live.delta(10).tokens.tolist() == [9]  # 8 keeps the number that it was sent under
    assert live.reroot([1, 2, 3]).tolist() == []
    assert (len(live), live.best(5).tokens.tolist()) == (1, [3])


@pytest.mark.parametrize("official", [True, False])
def test_certain_children_come_after_their_parents(official: bool) -> None:
    live = LiveTree(7, top_k=1, depth=3, entries=10)
    for _ in range(4):
        nodes = live.frontier(1, 5, official=official)
        live.claim(nodes)
        live.expand(nodes, np.array([[1]]), np.zeros((1, 1), np.float32))
    assert live.best(4, official=official).parents.tolist() == [-1, 0, 1, 2]
    assert live.at_rest(5, official=official)


def test_of_many_nodes_the_best_are_sent_first() -> None:
    live = LiveTree(7, top_k=2, depth=5, entries=10)
    root = np.array([0])
    live.claim(root)
    live.expand(root, np.array([[3, 4]]), np.array([[-0.5, -1.0]], np.float32))
    nodes = live.frontier(2, 10)
    live.claim(nodes)
    live.expand(nodes, np.array([[5, 6], [5, 8]]), np.array([[-0.1, -2.0], [-0.5, -3.0]], np.float32))
    assert len(live.delta(10, least=7)) == 0
    assert len(live.delta(10, least=3, most=2)) == 0
    first = live.delta(10, least=3, most=3)  # in generation order, though 5 is likelier than 4
    assert (first.tokens.tolist(), first.parents.tolist(), first.first) == ([3, 4, 5], [-1, -1, 0], 0)
    rest = live.delta(10, least=3)
    assert (rest.tokens.tolist(), rest.parents.tolist(), rest.first) == ([6, 5, 8], [0, 1, 1], 3)
    assert len(live.delta(10)) == 0
    live.wipe()
    live.reset(3)
    live.claim(root)
    live.expand(root, np.array([[1, 2]]), np.array([[-0.5, -1.0]], np.float32))
    assert live.delta(10).first == 0

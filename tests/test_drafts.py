"""Late trees are grafted where they go on from the tip, and only there."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from starsd.edge.drafts import MAX_NODES, Drafts, Node, Source, layout
from starsd.shared import tree
from starsd.shared.messages import Draft
from starsd.shared.phrases import Phrasebook


def draft(base: int, first: int, nodes: list[tuple[int, int, float]]) -> Draft:
    """Nodes as (parent, token, step)."""
    parents, tokens, steps = zip(*nodes, strict=True)
    return Draft(1, 1, 0, base, first, np.array(parents), np.array(tokens), np.array(steps, np.float32))


def certain(node: Node) -> float:
    return float(np.exp(node.step))


def paths(drafts: Drafts) -> set[tuple[int, ...]]:
    """Every path below the tip."""
    found: set[tuple[int, ...]] = set()
    for node, _ in drafts.best(MAX_NODES, certain):
        path: list[int] = []
        at: Node | None = node
        while at is not None:
            path.insert(0, at.token)
            at = at.parent
        found.add(tuple(path))
    return found


def test_a_tree_from_the_tip_is_kept_whole() -> None:
    drafts = Drafts([5, 6])
    drafts.graft(draft(2, 0, [(-1, 10, -0.1), (-1, 11, -1.0), (0, 12, -0.2), (1, 13, -0.3)]))
    assert paths(drafts) == {(10,), (11,), (10, 12), (11, 13)}
    assert len(drafts) == 4


def test_a_late_tree_is_kept_below_the_tip() -> None:
    text = [5, 6]
    drafts = Drafts(text)
    text += [10, 12]
    drafts.commit()
    nodes = [(-1, 10, -0.1), (-1, 11, -1.0), (0, 12, -0.2), (1, 13, -0.3), (2, 14, -0.4), (2, 15, -0.9), (4, 16, -0.1)]
    drafts.graft(draft(2, 0, nodes))
    assert paths(drafts) == {(14,), (15,), (14, 16)}


def test_a_tree_that_the_path_left_is_dropped() -> None:
    text = [5, 6]
    drafts = Drafts(text)
    text += [99]
    drafts.commit()
    drafts.graft(draft(2, 0, [(-1, 10, -0.1), (0, 12, -0.2)]))
    assert paths(drafts) == set()
    assert len(drafts) == 0


def test_children_of_a_node_that_was_committed_meanwhile_find_their_place() -> None:
    text = [5]
    drafts = Drafts(text)
    drafts.graft(draft(1, 0, [(-1, 10, -0.1), (0, 11, -0.1)]))
    text += [10, 11]
    drafts.commit()
    drafts.graft(draft(1, 2, [(1, 12, -0.1), (0, 77, -0.1), (2, 13, -0.2)]))
    assert paths(drafts) == {(12,), (12, 13)}


def test_a_token_that_came_twice_is_one_node_and_the_newer_step_counts() -> None:
    drafts = Drafts([5])
    drafts.graft(draft(1, 0, [(-1, 10, -2.0)]))
    drafts.graft(draft(1, 1, [(-1, 10, -0.5), (1, 11, -0.5), (0, 12, -0.5)]))
    assert paths(drafts) == {(10,), (10, 11), (10, 12)}
    assert drafts.best(1, certain)[0][1] == pytest.approx(np.exp(-0.5))


def test_numbers_that_begin_anew_do_not_meet_old_ones() -> None:
    drafts = Drafts([5])
    drafts.graft(draft(1, 0, [(-1, 10, -0.1), (0, 11, -0.1)]))
    drafts.renumber()
    drafts.graft(draft(1, 1, [(0, 12, -0.1)]))
    assert paths(drafts) == {(10,), (10, 11)}


def test_no_more_nodes_than_there_is_room_for() -> None:
    drafts = Drafts([5])
    for first in range(0, 2 * MAX_NODES, 500):
        drafts.graft(draft(1, first, [(-1, 1000 + first + i, -0.1) for i in range(500)]))
    assert len(drafts) == MAX_NODES


def test_the_likeliest_path_is_the_trunk() -> None:
    drafts = Drafts([5])
    nodes = [(-1, 10, -1.0), (-1, 11, -0.1), (0, 12, -0.1), (1, 13, -0.7), (1, 14, -0.2), (4, 15, -0.1)]
    drafts.graft(draft(1, 0, nodes))
    found = drafts.best(6, certain)
    assert all(a >= b for (_, a), (_, b) in pairwise(found))
    rows, parents = layout([node for node, _ in found])
    assert [node.token for node in rows[:3]] == [11, 14, 15]
    tree.check(parents)
    assert tree.trunk(parents) == 4
    for row, node in enumerate(rows, start=1):
        above = parents[row]
        assert (node.parent is None) == (above == 0)
        assert node.parent is None or rows[above - 1] is node.parent


def test_the_best_are_a_tree_however_few() -> None:
    drafts = Drafts([5])
    drafts.graft(draft(1, 0, [(-1, 10, -0.1), (0, 11, -0.1), (1, 12, -0.1), (-1, 13, -0.25)]))
    for count, expected in enumerate([[], [10], [10, 11], [10, 11, 13], [10, 11, 13, 12], [10, 11, 13, 12]]):
        found = [node for node, _ in drafts.best(count, certain)]
        assert [node.token for node in found] == expected
        tree.check(layout(found)[1])


@pytest.mark.parametrize("late", [False, True])
def test_who_knows_more_has_the_word(late: bool) -> None:
    drafts = Drafts([5])
    for turn in (late, not late):
        if turn:
            drafts.suggest([10, 11], -0.5)
        else:
            drafts.graft(draft(1, 0, [(-1, 10, -0.125)]))
    found = {node.token: (node.source, node.step) for node, _ in drafts.best(9, certain)}
    assert found == {10: (Source.REMOTE, -0.125), 11: (Source.NGRAM, -0.5)}


def test_where_the_server_has_spoken_others_are_passed_over() -> None:
    drafts = Drafts([5])
    drafts.suggest([10, 11], -0.5)
    drafts.suggest([30], -0.5)

    def passed_over() -> set[int]:
        return {node.token for node, _ in drafts.best(9, certain) if node.passed_over}

    drafts.graft(draft(1, 0, [(-1, 20, -0.5)]))
    assert passed_over() == set()  # one is no opinion yet
    drafts.graft(draft(1, 1, [(-1, 10, -0.5)]))
    assert passed_over() == {30}  # 10 is the server's word now, and of what follows it has said nothing
    drafts.suggest([40], -0.5)
    assert passed_over() == {30, 40}


class Book(Phrasebook):
    """Says so much of so few contexts; notes what it is asked."""

    def __init__(self, known: dict[tuple[int, int], list[tuple[int, float]]]) -> None:
        self.known, self.asked = known, list[tuple[int, int]]()

    def follow(self, older: int, newer: int) -> list[tuple[int, float]]:
        self.asked.append((older, newer))
        return self.known.get((older, newer), [])


def test_phrases_go_on_from_the_tip_and_from_whoever_is_likely() -> None:
    drafts = Drafts([4, 5])
    drafts.graft(draft(2, 0, [(-1, 10, -0.25), (-1, 20, -6.0)]))
    book = Book(
        {(4, 5): [(10, -1.0), (30, -2.0)], (5, 10): [(11, -0.5)], (10, 11): [(12, -0.5)], (5, 30): [(31, -9.0)]}
    )
    for _ in range(2):
        found = [(node.token, node.source, node.step) for node, _ in drafts.best(9, certain, None, book)]
        assert found == [
            (10, Source.REMOTE, -0.25),
            (11, Source.PHRASE, -0.5),
            (12, Source.PHRASE, -0.5),
            (30, Source.PHRASE, -2.0),
            (20, Source.REMOTE, -6.0),
            (31, Source.PHRASE, -9.0),
        ]
    # once each, the tip every time, and never what is hardly reached
    assert book.asked == [(4, 5), (5, 10), (10, 11), (11, 12), (5, 30), (4, 5)]


def test_phrases_of_a_lone_token() -> None:
    book = Book({(-1, 5): [(6, -0.5)], (5, 6): [(7, -0.5)]})
    assert [node.token for node, _ in Drafts([5]).best(9, certain, None, book)] == [6, 7]


def test_what_a_pass_foretold_comes_first() -> None:
    drafts = Drafts([5])
    drafts.graft(draft(1, 0, [(-1, 10, -0.1), (-1, 20, -3.0)]))
    drafts.expect([20, 21], Source.NGRAM)
    rows, _ = layout([node for node, _ in drafts.best(9, lambda node: 0.97 if node.sure else certain(node))])
    assert [node.token for node in rows] == [20, 21, 10]
    # the server had proposed 20; who led the pass there is credited with the rest, or else whoever stands above it
    assert [node.source for node in rows] == [Source.REMOTE] * 3
    drafts.expect([40, 41], Source.PHRASE)
    found = {node.token: node.source for node, _ in drafts.best(9, certain)}
    assert (found[40], found[41]) == (Source.PHRASE, Source.PHRASE)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_delays_nothing_hangs_where_it_does_not_belong(seed: int) -> None:
    """Random deltas of one tree, late by a random number of commits: what is held is exactly what the tree has below
    the tip."""
    rng = random.Random(seed)
    text = [1]
    known: dict[int, tuple[int, ...]] = {}  # number → path from the first base
    drafts, waiting, first = Drafts(text), [], 0
    for _ in range(60):
        parents = [rng.choice([-1, *known][-12:]) for _ in range(rng.randint(0, 4))]
        nodes = []
        for i, parent in enumerate(parents):
            token = rng.randint(0, 2)
            known[first + i] = (*known.get(parent, ()), token)
            nodes.append((parent, token, -0.1))
        if nodes:
            waiting.append(draft(1, first, nodes))
            first += len(nodes)
        while waiting and rng.random() < 0.4:
            drafts.graft(waiting.pop(0))
        if rng.random() < 0.15:
            text.append(rng.randint(0, 2))
            drafts.commit()
    for late in waiting:
        drafts.graft(late)
    committed = tuple(text[1:])
    below = {path[len(committed) :] for path in known.values() if path[: len(committed)] == committed}
    assert paths(drafts) == below - {()}


def test_what_is_forbidden_is_dropped_with_all_below() -> None:
    drafts = Drafts([5])
    for tokens in ([1, 2], [1, 3], [4]):
        drafts.suggest(tokens, -0.1)
    found = drafts.best(9, lambda node: 0.5, lambda node: node.token != 1)
    assert [node.token for node, _ in found] == [4]
    assert [node.token for node in drafts.roots] == [4]


def test_what_is_forced_stands_alone() -> None:
    drafts = Drafts([5])
    for tokens in ([1, 2], [1, 3], [4]):
        drafts.suggest(tokens, -0.1)
    drafts.force([1, 3, 6])
    path = [node for node, _ in drafts.best(9, lambda node: 0.5)]
    assert [node.token for node in path] == [1, 3, 6]
    assert all(node.source is Source.GRAMMAR and node.sure for node in path)

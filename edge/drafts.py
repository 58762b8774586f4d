"""Drafts that may still come true: a tree of tokens under the tip, from whoever proposed them.

Several sources grow it. N-grams and phrases are at hand and hang from the tip at once. Remote drafts arrive late: their
tree hangs from a token that was the tip when the server last heard of us. They are *grafted*: followed along what has
been committed since, and kept where they go on from there. So a node stays known by its number after it was committed,
since its children may still be on their way.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from starsd.shared.messages import Draft
from starsd.shared.phrases import Phrasebook

MAX_NODES = 1024  # that may wait here; what comes beyond is dropped
_WORTH_EXTENDING = 0.04  # chance of being reached below which what follows is worth no row of a pass
_OPINION = 2  # children that the server proposes where it has expanded a node; one may be all that came so far
_SPINE = 1024  # committed nodes whose children may still come


class Source(IntEnum):
    """Who proposed a node, those who know more first: of several that propose it their word counts."""

    REMOTE = 0
    NGRAM = 1
    PHRASE = 2
    GRAMMAR = 3  # no other token is legal there


@dataclass(eq=False)
class Node:
    """`step` is the log-probability after the parent; `parent` None: the tip."""

    token: int
    step: float
    source: Source
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    passed_over: bool = False  # the server proposed others in its place
    extended: bool = False  # the phrasebook was asked what follows it
    sure: bool = False  # a pass has already all but confirmed it: see `Drafts.expect`


Estimate = Callable[[Node], float]  # probability that a node is right, its parent being right
Allows = Callable[[Node], bool]  # whether a node may follow its parent, which may be where it is


class Drafts:
    """The tree under the newest of `tokens`, the conversation so far, which is read and never changed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.begin()

    def begin(self) -> None:
        """Forget everything: the conversation is another one, or shorter than it was."""
        self.roots: list[Node] = []
        self._length = len(self._tokens)  # committed tokens that the tree's root takes into account
        self._live: dict[int, Node] = {}
        self._spine: OrderedDict[int, int] = OrderedDict()  # node → position of the token it became
        self._count = 0

    def renumber(self) -> None:
        """Node numbers begin anew; what they meant so far stays, but nobody will speak of it."""
        self._live.clear()
        self._spine.clear()

    def __len__(self) -> int:
        return self._count

    def commit(self) -> None:
        """Follow the tokens that were appended to the conversation; what left their path is dropped."""
        for position in range(self._length, len(self._tokens)):
            token = self._tokens[position]
            passed = next((node for node in self.roots if node.token == token), None)
            self.roots = passed.children if passed else []
            for node in self.roots:
                node.parent = None
            for number in [n for n, node in self._live.items() if node is passed]:
                self._remember(number, position)
        self._length = len(self._tokens)
        kept = set(map(id, self._walk()))
        self._live = {number: node for number, node in self._live.items() if id(node) in kept}
        self._count = len(kept)

    def graft(self, draft: Draft) -> None:
        """Add the nodes of a delta that hang below the tip."""
        parents, tokens, steps = draft.parents.tolist(), draft.tokens.tolist(), draft.steps.tolist()
        for number, (above, token, step) in enumerate(zip(parents, tokens, steps, strict=True), start=draft.first):
            if (parent := self._live.get(above)) is not None:
                self._attach(parent, token, step, number)
            elif above < 0 or above in self._spine:
                position = (draft.base if above < 0 else self._spine[above] + 1) - 1
                self._follow(position + 1, token, step, number)

    def suggest(self, tokens: Sequence[int], step: float) -> None:
        """Add a path below the tip, found in the conversation itself; every node with this log-probability."""
        node = None
        for token in tokens:
            node = self._child(node, token, step, Source.NGRAM)
            if node is None:
                return

    def expect(self, tokens: Sequence[int], source: Source) -> None:
        """A pass foretold this path below the tip; only its trunk may decide, so the path is verified once more.

        It was a draft of `source` that led there: what nobody else proposed counts as its.
        """
        node = None
        for token in tokens:
            siblings = self.roots if node is None else node.children
            known = next((sibling for sibling in siblings if sibling.token == token), None)
            if (node := known or self._child(node, token, 0.0, source)) is None:
                return
            node.sure, source = True, node.source

    def force(self, tokens: Sequence[int]) -> None:
        """Nothing but this path can follow the tip; what else hangs beside it is dropped."""
        node = None
        for token in tokens:
            above, node = node, self._child(node, token, 0.0, Source.GRAMMAR)
            if node is None:
                return
            node.source, node.sure = Source.GRAMMAR, True
            siblings = self.roots if above is None else above.children
            siblings[:] = [node]

    def best(
        self, limit: int, estimate: Estimate, allows: Allows | None = None, phrases: Phrasebook | None = None
    ) -> list[tuple[Node, float]]:
        """Up to `limit` nodes with the probability of their whole path, highest first, parents before children.

        A node that `allows` says no to is dropped for good, and all below it. A phrasebook is asked what follows the
        tip and each node that is likely to be reached, whoever proposed it.
        """
        found: list[tuple[Node, float]] = []
        if phrases is not None:
            self._extend(None, phrases)
        heap = [(-estimate(node), order, node) for order, node in enumerate(self.roots)]
        heapq.heapify(heap)
        order = len(heap)
        while heap and len(found) < limit:
            negative, _, node = heapq.heappop(heap)
            if allows is not None and not allows(node):
                (self.roots if node.parent is None else node.parent.children).remove(node)
                continue
            found.append((node, -negative))
            if phrases is not None and not node.extended and -negative >= _WORTH_EXTENDING:
                self._extend(node, phrases)
            for child in node.children:
                heapq.heappush(heap, (negative * estimate(child), order, child))
                order += 1
        return found

    def _extend(self, node: Node | None, phrases: Phrasebook) -> None:
        """Hang what may follow below a node, None: the tip."""
        if node is None:
            older, newer = self._tokens[-2] if len(self._tokens) > 1 else -1, self._tokens[-1]
        else:
            node.extended = True
            older, newer = node.parent.token if node.parent is not None else self._tokens[-1], node.token
        for token, step in phrases.follow(older, newer):
            self._child(node, token, step, Source.PHRASE)

    def _walk(self) -> Iterator[Node]:
        waiting = list(self.roots)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children

    def _follow(self, position: int, token: int, step: float, number: int) -> None:
        """Place a node that stands for the token at this position."""
        if position < self._length:
            if self._tokens[position] == token:
                self._remember(number, position)
        elif position == self._length:
            self._attach(None, token, step, number)

    def _attach(self, parent: Node | None, token: int, step: float, number: int) -> None:
        node = self._child(parent, token, step, Source.REMOTE)
        if node is not None:
            self._live[number] = node

    def _child(self, parent: Node | None, token: int, step: float, source: Source) -> Node | None:
        """The child with this token, new or known; None when there is no room for a new one."""
        siblings = self.roots if parent is None else parent.children
        for node in siblings:
            if node.token == token:
                if source <= node.source and not node.sure:
                    changed, node.source, node.step = node.source is not source, source, step  # the newer word counts
                    if changed:
                        _compare(siblings)
                return node
        if self._count >= MAX_NODES:
            return None
        node = Node(token, min(step, 0.0) if math.isfinite(step) else -math.inf, source, parent)
        siblings.append(node)
        self._count += 1
        _compare(siblings)
        return node

    def _remember(self, number: int, position: int) -> None:
        self._spine[number] = position
        if len(self._spine) > _SPINE:
            self._spine.popitem(last=False)


def _compare(siblings: Sequence[Node]) -> None:
    """Mark what others propose where the server has spoken: it has looked there, and has seen better."""
    spoken = sum(node.source is Source.REMOTE for node in siblings) >= _OPINION
    for node in siblings:
        node.passed_over = spoken and node.source is not Source.REMOTE


def layout(nodes: Sequence[Node]) -> tuple[list[Node], list[int]]:
    """Nodes as rows of a pass behind the tip, and parents of all rows, the tip's included.

    The likeliest path comes first: it is the trunk, and where branches are noisy it alone decides. `nodes` hold every
    node's parent and are ordered by probability.
    """
    chosen = set(map(id, nodes))
    best: dict[int, Node] = {}
    for node in nodes:
        best.setdefault(id(node.parent), node)
    rows: list[Node] = []
    below = best.get(id(None))
    while below is not None:
        rows.append(below)
        below = best.get(id(below))
    trunk = set(map(id, rows))
    rows += [node for node in nodes if id(node) not in trunk]
    place = {id(node): row for row, node in enumerate(rows, start=1)}
    assert len(place) == len(chosen)
    return rows, [-1, *(0 if node.parent is None else place[id(node.parent)] for node in rows)]

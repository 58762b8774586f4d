"""Nodes of one live tree as columns of numbers, so that nothing is done node by node.

A node is an index. Index 0 is the root and parents come before children, always: `append` adds behind, `compact` keeps
the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.server.drafter import Floats, Ints

Marks = NDArray[np.bool_]

ROOT = 0


def _column(table: str, row: int) -> Any:
    """A column of `Nodes`: a view (count,) of one row of a table, which can be written through."""
    return property(lambda nodes: getattr(nodes, table)[row, : nodes.count])


class Nodes:
    """At most `capacity` nodes."""

    token: Ints = _column("_whole", 0)
    parent: Ints = _column("_whole", 1)  # an index, the root has -1
    depth: Ints = _column("_whole", 2)
    rank: Ints = _column("_whole", 3)  # among its siblings, best first
    entry: Ints = _column("_whole", 4)  # where its K/V is, -1: nowhere
    epoch: Ints = _column("_whole", 5)  # of its expansion, -1: none
    number: Ints = _column("_whole", 6)  # what the receiver knows it by, see `tell`; -1: the root, or not sent
    step: Floats = _column("_real", 0)  # log-probability after its parent
    score: Floats = _column("_real", 1)  # sum of steps from the root, which has 0
    sent: Marks = _column("_flags", 0)

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._whole = np.zeros((7, capacity), np.int64)
        self._real = np.zeros((2, capacity), np.float32)
        self._flags = np.zeros((1, capacity), np.bool_)
        self.told = 0  # nodes that were numbered so far

    def reset(self, token: int) -> None:
        """Only a new root, which has not been expanded; it counts as sent, since the receiver chose it."""
        self.count = 1
        self._whole[:, ROOT] = token, -1, 0, 0, -1, -1, -1
        self._real[:, ROOT] = 0
        self._flags[:, ROOT] = True

    def append(self, parents: Ints, tokens: Ints, ranks: Ints, steps: Floats) -> None:
        """Children (n,) of these nodes, neither expanded nor sent."""
        start, self.count = self.count, self.count + len(parents)
        added = slice(start, self.count)
        self.token[added], self.parent[added], self.rank[added] = tokens, parents, ranks
        self.depth[added] = self.depth[parents] + 1
        self.entry[added] = self.epoch[added] = self.number[added] = -1
        self.step[added] = steps
        self.score[added] = self.score[parents] + steps
        self.sent[added] = False

    def compact(self, keep: Marks) -> Ints:
        """Only these nodes, which hold every node's parent but the first one's; the new index of each old one.

        The first of them is the root from now on.
        """
        place: Ints = np.cumsum(keep) - 1
        count = int(place[-1]) + 1
        for table in (self._whole, self._real, self._flags):
            table[:, :count] = table[:, : self.count][:, keep]
        self.count = count
        self.parent[1:] = place[self.parent[1:]]
        self.depth[:] -= self.depth[ROOT]
        self.parent[ROOT], self.rank[ROOT], self.step[ROOT], self.number[ROOT] = -1, 0, 0, -1
        self.sent[ROOT] = True
        return place

    def tell(self, nodes: Ints) -> int:
        """Number these nodes in this order, after all that were numbered before; the first one's number."""
        first, self.told = self.told, self.told + len(nodes)
        self.number[nodes] = np.arange(first, self.told)
        self.sent[nodes] = True
        return first

    def wipe(self) -> None:
        """Only a root is left, numbers start anew, and no token of anybody's text remains."""
        for table in (self._whole, self._real, self._flags):
            table[:] = 0
        self.told = 0
        self.reset(0)

    def levels(self) -> Iterator[Ints]:
        """Nodes of each level below the root."""
        depth = self.depth
        return (np.flatnonzero(depth == level) for level in range(1, int(depth.max()) + 1))

    def add_up(self) -> None:
        """Scores anew from steps, so that they carry no history."""
        self.score[ROOT] = 0
        for nodes in self.levels():
            self.score[nodes] = self.score[self.parent[nodes]] + self.step[nodes]

    def without(self, gone: Ints) -> Marks:
        """Marks all nodes but these and whatever hangs below them."""
        keep = np.ones(self.count, np.bool_)
        keep[gone] = False
        for nodes in self.levels():
            keep[nodes] &= keep[self.parent[nodes]]
        return keep

    def below(self, node: int) -> Marks:
        """Marks this node and whatever hangs below it."""
        keep = np.zeros(self.count, np.bool_)
        keep[node] = True
        for nodes in self.levels():
            keep[nodes] |= keep[self.parent[nodes]]
        return keep

    def places(self, nodes: Ints) -> Ints:
        """For every node its place among these, -1 for all others."""
        out = np.full(self.count, -1)
        out[nodes] = np.arange(len(nodes))
        return out

    def children(self, places: Ints) -> Ints:
        """Nodes whose parent has a place (see `places`)."""
        return ROOT + 1 + np.flatnonzero(places[self.parent[1:]] >= 0)

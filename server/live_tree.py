"""A tree that keeps growing, best nodes first, and moves its root along what the target commits. No tensors here.

Words of this file. A node is *expanded* when its row ran and its `top_k` children are known. Expansions are valid for
one *epoch*: when the rows under the tree change (`invalidate`: true features landed) every node is due again, and its
children are matched by token, so that the tree is refined rather than regrown. A node is *confirmed* when its parent's
expansion is of this epoch; only confirmed nodes are offered. Scores are float32 sums of log-probabilities from the
root, which has 0; they are summed anew from the root after each change, so that they carry no history.

At rest, and the official tree. Let best(T) be the root and the T - 1 best confirmed nodes. The tree *rests* for T when
no node of best(T) is due: a child never scores more than its parent, so nothing that is still to come could enter.
best(T) is then the best tree of T nodes there is with `top_k` children a node and `depth` expanded levels.

The official tree (`DynamicTree`) expands only the `top_k` best nodes of each level. It picks the same T nodes unless
one of them hangs below a node that the official beam cut; then its sum of scores is the smaller one. `official=True`
looks at, expands and offers exactly the official candidates, whatever else has grown, so that equality is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starsd.server.drafter import Draft, Floats, Ints
from starsd.server.tree_nodes import ROOT, Marks, Nodes


@dataclass(frozen=True)
class Delta:
    """Nodes that were not sent before, parents first: `parents`, `tokens` int64 (n,), `steps` float32 (n,).

    They are numbered from `first` on. Parents are numbers, of an earlier delta or of this one; -1 is the present root.
    Steps are log-probabilities after the parent.
    """

    first: int
    parents: Ints
    tokens: Ints
    steps: Floats

    def __len__(self) -> int:
        return len(self.tokens)


class LiveTree:
    """One session's tree. At most `entries` nodes besides the root can be expanded at a time, so memory is bounded.

    An index into `nodes` is good until the next `expand` or `reroot`.
    """

    def __init__(self, root: int, *, top_k: int = 10, depth: int = 7, entries: int = 128) -> None:
        self.top_k, self.depth = top_k, depth
        self.nodes = Nodes(1 + (1 + entries) * top_k)
        self._free = np.ones(entries, np.bool_)
        # row sees column, among entries: itself and its ancestors
        self._sees = np.zeros((entries, entries), np.bool_)
        self._epoch = 0
        self.reset(root)

    def __len__(self) -> int:
        return self.nodes.count

    @property
    def entries(self) -> int:
        """Entries in use lie below it."""
        used = np.flatnonzero(~self._free)
        return int(used[-1]) + 1 if len(used) else 0

    def reset(self, root: int) -> None:
        """Forget all nodes; only this root is left."""
        self._free[:] = True
        self._sees[:] = False
        self.nodes.reset(root)

    def wipe(self) -> None:
        """Forget also what was sent: numbers start anew."""
        self.nodes.wipe()
        self.reset(0)

    def invalidate(self) -> None:
        """The rows below the tree changed: every expansion is due again."""
        self._epoch += 1

    @property
    def root_due(self) -> bool:
        return bool(self.nodes.epoch[ROOT] != self._epoch)

    def frontier(self, budget: int, total: int, *, official: bool = False) -> Ints:
        """At most `budget` nodes to expand next, best first; none when the tree rests for `total`.

        Nodes that need an entry are left out when none is free.
        """
        levels = self._beam()[0] if official else [self._best(total)]
        due = next((due for level in levels if len(due := self._due(level))), np.empty(0, np.int64))
        new = (self.nodes.entry[due] < 0) & (due != ROOT)
        picked: Ints = due[~new | (np.cumsum(new) <= np.count_nonzero(self._free))][:budget]
        return picked

    def at_rest(self, total: int, *, official: bool = False) -> bool:
        """Whether best(`total`) is final, or no entry is free to grow further."""
        return len(self.frontier(1, total, official=official)) == 0

    def claim(self, nodes: Ints) -> Ints:
        """Entries for the K/V of these nodes, -1 for the root; each sees itself and its ancestors from now on."""
        entry = self.nodes.entry
        below = nodes[nodes != ROOT]
        new = below[entry[below] < 0]
        entry[new] = np.flatnonzero(self._free)[: len(new)]
        self._free[entry[new]] = False
        above = entry[self.nodes.parent[below]]
        self._sees[entry[below]] = self._sees[above] & (above >= 0)[:, None]
        self._sees[entry[below], entry[below]] = True
        return entry[nodes]

    def seen(self, entries: Ints, width: int) -> Marks:
        """Which of the first `width` entries the rows at these entries see, (n, width); an entry -1 sees none."""
        marks: Marks = self._sees[entries, :width] & (entries >= 0)[:, None]
        return marks

    def expand(self, nodes: Ints, tokens: Ints, steps: Floats) -> None:
        """Give nodes their children: target ids and log-probabilities (n, k), best first, under claimed nodes."""
        own, (count, width) = self.nodes, tokens.shape
        places = own.places(nodes)
        old = own.children(places)
        new, gone = np.ones((count, width), np.bool_), old
        if len(old):
            known = places[own.parent[old]] << 32 | own.token[old]
            found = np.arange(count)[:, None] << 32 | tokens
            _, mine, theirs = np.intersect1d(known, found, return_indices=True)
            own.rank[old[mine]] = theirs % width
            own.step[old[mine]] = steps.ravel()[theirs]
            new.ravel()[theirs] = False
            gone = np.delete(old, mine)
        own.epoch[nodes] = self._epoch
        if len(gone):
            nodes = self._keep(own.without(gone))[nodes]
        row, rank = np.nonzero(new)
        own.append(nodes[row], tokens[new], rank, steps[new])
        if len(old):
            own.add_up()

    def reroot(self, tokens: Sequence[int]) -> Ints:
        """Move the root along committed tokens; entries (n,) of the expanded nodes that were passed, root excluded.

        What hangs below the new root stays. When the tokens leave the tree only the last of them remains, as the root.
        The entries are free from now on: what they hold is to be read before anything is claimed.
        """
        own, node, path = self.nodes, ROOT, []
        for token in tokens:
            below = np.flatnonzero((own.parent == node) & (own.token == token))
            if not len(below):
                break
            node = int(below[0])
            path.append(node)
        entries = own.entry[path]
        passed: Ints = entries[entries >= 0]
        if len(path) < len(tokens):
            self.reset(int(tokens[-1]))
        elif path:
            self._keep(own.below(node))
            if own.entry[ROOT] >= 0:
                self._release(own.entry[:1])
                own.entry[ROOT] = -1
            own.add_up()
        return passed

    def best(self, total: int, *, official: bool = False) -> Draft:
        """The root and the `total` - 1 best confirmed nodes, in generation order."""
        nodes = self._ordered(total, official)
        parents = np.where(nodes == ROOT, -1, self.nodes.places(nodes)[self.nodes.parent[nodes]])
        return Draft(self.nodes.token[nodes], parents, self.nodes.score[nodes])

    def delta(self, total: int, *, official: bool = False, least: int = 0, most: int | None = None) -> Delta:
        """Those of `best(total)` that were not sent before, the best `most` of them; they count as sent from now on.

        Where there are fewer than `least`, none.
        """
        own, nodes = self.nodes, self._ordered(total, official)
        nodes = nodes[~own.sent[nodes]]
        if most is not None and len(nodes) > most:
            nodes = nodes[np.isin(nodes, self._top(nodes, most))]
        if len(nodes) < least:
            nodes = nodes[:0]
        first = own.tell(nodes)
        return Delta(first, own.number[own.parent[nodes]], own.token[nodes], own.step[nodes])

    def _due(self, nodes: Ints) -> Ints:
        """Those of these nodes that are to be expanded, in the same order."""
        picked: Ints = nodes[(self.nodes.epoch[nodes] != self._epoch) & (self.nodes.depth[nodes] <= self.depth)]
        return picked

    def _best(self, total: int) -> Ints:
        """The best confirmed nodes, best first; stable, so a parent comes before a child of the same score."""
        confirmed = self.nodes.epoch[self.nodes.parent] == self._epoch
        confirmed[ROOT] = True
        return self._top(np.flatnonzero(confirmed), total)

    def _top(self, nodes: Ints, count: int) -> Ints:
        """The best of these nodes, best first; equals stay in order."""
        return nodes[np.argsort(-self.nodes.score[nodes], kind="stable")[:count]]

    def _beam(self) -> tuple[list[Ints], list[Ints]]:
        """The official frontiers so far, the root first, each best first; and their children in generation order."""
        own, frontiers, levels = self.nodes, [np.array([ROOT])], []
        for _ in range(self.depth + 1):
            above = frontiers[-1]
            if (own.epoch[above] != self._epoch).any():
                break
            places = own.places(above)
            nodes = own.children(places)
            nodes = nodes[np.lexsort((own.rank[nodes], places[own.parent[nodes]]))]
            levels.append(nodes)
            frontiers.append(self._top(nodes, self.top_k))
        return frontiers, levels

    def _ordered(self, total: int, official: bool) -> Ints:
        """`best` as indices: by level, then the parent's place among those expanded, then rank."""
        own = self.nodes
        if official:
            nodes = np.concatenate([np.array([ROOT]), *self._beam()[1]])
            kept: Ints = nodes[np.sort(np.argsort(-own.score[nodes], kind="stable")[:total])]
            return kept
        nodes = self._best(total)
        parent = own.parent[nodes]
        ordered: Ints = nodes[np.lexsort((own.rank[nodes], parent, -own.score[parent], own.depth[nodes]))]
        return ordered

    def _keep(self, marks: Marks) -> Ints:
        """Keep only these nodes; the new index of each old one."""
        gone = self.nodes.entry[~marks]
        self._release(gone[gone >= 0])
        return self.nodes.compact(marks)

    def _release(self, entries: Ints) -> None:
        self._free[entries] = True
        self._sees[:, entries] = False

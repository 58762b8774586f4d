"""One conversation's rows and live tree, and what it wants of the next pass. No tensors here: `batch.py` runs passes.

The newest row decides where the tree starts. It is fed its true feature or, while that is missing, the output of the
row before it. So after a verdict:

- tokens that the tree held, and whose rows ran as its nodes, become provisional rows as they are;
- tokens that it did not hold are run one row a pass, each fed the output before it. Past `CATCH_UP` rows the older ones
  are skipped: they stay missing until their features come, so that no session can ask for unbounded work;
- when the feature of the newest row lands, the tree is refined from the root down at once; when older ones do, it is
  refined as soon as it rests, since features that trickle in must not keep a tree from growing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from starsd.server.drafter import Floats, Ints, SlotLimits
from starsd.server.live_tree import Delta, LiveTree
from starsd.server.race import RaceNoise
from starsd.server.rows import Rows
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.messages import Race

CATCH_UP = 16
_ROOT = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Plan:
    """Rows of one session in one pass, all int64 (n,): `columns` for their K/V, places in the slot's `hidden` that
    they are fed from and whose latents go to. `nodes` are the tree's; None for the one row of `row`."""

    tokens: Ints
    positions: Ints
    columns: Ints
    sources: Ints
    targets: Ints
    entries: Ints  # of the tree, -1 for a row
    nodes: Ints | None
    row: int = -1


class LiveSession:
    """Made by `BatchDrafter.open`."""

    def __init__(
        self,
        slot: int,
        limits: SlotLimits,
        tree: LiveTree,
        *,
        vocab: int,
        width: int,
        projected: bool,
        close: Callable[[int], None],
        draft_ids: Ints | None = None,
    ) -> None:
        """`draft_ids` are the target ids that the drafter knows, None where they are all."""
        self.slot = slot
        self.rows = Rows(limits.window)
        self.tree = tree
        self.projected = projected
        self.fault = ""
        self._vocab, self.width = vocab, width
        self._entries = limits.entries
        self._latent, self._fed = limits.entries, limits.entries + 1  # as in SlotPool.hidden
        self._close: Callable[[int], None] | None = close
        self._draft_ids = draft_ids
        self._noise: RaceNoise | None = None
        self._row = -1  # the newest row that has something to be fed; -1: no feature has come yet
        self._true = False  # and that is its true feature
        self._ran = False
        self._older = False  # features of older rows landed since the tree was last refined
        self._queue: deque[tuple[Ints, Floats]] = deque()
        self._moves: list[tuple[int, int]] = []  # tree entry → row whose K/V it is
        self._pointers = (self._latent, self._fed)  # where latent and feed of `_row` are at present

    @property
    def base(self) -> int:
        """Committed tokens; the root is the newest of them."""
        return self.rows.tokens

    def begin(self, tokens: int) -> None:
        """The text goes on behind `tokens` tokens that nobody here knows; only while the session holds none."""
        self._check()
        if self.rows.tokens:
            raise UsageError(f"session holds {self.rows.tokens} tokens, expected none: truncate it to 0 first")
        self.rows.begin(tokens)

    def commit(self, tokens: Sequence[int] | Ints) -> None:
        """Append the ids that the target committed: a prompt, or a verdict, which re-roots the tree."""
        self._check()
        ids = np.asarray(tokens, np.int64)
        if not len(ids):
            return
        if not 0 <= ids.min() <= ids.max() < self._vocab:
            raise UsageError(f"token ids run from {ids.min()} to {ids.max()}, expected 0 to {self._vocab - 1}")
        last = self.rows.last
        passed = self.tree.reroot(ids.tolist())
        self.rows.append(ids.tolist())
        if len(passed):
            rows = np.arange(last + 1, last + 1 + len(passed))
            self._moves += zip(passed.tolist(), rows.tolist(), strict=True)
            self.rows.hold(rows, true=False)
            before = int(passed[-2]) if len(passed) > 1 else self._pointers[0]
            self._pointers = int(passed[-1]), before
            self._row, self._true, self._ran = int(rows[-1]), False, True

    def feed(self, start: int, features: Floats) -> None:
        """True features (n, width) of rows from `start` on, in any order and any pieces; the next pass takes them."""
        self._check()
        rows = self.rows.wanted(start, len(features))
        if features.ndim != 2 or features.shape[1] != self.width:
            raise UsageError(f"features have shape {list(features.shape)}, expected [rows, {self.width}]")
        if not np.isfinite(features).all():
            raise UsageError("features are not finite: the target overflowed or the transfer broke them")
        self._drop_queued()
        waiting = sum(len(rows) for rows, _ in self._queue)
        if waiting + len(rows) > self.rows.window:
            raise UsageError(f"{waiting + len(rows)} rows of features wait, expected at most {self.rows.window}")
        if len(rows):
            self._queue.append((rows, np.array(features[len(features) - len(rows) :], np.float32)))

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` committed tokens. Growth goes on when features of the newest rows have come.

        Nodes that were handed out are forgotten, and numbered from 0 again.
        """
        self._check()
        self.rows.truncate(tokens)
        self._drop_queued()
        self.tree.wipe()
        self.tree.reset(self.rows.root)
        if self._row >= self.rows.count:
            self._row, self._ran = -1, False
        self._moves = [(entry, row) for entry, row in self._moves if row < self.rows.count]

    def draw(self, race: Race | None) -> None:
        """From now on children are ranked for an answer that is drawn so; None: by probability alone."""
        self._check()
        self._noise = None if race is None else RaceNoise(race, self._vocab, self._draft_ids)

    def noise(self, position: int) -> Floats | None:
        """What is added to the logits of the row here, which are of the token at position + 2: (draft_vocab,)."""
        return None if self._noise is None else self._noise.at(position + 2)

    def restart(self) -> None:
        """Drop all nodes; the newest row runs again before any other."""
        self._check()
        self.tree.reset(self.rows.root)

    def close(self) -> None:
        """Give the slot back; it is zeroed, as are tokens here. Closing twice is fine, all else is refused then."""
        if self._close is not None:
            self._close(self.slot)
            self._close = None
            for _, features in self._queue:
                features[:] = 0
            self._queue.clear()
            self._noise = None
            self.rows.begin(0)
            self.tree.wipe()

    def delta(self, total: int, *, official: bool = False, least: int = 0, most: int | None = None) -> Delta:
        """Nodes of the best `total` that were not handed out before, so many of them (see `LiveTree.delta`)."""
        self._check()
        return self.tree.delta(total, official=official, least=least, most=most)

    @property
    def closed(self) -> bool:
        return self._close is None

    @property
    def draws(self) -> bool:
        """Whether there is noise to rank by."""
        return self._noise is not None

    @property
    def ready(self) -> bool:
        """Whether the newest row has, or can get, something to be fed."""
        return not self.fault and self._close is not None and self._row >= 0 and self.rows.tip is not None

    @property
    def waiting(self) -> bool:
        """Whether features wait for a pass."""
        return bool(self._queue)

    @property
    def behind(self) -> bool:
        """Whether the newest row has to run before any node."""
        return self._row < self.rows.last or not self._ran or self.tree.root_due

    @property
    def told(self) -> int:
        """Nodes that were handed out since the last truncation."""
        return self.tree.nodes.told

    @property
    def newest_fed(self) -> int:
        """The newest row whose true feature has come, though no pass may have taken it; -1: none."""
        queued = (int(rows[-1]) for rows, _ in self._queue)
        return max(self.rows.newest_true, *queued, -1)

    def wants(self, total: int) -> int:
        """Rows that the next pass could run: one that is behind, or all nodes that are due; features not counted."""
        if not self.ready:
            return 0
        if self.behind:
            return 1
        return len(self.tree.frontier(self._entries + 1, total)) or int(self._older)

    def at_rest(self, total: int, *, official: bool = False) -> bool:
        """Whether passes would change nothing about the best `total`, until tokens or features come."""
        if self._queue:
            return False
        return not self.ready or not (self.behind or self._older or not self.tree.at_rest(total, official=official))

    def plan(self, budget: int, total: int, *, official: bool = False) -> Plan | None:
        """Rows for the next pass: a row that is behind, or at most `budget` nodes. None when there is nothing to do.

        Tree entries are claimed, so a plan must be run, then `finish`ed.
        """
        if not self.ready or budget < 1:
            return None
        if self.behind:
            return self._row_plan()
        nodes = self.tree.frontier(budget, total, official=official)
        if not len(nodes) and self._older:
            self._older = False
            self.tree.invalidate()
            return self._row_plan()
        return self._node_plan(nodes) if len(nodes) else None

    def finish(self, plan: Plan, tokens: Ints, steps: Floats) -> None:
        """Take the children (n, top_k) of a plan's rows."""
        if np.isnan(steps).any():
            self.fault = "the head's outputs are not numbers: load it as bf16 or fp32"
        elif plan.nodes is not None:
            self.tree.expand(plan.nodes, tokens, steps)
        else:
            self._row, self._ran = plan.row, True
            if plan.row == self.rows.last:
                self.tree.expand(_ROOT, tokens, steps)

    def take_moves(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Tree entries whose K/V go to columns, and where `hidden` has the newest row's latent and feed."""
        moves = [(self._entries - 1 - entry, self._entries + row % self.rows.window) for entry, row in self._moves]
        pointers, self._moves, self._pointers = self._pointers, [], (self._latent, self._fed)
        return moves, pointers

    def take_features(self, limit: int) -> tuple[Ints, Floats] | None:
        """At most `limit` rows that wait, in the order they came."""
        while self._queue and limit > 0:
            rows, features = self._queue.popleft()
            if len(rows) > limit:
                self._queue.appendleft((rows[limit:], features[limit:]))
            inside = rows[:limit] >= self.rows.count - self.rows.window
            if inside.any():
                return rows[:limit][inside], features[:limit][inside]
        return None

    def landed(self, rows: Ints) -> bool:
        """K/V of true rows is in place. True when the last of them is what the newest row is to be fed."""
        self.rows.hold(rows, true=True)
        newest = int(rows[-1])
        if newest < self._row or newest < self.rows.newest_true:
            self._older = True
            return False
        self._row, self._true, self._ran = newest, True, False
        self._older = False
        self.tree.invalidate()
        return True

    def columns(self, rows: Ints) -> Ints:
        """Where the K/V of rows is."""
        return self._entries + rows % self.rows.window

    def _row_plan(self) -> Plan:
        """The newest row that has something to be fed, once more if need be; then those after it."""
        again = not self._ran or self._row == self.rows.last
        row = self._row if again else max(self._row, self.rows.last - CATCH_UP) + 1
        rows = np.array([row])
        self._true = self._true and row == self._row
        self.rows.hold(rows, true=self._true)  # a row sees itself
        return Plan(
            tokens=self.rows.following(rows),
            positions=rows,
            columns=self.columns(rows),
            sources=np.array([self._fed if again else self._latent]),
            targets=np.array([self._latent]),
            entries=np.array([-1]),
            nodes=None,
            row=row,
        )

    def _node_plan(self, nodes: Ints) -> Plan:
        entries, parents = self.tree.claim(nodes), self.tree.nodes.parent[nodes]
        return Plan(
            tokens=self.tree.nodes.token[nodes],
            positions=self.rows.last + self.tree.nodes.depth[nodes],
            columns=self._entries - 1 - entries,
            sources=np.where(parents == 0, self._latent, self.tree.nodes.entry[parents]),
            targets=entries,
            entries=entries,
            nodes=nodes,
        )

    def _drop_queued(self) -> None:
        """Forget features that wait for rows which are no more, or no longer in the window."""
        count, window = self.rows.count, self.rows.window
        marked = [(rows, features, (rows < count) & (rows >= count - window)) for rows, features in self._queue]
        self._queue = deque((rows[kept], features[kept]) for rows, features, kept in marked if kept.any())

    def _check(self) -> None:
        if self._close is None:
            raise UsageError("session is closed")
        if self.fault:
            raise ModelError(self.fault)

"""One session as its edge sees it: epochs, verdicts, credit, and what was told of its tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starsd.server import drafter
from starsd.server.drafter import DynamicTree, Floats, Ints, Total
from starsd.server.limits import ServerLimits
from starsd.server.live_session import LiveSession
from starsd.shared.errors import ProtocolError, UsageError
from starsd.shared.features import codec
from starsd.shared.limits import Layout
from starsd.shared.messages import Draft, Features, HeadInfo, Open, Opened, Prefix, Verdict


class Drafting(Protocol):
    """What `BatchDrafter` does, and what may stand in for it."""

    def open(self, *, projected: bool = False) -> LiveSession: ...

    def advance(self, work: Sequence[tuple[LiveSession, int]], total: Total = None) -> int: ...

    def trees(self, sessions: Sequence[LiveSession], shape: DynamicTree) -> list[drafter.Draft]: ...


@dataclass(frozen=True, eq=False)
class Head:
    """A head that sessions are opened for."""

    info: HeadInfo
    drafter: Drafting
    vocab: int
    projects: bool  # features may go through its projector on the edge


class Served:
    """A session of a peer. Everything that its edge gets wrong raises UsageError."""

    def __init__(self, peer: bytes, message: Open, head: Head, limits: ServerLimits) -> None:
        """Takes a slot; raises CapacityError where none is free."""
        if message.vocab != head.vocab:
            raise UsageError(f"vocabulary has {message.vocab} tokens, expected the head's {head.vocab}")
        if message.projected and not head.projects:
            raise UsageError("features are projected, expected them as they are: the head has no projector")
        self._codec = codec(message.codec)
        self.peer, self.number, self.head = peer, message.session, head
        self._limits = limits
        self.live = head.drafter.open(projected=message.projected)
        self.epoch = self.seq = self.received = self.told = 0
        self.bare = True  # no node below the present root was told
        self.lag = 0  # tokens by which the edge is ahead of the drafts that reach it
        self.rested = False  # it was told that the present tree is all there is
        self.wants = 0  # rows that it wants of the next pass, see `schedules.py`
        self.drafted = 0  # tokens that the newest whole tree grew from, 0: there is none
        live = self.live
        self.opened = Opened(self.number, head.info.head, live.width, live.rows.window, limits.max_nodes)
        try:
            self.layout = Layout.of(message, self.opened)
        except ProtocolError:
            live.close()
            raise

    @property
    def credit(self) -> int:
        """Nodes that may be told before more have arrived."""
        return self._limits.max_nodes - (self.told - self.received)

    def prefix(self, message: Prefix) -> None:
        """The text anew from a token on. An epoch that is not newer than the present one is late."""
        if message.epoch <= self.epoch:
            return
        if not self.live.base:
            self.live.begin(message.start)
        elif message.start > self.live.base:
            raise UsageError(f"prefix has start {message.start}, expected at most {self.live.base}")
        self.live.truncate(message.start)
        self.live.draw(message.race)
        self.live.commit(message.tokens)
        self.epoch, self.seq, self.received, self.told = message.epoch, 0, 0, 0
        self.bare, self.drafted = True, 0
        self.rested = False

    def verdict(self, message: Verdict) -> None:
        if self._late(message.epoch):
            return
        if message.seq != self.seq + 1:
            raise UsageError(f"verdict has seq {message.seq}, expected {self.seq + 1}")
        if message.start != self.live.base:
            raise UsageError(f"verdict has start {message.start}, expected {self.live.base}")
        if not self.received <= message.received <= self.told:
            raise UsageError(f"verdict has received {message.received}, expected {self.received} to {self.told}")
        self.live.commit(message.tokens)
        self.seq, self.received, self.lag = message.seq, message.received, message.lag
        self.bare = self.bare or len(self.live.tree) == 1
        self.rested = False

    def features(self, message: Features) -> None:
        if self._late(message.epoch):
            return
        self.live.feed(message.start, self._decode(message.rows))
        self.rested = False

    def grown(self, nodes: int, *, least: int, resting: bool) -> Draft | None:
        """The next nodes of a growing tree's best `nodes`; None where fewer than `least` wait or may be told.

        A tree that is `resting` on the newest row's true feature says so once, with or without nodes, when all of it
        was told.
        """
        credit = self.credit
        delta = self.live.delta(nodes, least=least, most=max(credit, 0))
        rest = resting and not self.rested and len(delta) < credit and self.live.newest_fed == self.live.rows.last
        self.rested = self.rested or rest
        return self._draft(delta.parents, delta.tokens, delta.steps, rest) if len(delta) or rest else None

    def whole(self, tree: drafter.Draft) -> Draft:
        """A tree that grew at once; its root is known to the edge."""
        self.drafted = self.live.base
        parents = tree.parents[1:]
        steps = tree.scores[1:] - tree.scores[parents]
        return self._draft(np.where(parents == 0, -1, parents - 1 + self.told), tree.tokens[1:], steps, rest=True)

    def _draft(self, parents: Ints, tokens: Ints, steps: Floats, rest: bool) -> Draft:
        first, self.told, self.bare = self.told, self.told + len(tokens), False
        return Draft(self.number, self.epoch, self.seq, self.live.base, first, parents, tokens, steps, rest)

    def _late(self, epoch: int) -> bool:
        if epoch > self.epoch:
            raise UsageError(f"epoch is {epoch}, expected at most {self.epoch}: a prefix begins the next one")
        return epoch < self.epoch

    def _decode(self, rows: bytes | memoryview) -> Floats:
        """Rows (n, width) without the padding behind each."""
        width, size = self.live.width, self.layout.row_bytes
        own = self._codec.row_bytes(width)
        if len(rows) % size:
            raise UsageError(f"features take {len(rows)} bytes, expected a multiple of {size}")
        if own < size:
            rows = np.frombuffer(rows, np.uint8).reshape(-1, size)[:, :own].tobytes()
        try:
            return self._codec.decode(rows, width)
        except ValueError as error:
            raise UsageError(str(error)) from error

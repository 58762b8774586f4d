"""The loop of a drafter: what came in is applied, one pass grows the trees, what is new goes out.

It runs on any clock, and knows neither sockets nor bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starsd.server.metrics import Metrics
from starsd.server.schedules import Schedule, Work
from starsd.server.served import Head, Served
from starsd.server.sessions import Item, Sessions
from starsd.shared.clock import REAL, Clock, Mailbox
from starsd.shared.errors import StarsdError
from starsd.shared.messages import Stats

IDLE_SECONDS = 0.5  # that the loop waits for something to come, when there is nothing to grow


class Service:
    """Drafts for all sessions of a worker; `inbox` has pairs of a peer and what came from it (`sessions.Item`).

    What goes out goes through the `send` that the sessions were made with.
    """

    def __init__(
        self,
        sessions: Sessions,
        schedule: Schedule,
        inbox: Mailbox[tuple[bytes, Item]],
        clock: Clock = REAL,
    ) -> None:
        self.sessions = sessions
        self.metrics = Metrics(clock.now(), sessions.limits.stats_seconds)
        self._schedule, self._inbox, self._clock = schedule, inbox, clock

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            self.turn()

    def turn(self, wait: float = IDLE_SECONDS) -> None:
        """One round; waits up to `wait` seconds for messages where there is nothing else to do."""
        for peer, item in self._inbox.take(0.0 if self._hungry() else wait):
            self.sessions.apply(peer, item)
        self._tell(self.sessions.take_changed())
        for head, wants in self._hungry().items():
            work = self._schedule.next(head, wants)
            self._advance(head, work)
            self._tell(work)
        self._report()

    def _hungry(self) -> dict[Head, dict[Served, int]]:
        """Rows that sessions want of the next pass, by head."""
        found: dict[Head, dict[Served, int]] = {}
        for session in self.sessions:
            if session.wants:
                found.setdefault(session.head, {})[session] = session.wants
        return found

    def _advance(self, head: Head, work: Work) -> None:
        started = self._clock.now()
        try:
            rows = self._schedule.advance(head, work, self.sessions.count(head))
        except StarsdError as error:
            for session in work:
                self.sessions.fail(session, error)
        else:
            self.metrics.passed(rows, self._clock.now() - started)

    def _tell(self, touched: Iterable[Served]) -> None:
        """See what sessions want now that they have changed, and send what is new in their trees."""
        counts = {head: self.sessions.count(head) for head in self.sessions.heads.values()}
        for session in touched:
            if session.live.closed:
                continue
            count = counts[session.head]
            try:
                session.wants = self._schedule.wants(session, count)
                draft = self._schedule.draft(session, count)
            except StarsdError as error:
                self.sessions.fail(session, error)
                continue
            if draft is not None:
                self.metrics.told(len(draft.tokens))
                self.sessions.send(session.peer, draft)

    def _report(self) -> None:
        if (values := self.metrics.due(self._clock.now(), len(self.sessions))) is not None:
            for peer in self.sessions.peers:
                self.sessions.send(peer, Stats(values))

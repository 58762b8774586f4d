"""How long what edges say waits for the drafter, on a virtual clock."""

from __future__ import annotations

from starsd.scripts.virtual_clock import VirtualClock
from starsd.server.schedules import Name, Schedule, Work
from starsd.server.served import Head, Served
from starsd.shared.messages import Draft


class Queue:
    """A schedule that takes the time from a message that leaves its session something to grow until that begins."""

    def __init__(self, schedule: Schedule, clock: VirtualClock) -> None:
        self.waits: list[float] = []  # seconds
        self._schedule, self._clock = schedule, clock
        self._since: dict[Name, float] = {}

    def arrived(self, peer: bytes, session: int) -> None:
        """A verdict or features of this session are in the drafter's inbox."""
        self._since.setdefault((peer, session), self._clock.now())

    def wants(self, session: Served, sessions: int) -> int:
        rows = self._schedule.wants(session, sessions)
        if not rows:
            self._since.pop((session.peer, session.number), None)
        return rows

    def next(self, head: Head, wants: Work) -> Work:
        work = self._schedule.next(head, wants)
        for session in work:
            if (since := self._since.pop((session.peer, session.number), None)) is not None:
                self.waits.append(self._clock.now() - since)
        return work

    def advance(self, head: Head, work: Work, sessions: int) -> int:
        return self._schedule.advance(head, work, sessions)

    def draft(self, session: Served, sessions: int) -> Draft | None:
        return self._schedule.draft(session, sessions)

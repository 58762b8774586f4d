"""The two ways to draft for many sessions: growing all their trees in the same passes, or one whole tree at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from starsd.server.limits import PAPER_TREE, SCHEDULES, ServerLimits
from starsd.server.scheduler import DeficitRoundRobin, FirstCome, least_nodes, tree_nodes
from starsd.server.served import Head, Served
from starsd.shared.errors import UsageError
from starsd.shared.messages import Draft

Work = Mapping[Served, int]
Name = tuple[bytes, int]  # of a session: its peer and number


class Schedule(Protocol):
    """What the service asks of a schedule, for one head at a time."""

    def wants(self, session: Served, sessions: int) -> int:
        """Rows that a session wants of the next pass, when its head has so many sessions."""
        ...

    def next(self, head: Head, wants: Work) -> Work:
        """Whose turn it is, with how many rows."""
        ...

    def advance(self, head: Head, work: Work, sessions: int) -> int:
        """Do it; how many rows ran."""
        ...

    def draft(self, session: Served, sessions: int) -> Draft | None:
        """What is worth telling its edge now."""
        ...


class Batched:
    """Every pass has rows of all sessions that want some."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._turns: WeakKeyDictionary[Head, DeficitRoundRobin[Name]] = WeakKeyDictionary()

    def wants(self, session: Served, sessions: int) -> int:
        # features that wait may make one row due, so one is kept for it
        return session.live.wants(self._nodes(session, sessions)) or int(session.live.waiting)

    def next(self, head: Head, wants: Work) -> Work:
        limits = self._limits
        turns = self._turns.setdefault(head, DeficitRoundRobin(limits.rows_per_pass, limits.quantum))
        granted = _by_name(turns.next, wants)
        # features land in any case: they cost no turn
        return {session: rows for session, rows in granted.items() if rows or session.live.waiting}

    def advance(self, head: Head, work: Work, sessions: int) -> int:
        totals = [self._nodes(session, sessions) for session in work]
        return head.drafter.advance([(session.live, rows) for session, rows in work.items()], totals)

    def draft(self, session: Served, sessions: int) -> Draft | None:
        resting = not session.wants
        least = least_nodes(self._limits, bare=session.bare, resting=resting)
        return session.grown(self._nodes(session, sessions), least=least, resting=resting)

    def _nodes(self, session: Served, sessions: int) -> int:
        return tree_nodes(sessions, self._limits, session.lag)


class Fifo:
    """The paper's: the official tree of one session after the other, each sent whole, in order of arrival.

    A session's turn comes when the true feature of its newest row is there and no tree grew from its newest token yet.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._turns: WeakKeyDictionary[Head, FirstCome[Name]] = WeakKeyDictionary()
        self._drafts: dict[Served, Draft] = {}

    def wants(self, session: Served, sessions: int) -> int:
        live = session.live
        fed = live.base > 1 and live.newest_fed == live.rows.last
        return int(fed and session.drafted < live.base and session.credit >= PAPER_TREE.total)

    def next(self, head: Head, wants: Work) -> Work:
        return _by_name(self._turns.setdefault(head, FirstCome()).next, wants)

    def advance(self, head: Head, work: Work, sessions: int) -> int:
        for session, tree in zip(work, head.drafter.trees([session.live for session in work], PAPER_TREE), strict=True):
            self._drafts[session] = session.whole(tree)
        return len(work) * (1 + PAPER_TREE.depth * PAPER_TREE.top_k)

    def draft(self, session: Served, sessions: int) -> Draft | None:
        return self._drafts.pop(session, None)


def _by_name(turns: Callable[[Mapping[Name, int]], dict[Name, int]], wants: Work) -> dict[Served, int]:
    """Whose turn it is, by name: a scheduler remembers names, not sessions, which hold on to their head."""
    named = {(session.peer, session.number): session for session in wants}
    return {named[name]: rows for name, rows in turns({name: wants[named[name]] for name in named}).items()}


_SCHEDULES: dict[str, Callable[[ServerLimits], Schedule]] = dict(zip(SCHEDULES, (Batched, Fifo), strict=True))


def schedule(name: str, limits: ServerLimits) -> Schedule:
    """The schedule of this name. Raises UsageError naming those that exist."""
    if name not in _SCHEDULES:
        raise UsageError(f"schedule {name!r} is unknown, expected one of {', '.join(_SCHEDULES)}")
    return _SCHEDULES[name](limits)

"""Who gets rows of the next pass, how large trees may be, and when nodes are worth a message: numbers, nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from starsd.server.limits import ServerLimits

Key = TypeVar("Key", bound=Hashable)


class DeficitRoundRobin(Generic[Key]):
    """Rows of a pass for whoever wants some, none being left while anybody wants more (Shreedhar and Varghese 1995).

    In turn each gets `quantum` rows on its account and takes what it wants of it. Where a pass ends in somebody's turn
    the next one goes on there. So over any time two that always want more differ by no more than a quantum, however
    much one of them wants.

    Whoever wants a single row does not wait for a turn, as long as half of the pass is left for others: it is what the
    first level of a new tree takes, for which an edge waits most.
    """

    def __init__(self, room: int, quantum: int) -> None:
        self.room, self._quantum = room, quantum
        self._turns: deque[Key] = deque()
        self._account: dict[Key, int] = {}

    def next(self, wants: Mapping[Key, int]) -> dict[Key, int]:
        """Rows for each key that wants some, at most as many as it wants and `room` together."""
        self._account = {key: self._account.get(key, 0) for key in wants}
        known = dict.fromkeys(key for key in self._turns if key in wants)
        self._turns = deque(known | dict.fromkeys(wants))
        single = [key for key in self._turns if wants[key] == 1][: self.room // 2]
        granted = dict.fromkeys(wants, 0) | dict.fromkeys(single, 1)
        room, hungry = self.room - len(single), sum(wants[key] > granted[key] for key in wants)
        while room > 0 and hungry:
            key = self._turns[0]
            missing = wants[key] - granted[key]
            if missing <= 0:
                self._turns.rotate(-1)
                continue
            if not self._account[key]:
                self._account[key] = self._quantum
            taken = min(missing, self._account[key], room)
            granted[key] += taken
            room -= taken
            self._account[key] -= taken
            if taken == missing:  # whoever wants no more saves nothing up
                self._account[key] = 0
                hungry -= 1
            if not self._account[key]:
                self._turns.rotate(-1)
        return granted


class FirstCome(Generic[Key]):
    """One at a time, in the order in which they began to want something: the paper's schedule."""

    def __init__(self) -> None:
        self._queue: dict[Key, None] = {}

    def next(self, wants: Mapping[Key, int]) -> dict[Key, int]:
        """The one whose turn it is, with all that it wants; nobody when nobody wants anything."""
        self._queue = {key: None for key in self._queue if wants.get(key, 0) > 0}
        self._queue |= {key: None for key, count in wants.items() if count > 0}
        return {key: wants[key] for key in list(self._queue)[:1]}


def tree_nodes(sessions: int, limits: ServerLimits, lag: int = 0) -> int:
    """Nodes of a tree while a head has so many sessions, for an edge that is `lag` tokens ahead when drafts reach it.

    What it has committed by then must lie in the tree for the rest to be of use. So trees grow with the distance; and
    smaller ones, down to `least_nodes`, come before refusals.
    """
    wanted = limits.nodes * min(1 + lag, limits.farthest)
    shared = limits.nodes * limits.full_trees // max(sessions, 1)
    return max(min(wanted, shared), min(limits.least_nodes, limits.nodes))


def least_nodes(limits: ServerLimits, *, bare: bool, resting: bool) -> int:
    """Nodes that have to wait before a message is worth it.

    An edge that holds nothing (`bare`: none of this root's nodes went out) gets the first level at once, since until
    then it takes steps of one token. A tree at rest has nothing to wait for. In between nodes wait for each other: the
    best of a growing tree change with every pass, and a message costs about as much as a dozen nodes in it.
    """
    return 1 if bare or resting else limits.nodes_per_draft

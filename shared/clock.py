"""Time, as both loops see it: the machine's, or a simulated one that charges what it is told (`starsd.scripts`).

A loop reads `now`, spends time with `sleep`, and waits for what others send it in a `Mailbox` that its clock made. It
does nothing else that takes time on purpose, so the same loop runs on either clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")


class Mailbox(Protocol[Item]):
    """Where any thread leaves items for one loop."""

    def put(self, item: Item) -> None: ...

    def take(self, timeout: float) -> list[Item]:
        """All items there are, oldest first; when there are none, waits for one up to `timeout` seconds."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def mailbox(self) -> Mailbox[Any]: ...


class RealMailbox(Generic[Item]):
    """Items wait in memory; whoever fills it bounds it."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = threading.Condition()

    def put(self, item: Item) -> None:
        with self._filled:
            self._items.append(item)
            self._filled.notify()

    def take(self, timeout: float) -> list[Item]:
        with self._filled:
            if not self._items and timeout > 0:
                self._filled.wait(min(timeout, threading.TIMEOUT_MAX))
            items = list(self._items)
            self._items.clear()
            return items


class RealClock:
    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def mailbox(self) -> RealMailbox[Any]:
        return RealMailbox()


REAL = RealClock()

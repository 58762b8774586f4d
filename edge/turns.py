"""Whose turn it is on an engine that several conversations share: one pass each, in the order in which they asked.

Who has had its turn and wants another waits behind all who wait already, so conversations advance at the same pace and
a long prompt, which is read in pieces, holds nobody up.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """Hold one as a context manager, for a pass. It may be left by another thread than entered it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()  # each held until it is its turn

    def __enter__(self) -> Turns:
        with self._lock:
            if not self._taken:
                self._taken = True
                return self
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # interrupted: whoever comes next must not wait for us
            with self._lock:
                waits = mine in self._waiting
                if waits:
                    self._waiting.remove(mine)
            if not waits:
                self._pass_on()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

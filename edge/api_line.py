"""The line before the engine: so many answers are under way, so many requests wait, and the next one is sent away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starsd.edge.api_errors import full

FIRST_GUESS = 5.0  # seconds that an answer takes, before one was seen
MEMORY = 0.8  # how much of the estimate a new answer leaves
LONGEST_WAIT = 600.0  # seconds that a client is ever told to stay away


class Line:
    """First come, first served. Belongs to one event loop."""

    def __init__(self, turns: int, places: int, now: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        self.waiting = 0
        self._turns, self._places = turns, places
        self._free = asyncio.Semaphore(turns)
        self._now = now
        self._seconds = FIRST_GUESS

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it while inside. Raises ApiError (429) at once where the line is full."""
        if self.running + self.waiting >= self._turns + self._places:
            raise full(
                self.wait(),
                f"{self.running} answers are under way and {self.waiting} requests wait, expected at most "
                f"{self._turns} and {self._places}: try again later",
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        began = self._now()
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()
            self._seconds = MEMORY * self._seconds + (1 - MEMORY) * (self._now() - began)

    def wait(self) -> float:
        """Seconds after which a new request would likely find a turn: answers take as long as lately."""
        return min(LONGEST_WAIT, self._seconds * (self.waiting + 1) / self._turns)

"""How much may be under way to the server at a time, so that a token never queues behind features.

The bytes in flight are those sent and not yet acknowledged. What a path holds without queueing is its rate times its
shortest round trip; a little more keeps it busy, anything beyond waits in some buffer. So the window grows while
acknowledgements come soon and shrinks when they come late (delay-based, as LEDBAT, RFC 6817). Tokens ignore it.
"""

from __future__ import annotations

from collections import deque

START = 8192  # bytes
LEAST = 2048
MOST = 1 << 20
QUEUE = 0.05  # seconds that a byte may wait in buffers
TARGET = QUEUE / 2  # that it does wait, on average
GAIN = 0.5  # of the window: the most that it changes in a round trip, once it has found its size
_FORGET = 10.0  # seconds after which the shortest round trip is measured anew


class Uplink:
    """One connection's. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.window = float(START)
        self.sent = self.acked = 0
        self._marks: deque[tuple[int, float]] = deque()  # (bytes sent so far, when) of what is under way
        self._shortest = self._shortest_new = float("inf")
        self._since = 0.0
        self._growing = True

    @property
    def in_flight(self) -> int:
        return self.sent - self.acked

    @property
    def room(self) -> bool:
        """Whether more than tokens may be sent."""
        return self.in_flight < self.window

    @property
    def round_trip(self) -> float:
        """The shortest seen lately, infinite before any."""
        return min(self._shortest, self._shortest_new)

    def on_sent(self, size: int, now: float) -> None:
        self.sent += size
        self._marks.append((self.sent, now))

    def on_ack(self, received: int, now: float) -> None:
        """The server has read the first `received` bytes. What it cannot have read is not believed."""
        gained = min(received, self.sent) - self.acked
        if gained <= 0:
            return
        self.acked += gained
        when = now
        while self._marks and self._marks[0][0] <= self.acked:
            when = self._marks.popleft()[1]
        took = now - when
        if now - self._since > _FORGET:
            self._shortest, self._shortest_new, self._since = self._shortest_new, took, now
        self._shortest_new = min(self._shortest_new, took)
        ahead = 1 - (took - self.round_trip) / TARGET  # 1: no queue at all, 0: as long as it should be
        self._growing = self._growing and ahead > 0
        change = gained if self._growing else GAIN * max(ahead, -1.0) * gained
        self.window = min(MOST, max(LEAST, self.window + change))

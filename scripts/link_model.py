"""A link between edge and server as a model of time, without I/O: what goes in, and when it comes out.

    push ─► queue ─► line, `rate` bits a second ─► way, rtt / 2 + jitter ─► pop

Nothing is lost and order is kept, as in TCP: what a real link loses, TCP sends again, which looks like a stall. In a
stall nothing moves, on the line or the way. Changes of rate apply to what is still in the queue, changes of delay to
what leaves it from then on. `link_emulator` runs it between sockets, `virtual_link` on a virtual clock.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from typing import Generic, TypeVar

import msgspec

from starsd.shared.errors import UsageError

Item = TypeVar("Item")

FASTEST_KBIT = 1e6  # what a link carries that states no rate: everything is bounded
QUEUE_SECONDS, MOST_QUEUE, LEAST_QUEUE = 1.0, 256 * 1024, 4 * 1024  # a queue by default: a second's bytes, within these
_UNITS = {"bit": 1e-3, "kbit": 1.0, "mbit": 1e3, "gbit": 1e6}
_RULES = {
    "rtt_ms": (0.0, 60_000.0),
    "jitter_ms": (0.0, 60_000.0),
    "up_kbit": (1.0, FASTEST_KBIT),
    "down_kbit": (1.0, FASTEST_KBIT),
    "queue_bytes": (0, 1 << 26),
    "seed": (0, 2**63),
}


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a link is. Raises UsageError for values out of range."""

    rtt_ms: float = 0.0  # half of it each way
    jitter_ms: float = 0.0  # up to so much more, each way, evenly spread
    up_kbit: float = FASTEST_KBIT
    down_kbit: float = FASTEST_KBIT
    queue_bytes: int = 0  # in front of either line; 0: a second's worth, 4 to 256 KB
    seed: int = 0  # of the jitter

    def __post_init__(self) -> None:
        for name, (least, most) in _RULES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(f"{name} is {value}, expected {least:,.0f} to {most:,.0f}")

    def changed(self, **changes: float | None) -> LinkSettings:
        """With these fields; None leaves one as it is. Raises UsageError for unknown names and bad values."""
        if unknown := [name for name in changes if name not in _RULES]:
            raise UsageError(f"a link has no {unknown[0]}, expected one of {', '.join(_RULES)}")
        return msgspec.structs.replace(self, **{name: value for name, value in changes.items() if value is not None})


class Direction(Generic[Item]):
    """One way over a link. Times are seconds on the caller's clock, which never goes back; sizes are bytes."""

    def __init__(self, rate_kbit: float, settings: LinkSettings, salt: int) -> None:
        self._random = random.Random(f"{settings.seed} {salt}")
        self._queue: deque[tuple[int, Item]] = deque()  # size, item
        self._way: deque[tuple[float, int, Item]] = deque()  # arrival, unless one before it is later; size, item
        self._left = 0.0  # bytes of the queue's first item that are still to go
        self._behind = 0  # bytes in the queue but for its first item
        self._coming = 0  # bytes on the way, and arrived without having been taken
        self._line = 0.0  # the line is used up to here
        self._gate = 0.0  # nothing arrives before
        self._set(rate_kbit, settings)

    def change(self, now: float, rate_kbit: float, settings: LinkSettings) -> None:
        self._advance(now)
        self._set(rate_kbit, settings)

    def push(self, now: float, size: int, item: Item) -> None:
        """Put an item of `size` bytes into the queue. Who pushes looks at `room` first."""
        self._advance(now)
        if self._queue:
            self._behind += size
        else:
            self._line, self._left = max(self._line, now), size
        self._queue.append((size, item))

    def pop(self, now: float) -> Item | None:
        """The oldest item that has arrived by `now`; None: there is none."""
        self._advance(now)
        if not self._way or max(self._way[0][0], self._gate) > now:
            return None
        _, size, item = self._way.popleft()
        self._coming -= size
        return item

    def next(self) -> float:
        """When to `pop` or look for `room` again: something arrives then or leaves the queue. Infinity: never."""
        arrival = max(self._way[0][0], self._gate) if self._way else math.inf
        return min(arrival, self._line + self._left / self._bytes_per_second) if self._queue else arrival

    def room(self, now: float) -> int:
        """Bytes that still fit into the queue. What arrived and nobody took counts, beyond what the way holds."""
        self._advance(now)
        not_taken = max(0.0, self._coming - self._bytes_per_second * (self._delay + self._jitter))
        return max(0, int(self._limit - self._left - self._behind - not_taken))

    def segment(self) -> int:
        """Bytes to push at once for a smooth flow: a packet's, or a millisecond's when that is more."""
        return max(1448, int(self._bytes_per_second * 1e-3))

    def stall(self, now: float, seconds: float) -> None:
        """Nothing moves for so long from `now` on; infinity: until `resume`."""
        self._advance(now)
        self._line = max(self._line, now + seconds)
        self._gate = max(self._gate, now + seconds)

    def resume(self, now: float) -> None:
        """End any stall."""
        self._advance(now)
        self._line = self._gate = now

    def drop(self) -> None:
        """Forget everything in the queue and on the way."""
        self._queue.clear()
        self._way.clear()
        self._left, self._behind, self._coming = 0.0, 0, 0

    def _set(self, rate_kbit: float, settings: LinkSettings) -> None:
        self._bytes_per_second = rate_kbit * 1e3 / 8
        self._delay, self._jitter = settings.rtt_ms / 2e3, settings.jitter_ms / 1e3
        wanted = min(MOST_QUEUE, max(LEAST_QUEUE, int(QUEUE_SECONDS * self._bytes_per_second)))
        self._limit = settings.queue_bytes or wanted

    def _advance(self, now: float) -> None:
        """Let the line work up to `now`: what is through is on the way, of the next item a part may be."""
        while self._queue:
            through = self._line + self._left / self._bytes_per_second
            if through > now:
                if now > self._line:
                    self._left -= (now - self._line) * self._bytes_per_second
                    self._line = now
                return
            size, item = self._queue.popleft()
            self._line = through
            self._left = self._queue[0][0] if self._queue else 0.0
            self._behind -= int(self._left)
            delay = self._delay + (self._jitter * self._random.random() if self._jitter else 0.0)
            self._way.append((through + delay, size, item))
            self._coming += size


class Link(Generic[Item]):
    """Both ways: `up` from the edge to the server, and `down`."""

    def __init__(self, settings: LinkSettings, number: int = 0) -> None:
        """`number` tells apart links with the same seed."""
        self.up: Direction[Item] = Direction(settings.up_kbit, settings, 2 * number)
        self.down: Direction[Item] = Direction(settings.down_kbit, settings, 2 * number + 1)

    def change(self, now: float, settings: LinkSettings) -> None:
        self.up.change(now, settings.up_kbit, settings)
        self.down.change(now, settings.down_kbit, settings)


def parse_kbit(text: str) -> float:
    """`5mbit` as kbit/s. Raises UsageError for anything but a positive number and bit, kbit, mbit or gbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", text.strip().lower())
    if not found:
        raise UsageError(f"rate {text!r} cannot be read, expected a number and a unit, such as 64kbit or 5mbit")
    return float(found[1]) * _UNITS[found[2]]

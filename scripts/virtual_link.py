"""A link on a virtual clock: bytes are counted, not moved, and what they stand for is delivered when they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from starsd.scripts.link_model import Direction, Link, LinkSettings
from starsd.scripts.link_trace import Cut, TraceEvent
from starsd.scripts.virtual_clock import VirtualClock
from starsd.shared.errors import CapacityError

Deliver = Callable[[], None]


class VirtualWay:
    """One direction of a VirtualLink."""

    def __init__(self, clock: VirtualClock, way: Direction[Deliver]) -> None:
        self._clock, self._way = clock, way
        self._armed = math.inf  # the earliest time at which the clock will call
        self.open = True

    @property
    def room(self) -> int:
        """Bytes that still fit into its queue."""
        return self._way.room(self._clock.now())

    def send(self, size: int, deliver: Deliver) -> None:
        """Call `deliver` when `size` bytes sent now have arrived; as a callback, it may put and send.

        While the link is cut by closing they are lost. Raises CapacityError when the queue is full: a socket would
        block here. A queue with any room takes a message whole.
        """
        if not self.open:
            return
        if not self.room:
            raise CapacityError(f"queue of the link is full, {size} bytes do not fit: send when there is room")
        self._way.push(self._clock.now(), size, deliver)
        self.arm()

    def arm(self) -> None:
        """Have the clock call when something is due; to be done after every change."""
        due = self._way.next()
        if due < self._armed:
            self._armed = due
            self._clock.call_at(due, self._look)

    def _look(self) -> None:
        now = self._clock.now()
        if now >= self._armed:
            self._armed = math.inf
        while (deliver := self._way.pop(now)) is not None:
            deliver()
        self.arm()


class VirtualLink:
    """`up` from the edge to the server and `down`, with the controls of `link_trace.Controls`."""

    def __init__(self, clock: VirtualClock, settings: LinkSettings | None = None, number: int = 0) -> None:
        """`number` tells apart links with the same seed."""
        self.settings = settings or LinkSettings()
        self._clock = clock
        self._link: Link[Deliver] = Link(self.settings, number)
        self.up, self.down = VirtualWay(clock, self._link.up), VirtualWay(clock, self._link.down)

    def set(self, **changes: float | None) -> None:
        self.settings = self.settings.changed(**changes)
        self._link.change(self._clock.now(), self.settings)
        self._arm()

    def stall(self, seconds: float) -> None:
        for way in (self._link.up, self._link.down):
            way.stall(self._clock.now(), seconds)
        self._arm()

    def cut(self, how: Cut) -> None:
        """As a real one, but that nobody is told of a closed connection: both ends see silence."""
        self.up.open = self.down.open = how != "close"
        for way in (self._link.up, self._link.down):
            if how == "close":
                way.drop()
            elif how == "none":
                way.resume(self._clock.now())
            else:
                way.stall(self._clock.now(), math.inf)
        self._arm()

    def play(self, events: Sequence[TraceEvent]) -> None:
        """Let these happen, counted from now."""
        started = self._clock.now()
        for event in events:
            self._clock.call_at(started + event.at, lambda event=event: event.apply(self))  # type: ignore[misc]

    def _arm(self) -> None:
        self.up.arm()
        self.down.arm()

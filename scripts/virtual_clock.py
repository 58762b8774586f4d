"""A clock that is simulated: `sleep` and waiting cost nothing but the time they say, and hours pass in seconds.

The loops of edges and server run unchanged, each in a thread of its own, as *participants*. Exactly one runs at a time:
who sleeps or waits hands the baton to whoever is due next, and the clock jumps to that moment. So a run is
deterministic: what is due at the same moment goes in the order in which it was scheduled, whatever the processor does.

    with VirtualClock() as clock:
        clock.spawn(edge_loop, "edge 1")
        clock.spawn(service_loop, "server", daemon=True)
        clock.run()

Computation takes no time here unless it is charged with `sleep`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from starsd.shared.errors import StarsdError

Item = TypeVar("Item")

MOST_STEPS = 1_000_000  # without time passing; then nothing ever will
JOIN_SECONDS = 10.0  # that a participant gets to clean up when the run is over


class SimulationError(StarsdError):
    """A simulation cannot go on, or was used in a way that would make it wrong."""


class _Closed(BaseException):
    """Raised in participants that are suspended when the run is over, so that their threads end."""


class _Participant:
    def __init__(self, work: Callable[[], object], name: str, daemon: bool) -> None:
        self.work, self.name, self.daemon = work, name, daemon
        self.baton = threading.Lock()  # locked: it is another's turn
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.turn = 0  # counts its turns: what was scheduled for an earlier one is void


class VirtualMailbox(Generic[Item]):
    """See `Mailbox`. One participant takes; participants and callbacks put."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: list[Item] = []
        self._taker: _Participant | None = None

    def put(self, item: Item) -> None:
        self._clock._must_not_run_elsewhere()
        self._items.append(item)
        if self._taker is not None:
            self._clock._schedule(self._clock.now(), self._taker)

    def take(self, timeout: float) -> list[Item]:
        """All items there are; else waits. An infinite `timeout` waits for an item alone."""
        me = self._clock._running("take")
        if not self._items and timeout > 0:
            if self._taker is not None:
                raise SimulationError(f"{me.name} and {self._taker.name} take from one mailbox, expected one of them")
            self._taker = me
            self._clock._pause(me, timeout)
            self._taker = None
        items, self._items = self._items, []
        return items


class VirtualClock:
    """A `Clock` for participants that `spawn` adds. Time begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, int, _Participant | Callable[[], None]]] = []  # time, order, turn, whose
        self._orders = itertools.count()
        self._alive: dict[_Participant, None] = {}  # in the order of creation
        self._left = 0  # of those that are no daemons
        self._current: _Participant | None = None
        self._over = threading.Lock()  # locked while a run is under way
        self._over.acquire()
        self._until = math.inf
        self._until_all_ended = False
        self._steps = 0  # since time last moved
        self._closing = False
        self._error: BaseException | None = None

    def __enter__(self) -> VirtualClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Infinity: until the run is over."""
        self._pause(self._running("sleep"), max(0.0, seconds))

    def mailbox(self) -> VirtualMailbox[Any]:
        return VirtualMailbox(self)

    def spawn(self, work: Callable[[], object], name: str = "", *, daemon: bool = False) -> None:
        """Let `work` run as a participant from now on. Nobody waits for the end of a `daemon`."""
        participant = _Participant(work, name or f"participant {len(self._alive) + 1}", daemon)
        self._alive[participant] = None
        self._left += not daemon
        self._schedule(self._now, participant)

    def call_at(self, time: float, act: Callable[[], None]) -> None:
        """Call `act` when it is `time`, or next if it is later already. It may put and spawn, but not sleep or take."""
        self._schedule(max(time, self._now), act)

    def run(self, until: float = math.inf) -> None:
        """Let time pass: until the last participant that is no daemon has ended, or until `until`, whichever is first.

        Without such participants, until nothing is due, or `until`. May be called again to go on. Raises the error of
        a participant or callback, and SimulationError when all wait for items that nobody will put, or when they go on
        and on without time passing; the clock is closed then.
        """
        if self._closing or self._current is not None:
            raise SimulationError("the clock is closed or running, expected one that waits to be run")
        self._until, self._until_all_ended = until, self._left > 0
        self._hand_on()
        try:
            self._over.acquire()
        except BaseException:
            self._until = -math.inf  # whoever runs ends the run when it pauses
            self._over.acquire()
            self.close()
            raise
        if self._error is not None:
            self.close()
            raise self._error

    def close(self) -> None:
        """End the threads of all participants; their `finally` blocks run."""
        self._closing = True
        for participant in list(self._alive):
            if participant.thread is not None:
                participant.baton.release()
                participant.thread.join(JOIN_SECONDS)
        self._alive.clear()
        self._due.clear()

    def _schedule(self, time: float, whom: _Participant | Callable[[], None]) -> None:
        if math.isnan(time):
            raise SimulationError("time is not a number, expected seconds")
        turn = whom.turn if isinstance(whom, _Participant) else 0
        heapq.heappush(self._due, (time, next(self._orders), turn, whom))

    def _running(self, what: str) -> _Participant:
        """The participant that calls."""
        me, caller = self._current, threading.current_thread()
        if self._closing and any(each.thread is caller for each in self._alive):
            raise _Closed  # while it cleans up
        if me is None or me.thread is not caller:
            raise SimulationError(
                f"{what} outside the participant whose turn it is, expected it to be called by that one"
            )
        self._step()
        return me

    def _must_not_run_elsewhere(self) -> None:
        """A thread that is no participant would make runs differ."""
        if self._current is not None and self._current.thread is not threading.current_thread():
            raise SimulationError("put from outside while the clock runs, expected a participant or a callback")

    def _pause(self, me: _Participant, seconds: float) -> None:
        """Let others run until it is this one's turn again."""
        if seconds < math.inf:
            self._schedule(self._now + seconds, me)
        if self._hand_on(me):
            return
        me.baton.acquire()
        if self._closing:
            raise _Closed

    def _hand_on(self, me: _Participant | None = None) -> bool:
        """Give the baton to whoever is due next, or end the run. True: that is `me` again."""
        self._current = None
        whom = self._next()
        if whom is None:
            self._over.release()
            return False
        self._current = whom
        if whom is me:
            return True
        if whom.thread is None:
            whom.thread = threading.Thread(target=self._live, args=(whom,), name=whom.name, daemon=True)
            whom.thread.start()
        else:
            whom.baton.release()
        return False

    def _next(self) -> _Participant | None:
        """Move time to the next participant's turn, calling what is due before. None: the run is over."""
        try:
            while self._due and self._error is None and not (self._until_all_ended and not self._left):
                time, _, turn, whom = self._due[0]
                if isinstance(whom, _Participant) and whom.turn != turn:
                    heapq.heappop(self._due)
                    continue
                if time > self._until:
                    self._now = max(self._now, self._until)
                    return None
                heapq.heappop(self._due)
                if time > self._now:
                    self._now, self._steps = time, 0
                if isinstance(whom, _Participant):
                    whom.turn += 1
                    return whom
                self._step()
                whom()
        except BaseException as error:
            self._error = error
        if self._error is None and self._left == 0 and not self._until_all_ended and self._until < math.inf:
            self._now = max(self._now, self._until)
        if self._error is None and self._left:
            waiting = ", ".join(each.name for each in self._alive if not each.daemon)
            self._error = SimulationError(f"nothing is due after {self._now:.3f} s and these still wait: {waiting}")
        return None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise SimulationError(
                f"{MOST_STEPS:,} steps at {self._now:.3f} s, expected time to pass: somebody never sleeps"
            )

    def _live(self, me: _Participant) -> None:
        """The life of a participant's thread."""
        try:
            me.work()
        except _Closed:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._alive.pop(me, None)
        self._left -= not me.daemon
        if not self._closing:
            self._hand_on()

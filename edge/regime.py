"""What an edge lives on, in one word: judged by what its last steps were like."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starsd.edge.policy import Policy
from starsd.shared.clock import REAL

LATELY = 2.0  # seconds that it is judged by
WAITS = 0.1  # share of an edge's time from which on it is said to wait

CONNECTING, DEVICE_ONLY, WAITING, STREAMING = "connecting", "device only", "waits", "streams"
IDLE = "idle"  # connected, and nothing was asked lately


@dataclass(frozen=True)
class Lately:
    """The last seconds of an edge."""

    connected: bool = False  # now
    live: bool = False  # a step had a session at the server
    waited: float = 0.0  # share of the time that went into waiting for a draft
    remote: int = 0  # drafts of the server that were accepted


def regime(policy: Policy, was_connected: bool, lately: Lately) -> str:
    """What an edge lives on: `device only`, `waits` for each draft, `streams` drafts past its steps, or `connecting`.

    Without a connection that was there before, and where nothing of the server's is accepted, a device is alone.
    """
    if policy is Policy.PLAIN:
        return DEVICE_ONLY
    if not lately.connected:
        return DEVICE_ONLY if was_connected else CONNECTING
    if not lately.live:
        return CONNECTING
    if lately.waited > WAITS:
        return WAITING
    return STREAMING if lately.remote else DEVICE_ONLY


@dataclass(frozen=True)
class Step:
    """A pass and what went before it. Times in seconds."""

    at: float
    seconds: float
    waited: float
    remote: int
    live: bool


class Watch:
    """Remembers the last seconds' steps, of one conversation or of several in threads of their own."""

    def __init__(self, now: Callable[[], float] = REAL.now) -> None:
        self._now = now
        self._steps: deque[Step] = deque()
        self._lock = threading.Lock()

    def saw(self, step: Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._forget()

    def lately(self, connected: bool) -> Lately | None:
        """None: there was no step."""
        with self._lock:
            self._forget()
            steps = list(self._steps)
        if not steps:
            return None
        seconds = sum(step.seconds for step in steps)
        return Lately(
            connected=connected,
            live=any(step.live for step in steps),
            waited=sum(step.waited for step in steps) / seconds if seconds else 0.0,
            remote=sum(step.remote for step in steps),
        )

    def _forget(self) -> None:
        before = self._now() - LATELY
        while self._steps and self._steps[0].at < before:
            self._steps.popleft()

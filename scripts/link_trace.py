"""How a link changes over time: a JSON list of events, each at so many seconds from the start.

[{"at": 0, "rtt_ms": 20}, {"at": 5, "rtt_ms": 500, "up_kbit": 64}, {"at": 8, "stall_ms": 300},
 {"at": 9, "cut": "hole"}, {"at": 19, "cut": "none"}]
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from starsd.scripts.link_model import LinkSettings
from starsd.shared.errors import UsageError

Cut = Literal["none", "hole", "close"]
CUTS: tuple[Cut, ...] = ("none", "hole", "close")


class Controls(Protocol):
    """What can be done to a link that runs, simulated or between sockets."""

    def set(self, **changes: float | None) -> None:
        """Change fields of its LinkSettings, from now on. Raises UsageError for unknown names and bad values."""
        ...

    def stall(self, seconds: float) -> None:
        """Nothing moves for so long, then everything goes on."""
        ...

    def cut(self, how: Cut) -> None:
        """`hole`: nothing moves until `none`, and nobody is told. `close`: connections end and what is under way is
        lost; until `none` there are no new ones."""
        ...


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes `at` seconds after the start; what is not named stays."""

    at: float
    rtt_ms: float | None = None
    jitter_ms: float | None = None
    up_kbit: float | None = None
    down_kbit: float | None = None
    stall_ms: float = 0.0
    cut: Cut | None = None

    def apply(self, link: Controls) -> None:
        changes = {name: getattr(self, name) for name in ("rtt_ms", "jitter_ms", "up_kbit", "down_kbit")}
        if any(value is not None for value in changes.values()):
            link.set(**changes)
        if self.stall_ms:
            link.stall(self.stall_ms / 1e3)
        if self.cut is not None:
            link.cut(self.cut)


def read_trace(path: Path) -> tuple[TraceEvent, ...]:
    """The events of a file, in order of time. Raises UsageError saying which one is wrong."""
    try:
        events = msgspec.json.decode(path.read_bytes(), type=tuple[TraceEvent, ...])
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"trace {path} cannot be read: {error}") from error
    if not events:
        raise UsageError(f"trace {path} is empty, expected at least one event")
    for number, event in enumerate(events, start=1):
        for name in ("at", "stall_ms"):
            if not 0 <= getattr(event, name) < math.inf:
                raise UsageError(f"trace {path} event {number}: {name} is {getattr(event, name)}, expected 0 or more")
        try:
            event.apply(_Dry())
        except UsageError as error:
            raise UsageError(f"trace {path} event {number}: {error}") from error
    for number, (before, after) in enumerate(pairwise(events), start=2):
        if after.at < before.at:
            raise UsageError(f"trace {path} event {number}: at is {after.at}, expected {before.at} or more")
    return events


class _Dry:
    """Controls of no link: values are looked at and nothing happens."""

    def set(self, **changes: float | None) -> None:
        LinkSettings().changed(**changes)

    def stall(self, seconds: float) -> None:
        pass

    def cut(self, how: Cut) -> None:
        pass

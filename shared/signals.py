"""Signals that end a command: as an exception, so that what it began is undone and what it started is ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: SystemExit, with the status that a shell tells of them.

    The first does; later ones find it on its way out and are ignored: a closing session brings both. A signal that is
    ignored already stays so. In another thread than the main one nothing changes.
    """
    before: dict[int, Any] = {}
    ending = False

    def end(number: int, frame: object) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise SystemExit(128 + number)

    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)

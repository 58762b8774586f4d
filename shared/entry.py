"""How a command starts: signals are heard from its first moment on, before the imports that take a while."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterable
from types import FrameType

INTERRUPTED = 130


def start(prog: str, module: str, hold: Iterable[signal.Signals] = ()) -> int:
    """Run `main` of a module that takes a while to import; its exit status.

    Ctrl-C meanwhile ends the process quietly. Signals in `hold` wait until `module` calls `heard`: else they would
    end it before it has handlers for them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, hold)

    def interrupted(number: int, frame: FrameType | None) -> None:
        os.write(2, f"\n{prog}: interrupted\n".encode())
        os._exit(INTERRUPTED)  # nothing was begun yet; libraries that are half loaded do not take an exception well

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a job that a shell runs in the background
        signal.signal(signal.SIGINT, interrupted)
    main = importlib.import_module(module).main
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = main()
    return status


def heard(signals: Iterable[signal.Signals]) -> None:
    """There are handlers now: let signals through that were held."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

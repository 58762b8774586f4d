"""Programs that start others: their output until they end, and ending them with all that they started."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

LOOK = 0.2  # seconds between looks at whether it has ended
LEFT = 1.0  # seconds in which what it has left behind may still say something


def lines_of(child: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines of its output as they come, a carriage return ending one too, until it has ended.

    What it started and left running may hold its output open: that is not waited for.
    """
    assert child.stdout is not None
    source = child.stdout.fileno()
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    rest, until = "", None
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while until is None or time.monotonic() < until:
            if until is None and child.poll() is not None:  # asked before looking: what it wrote is there then
                until = time.monotonic() + LEFT
            if not selector.select(LOOK if until is None else 0):
                if until is not None:
                    break
                continue
            data = os.read(source, 1 << 16)
            *lines, rest = (rest + decoder.decode(data, final=not data)).split("\n")
            yield from lines
            if not data:
                break
    if rest:
        yield rest


def end_all(child: subprocess.Popen[Any], patience: float = 0.0) -> None:
    """End a child that leads a session of its own, and whatever in it: asked to at first, where there is patience.

    It has been waited for afterwards, unless the kernel cannot end it.
    """
    if patience:
        _tell(child, signal.SIGTERM)
        until = time.monotonic() + patience
        while time.monotonic() < until and (child.poll() is None or _tell(child, 0)):
            time.sleep(0.05)
    _tell(child, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)


def _tell(child: subprocess.Popen[Any], number: int) -> bool:
    """Whether anything of its session heard."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # some of it is another user's
        return True
    return True

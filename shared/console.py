"""How every command speaks: results on stdout, progress on stderr, one line when it fails."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from starsd.shared.errors import StarsdError

REDRAW_SECONDS = 0.1


class Progress(Protocol):
    """Called with what is being done, how much is done, and how much there is (0 when unknown)."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def no_progress(what: str, done: int, total: int) -> None:
    """A Progress that says nothing."""


class StderrProgress:
    """One line that rewrites itself on a terminal; a line at the start and end of each item elsewhere."""

    def __init__(self) -> None:
        self._what: str | None = None
        self._drawn = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        finished = 0 < total <= done
        started = what != self._what
        self._what = None if finished else what
        if sys.stderr.isatty():
            now = time.monotonic()
            if not (started or finished) and now - self._drawn < REDRAW_SECONDS:
                return
            self._drawn = now
            share = f"{100 * done / total:5.1f} %" if total else f"{done:,}"
            print(f"\r\x1b[K{what} {share}", end="\n" if finished else "", file=sys.stderr, flush=True)
        elif finished or started:
            print(f"{what} {'done' if finished else '…'}", file=sys.stderr, flush=True)


def emit(row: Any) -> None:
    """Print one JSON object on one line of stdout: the machine-readable form of every command."""
    sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    sys.stdout.flush()


def run(app: Callable[..., Any], argv: Sequence[str] | None, prog: str) -> int:
    """Run a typer app as a command: our own errors become one line on stderr and exit status 1."""
    try:
        app(args=None if argv is None else list(argv), prog_name=prog)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except StarsdError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise
        where = error.filename or "while writing"
        print(f"{prog}: {(error.strerror or str(error)).lower()}: {where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return 130
    return 0

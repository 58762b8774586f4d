"""How every command speaks: results on stdout, progress on stderr, one line when it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from starsd.shared.errors import MissingExtraError, StarsdError

REDRAW_SECONDS = 0.1
CLOSED_PIPE = 141  # the exit status of a command whose reader has gone, as shells tell it of other tools
_STORAGE = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


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


def run(app: Callable[..., Any], argv: Sequence[str] | None, prog: str, extra: str) -> int:
    """Run a typer app as a command: our own errors become one line on stderr and exit status 1.

    So does a library that is not installed; `extra` is what brings this command's. `--version` alone says the version.
    A reader that has gone ends the command quietly.
    """
    asked = sys.argv[1:] if argv is None else list(argv)
    status: Any = 0
    try:
        if asked == ["--version"]:
            print(f"{prog} {version('starsd')}")
        else:
            app(args=asked, prog_name=prog)
    except SystemExit as stop:
        status = CLOSED_PIPE if _reader_gone(stop.__context__) else stop.code
    except BrokenPipeError:
        status = CLOSED_PIPE
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        status = 130
    except (StarsdError, ModuleNotFoundError, OSError) as error:
        print(f"{prog}: {_one_line(error, extra)}", file=sys.stderr)
        status = 1
    status = status if isinstance(status, int) else int(status is not None)
    return status if _flushed() else CLOSED_PIPE


def _reader_gone(error: BaseException | None) -> bool:
    """Whether an exit follows from writing to a closed pipe."""
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _flushed() -> bool:
    """Write what is left to be written; False where nobody reads it any more. Then nothing is left, either."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # the interpreter flushes once more, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _one_line(error: Exception, extra: str) -> str:
    """What a user is told of an error; those that are no user's business are raised again."""
    match error:
        case StarsdError():
            return str(error)
        case ModuleNotFoundError() if error.name and not error.name.startswith("starsd"):
            return str(MissingExtraError(error.name, extra))
        case OSError() if error.errno in _STORAGE:
            return f"{(error.strerror or str(error)).lower()}: {error.filename or 'while writing'}"
    raise error

"""One at a time: a lock that a build, a flash or an update holds as long as anything it started still runs.

The kernel lets go of it when the last process that holds it ends, however that ends. Commands inherit it: where a build
is killed while NVIDIA's tools work in its tree, the next one would meet them there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from starsd.shared.errors import StorageError, UsageError

NAME = ".starsd.lock"
GRACE = 3.0  # seconds that commands of a killed process are given to notice


@contextlib.contextmanager
def alone(what: str, folder: Path, name: str = NAME) -> Iterator[None]:
    """Hold the lock file `name` of a folder, which is made where it is missing. The file stays, and says who was last.

    Whatever is run meanwhile with `close_fds=False` holds it too. Raises UsageError, naming the other process, when
    `what` ("build of …") is under way already; StorageError where the file cannot be had.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(f"{path} cannot be locked: {reason}") from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:  # what is written here must not end up elsewhere
            raise StorageError(f"{path} cannot be locked: it is no plain file, remove it")
        _take(descriptor, what, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        os.set_inheritable(descriptor, True)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, what: str, path: Path) -> None:
    until = time.monotonic() + GRACE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            other = _holder(descriptor)
            if _lives(other):
                raise UsageError(
                    f"another {what} is under way, process {other or 'unknown'}: wait for its end"
                ) from None
            if time.monotonic() >= until:
                raise UsageError(
                    f"another {what}, process {other}, was killed, and what it started still runs: "
                    f"wait for its end, or see fuser {path}"
                ) from None
        time.sleep(0.05)


def _holder(descriptor: int) -> int:
    """The process that took the lock; 0 when it has not said so yet."""
    said = os.pread(descriptor, 32, 0).strip()
    return int(said) if said.isdigit() else 0


def _lives(process: int) -> bool:
    """A process of which nothing is known counts as living; one that has ended and was not waited for does not."""
    if not process:
        return True
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] not in ("Z", "X")

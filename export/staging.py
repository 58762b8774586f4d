"""Folders that appear whole or not at all: made beside their final place, then renamed onto it.

A staged folder is locked (flock) by the process that fills it, so that whoever comes next can tell an abandoned one
from one under way, whatever happened to its maker. Making, sweeping and renaming hold the lock of the parent folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from starsd.shared.errors import StorageError

_PREFIX, _SUFFIX = ".staged-", ".tmp"
_NAME_SHOWN = 40  # characters of the final name in a staged one, which must not pass 255 bytes
_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space")
_REMEDIES |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable")
_REMEDIES |= {errno.EFBIG: "allow larger files (ulimit -f)", errno.ENAMETOOLONG: "choose a shorter name"}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def staged(final: Path, *, bytes_needed: int = 0) -> Iterator[Path]:
    """Yield an empty folder beside `final`; it becomes `final` (replacing what was there) when the block succeeds.

    On any failure, an interrupt included, it is removed and `final` is as it was. What killed processes left behind
    beside `final` is removed first. A full disk, a quota or a folder that cannot be written raises StorageError;
    `bytes_needed`, when known, is checked before anything is written.
    """
    final = final.resolve()  # the place itself when it is a link to another disk
    parent = final.parent
    with storage_errors(final, bytes_needed=bytes_needed):
        parent.mkdir(parents=True, exist_ok=True)
        require_space(parent, bytes_needed)
        with contextlib.suppress(FileNotFoundError):
            final.lstat()  # a name that is too long is told before the work
        with locked(parent):
            sweep(parent)
            folder = parent / f"{_PREFIX}{final.name[:_NAME_SHOWN]}-{secrets.token_hex(4)}{_SUFFIX}"
            folder.mkdir()
            lock = _lock(folder)
        try:
            yield folder
            _flush(folder)
            with locked(parent):
                _move(folder, final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # what `final` was before, once it has been exchanged
            if lock is not None:
                os.close(lock)


@contextlib.contextmanager
def storage_errors(path: Path, *, bytes_needed: int = 0) -> Iterator[None]:
    """Turn the operating system's word for a place that is full, read-only, forbidden or no possible one into
    StorageError."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        reason = os.strerror(error.errno or 0).lower()
        where = error.filename or path
        needed = f", {size_text(bytes_needed)} needed" if bytes_needed else ""
        raise StorageError(f"{where}: {reason}{needed}: {remedy} or point STARSD_HOME elsewhere") from error


def require_space(folder: Path, bytes_needed: int) -> None:
    """Raise StorageError unless the disk of `folder` (which need not exist yet) has `bytes_needed` bytes free."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        raise StorageError(
            f"{folder} has {size_text(free)} free, expected {size_text(bytes_needed)}: "
            "free some space or point STARSD_HOME elsewhere"
        )


def size_text(count: int) -> str:
    """A number of bytes as people read it: 92.9 MB."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def sweep(parent: Path) -> None:
    """Remove the staged folders below `parent` whose makers are gone. Call with the lock of `parent` held."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        if not folder.is_dir():
            continue  # not of our making
        lock = _lock(folder, wait=False)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def is_staged(path: Path) -> bool:
    """Whether `path` is a folder still being made, or abandoned."""
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)


def discarded(path: Path) -> Path:
    """Rename a folder to a name that counts as abandoned, and return that: from then on it is as good as removed."""
    hidden = path.with_name(f"{_PREFIX}old-{secrets.token_hex(4)}{_SUFFIX}")
    path.rename(hidden)
    return hidden


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder against other processes; wait for it as long as it takes."""
    lock = _lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool = True) -> int | None:
    """An open descriptor that holds the folder's lock; None when another holds it or the file system has no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flush(folder: Path) -> None:
    """Bring the files to the disk before the rename does: a device that loses power must not keep empty ones."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _move(folder: Path, final: Path) -> None:
    """Rename `folder` onto `final`. What was there changes places with it, so that at no time there is nothing."""
    with contextlib.suppress(OSError):
        os.rename(folder, final)  # only a missing or empty folder can be replaced in this way
        return
    if not _exchange(folder, final):
        old = discarded(final)
        os.rename(folder, final)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # glibc 2.28, musl 1.2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.tmp")
    with storage_errors(path):
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

"""The root file system of a device, changed from outside: paths that cannot lead out of it, and steps that change it.

A tree is full of links meant for the device, such as an absolute one that would end on this machine. So every path is
resolved as the device would resolve it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

import msgspec

from starsd.shared.errors import HashMismatchError, UsageError
from starsd.shared.manifest import file_sha256

_BLOCK = 1 << 20  # bytes
MOST_LINKS = 40  # as Linux has it


def inside(root: Path, path: str, *, follow_last: bool = True) -> Path:
    """Where the device's `path` is on this machine: links are followed below `root`. It need not exist.

    Raises UsageError for links without an end.
    """
    done: list[str] = []
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done[:-1]
            continue
        here = root.joinpath(*done, part)
        if here.is_symlink() and (todo or follow_last):
            links += 1
            if links > MOST_LINKS:
                raise UsageError(f"{path} in {root} is a link without an end")
            target = os.readlink(here)
            if target.startswith("/"):
                done = []
            todo += [name for name in reversed(target.split("/")) if name not in ("", ".")]
            continue
        done.append(part)
    return root.joinpath(*done)


class Folder(msgspec.Struct, frozen=True, tag="folder"):
    """A folder with that owner and mode; its missing parents are made root's, 0755."""

    path: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0


class File(msgspec.Struct, frozen=True, tag="file"):
    """A file with that content, owner and mode. A secret one shows neither content, size nor hash."""

    path: str
    content: bytes
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    secret: bool = False

    def __repr__(self) -> str:
        shown = "…" if self.secret else f"{len(self.content)} bytes"
        return f"File({self.path!r}, {shown}, mode={self.mode:04o})"


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """A file like `source` of this machine, which has so many bytes and that SHA-256; for those too large to hold."""

    path: str
    source: Path
    bytes: int
    sha256: str
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


class Link(msgspec.Struct, frozen=True, tag="link"):
    """A symbolic link, in the place of whatever file or link is there."""

    path: str
    target: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Nothing at that path; a folder there goes with all that is in it."""

    path: str


Step = Folder | File | Copy | Link | Gone


def apply(root: Path, step: Step) -> None:
    """Change the tree; doing it again changes nothing. Raises UsageError where the tree has something in the way."""
    match step:
        case Folder():
            place = inside(root, step.path)
            _make_folders(root, place)
            os.chown(place, step.uid, step.gid)
            place.chmod(step.mode)
        case File() | Copy():
            write(root, step)
        case Link():
            place = _place(root, step.path)
            if place.is_symlink() or place.exists():
                place.unlink()
            place.symlink_to(step.target)
            os.lchown(place, 0, 0)
        case Gone():
            place = _place(root, step.path, make=False)
            for one in (place, _part(place)):
                _remove(one)


def write(root: Path, file: File | Copy) -> None:
    """Write a file whole or not at all; it never is readable by more than its mode allows, not even for a moment.

    Raises HashMismatchError when the source of a copy is not what was expected.
    """
    place = _place(root, file.path)
    part = _part(place)
    _remove(part)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as stream:
        if isinstance(file, Copy):
            _copy(file, stream, part)
        else:
            stream.write(file.content)
        os.fchown(handle, file.uid, file.gid)
        os.fchmod(handle, file.mode)
        stream.flush()
        os.fsync(handle)
    part.replace(place)


def _part(place: Path) -> Path:
    """What `write` fills before it takes its place. One that is there was left by a build that was killed."""
    return place.with_name(f".{place.name}.starsd")


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _copy(file: Copy, stream: BinaryIO, part: Path) -> None:
    digest = hashlib.sha256()
    with file.source.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            stream.write(block)
    if digest.hexdigest() != file.sha256:
        part.unlink()
        raise HashMismatchError(f"{file.source} has SHA-256 {digest.hexdigest()}, expected {file.sha256}")


def is_applied(root: Path, step: Step) -> bool:
    """Whether the tree is as `apply` leaves it."""
    place = inside(root, step.path, follow_last=isinstance(step, Folder))
    if isinstance(step, File | Copy | Gone) and os.path.lexists(_part(place)):
        return False
    if isinstance(step, Gone):
        return not (place.exists() or place.is_symlink())
    try:
        found = place.lstat()
    except OSError:
        return False
    match step:
        case Link():
            return place.is_symlink() and os.readlink(place) == step.target
        case Folder():
            kind, content = stat.S_ISDIR(found.st_mode), True
        case File():
            kind = stat.S_ISREG(found.st_mode)
            content = kind and place.read_bytes() == step.content
        case Copy():
            kind = stat.S_ISREG(found.st_mode)
            content = kind and found.st_size == step.bytes and file_sha256(place) == step.sha256
    owned = (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (step.uid, step.gid, step.mode)
    return kind and content and owned


def _place(root: Path, path: str, *, make: bool = True) -> Path:
    """The path itself, even where it is a link, in its resolved and (with `make`) existing folder.

    Raises UsageError for a path that is the tree itself or leads back to it.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise UsageError(f"got path {path!r}, expected one below {root}")
    folder = inside(root, parent)
    if make:
        _make_folders(root, folder)
    place = folder / name
    if make and place.is_dir() and not place.is_symlink():
        raise UsageError(f"{place} is a folder, expected a file or nothing")
    return place


def _make_folders(root: Path, folder: Path) -> None:
    missing = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder, expected one")
    for made in reversed(missing):
        made.mkdir(0o700)
        os.chown(made, 0, 0)
        made.chmod(0o755)

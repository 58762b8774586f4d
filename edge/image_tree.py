"""The root file system of a device, changed from outside: paths that cannot lead out of it, and steps that change it.

A tree is full of links meant for the device, such as an absolute one that would end on this machine. So every path is
resolved as the device would resolve it.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import msgspec

from starsd.shared.errors import UsageError

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


class Link(msgspec.Struct, frozen=True, tag="link"):
    """A symbolic link, in the place of whatever file or link is there."""

    path: str
    target: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Nothing at that path; a folder there goes with all that is in it."""

    path: str


Step = Folder | File | Link | Gone


def apply(root: Path, step: Step) -> None:
    """Change the tree; doing it again changes nothing. Raises UsageError where the tree has something in the way."""
    match step:
        case Folder():
            place = inside(root, step.path)
            _make_folders(root, place)
            os.chown(place, step.uid, step.gid)
            place.chmod(step.mode)
        case File():
            write(root, step)
        case Link():
            place = _place(root, step.path)
            if place.is_symlink() or place.exists():
                place.unlink()
            place.symlink_to(step.target)
            os.lchown(place, 0, 0)
        case Gone():
            place = _place(root, step.path, make=False)
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)


def write(root: Path, file: File) -> None:
    """Write a file whole or not at all; it never is readable by more than its mode allows, not even for a moment."""
    place = _place(root, file.path)
    part = place.with_name(f".{place.name}.starsd")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as stream:
        stream.write(file.content)
        os.fchown(handle, file.uid, file.gid)
        os.fchmod(handle, file.mode)
        stream.flush()
        os.fsync(handle)
    part.replace(place)


def is_applied(root: Path, step: Step) -> bool:
    """Whether the tree is as `apply` leaves it."""
    place = inside(root, step.path, follow_last=isinstance(step, Folder))
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
    owned = (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (step.uid, step.gid, step.mode)
    return kind and content and owned


def _place(root: Path, path: str, *, make: bool = True) -> Path:
    """The path itself, even where it is a link, in its resolved and (with `make`) existing folder."""
    parent, _, name = path.rstrip("/").rpartition("/")
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
        made.mkdir()
        os.chown(made, 0, 0)
        made.chmod(0o755)

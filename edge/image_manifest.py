"""What an image says of itself, `etc/starsd/image.json` in its tree. No secret is in it, nor the hash of one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

import msgspec

from starsd.edge.image_tree import Copy, File, Folder, Gone, Link, Step, apply, inside
from starsd.shared.errors import BundleError
from starsd.shared.manifest import file_sha256

FORMAT = 1
PLACE = "etc/starsd/image.json"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One path that the image decides over."""

    path: str
    kind: str  # file, secret, folder, link or gone
    mode: int = 0
    uid: int = 0
    gid: int = 0
    sha256: str = ""  # of a file that is no secret
    target: str = ""  # of a link


class ImageManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    board: str
    l4t: str
    python: str
    openrm: bool
    starsd: str  # version
    wheels: str  # digest of the wheelhouse
    package: str  # SHA-256 of the .deb
    lock: dict[str, str]  # SHA-256 of what the tree was unpacked from, by file
    user: str
    bundles: dict[str, str] = {}  # SHA-256 of each one's own manifest, by model/flavour-precision
    entries: tuple[Entry, ...]
    finished: bool = True  # False: a build was killed in mid-writing, and any of the entries may be there


def entry(step: Step) -> Entry:
    match step:
        case File(secret=True) | File(path="etc/shadow"):  # hashes of other users' passwords may be in the latter
            return Entry(step.path, "secret", step.mode, step.uid, step.gid)
        case File():
            digest = hashlib.sha256(step.content).hexdigest()
            return Entry(step.path, "file", step.mode, step.uid, step.gid, sha256=digest)
        case Copy():
            return Entry(step.path, "file", step.mode, step.uid, step.gid, sha256=step.sha256)
        case Folder():
            return Entry(step.path, "folder", step.mode, step.uid, step.gid)
        case Link():
            return Entry(step.path, "link", target=step.target)
        case Gone():
            return Entry(step.path, "gone")


def encode(manifest: ImageManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read(root: Path) -> ImageManifest | None:
    """The manifest of a tree; None when it has none. Raises BundleError when it cannot be read."""
    place = inside(root, PLACE)
    if not place.is_file():
        return None
    try:
        found = msgspec.json.decode(place.read_bytes(), type=ImageManifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{place} cannot be read: {error}") from error
    if found.format != FORMAT:
        raise BundleError(f"{place} has format {found.format}, expected {FORMAT}: build the image again")
    if any("\0" in entry.path for entry in found.entries):
        raise BundleError(f"{place} cannot be read: it has a path that cannot be")
    return found


def forget(root: Path, old: Entry) -> None:
    """Take away what an image wrote, by its entry; folders only when nothing else is in them.

    A manifest may have come with the tree, so that a folder which an entry calls a file is left alone.
    """
    if old.kind == "folder":
        with contextlib.suppress(OSError):  # something is in it that is not ours
            inside(root, old.path).rmdir()
    elif old.kind != "gone":
        place = inside(root, old.path, follow_last=False)
        if place.is_symlink() or not place.is_dir():
            apply(root, Gone(old.path))


def difference(root: Path, expected: Entry) -> str | None:
    """How the tree differs from an entry, None when it does not."""
    place = inside(root, expected.path, follow_last=expected.kind == "folder")
    try:
        found = place.lstat()
    except OSError:
        return None if expected.kind == "gone" else "is missing"
    if expected.kind == "gone":
        return "is there, expected nothing"
    if expected.kind == "link":
        target = os.readlink(place) if stat.S_ISLNK(found.st_mode) else "nowhere"
        return None if target == expected.target else f"leads to {target}, expected {expected.target}"
    if not (stat.S_ISDIR if expected.kind == "folder" else stat.S_ISREG)(found.st_mode):
        return f"is no {'folder' if expected.kind == 'folder' else 'file'}"
    return _unlike(place, found, expected)


def _unlike(place: Path, found: os.stat_result, expected: Entry) -> str | None:
    if (found.st_uid, found.st_gid) != (expected.uid, expected.gid):
        return f"belongs to {found.st_uid}:{found.st_gid}, expected {expected.uid}:{expected.gid}"
    if (mode := stat.S_IMODE(found.st_mode)) != expected.mode:
        return f"has mode {mode:04o}, expected {expected.mode:04o}"
    if expected.kind == "file" and file_sha256(place) != expected.sha256:
        return "is not what was written: its SHA-256 differs from the manifest's"
    return None

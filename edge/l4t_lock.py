"""The lock file: which package and which root file system an image is made from, by SHA-256, and unpacking just those.

{"bsp": {"file": "Jetson_Linux_R39.2.0_aarch64.tbz2", "sha256": "…"},
 "rootfs": {"file": "Tegra_Linux_Sample-Root-Filesystem_R39.2.0_aarch64.tbz2", "sha256": "…"}}
"""

from __future__ import annotations

import re
import tarfile
import zlib
from pathlib import Path

import msgspec

from starsd.edge.l4t_command import Command
from starsd.shared.errors import HashMismatchError, UsageError
from starsd.shared.manifest import file_sha256

FOLDER = "Linux_for_Tegra"
SCRATCH = ".starsd-unpacking"  # beside it, until all of it is there
KEPT = "starsd-lock.json"  # in that folder: what it was unpacked from
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w-][\w.-]{0,200}")


class Pinned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    sha256: str


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bsp: Pinned
    rootfs: Pinned

    def hashes(self) -> dict[str, str]:
        return {pinned.file: pinned.sha256 for pinned in (self.bsp, self.rootfs)}


def make_lock(bsp: Path, rootfs: Path) -> Lock:
    """Pin two archives as they are now. Raises UsageError for what is none, for one in the other's place, and for names
    that a lock file may not hold."""
    for path, first in ((bsp, True), (rootfs, False)):
        if not path.is_file():
            raise UsageError(f"{path} is no file, expected an archive of NVIDIA's")
        if not _NAME.fullmatch(path.name):
            raise UsageError(f"{path} has more than letters, digits and any of . _ - in its name: rename it")
        if (_top(path) == FOLDER) != first:
            raise UsageError(
                f"{path} has {_top(path)[:40]!r} at its top, expected the driver package, which has {FOLDER}, first, "
                "and the sample root file system second"
            )
    return Lock(*(Pinned(path.name, file_sha256(path)) for path in (bsp, rootfs)))


def _top(path: Path) -> str:
    """The first name in an archive."""
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if parts := [part for part in member.name.split("/") if part not in ("", ".")]:
                    return parts[0]
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise UsageError(f"{path} cannot be read, expected an archive of NVIDIA's: {error}") from error
    raise UsageError(f"{path} is empty, expected an archive of NVIDIA's")


def encode(lock: Lock) -> bytes:
    return msgspec.json.format(msgspec.json.encode(lock), indent=2) + b"\n"


def read_lock(path: Path) -> Lock:
    """Raises UsageError when the file is missing or is no lock file."""
    try:
        lock = msgspec.json.decode(path.read_bytes(), type=Lock)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"lock file {path} cannot be read: {error}") from error
    for pinned in (lock.bsp, lock.rootfs):
        if not _NAME.fullmatch(pinned.file) or not _SHA256.fullmatch(pinned.sha256):
            raise UsageError(f"lock file {path} pins {pinned.file[:80]!r}, expected a file's name and its SHA-256")
    return lock


def check_archives(lock: Lock, folder: Path) -> tuple[Path, Path]:
    """The two archives in `folder`. Raises UsageError for a missing one, HashMismatchError for another than pinned."""
    for pinned in (lock.bsp, lock.rootfs):
        path = folder / pinned.file
        if not path.is_file():
            raise UsageError(f"{path} is missing, expected the archive that the lock file pins")
        if (found := file_sha256(path)) != pinned.sha256:
            raise HashMismatchError(f"{path} has SHA-256 {found}, expected {pinned.sha256}")
    return folder / lock.bsp.file, folder / lock.rootfs.file


def unpack_commands(bsp: Path, rootfs: Path, dest: Path) -> list[Command]:
    """As NVIDIA's guide has it, beside the place where the last command puts all of it, so that nobody takes a part for
    the whole. -p keeps owners and setuid bits, which is why it takes root. All paths are absolute."""
    scratch = dest / SCRATCH
    return [
        Command(("mkdir", str(scratch)), str(dest)),
        Command(("tar", "-xpf", str(bsp), "-C", str(scratch)), str(dest)),
        Command(("tar", "-xpf", str(rootfs), "-C", str(scratch / FOLDER / "rootfs")), str(dest)),
        Command(("mv", "-T", str(scratch / FOLDER), str(dest / FOLDER)), str(dest)),
    ]


def locked(folder: Path) -> dict[str, str]:
    """What a `Linux_for_Tegra` was unpacked from, file by SHA-256; {} when nobody wrote it down."""
    path = folder / KEPT
    return read_lock(path).hashes() if path.is_file() else {}

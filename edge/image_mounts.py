"""Running programs of a tree: what they need is mounted, and unmounted again, also when a build before was killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from starsd.edge.l4t_command import Command, CommandError, Runner
from starsd.shared.errors import StorageError, UsageError

MOUNTS = (("proc", "proc"), ("tmpfs", "run"), ("tmpfs", "tmp"))  # kind and place; removed in the other order
DEVICES = ("null", "zero", "urandom", "random")  # of /dev; nothing else of this machine is shown to the tree
_MOUNTINFO = Path("/proc/self/mountinfo")


def mount_commands(root: Path) -> list[Command]:
    places = [Command(("mount", "-t", kind, kind, str(root / place)), str(root.parent)) for kind, place in MOUNTS]
    devices = Command(("mount", "-t", "tmpfs", "-o", "mode=755,nosuid", "tmpfs", str(root / "dev")), str(root.parent))
    names = [f"{root}/dev/{name}" for name in DEVICES]
    touch = Command(("touch", *names), str(root.parent))
    binds = [Command(("mount", "--bind", f"/dev/{name}", f"{root}/dev/{name}"), str(root.parent)) for name in DEVICES]
    return [*places, devices, touch, *binds]


def check_places(root: Path) -> None:
    """Raises UsageError where mounting would reach past the tree: mount(8) follows links as this machine has them."""
    if root.samefile("/"):
        raise UsageError(f"{root} is this machine's own file system, expected a device's")
    for name in (*(place for _, place in MOUNTS), "dev"):
        place = root / name
        if place.is_symlink() or not place.is_dir():
            what = f"leads to {os.readlink(place)}" if place.is_symlink() else "is no folder"
            raise UsageError(f"{place} {what}, expected a folder of its own: unpack the root file system anew")


def unmount_commands(root: Path) -> list[Command]:
    places = [place for _, place in MOUNTS] + ["dev"] + [f"dev/{name}" for name in DEVICES]
    return [Command(("umount", "--lazy", str(root / place)), str(root.parent)) for place in reversed(places)]


def mounted_below(root: Path, mountinfo: Path = _MOUNTINFO) -> list[Path]:
    """Where something is mounted below the tree, deepest first; proc(5) has the format."""
    found, root = [], root.resolve()  # as the kernel has it
    for line in mountinfo.read_text().splitlines() if mountinfo.is_file() else []:
        place = line.split(" ")[4]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            place = place.replace(code, character)
        if Path(place) != root and root in Path(place).parents:
            found.append(Path(place))
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def undo_mounts(root: Path, run: Runner, mountinfo: Path = _MOUNTINFO) -> list[Path]:
    """Unmount whatever is below the tree, whoever mounted it. Raises StorageError when something stays."""
    found = mounted_below(root, mountinfo)
    for place in found:
        with contextlib.suppress(CommandError):
            run(Command(("umount", "--lazy", str(place)), str(root.parent)))
    if mountinfo == _MOUNTINFO and (left := mounted_below(root)):
        raise StorageError(f"{left[0]} stays mounted: end what uses it, then umount it")
    return found


@contextlib.contextmanager
def mounted(root: Path, run: Runner) -> Iterator[None]:
    """The tree with its mounts; they are undone however the block ends."""
    check_places(root)
    try:
        for command in mount_commands(root):
            run(command)
        yield
    finally:
        undo_mounts(root, run)

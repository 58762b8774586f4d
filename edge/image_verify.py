"""An audit of a finished tree: what the manifest promises, what must not be there, and whether the units make sense."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

from starsd.edge import image_manifest
from starsd.edge.enrol import DEVICE_FILE
from starsd.edge.image_access import SETUID, Finding, access
from starsd.edge.image_bundles import strangers
from starsd.edge.image_deb import FIRST_BOOT, SYSTEM, UNITS
from starsd.edge.image_mounts import mounted_below
from starsd.edge.image_plan import HOST_KEYS, NO_SERVICES, WANTED, WIFI_FILE, needed_files
from starsd.edge.image_tree import inside, is_applied
from starsd.edge.l4t import Bsp
from starsd.edge.l4t_boards import Board, driver_problem
from starsd.edge.l4t_command import Command
from starsd.shared.errors import BundleError

LEFTOVERS = (  # what building in a tree, with our tools or NVIDIA's, may forget
    *("usr/bin/qemu-aarch64-static", "var/cache/starsd", "opt/nvidia/l4t-packages"),
    *("root/.bash_history", "opt/starsd/next", "var/lib/dpkg/triggers/ldconfig.backup"),
    FIRST_BOOT,  # its markers: nothing would be done again
)
OWN = ("etc/starsd", "opt/starsd", "usr/lib/starsd", "usr/share/starsd")  # folders where everything is ours
OURS, CONNECTIONS = "etc/starsd", "etc/NetworkManager/system-connections"  # where secrets may be
_SECRET = re.compile(rb"^[\w-]*(?:psk|password|wep-key\d|private-key|secret)\s*=\s*\S", re.MULTILINE)


def verify_command(bsp: Bsp) -> Command:
    """systemd's own check of our units, against the tree."""
    units = [f"/{SYSTEM}/{unit}" for unit in UNITS]
    return Command(("systemd-analyze", "verify", "--man=no", f"--root={bsp.rootfs}", *units), str(bsp.folder))


def verify(bsp: Bsp, board: Board) -> Iterator[Finding]:
    """Everything that is wrong with a tree, in the order of the checks; nothing when it is ready to be flashed."""
    root = bsp.rootfs
    found, why_not = _read(root)
    if why_not:
        yield Finding("manifest", image_manifest.PLACE, why_not)
    if found:
        yield from _manifest(bsp, board, found)
    listed = frozenset(entry.path for entry in found.entries if entry.kind != "gone") if found else frozenset()
    for path in needed_files():
        place = inside(root, path)
        if not place.exists() and not place.is_symlink():
            yield Finding("files", path, "is missing, expected what the package installs")
    yield from _ownership(root)
    yield from _secrets(root, listed)
    yield from access(root, listed, OWN)
    for path in (*LEFTOVERS, *HOST_KEYS):
        place = inside(root, path, follow_last=False)
        if place.exists() or place.is_symlink():
            yield Finding("leftovers", path, "is there, expected nothing: it is of the build, or of another device")
    if is_applied(root, NO_SERVICES):
        yield Finding("leftovers", NO_SERVICES.path, "is the build's, and keeps services from starting: remove it")
    elif os.path.lexists(inside(root, NO_SERVICES.path, follow_last=False)):
        yield Finding("leftovers", NO_SERVICES.path, "decides what starts when a package is installed", error=False)
    for place in mounted_below(root):
        yield Finding("mounts", str(place.relative_to(root)), "is mounted, expected nothing to be")
    yield from _resolver(root)
    yield from _units(bsp)
    if problem := driver_problem(board, bsp):
        yield Finding("driver", "var/lib/dpkg/status", problem)


def _read(root: Path) -> tuple[image_manifest.ImageManifest | None, str]:
    """The manifest, or why there is none."""
    try:
        found = image_manifest.read(root)
    except BundleError as error:
        return None, str(error)
    return found, "" if found else "is missing: make the image with starsd-edge image build"


def _manifest(bsp: Bsp, board: Board, found: image_manifest.ImageManifest) -> Iterator[Finding]:
    if found.board != board.name:
        yield Finding("manifest", image_manifest.PLACE, f"is of an image for {found.board}, expected {board.name}")
    if not found.finished:
        yield Finding("manifest", image_manifest.PLACE, "is of a build that was stopped: build the image again")
    if found.l4t != str(bsp.release):
        yield Finding("manifest", image_manifest.PLACE, f"is of Jetson Linux R{found.l4t}, expected R{bsp.release}")
    for path in strangers(bsp.rootfs, [entry.path for entry in found.entries]):
        yield Finding("leftovers", path, "is in no bundle of the image, expected nothing else in the edge's home")
    for entry in found.entries:
        if problem := image_manifest.difference(bsp.rootfs, entry):
            yield Finding("manifest", entry.path, problem)


def _ownership(root: Path) -> Iterator[Finding]:
    """What is ours belongs to root, nobody else may write it, and it gives nobody root's rights."""
    for folder in OWN:
        top = inside(root, folder)
        for place in sorted([top, *top.rglob("*")]) if top.is_dir() else []:
            found, path = place.lstat(), str(place.relative_to(root))
            if (found.st_uid, found.st_gid) != (0, 0):
                yield Finding("ownership", path, f"belongs to {found.st_uid}:{found.st_gid}, expected root")
            if stat.S_ISLNK(found.st_mode):
                continue
            if found.st_mode & 0o022:
                yield Finding("ownership", path, f"has mode {stat.S_IMODE(found.st_mode):04o}, expected no writers")
            if stat.S_ISREG(found.st_mode) and found.st_mode & SETUID:
                yield Finding("ownership", path, f"has mode {stat.S_IMODE(found.st_mode):04o}, expected no setuid")
    sudo = inside(root, "usr/bin/sudo")
    if sudo.is_file() and not (sudo.stat().st_mode & stat.S_ISUID and sudo.stat().st_uid == 0):
        yield Finding("ownership", "usr/bin/sudo", "is not setuid root: the tree was unpacked without sudo, or copied")


def _secrets(root: Path, listed: Collection[str]) -> Iterator[Finding]:
    for path in (DEVICE_FILE, WIFI_FILE):
        place = inside(root, path)
        if place.is_file() and (mode := stat.S_IMODE(place.stat().st_mode)) != 0o600:
            yield Finding("secrets", path, f"has mode {mode:04o}, expected 0600")
    for folder in (OURS, CONNECTIONS):
        for place in sorted(inside(root, folder).glob("*")):
            path = f"{folder}/{place.name}"
            if place.name.startswith("."):
                yield Finding("secrets", path, "is a half-written file, expected none")
            elif path in (*listed, image_manifest.PLACE):
                continue
            elif folder == OURS or (place.is_file() and _SECRET.search(place.read_bytes())):
                yield Finding("secrets", path, "is not in the manifest, and may be another device's: remove it")


def _resolver(root: Path) -> Iterator[Finding]:
    """Building tools put this machine's name servers there."""
    place, here = inside(root, "etc/resolv.conf", follow_last=False), Path("/etc/resolv.conf")
    if place.is_symlink() or not place.is_file() or not here.is_file():
        return
    if place.read_bytes().strip() and place.read_bytes() == here.read_bytes():
        yield Finding("leftovers", "etc/resolv.conf", "is this machine's, expected the device's own")


def _units(bsp: Bsp) -> Iterator[Finding]:
    root = bsp.rootfs
    for unit in UNITS:
        path = f"{WANTED}/{unit}"
        if not inside(root, path, follow_last=False).is_symlink():
            yield Finding("units", path, "is missing, so that the unit does not start")
    default = inside(root, "etc/systemd/system/default.target", follow_last=False)
    if default.is_symlink() and "oem-config" in os.readlink(default):
        yield Finding("units", "etc/systemd/system/default.target", "starts NVIDIA's set-up, which waits for a person")
    if shutil.which("systemd-analyze") is None or not (root / "usr/lib/systemd/systemd").exists():
        yield Finding("units", "", "could not be checked by systemd-analyze, which is missing here", error=False)
        return
    command = verify_command(bsp)
    done = subprocess.run(command.argv, cwd=command.cwd, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if any(unit in line for unit in UNITS)]
    for line in ours:
        yield Finding("units", "", f"systemd-analyze: {line}")
    if done.returncode and not ours:  # an older one, which has no --root
        yield Finding(
            "units", "", f"could not be checked: {lines[-1] if lines else 'systemd-analyze failed'}", error=False
        )

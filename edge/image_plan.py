"""What an image is made of: commands of NVIDIA's and the system's tools, then files of ours."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from starsd.edge import enrol
from starsd.edge.image_alone import NAME as LOCK
from starsd.edge.image_bundles import Packed, bundle_steps
from starsd.edge.image_deb import INSTALLER, SLOTS, SYSTEM, UNITS, WHEELHOUSE, epoch, file_name, settings_link
from starsd.edge.image_mounts import mount_commands, unmount_commands
from starsd.edge.image_tree import File, Folder, Gone, Link, Step, inside
from starsd.edge.image_users import user_steps
from starsd.edge.image_wheels import Wheelhouse, fill_commands, source_digest
from starsd.edge.l4t import Bsp
from starsd.edge.l4t_boards import Board
from starsd.edge.l4t_command import Command
from starsd.shared.errors import UsageError

PREREQUISITES, APPLY = "./tools/l4t_flash_prerequisites.sh", "./apply_binaries.sh"
RELEASE_KEY = "etc/starsd/release.pub"
HOST_KEYS = tuple(
    f"etc/ssh/ssh_host_{kind}_key{end}" for kind in ("rsa", "dsa", "ecdsa", "ed25519") for end in ("", ".pub")
)
WIFI_FILE = "etc/NetworkManager/system-connections/starsd.nmconnection"
FIRST_BOOT_FILES = tuple(f"etc/starsd/{name}" for name in ("token", "api-key", "edge.env"))
WIFI_UUID = "7b1c9d7e-6c39-4c3e-9a55-57a7d0e5b001"  # of the connection; the same on every device
WANTED = "etc/systemd/system/multi-user.target.wants"
NO_SERVICES = File("usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n", mode=0o755)  # while it is installed
PACKAGE_FOLDER = "var/cache/starsd"  # of the tree, while the package is installed
OEM_CONFIG = ("nv-oem-config.service", "nv-oem-config-gui.service", "nv-oem-config.target")
_SSHD = b"# starsd: keys only\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin no\n"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """All that an image is made from. `house` is None while its wheelhouse is still to be filled."""

    bsp: Bsp
    board: Board
    openrm: bool
    device: enrol.Device | None = None
    user: str = ""
    keys: bytes = b""  # of the user; none: nobody logs in
    release_key: bytes = b""
    house: Wheelhouse | None = None
    source: str = ""  # of starsd, where the wheelhouse is to be filled
    bundles: tuple[Packed, ...] = ()  # that it brings
    lock: dict[str, str] = {}  # what the package was unpacked from

    @property
    def root(self) -> Path:
        return self.bsp.rootfs

    @property
    def digest(self) -> str:
        """Names the work folder: what decides over the tree, and no secret."""
        said = [str(self.bsp.folder), str(self.bsp.release), self.board.name, self.openrm, epoch(), self.lock]
        said.append(self.house.digest if self.house else source_digest(self.source))
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def prerequisites(order: Order) -> Command:
    return Command((PREREQUISITES,), str(order.bsp.folder))


def binaries(order: Order) -> Command:
    return Command((APPLY, "--openrm") if order.openrm else (APPLY,), str(order.bsp.folder))


def filling(order: Order, work: Path) -> list[Command]:
    return fill_commands(work / "wheelhouse", order.bsp.python, order.source)


def installing(order: Order, package: Path) -> Command:
    """Install the package inside the tree, with nothing of this machine's environment."""
    env = {
        "DEBIAN_FRONTEND": "noninteractive",
        "HOME": "/",
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": str(epoch()),
    }
    clean = ("/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items()))
    install = ("dpkg", "--install", f"/{package.relative_to(order.root)}")
    return Command(("chroot", str(order.root), *clean, *install), str(order.bsp.folder))


def package_place(order: Order, version: str = "") -> Path:
    """Where the package lies in the tree while it is installed."""
    name = file_name(order.house) if order.house else f"starsd_{version}_arm64.deb"
    folder = inside(order.root, PACKAGE_FOLDER, follow_last=False)
    if folder != order.root / PACKAGE_FOLDER:  # it is emptied, wherever that is
        raise UsageError(f"{folder.parent} is where var/cache of {order.root} leads, expected no link")
    return folder / name


def commands(order: Order, work: Path, version: str) -> list[Command]:
    """Everything a whole build runs, in its order."""
    wheels = [] if order.house else filling(order, work)
    inside = [*mount_commands(order.root), installing(order, package_place(order, version))]
    return [prerequisites(order), binaries(order), *wheels, *inside, *unmount_commands(order.root)]


def steps(order: Order) -> list[Step]:
    """What is written into the tree once the package is installed."""
    device = order.device or enrol.Device()
    name = device.hostname or "starsd"
    made: list[Step] = [
        File("etc/hostname", f"{name}\n".encode()),
        File("etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost\n".encode()),
        File("etc/machine-id", b"", mode=0o444),  # empty: systemd makes one at the first boot, machine-id(5)
        Link("var/lib/dbus/machine-id", "/etc/machine-id"),
        *(Gone(key) for key in HOST_KEYS),
        File("etc/ssh/sshd_config.d/10-starsd.conf", _SSHD),
        Link("etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target"),
        Gone("etc/systemd/system/nv-oem-config.target.wants"),
        *(Link(f"etc/systemd/system/{unit}", "/dev/null") for unit in OEM_CONFIG),
        Folder("etc/starsd"),
        *(Link(f"{WANTED}/{unit}", f"/{SYSTEM}/{unit}") for unit in UNITS),
        Gone(PACKAGE_FOLDER),
        Gone(f"{SLOTS[1:]}/{LOCK}"),  # it names a process
    ]
    if order.keys:
        made += user_steps(order.root, order.user, order.keys)
    made.append(File(RELEASE_KEY, order.release_key) if order.release_key else Gone(RELEASE_KEY))
    return made + _device_steps(order.device) + bundle_steps(order.bundles)


def _device_steps(device: enrol.Device | None) -> list[Step]:
    """What is one device's alone. What is not this one's is said to be gone, so that no other's can stay."""
    made: list[Step] = [Gone(path) for path in FIRST_BOOT_FILES]
    if device is None:
        return [*made, Gone(enrol.DEVICE_FILE), Gone(WIFI_FILE)]
    made.append(File(enrol.DEVICE_FILE, msgspec.json.encode(device), mode=0o600, secret=True))
    if device.wifi is None:
        return [*made, Gone(WIFI_FILE)]
    return [*made, File(WIFI_FILE, enrol.network_file(device.wifi, WIFI_UUID), mode=0o600, secret=True)]


def needed_files() -> tuple[str, ...]:
    """What the package leaves in the tree and the units rely on."""
    return (
        *(f"{SYSTEM}/{unit}" for unit in UNITS),
        *(settings_link(unit) for unit in UNITS),
        INSTALLER,
        f"{WHEELHOUSE}/requirements.txt",
        f"{SLOTS[1:]}/current/bin/starsd-edge",
        f"{SLOTS[1:]}/current/bin/starsd",
    )

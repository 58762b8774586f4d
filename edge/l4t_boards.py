"""Which Jetsons can be made into edges: their releases of Jetson Linux, their storage, their names on the USB bus.

Board configurations and storage: Jetson Linux Developer Guide, "Quick Start" and "Flashing Support"; board ids for
flashing without a board: `tools/kernel_flash/README_initrd_flash.txt`, "Environment variables value table".
"""

from __future__ import annotations

import msgspec

from starsd.edge.l4t import Bsp, Release, installed_packages
from starsd.shared.errors import UsageError

SUPER = Release(36, 4, 3)  # the first with the Super configuration of Orin Nano and NX (JetPack 6.2)
T234_LAYOUT = "tools/kernel_flash/flash_l4t_t234_nvme.xml"  # of any external storage, despite its name
T264_LAYOUT = "tools/kernel_flash/flash_l4t_t264_nvme.xml"
QSPI = "-c bootloader/generic/cfg/flash_t234_qspi.xml"  # modules without eMMC have only QSPI inside


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of Jetson on NVIDIA's developer kit."""

    name: str
    title: str
    branches: tuple[int, ...]  # of Jetson Linux that support it
    storages: dict[str, str]  # kind: device on the board, "" for the storage that `internal` means; the default first
    layout: str  # of partitions on external storage
    usb: dict[str, str]  # product id in recovery mode: module
    ids: dict[str, str]  # what the flash tools read from a board, for working without one
    openrm: bool = False  # the GPU needs the open driver, installed by apply_binaries.sh --openrm


_ORIN = (36, 39)
_NANO_IDS = {"BOARDID": "3767", "BOARDSKU": "0005", "FAB": "300", "BOARDREV": ""}
_EXTERNAL = {"nvme": "nvme0n1p1", "usb": "sda1"}
BOARDS = {
    board.name: board
    for board in (
        Board(
            name="orin-nano",
            title="Jetson Orin Nano",
            branches=_ORIN,
            storages={**_EXTERNAL, "sd": "mmcblk0p1"},
            layout=T234_LAYOUT,
            usb={"7523": "Orin Nano 8GB", "7623": "Orin Nano 4GB"},
            ids=_NANO_IDS,
        ),
        Board(
            name="orin-nx",
            title="Jetson Orin NX",
            branches=_ORIN,
            storages=dict(_EXTERNAL),
            layout=T234_LAYOUT,
            usb={"7323": "Orin NX 16GB", "7423": "Orin NX 8GB"},
            ids={**_NANO_IDS, "BOARDSKU": "0000"},
        ),
        Board(
            name="agx-orin",
            title="Jetson AGX Orin",
            branches=_ORIN,
            storages={"emmc": "", **_EXTERNAL, "sd": "mmcblk1p1"},  # mmcblk0 is the eMMC
            layout=T234_LAYOUT,
            usb={"7023": "AGX Orin", "7223": "AGX Orin 32GB"},
            ids={"BOARDID": "3701", "BOARDSKU": "0005", "FAB": "000", "BOARDREV": ""},
        ),
        Board(
            name="agx-thor",
            title="Jetson AGX Thor",
            branches=(38, 39),
            storages={"nvme": "", "usb": "sda1"},
            layout=T264_LAYOUT,
            usb={"7026": "Thor T5000", "7226": "Thor T4000"},
            ids={"BOARDID": "3834", "BOARDSKU": "0008", "FAB": "000", "BOARDREV": ""},
            openrm=True,
        ),
    )
}


def find_board(name: str) -> Board:
    """Raises UsageError for a name that BOARDS lacks."""
    if name not in BOARDS:
        raise UsageError(f"board is {name!r}, expected one of {', '.join(BOARDS)}")
    return BOARDS[name]


def check_release(board: Board, release: Release) -> None:
    """Raises UsageError when this release does not run on that board."""
    if release.branch not in board.branches:
        supported = " or ".join(f"R{branch}" for branch in board.branches)
        raise UsageError(f"Jetson Linux is R{release}, expected {supported} for {board.name}")


def check_openrm(board: Board, openrm: bool | None) -> bool:
    """Whether to apply the binaries with --openrm. Raises UsageError for a choice that leaves the board without GPU."""
    if openrm is not None and openrm != board.openrm:
        got, expected = ("with", "without") if openrm else ("without", "with")
        raise UsageError(f"{board.name} {got} --openrm has no GPU, expected it {expected}")
    return board.openrm


def storage_of(board: Board, kind: str | None) -> str:
    """The storage to flash, the board's usual one when `kind` is None. Raises UsageError for one it has not."""
    if kind is None:
        return next(iter(board.storages))
    if kind not in board.storages:
        raise UsageError(f"storage is {kind!r}, expected one of {', '.join(board.storages)} for {board.name}")
    return kind


def config_of(board: Board, release: Release) -> str:
    """The name of the board's configuration in the package, a `.conf` file without its ending."""
    if board.name in ("orin-nano", "orin-nx"):  # one carrier board, and one configuration, for both modules
        return "jetson-orin-nano-devkit" + ("-super" if release >= SUPER else "")
    return f"jetson-{board.name}-devkit"


def driver_problem(board: Board, bsp: Bsp) -> str | None:
    """Why the tree's GPU driver will not work on the board; None when it will, or when nothing is installed yet."""
    installed = installed_packages(bsp.rootfs)
    if installed is None or not any(name.startswith("nvidia-l4t-") for name in installed):
        return None
    has = any(name.startswith("nvidia-l4t-") and name.endswith("-openrm") for name in installed)
    if board.openrm and not has:
        return f"the binaries were applied without --openrm, expected apply_binaries.sh --openrm for {board.name}"
    return None

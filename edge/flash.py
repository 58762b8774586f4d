"""What to run to flash a Jetson: NVIDIA's commands for each board, storage and release, and for many boards at a time.

Developer Guide, "Quick Start"; `tools/kernel_flash/README_initrd_flash.txt`, workflows 1, 3 and 6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from starsd.edge import image_manifest
from starsd.edge.enrol import DEVICE_FILE
from starsd.edge.l4t import Bsp
from starsd.edge.l4t_boards import QSPI, Board, check_release, config_of, driver_problem, storage_of
from starsd.edge.l4t_command import Command
from starsd.shared.errors import BundleError, UsageError

TOOL = "tools/kernel_flash/l4t_initrd_flash.sh"
ROOT_TOOL = "l4t_initrd_flash.sh"  # where R38 and later have it, and what their guide calls
MOST_BOARDS = 32  # of one massflash


class FlashPlan(msgspec.Struct, frozen=True):
    """Commands in their order; `notices` are worth saying before."""

    board: Board
    storage: str
    commands: tuple[Command, ...]
    notices: tuple[str, ...] = ()


def plan_flash(
    bsp: Bsp,
    board: Board,
    storage: str | None = None,
    massflash: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> FlashPlan:
    """The commands that flash `bsp`'s root file system to one board, or to up to `massflash` at a time.

    Raises UsageError for a release, a storage or a number that cannot be, and for a tree that has no GPU on the board.
    """
    check_release(board, bsp.release)
    kind = storage_of(board, storage)
    if massflash is not None and not 1 <= massflash <= MOST_BOARDS:
        raise UsageError(f"massflash is {massflash}, expected 1 to {MOST_BOARDS}")
    if problem := driver_problem(board, bsp):
        raise UsageError(f"{bsp.rootfs}: {problem}")
    tool, config, root = _tool(bsp), config_of(board, bsp.release), _root_device(board, kind)
    device, env = _device_options(board, kind), _boot_order(board, kind)
    cwd = str(bsp.folder)
    if massflash is None:
        network = ("--network", "usb0") if not board.openrm else ()  # Thor's tool needs no network over USB
        logs = ("--showlogs",) if device or not board.openrm else ()
        commands: tuple[Command, ...] = (Command((tool, *device, *logs, *network, config, root), cwd, env),)
    else:
        many = ("--massflash", str(massflash), "--network", "usb0")
        ids = {name: environment.get(name, value) for name, value in board.ids.items()}
        commands = (
            Command((tool, *device, "--no-flash", *many, config, root), cwd, {**ids, **env}),
            Command((tool, "--flash-only", *many, "--showlogs", config, root), cwd),
        )
    return FlashPlan(board, kind, commands, tuple(_notices(bsp, board, config, commands)))


def _tool(bsp: Bsp) -> str:
    newer = bsp.release.branch >= 38 and (bsp.folder / ROOT_TOOL).is_file()
    return f"./{ROOT_TOOL if newer else TOOL}"


def _device_options(board: Board, kind: str) -> tuple[str, ...]:
    """Options for storage that is not what `internal` means; on modules without eMMC their QSPI is written with it."""
    device = board.storages[kind]
    if not device:
        return ()
    inside = ("-p", QSPI) if board.name in ("orin-nano", "orin-nx") else ()
    return ("--external-device", device, "-c", board.layout, *inside)


def _root_device(board: Board, kind: str) -> str:
    """AGX Orin has a second root file system inside, which `external` leaves alone."""
    return "external" if board.name == "agx-orin" and board.storages[kind] else "internal"


def _boot_order(board: Board, kind: str) -> dict[str, str]:
    """Boards with storage inside boot from it unless told otherwise."""
    if not board.storages[kind] or "" not in board.storages.values():
        return {}
    overlay = {"nvme": "BootOrderNvme.dtbo", "usb": "BootOrderUsb.dtbo"}.get(kind)
    return {"ADDITIONAL_DTB_OVERLAY_OPT": overlay} if overlay else {}


def _notices(bsp: Bsp, board: Board, config: str, commands: tuple[Command, ...]) -> list[str]:
    command = commands[0]
    needed = [command.argv[0].removeprefix("./"), f"{config}.conf"]
    needed += [board.layout] if board.layout in command.argv else []
    found = [f"{bsp.folder / name} is missing: unpack the whole package" for name in needed if not _is(bsp, name)]
    found += _about_image(bsp, board)
    if len(commands) > 1 and _is(bsp, f"rootfs/{DEVICE_FILE}"):
        found.append(f"{bsp.rootfs} holds one device's file: all boards get its name and its token")
    return found


def _about_image(bsp: Bsp, board: Board) -> list[str]:
    try:
        image = image_manifest.read(bsp.rootfs)
    except BundleError as error:
        return [str(error)]
    if image is None:
        return [f"{bsp.rootfs} holds no image of starsd: make one with starsd-edge image build"]
    found = []
    if not image.finished:
        found.append(f"{bsp.rootfs} holds an image whose build was stopped: build it again")
    if image.board != board.name:
        found.append(f"{bsp.rootfs} holds an image for {image.board}, expected one for {board.name}: build it again")
    return found


def _is(bsp: Bsp, name: str) -> bool:
    return (bsp.folder / name).is_file()

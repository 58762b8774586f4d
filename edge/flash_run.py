"""Flashing: find boards in recovery mode, ask, run the plan."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path

import msgspec

from starsd.edge.flash import FlashPlan
from starsd.edge.image_alone import alone
from starsd.edge.l4t_boards import BOARDS, Board
from starsd.edge.l4t_command import Command, run
from starsd.shared.errors import UsageError

VENDOR = "0955"  # NVIDIA
LSUSB = ("lsusb", "-d", f"{VENDOR}:")
RUNNING = {"7020": "a running Jetson", "7035": "a board that is being flashed"}  # product ids outside recovery mode
RECOVERY = "hold FORCE RECOVERY (or close its pins), switch power on, release; then lsusb -d 0955: shows it"
LOCKS = Path("/run/starsd")  # of boards, whatever folder they are flashed from
_DEVICE = re.compile(rf"Bus (\d+) Device (\d+): ID {VENDOR}:([0-9a-fA-F]{{4}})(.*)")


class Found(msgspec.Struct, frozen=True):
    """A board of NVIDIA on the USB bus in recovery mode; `boards` are the ones it may be, () when unknown."""

    place: str  # bus-device
    product: str
    module: str
    boards: tuple[str, ...]


class Done(msgspec.Struct, frozen=True):
    """A command that was run to its end."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    seconds: float
    log: str


def find_boards(lsusb: Sequence[str] = LSUSB) -> tuple[list[Found], list[str]]:
    """Boards in recovery mode, and what else of NVIDIA's is connected. Raises UsageError when lsusb cannot be run."""
    try:
        done = subprocess.run(
            list(lsusb), capture_output=True, text=True, errors="replace", check=False, timeout=30
        )  # names of devices come from the devices
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{lsusb[0]} cannot be run, which finds boards: install usbutils ({error})") from error
    found, others = [], []
    for bus, device, number, name in _DEVICE.findall(done.stdout):
        product = number.lower()
        modules = {board.name: board.usb[product] for board in BOARDS.values() if product in board.usb}
        if product in RUNNING or not (modules or "APX" in name):  # APX: what NVIDIA calls recovery mode
            others.append(RUNNING.get(product, f"another device of NVIDIA, {product}"))
            continue
        module = next(iter(modules.values()), f"unknown product {product}")
        found.append(Found(f"{bus}-{device}", product, module, tuple(modules)))
    return found, others


def check_boards(found: Sequence[Found], others: Sequence[str], board: Board, massflash: int | None) -> None:
    """Raises UsageError unless exactly the right boards are in recovery mode: one, or 1 to `massflash`."""
    if not found:
        seen = f"{', '.join(others)} and " if others else ""
        raise UsageError(f"got {seen}no board in recovery mode, expected a {board.title}: {RECOVERY}")
    for one in found:
        if not one.boards:
            raise UsageError(
                f"the board in recovery mode at {one.place} is of a kind that is not known here, {one.product}, "
                f"expected {board.name}: where you know better, run what --dry-run shows"
            )
        if board.name not in one.boards:
            raise UsageError(f"the board in recovery mode is {one.module}, expected {board.name}")
    if massflash is None and len(found) > 1:
        places = ", ".join(one.place for one in found)
        raise UsageError(
            f"got {len(found)} boards in recovery mode ({places}), expected one: "
            f"disconnect the others, or give --massflash {len(found)}"
        )
    if massflash is not None and len(found) > massflash:
        raise UsageError(f"got {len(found)} boards in recovery mode, expected at most --massflash {massflash}")


@contextlib.contextmanager
def reserved(found: Sequence[Found]) -> Iterator[None]:
    """Keep the boards for this flash. Raises UsageError when another one has any of them."""
    with contextlib.ExitStack() as held:
        for place in sorted(one.place for one in found):
            held.enter_context(alone(f"flash of the board at {place}", LOCKS, f"usb-{place}.lock"))
        yield


def confirm(plan: FlashPlan, count: int, ask: Callable[[str], str]) -> None:
    """Raises UsageError unless the board's name is typed."""
    what = f"{plan.storage} of {count} boards" if count > 1 else plan.storage
    answer = ask(f"This erases the {what}. Type {plan.board.name} to go on: ").strip()
    if answer != plan.board.name:
        raise UsageError(f"got {answer!r}, expected {plan.board.name}: nothing was flashed")


def ask_on_stderr(question: str) -> str:
    """A line of stdin; "" at its end. The question goes to stderr, since stdout is for results."""
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def flash(
    plan: FlashPlan,
    logs: Path,
    *,
    report: Callable[[Done], None],
    show: Callable[[str], None],
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> None:
    """Run the plan's commands. Their output goes to `show` and to a new file in `logs`, which is kept.

    Raises CommandError at the first that fails.
    """
    log = _new(logs / f"flash-{plan.board.name}-{now():%Y%m%dT%H%M%SZ}.log")
    for command in plan.commands:
        _must_exist(command)
        started = time.monotonic()
        run(command, log, show)
        report(Done(command.argv, command.cwd, command.env, time.monotonic() - started, str(log)))


def _new(log: Path) -> Path:
    """That name, or one like it that nobody has yet: another flash may begin in the same second."""
    others = (log.with_name(f"{log.stem}-{number}.log") for number in count(2))
    return next(path for path in chain([log], others) if not path.exists())


def _must_exist(command: Command) -> None:
    if not (Path(command.cwd) / command.argv[0]).is_file():
        raise UsageError(f"{command.argv[0]} is not in {command.cwd}, expected the whole Linux_for_Tegra")

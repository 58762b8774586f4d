"""Updates: a signed release is installed beside the one that runs, tried, and switched to by renaming one link.

    /opt/starsd/a, /opt/starsd/b    two environments
    /opt/starsd/current             a link to one of them

Until the new one has passed its self-test nothing of the old one is touched. Where the edge does not come up on the new
one, the link goes back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from starsd.edge.image_wheels import ABOUT, LIST
from starsd.edge.update_sign import check, read_public_key
from starsd.shared.errors import StarsdError, UsageError

FORMAT = 1
MOST_FILES, MOST_BYTES = 500, 4 << 30  # of a release
SETTLE_SECONDS = 20  # for the edge to fail after a switch, if it does
_FILE = re.compile(r"[\w-][\w.+!-]*\.whl")
_SLOTS = ("a", "b")
Check = Callable[[Path], None]


class UpdateError(StarsdError):
    """A release that could not be installed, or that does not work here; what ran before runs on."""


class Release(msgspec.Struct, frozen=True):
    """`release.json`."""

    format: int
    version: str
    python: str
    machine: str
    digest: str


class Updated(msgspec.Struct, frozen=True):
    version: str
    slot: str
    before: str  # version; "" when there was none
    comment: str  # what the signer said


class Slots:
    """The two environments below a folder."""

    def __init__(self, folder: Path = Path("/opt/starsd")) -> None:
        self.folder = folder
        self.link = folder / "current"

    def current(self) -> str:
        """a or b; "" before anything was installed."""
        name = os.readlink(self.link) if self.link.is_symlink() else ""
        return name if name in _SLOTS else ""

    def free(self) -> Path:
        """The environment that does not run."""
        return self.folder / ("b" if self.current() == "a" else "a")

    def switch(self, name: str) -> None:
        """Make `name` the current one. A crash leaves either the old or the new, never nothing."""
        part = self.folder / "next"
        part.unlink(missing_ok=True)
        part.symlink_to(name)
        part.replace(self.link)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def version(self, name: str) -> str:
        """The version in an environment; "" when nothing whole is there."""
        file = self.folder / name / ABOUT
        try:
            return msgspec.json.decode(file.read_bytes(), type=Release).version if name else ""
        except (OSError, msgspec.MsgspecError):
            return ""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Raises UsageError when another update is under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UsageError(f"another update of {self.folder} is under way: wait for it") from None
        finally:
            os.close(descriptor)


def update(
    file: Path,
    key: Path,
    slots: Slots,
    *,
    allow_older: bool = False,
    show: Callable[[str], None] = lambda text: None,
    install: Callable[[Path, Path], None] | None = None,
    self_test: Check | None = None,
    restart: Check = lambda slot: None,
) -> Updated:
    """Install the release `file`, whose signature lies beside it, and switch to it.

    `restart` makes the edge use the environment it is given, and raises UpdateError when it does not come up. Raises
    UsageError or SignatureError before anything is written, UpdateError afterwards; then the old release is current.
    """
    comment = check(file, file.with_name(f"{file.name}.minisig"), read_public_key(key))
    show(f"{file.name} is signed: {comment}")
    with slots.alone(), tempfile.TemporaryDirectory(dir=slots.folder, prefix=".update-") as scratch:
        release = unpack(file, Path(scratch))
        before, old = slots.current(), slots.version(slots.current())
        check_release(release, old, allow_older)
        slot = slots.free()
        show(f"installing {release.version} into {slot.name}")
        (install or run_installer)(Path(scratch), slot)
        show("self-test")
        (self_test or doctor)(slot)
        slots.switch(slot.name)
        try:
            restart(slots.link)
        except UpdateError as error:
            if before:
                slots.switch(before)
                with contextlib.suppress(UpdateError):
                    restart(slots.link)
                raise UpdateError(f"{release.version} did not come up, back at {old or before}: {error}") from error
            raise
    return Updated(release.version, slot.name, old, comment)


def unpack(file: Path, folder: Path) -> Release:
    """Unpack a release: plain files, with names of wheels. Raises UsageError for anything else in it."""
    total = 0
    try:
        with tarfile.open(file, "r:") as archive:
            for count, member in enumerate(archive, start=1):
                name = member.name.removeprefix("./")
                total += member.size
                if not member.isreg() or not (name in (ABOUT, LIST) or _FILE.fullmatch(name)):
                    raise UsageError(f"{file.name} holds {name[:80]!r}, expected wheels, {LIST} and {ABOUT}")
                if count > MOST_FILES or total > MOST_BYTES:
                    raise UsageError(f"{file.name} is too large, expected {MOST_FILES} files and {MOST_BYTES} bytes")
                source = archive.extractfile(member)
                assert source is not None
                with source, (folder / name).open("xb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=Release)
    except (tarfile.TarError, FileExistsError, FileNotFoundError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file.name} is no release of starsd: {error}") from error


def check_release(release: Release, installed: str, allow_older: bool, python: str | None = None) -> None:
    """Raises UsageError for a release that is not for this machine, or older than what is installed."""
    here = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    if release.format != FORMAT:
        raise UsageError(f"the release has format {release.format}, expected {FORMAT}")
    if release.python != here:
        raise UsageError(f"the release is for Python {release.python}, expected {here}")
    if installed and not allow_older and _order(release.version) < _order(installed):
        raise UsageError(f"the release is {release.version}, expected {installed} or newer: or give --allow-older")


def _order(version: str) -> tuple[tuple[int, ...], bool, str]:
    """Sorts versions: numbers by value, and what has letters behind them (0.2.0rc1) before what has not."""
    numbers, rest = re.fullmatch(r"([\d.]*)(.*)", version, re.DOTALL).groups()  # type: ignore[union-attr]
    return tuple(int(part) for part in numbers.split(".") if part), not rest, rest


def run_installer(wheelhouse: Path, slot: Path) -> None:
    """Raises UpdateError when the wheels cannot be installed; the half-made environment is not the current one."""
    script = resources.files("starsd.edge").joinpath("units", "install-release.sh")
    with resources.as_file(script) as path:
        _run(["sh", str(path), str(wheelhouse), str(slot)], "the release cannot be installed")
    _run([str(slot / "bin" / "python"), "-m", "compileall", "-q", str(slot / "lib")], "the release cannot be compiled")


def doctor(slot: Path) -> None:
    """The new environment's own self-test. Raises UpdateError when something is broken."""
    _run([str(slot / "bin" / "starsd"), "doctor", "--json"], "the self-test of the release failed")


def restart_edge(slot: Path, settle: float = SETTLE_SECONDS) -> None:
    """Restart the service, where there is one, and see whether it stays up. Raises UpdateError when it does not."""
    if not Path("/run/systemd/system").is_dir():
        return
    unit = "starsd-edge.service"
    if subprocess.run(["systemctl", "is-enabled", "--quiet", unit], check=False).returncode:
        return
    _run(["systemctl", "restart", unit], f"{unit} does not start")
    _run(["sleep", str(settle)], "interrupted")
    _run(["systemctl", "is-active", "--quiet", unit], f"{unit} does not stay up: see journalctl -u {unit}")


def _run(argv: Sequence[str], failed: str) -> None:
    done = subprocess.run(list(argv), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise UpdateError(f"{failed}: {lines[-1].strip()[:300] if lines else f'status {done.returncode}'}")

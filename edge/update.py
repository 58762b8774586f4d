"""Updates: a signed release is installed beside the one that runs, tried, and switched to by renaming one link.

Until the new one has passed its self-test nothing of the old one is touched. Where the edge does not come up on the new
one, the link goes back, and with it the settings of the units: update_units. Where nobody is left to put it back, a
note on disk has it done: update_slots.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec

from starsd.edge.image_alone import alone
from starsd.edge.image_wheels import ABOUT, LIST
from starsd.edge.update_sign import check, read_public_key
from starsd.edge.update_slots import Release, Slots, UpdateError, run_program
from starsd.edge.update_units import unit_problem
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.signals import ended_by_signals

try:
    from packaging.version import Version
except ModuleNotFoundError as error:
    raise MissingExtraError("packaging", "update") from error

FORMAT = 1
MOST_FILES, MOST_BYTES = 500, 4 << 30  # of a release
_FILE = re.compile(r"[\w-][\w.+!-]*\.whl")
Check = Callable[[Path], None]


class Updated(msgspec.Struct, frozen=True):
    version: str
    slot: str
    before: str  # version; "" when there was none
    comment: str  # what the signer said


def update(
    file: Path,
    key: Path,
    slots: Slots,
    *,
    allow_older: bool = False,
    show: Callable[[str], None] = lambda text: None,
    install: Callable[[Path, Path], None] | None = None,
    units: Callable[[Path, Path], str | None] = unit_problem,
    self_test: Check | None = None,
    restart: Check = lambda slot: None,
    machine: str | None = None,
) -> Updated:
    """Install the release `file`, whose signature lies beside it, and switch to it.

    `restart` makes the edge use the environment it is given, and raises UpdateError when it does not come up. Raises
    UsageError or SignatureError before anything is written, UpdateError afterwards; then the old release is current. So
    it is after SIGTERM, SIGHUP or Ctrl-C. `machine` is the kind of this one's processor, if not what the system says.
    """
    signature, public = file.with_name(f"{file.name}.minisig"), read_public_key(key)
    comment = check(file, signature, public)
    show(f"{file.name} is signed: {comment}")
    with ended_by_signals(), alone(f"update of {slots.folder}", slots.folder), slots.scratch() as scratch:
        ours, wheels = scratch / "signed", scratch / "wheels"
        for folder in (ours, wheels):
            folder.mkdir()
        for path in (file, signature):  # from here on nobody else can change it
            shutil.copyfile(path, ours / path.name)
        check(ours / file.name, ours / signature.name, public)
        release = unpack(ours / file.name, wheels)
        if slots.go_back():
            with contextlib.suppress(UpdateError):  # a better one may be what comes now
                restart(slots.link)
            show(f"an update was stopped before it was seen to work: back at {slots.version(slots.current())}")
        slots.end()
        before, old = slots.current(), slots.version(slots.current())
        check_release(release, old, allow_older, machine=machine)
        slot = slots.free()
        show(f"installing {release.version} into {slot.name}")
        (install or run_installer)(wheels, slot)
        if problem := units(slot, slots.link):
            package = f"starsd_{release.version}_arm64.deb"
            raise UpdateError(f"{release.version} {problem}, which takes its package: run apt install ./{package}")
        show("self-test")
        (self_test or doctor)(slot)
        slots.begin(slot.name)
        try:
            slots.switch(slot.name)
            restart(slots.link)
        except BaseException as error:  # also when a person loses patience: it was not seen to work
            if slots.go_back():
                with contextlib.suppress(UpdateError):
                    restart(slots.link)
            slots.end()
            if before and isinstance(error, UpdateError):
                raise UpdateError(f"{release.version} did not come up, back at {old or before}: {error}") from error
            raise
        slots.end()
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


def check_release(
    release: Release, installed: str, allow_older: bool, python: str | None = None, machine: str | None = None
) -> None:
    """Raises UsageError for a release that is not for this machine, or older than what is installed."""
    if release.format != FORMAT:
        raise UsageError(f"the release has format {release.format}, expected {FORMAT}")
    if release.python != (here := python or f"{sys.version_info[0]}.{sys.version_info[1]}"):
        raise UsageError(f"the release is for Python {release.python}, expected {here}")
    if release.machine != (kind := machine or platform.machine()):
        raise UsageError(f"the release is for {release.machine}, expected {kind}")
    version = _version(release.version, "the release")
    if installed and not allow_older and version < _version(installed, "what is installed"):
        raise UsageError(f"the release is {release.version}, expected {installed} or newer: or give --allow-older")


def _version(text: str, what: str) -> Version:
    try:
        return Version(text)
    except ValueError as error:  # a number may have too many digits, too
        raise UsageError(f"{what} is {text[:40]!r}, expected a version such as 0.2.0") from error


def run_installer(wheelhouse: Path, slot: Path) -> None:
    """Raises UpdateError when the wheels cannot be installed; the half-made environment is not the current one."""
    script = resources.files("starsd.edge").joinpath("units", "install-release.sh")
    with resources.as_file(script) as path:
        run_program(["sh", str(path), str(wheelhouse), str(slot)], "the release cannot be installed")
    run_program(
        [str(slot / "bin" / "python"), "-m", "compileall", "-q", str(slot / "lib")], "the release cannot be compiled"
    )


def doctor(slot: Path) -> None:
    """The new environment's own self-test. Raises UpdateError when something is broken."""
    run_program([str(slot / "bin" / "starsd"), "doctor", "--json"], "the self-test of the release failed")

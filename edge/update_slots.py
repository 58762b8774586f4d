"""The two environments of a device, the link to the one that runs, and a note on disk while a new one is being tried.

    /opt/starsd/a, /opt/starsd/b    two environments
    /opt/starsd/current             a link to one of them
    /opt/starsd/trying              "b a": b is being tried, before it was a; missing at all other times

Where an update ends before it has seen the new one work, by a power cut or whatever, the note stays. Then the next
start of the edge goes back (units/take-back.sh, which starsd-edge.conf runs), or the next update does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from starsd.edge.children import end_all
from starsd.edge.image_deb import NOTE, SLOTS
from starsd.edge.image_wheels import ABOUT
from starsd.shared.errors import StarsdError

NAMES = ("a", "b")
PATIENCE = 5.0  # seconds for a program that is interrupted
_SCRATCH = ".update-"


class UpdateError(StarsdError):
    """A release that could not be installed, or that does not work here; what ran before runs on."""


class Release(msgspec.Struct, frozen=True):
    """`release.json`."""

    format: int
    version: str
    python: str
    machine: str
    digest: str


class Slots:
    """The two environments below a folder."""

    def __init__(self, folder: Path = Path(SLOTS)) -> None:
        self.folder = folder
        self.link = folder / "current"
        self._note = folder / NOTE

    def current(self) -> str:
        """a or b; "" before anything was installed."""
        name = os.readlink(self.link) if self.link.is_symlink() else ""
        return name if name in NAMES else ""

    def free(self) -> Path:
        """The environment that does not run."""
        return self.folder / ("b" if self.current() == "a" else "a")

    def switch(self, name: str) -> None:
        """Make `name` the current one. A crash leaves either the old or the new, never nothing."""
        part = self.folder / "next"
        part.unlink(missing_ok=True)
        part.symlink_to(name)
        part.replace(self.link)
        self._sync()

    def begin(self, name: str) -> None:
        """Note that `name` is going to be tried in the place of the current one."""
        if before := self.current():
            part = self.folder / f"{NOTE}.part"
            with part.open("w", encoding="ascii") as file:
                file.write(f"{name} {before}\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._note)
            self._sync()

    def end(self) -> None:
        """What is current stays."""
        self._note.unlink(missing_ok=True)
        self._sync()

    def go_back(self) -> bool:
        """Make that one current again that was so before one which nobody has seen work. False: none is being tried.

        The note stays, for `end`.
        """
        tried, before = self._noted()
        if tried != self.current() or before not in NAMES or not (self.folder / before / ABOUT).is_file():
            return False
        self.switch(before)
        return True

    def _noted(self) -> tuple[str, str]:
        try:
            tried, before = self._note.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return "", ""
        return tried, before

    def _sync(self) -> None:
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
    def scratch(self) -> Iterator[Path]:
        """A folder for unpacking, on the same storage; what an update that was killed left goes first."""
        for left in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_SCRATCH) as made:
            yield Path(made)


def run_program(argv: Sequence[str], failed: str) -> str:
    """What a program says. Raises UpdateError, with its last line, when it fails."""
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        close_fds=False,  # it holds our lock
        start_new_session=True,  # so that it can be ended whole
        umask=0o022,  # what it makes is for the edge's own user to read
    ) as child:
        try:
            said, complaints = child.communicate()
        except BaseException:
            end_all(child, PATIENCE)
            raise
    if child.returncode:
        lines = [line for line in (complaints + said).splitlines() if line.strip()]
        raise UpdateError(f"{failed}: {lines[-1].strip()[:300] if lines else f'status {child.returncode}'}")
    return said

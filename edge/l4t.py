"""NVIDIA's package for Jetsons, the unpacked folder `Linux_for_Tegra`: its release and its root file system.

Where a release is written: Jetson Linux Developer Guide, "Package Manifest"; `flash.sh` reads the same files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from starsd.shared.errors import UsageError

RELEASE_FILES = (  # the first one found counts; the last two come with apply_binaries.sh
    "nv_tegra/bsp_version",
    "nv_tegra/release",
    "nv_tegra/nv_tegra_release",
    "rootfs/etc/nv_tegra_release",
)
EXAMPLE = "36.4.3"
_TEGRA = re.compile(r"R(\d+)\s*\(release\),\s*REVISION:\s*(\d+)(?:\.(\d+))?")
_PLAIN = re.compile(r"R?(\d+)\.(\d+)(?:\.(\d+))?\s*")
_PYTHON = re.compile(r"(?:/usr/bin/)?python(3\.\d+)")
_VARIABLE = re.compile(r"^BSP_(BRANCH|MAJOR|MINOR)=[\"']?(\d+)", re.MULTILINE)


class Release(msgspec.Struct, frozen=True, order=True):
    """A release of Jetson Linux, R36.4.3 being (36, 4, 3)."""

    branch: int
    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"{self.branch}.{self.major}.{self.minor}"


class Bsp(msgspec.Struct, frozen=True):
    """A folder `Linux_for_Tegra`, absolute, and its release; `stated` where no file told it when it was opened."""

    folder: Path
    release: Release
    stated: bool = False

    @property
    def rootfs(self) -> Path:
        return self.folder / "rootfs"

    @property
    def python(self) -> str:
        """The version of the tree's own Python; of the Ubuntu that this release brings, where there is no tree yet."""
        program = self.rootfs / "usr/bin/python3"
        found = _PYTHON.fullmatch(os.readlink(program)) if program.is_symlink() else None
        return found[1] if found else "3.10" if self.release.branch < 38 else "3.12"


def open_bsp(folder: Path, stated: str = "") -> Bsp:
    """The package in `folder`. `stated` is its release as a person has it, for a package that does not say its own.

    Raises UsageError when it is no folder, when neither tells the release, and when one tells another than the other.
    """
    release = _stated(stated) if stated else None
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder, expected an unpacked Linux_for_Tegra")
    folder = folder.resolve()
    told = _told(folder)
    if release is None:
        if (first := next(told, None)) is None:
            raise UsageError(
                f"{folder} does not say its release, looked for {', '.join(RELEASE_FILES)} in it: expected an unpacked "
                f"Linux_for_Tegra, or its release as --l4t-release {EXAMPLE}"
            )
        return Bsp(folder, first[1])
    files = list(told)
    for file, found in files:
        _agree(file, found, release)
    return Bsp(folder, release, stated=not files)


def check_stated(bsp: Bsp) -> None:
    """Raises UsageError when a file tells another release than was stated: NVIDIA's tools bring one into the tree."""
    if bsp.stated:
        for file, found in _told(bsp.folder):
            _agree(file, found, bsp.release)


def _told(folder: Path) -> Iterator[tuple[Path, Release]]:
    """Files that tell a release, and the one that each tells."""
    for name in RELEASE_FILES:
        file = folder / name
        if file.is_file():
            yield file, parse_release(file.read_text(encoding="utf-8", errors="replace"), str(file))


def _agree(file: Path, found: Release, stated: Release) -> None:
    if found != stated:
        raise UsageError(f"{file} says R{found}, expected R{stated} as --l4t-release has it: leave that option out")


def _stated(text: str) -> Release:
    found = _PLAIN.fullmatch(text)
    if found is None:
        raise UsageError(f"--l4t-release is {text[:40]!r}, expected the like of {EXAMPLE}")
    branch, major, minor = found.groups(default="0")
    return Release(int(branch), int(major), int(minor))


def parse_release(text: str, source: str) -> Release:
    """The release that one of RELEASE_FILES tells. Raises UsageError, naming `source`, when it tells none."""
    if found := _TEGRA.search(text) or _PLAIN.match(text):
        branch, major, minor = found.groups(default="0")
        return Release(int(branch), int(major), int(minor))
    said = {name: int(value) for name, value in _VARIABLE.findall(text)}
    if {"BRANCH", "MAJOR"} <= said.keys():
        return Release(said["BRANCH"], said["MAJOR"], said.get("MINOR", 0))
    first = text.strip().partition("\n")[0]
    raise UsageError(f"{source} begins with {first[:60]!r}, expected the like of '# R36 (release), REVISION: 4.3'")


def installed_packages(rootfs: Path) -> frozenset[str] | None:
    """Names of the Debian packages installed in a tree; None when it has no package database at all."""
    file = rootfs / "var/lib/dpkg/status"
    if not file.is_file():
        return None
    names = set()
    for entry in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if line[:1].isalpha() and ": " in line)
        if fields.get("Status", "").endswith(" installed"):
            names.add(fields.get("Package", ""))
    return frozenset(names)

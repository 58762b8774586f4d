"""The Debian package of an edge: units, the wheelhouse, and scripts that install one from the other.

deb(5) written here rather than by dpkg-deb: the same input gives the same bytes, on any system.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from starsd.edge.image_alone import NAME as LOCK
from starsd.edge.image_wheels import ABOUT, LIST, Wheelhouse, about, check_unchanged, requirements
from starsd.shared.errors import UsageError

EPOCH = 1_700_000_000  # of every file, unless $SOURCE_DATE_EPOCH says another second
PACKAGE = "starsd"
WHEELHOUSE = "usr/share/starsd/wheelhouse"
INSTALLER = "usr/lib/starsd/install-release"
UNITS = ("starsd-edge.service", "starsd-first-boot.service", "starsd-ssh-keys.service")
COMMANDS = ("starsd", "starsd-edge")
SLOTS = "/opt/starsd"
NOTE = "trying"  # there, while update_slots tries a release; the package goes by nothing that was before
FIRST_BOOT = "var/lib/starsd-first-boot"  # markers of what a first boot has done; `done` at its end
SYSTEM = "usr/lib/systemd/system"
SYSUSERS = "usr/lib/sysusers.d/starsd.conf"
_POSTINST = f"""#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
mkdir -p {SLOTS}
exec 9>>{SLOTS}/{LOCK}
flock --nonblock 9 || {{ echo "an update of {SLOTS} is under way: wait for its end" >&2; exit 1; }}
echo $$ >{SLOTS}/{LOCK}
systemd-sysusers starsd.conf
slot={SLOTS}/a
[ "$(readlink {SLOTS}/current 2>/dev/null)" != a ] || slot={SLOTS}/b
rm -f {SLOTS}/{NOTE}
/{INSTALLER} /{WHEELHOUSE} "$slot"
ln -sfn "${{slot##*/}}" {SLOTS}/next
mv -T {SLOTS}/next {SLOTS}/current
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart starsd-edge.service
fi
"""
_PRERM = """#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl stop starsd-edge.service || true
fi
"""
_POSTRM = f"""#!/bin/sh
set -e
case "$1" in remove|purge) rm -rf {SLOTS} ;; esac
"""


def epoch() -> int:
    """Seconds since 1970 that everything we make carries; https://reproducible-builds.org/specs/source-date-epoch.

    Raises UsageError for anything else in the environment.
    """
    said = os.environ.get("SOURCE_DATE_EPOCH", str(EPOCH))
    if re.fullmatch("[0-9]{1,11}", said) is None:  # an ar header has room for twelve
        raise UsageError(f"SOURCE_DATE_EPOCH is {said[:40]!r}, expected seconds since 1970")
    return int(said)


def unit(name: str) -> bytes:
    """A file of `edge/units`."""
    return resources.files("starsd.edge").joinpath("units", name).read_bytes()


def settings_link(name: str) -> str:
    """Where systemd looks for more of a unit; the package puts a link there."""
    return f"{SYSTEM}/{name}.d/release.conf"


def settings_target(name: str) -> str:
    """What that link leads to: the current release's, so that an update brings its own and a way back is one link.

    Relative, since `systemd-analyze --root` follows no others.
    """
    above = "../" * settings_link(name).count("/")
    return f"{above}{SLOTS[1:]}/current/units/{name.removesuffix('.service')}.conf"


def file_name(house: Wheelhouse) -> str:
    return f"{PACKAGE}_{house.version}_arm64.deb"


def write_deb(house: Wheelhouse, path: Path) -> None:
    """Write the package; equal wheelhouses give equal ones. Raises HashMismatchError when a wheel changes meanwhile."""
    part = path.with_name(f".{path.name}.part")
    size = sum(wheel.bytes for wheel in house.wheels) // 1024 + 100
    data = path.with_name(f".{path.name}.data")
    try:
        with data.open("wb") as stream:  # wheels are compressed already
            _tar(stream, _contents(house))
        check_unchanged(house)
        control = io.BytesIO()
        _tar(control, _control(house, size))
        with part.open("wb") as archive:
            archive.write(b"!<arch>\n")
            _member(archive, "debian-binary", io.BytesIO(b"2.0\n"), 4)
            packed = gzip.compress(control.getvalue(), mtime=0)
            _member(archive, "control.tar.gz", io.BytesIO(packed), len(packed))
            with data.open("rb") as stream:
                _member(archive, "data.tar", stream, data.stat().st_size)
        part.replace(path)
    finally:
        data.unlink(missing_ok=True)
        part.unlink(missing_ok=True)


def write_release(house: Wheelhouse, path: Path) -> None:
    """Write a release for `starsd-edge update`: a tar of the wheelhouse, to be signed."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as stream:
            _tar(stream, _wheels(house, ""))
        check_unchanged(house)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _contents(house: Wheelhouse) -> Iterator[tuple[str, bytes | Path | str, int]]:
    """Names, what they hold (bytes, a file to copy, or a link's target) and modes."""
    for name in UNITS:
        yield f"{SYSTEM}/{name}", unit(name), 0o644
        yield settings_link(name), settings_target(name), 0o777
    yield SYSUSERS, unit("starsd-sysusers.conf"), 0o644
    yield INSTALLER, unit("install-release.sh"), 0o755
    for name in COMMANDS:
        yield f"usr/bin/{name}", f"{SLOTS}/current/bin/{name}", 0o777
    yield from _wheels(house, f"{WHEELHOUSE}/")


def _wheels(house: Wheelhouse, prefix: str) -> Iterator[tuple[str, bytes | Path | str, int]]:
    yield f"{prefix}{ABOUT}", about(house), 0o644
    yield f"{prefix}{LIST}", requirements(house), 0o644
    for wheel in house.wheels:
        yield f"{prefix}{wheel.file}", house.folder / wheel.file, 0o644


def _control(house: Wheelhouse, size: int) -> Iterator[tuple[str, bytes | Path | str, int]]:
    major, minor = house.python.split(".")
    fields = {
        "Package": PACKAGE,
        "Version": house.version,
        "Architecture": "arm64",
        "Maintainer": "starsd",
        "Installed-Size": str(size),
        "Depends": f"python3 (>= {house.python}), python3 (<< {major}.{int(minor) + 1}), systemd, openssh-client",
        "Section": "science",
        "Priority": "optional",
        "Description": "edge of starsd\n The model runs on this device, its drafter in the cloud.",
    }
    yield "control", "".join(f"{name}: {value}\n" for name, value in fields.items()).encode(), 0o644
    for name, script in (("postinst", _POSTINST), ("prerm", _PRERM), ("postrm", _POSTRM)):
        yield name, script.encode(), 0o755


def _tar(stream: io.BufferedWriter | io.BytesIO, entries: Iterator[tuple[str, bytes | Path | str, int]]) -> None:
    """A tar with folders before what they hold, everything root's, every time the epoch."""
    made: set[str] = set()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content, mode in entries:
            parts = name.split("/")[:-1]
            for folder in ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
                if folder not in made:
                    made.add(folder)
                    archive.addfile(_info(folder, 0o755, tarfile.DIRTYPE))
            if isinstance(content, str):
                info = _info(name, mode, tarfile.SYMTYPE)
                info.linkname = content
                archive.addfile(info)
            elif isinstance(content, bytes):
                info = _info(name, mode, tarfile.REGTYPE)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info = _info(name, mode, tarfile.REGTYPE)
                info.size = content.stat().st_size
                with content.open("rb") as file:
                    archive.addfile(info, file)


def _info(name: str, mode: int, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"./{name}")
    info.mode, info.type, info.mtime = stat.S_IMODE(mode), kind, epoch()
    info.uname = info.gname = "root"
    return info


def _member(archive: io.BufferedWriter, name: str, content: io.BufferedReader | io.BytesIO, size: int) -> None:
    """One file of an ar archive; its header is 60 bytes of text, and it ends on an even byte."""
    archive.write(f"{name:<16}{epoch():<12}{0:<6}{0:<6}{'100644':<8}{size:<10}`\n".encode("ascii"))
    while block := content.read(1 << 20):
        archive.write(block)
    if size % 2:
        archive.write(b"\n")

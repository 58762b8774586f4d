"""A wheelhouse: every wheel that a device needs, pip's own among them, with a list of their hashes.

It is what a `.deb` and a release carry, so that a device installs without a network and gets what was tested.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from starsd.edge.l4t_command import Command, Runner
from starsd.shared.errors import HashMismatchError, UsageError
from starsd.shared.manifest import file_sha256

LIST = "requirements.txt"  # what install-release.sh reads
ABOUT = "release.json"
SOURCES = ("edge", "server", "shared", "export", "scripts", "pyproject.toml", "README.md", "LICENSE")
EXTRAS = "export,update"  # `export` brings `edge`, and lets a device make its own bundles
_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)  # minor versions that wheels are made for; Ubuntu 22.04 has 35
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in _GLIBC))
_SAID_VERSION = re.compile(r"^version = \"([^\"]+)\"", re.MULTILINE)
_WHEEL = re.compile(
    r"(?P<name>[\w.]+)-(?P<version>[\w.!+]+)(?:-\d[\w.]*)?-(?P<python>[\w.]+)-\w+-(?P<platform>[\w.]+)\.whl"
)


class Wheel(msgspec.Struct, frozen=True):
    file: str
    name: str
    version: str
    sha256: str
    bytes: int


class Wheelhouse(msgspec.Struct, frozen=True):
    """`python` is the version that all wheels fit, 3.12 for example."""

    folder: Path
    python: str
    wheels: tuple[Wheel, ...]

    @property
    def version(self) -> str:
        """Of starsd."""
        return next(wheel.version for wheel in self.wheels if wheel.name == "starsd")

    @property
    def digest(self) -> str:
        """Changes when any byte of any wheel does."""
        listed = [[wheel.file, wheel.sha256] for wheel in self.wheels]
        return hashlib.sha256(json.dumps([self.python, listed]).encode()).hexdigest()


def fill_commands(folder: Path, python: str, source: str) -> list[Command]:
    """Commands that fill a wheelhouse, by the pip of a Python of that version and with that pip's own index.

    pip weighs what is needed on which Python by the one it runs on, hence `python`. `source` is a wheel of starsd, or
    the folder of its source.
    """
    pip = (interpreter(python), "-m", "pip", "--disable-pip-version-check", "--no-input")
    target = ["--dest", str(folder), "--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    commands, wheel = [], source
    if not source.endswith(".whl"):
        build = (*pip, "wheel", "--no-deps", "--wheel-dir", str(folder / "own"), str(copy_place(folder)))
        commands.append(Command(build, str(folder.parent)))
        wheel = str(folder / "own" / f"starsd-{_version(source)}-py3-none-any.whl")
    wanted = f"starsd[{EXTRAS}] @ {Path(wheel).absolute().as_uri()}"
    commands.append(Command((*pip, "download", *target, wanted, "pip"), str(folder.parent)))
    return commands


def copy_place(folder: Path) -> Path:
    """Where `fill_wheelhouse` copies our source, since building leaves files behind where it builds."""
    return folder.parent / "source"


def fill_wheelhouse(folder: Path, python: str, source: str, run: Runner) -> Wheelhouse:
    """Run `fill_commands`; what was in the folder goes first. Raises CommandError when pip fails."""
    copy = copy_place(folder)
    for old in (folder, copy):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if not source.endswith(".whl"):
            copy.mkdir()
            for name in SOURCES:
                place = Path(source) / name
                if place.is_dir():
                    shutil.copytree(place, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copyfile(place, copy / name)
        for command in fill_commands(folder, python, source):
            run(command)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(folder / "own", ignore_errors=True)
    return read_wheelhouse(folder, python)


def source_digest(source: str) -> str:
    """Changes when anything does that a wheel of that source is made from; "" where there is no source."""
    place, digest = Path(source), hashlib.sha256()
    if not source or not place.exists():
        return ""
    paths = [place] if place.is_file() else sorted(path for name in SOURCES for path in _files(place / name))
    for path in paths:
        digest.update(f"{path.relative_to(place)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def interpreter(python: str) -> str:
    """The command of a Python of that version; this one, where it is of that version."""
    return sys.executable if python == f"{sys.version_info[0]}.{sys.version_info[1]}" else f"python{python}"


def _version(source: str) -> str:
    """Of a source folder, which need not be the one that runs."""
    file = Path(source) / "pyproject.toml"
    found = _SAID_VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else version("starsd")


def find_source(given: Path | None, wheelhouse: Path | None = None) -> str:
    """The wheel or the source folder that an image's starsd is made from: the one given, else our own.

    "" where neither is there and a wheelhouse makes up for it; else raises UsageError.
    """
    if given is None:
        if (own := own_source()) is None and wheelhouse is None:
            raise UsageError(
                "starsd runs apart from its source, expected --source FOLDER, a clone of its repository (or a wheel of "
                "it), or all wheels by --wheelhouse FOLDER"
            )
        return own or ""
    place = given.expanduser().resolve()
    if place.suffix == ".whl" and place.is_file():
        return str(place)
    if missing := [name for name in SOURCES if not (place / name).exists()]:
        raise UsageError(
            f"--source {given} has no {missing[0]}, expected a wheel of starsd or a clone of its repository"
        )
    return str(place)


def own_source() -> str | None:
    """The folder of our own source, when we run from it."""
    folder = Path(__file__).resolve().parent.parent
    return str(folder) if (folder / "pyproject.toml").is_file() else None


def read_wheelhouse(folder: Path, python: str) -> Wheelhouse:
    """What is in a wheelhouse. Raises UsageError when it cannot be installed on a device with that Python."""
    if not folder.is_dir():
        raise UsageError(f"wheelhouse {folder} is not a folder")
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        found = _WHEEL.fullmatch(path.name)
        if found is None:
            raise UsageError(f"{path} has no name of a wheel, expected name-version-python-abi-platform.whl")
        if problem := _problem(found["python"], path.name, found["platform"], python):
            raise UsageError(f"{path.name} is {problem}, expected one for Python {python} on aarch64 or any machine")
        name = re.sub(r"[-_.]+", "-", found["name"]).lower()
        wheels.append(Wheel(path.name, name, found["version"], file_sha256(path), path.stat().st_size))
    names = [wheel.name for wheel in wheels]
    for needed in ("starsd", "pip"):
        if needed not in names:
            raise UsageError(f"wheelhouse {folder} holds no wheel of {needed}, expected starsd, pip and all they need")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"wheelhouse {folder} holds {twice[0]} more than once, expected one version of each")
    return Wheelhouse(folder, python, tuple(wheels))


def _problem(pythons: str, file: str, platforms: str, python: str) -> str | None:
    abi = file.rsplit("-", 3)[2]
    if not all(platform == "any" or platform.endswith("_aarch64") for platform in platforms.split(".")):
        return f"for {platforms}"
    wanted = int(python.partition(".")[2])
    for tag in pythons.split("."):
        found = re.fullmatch(r"(py|cp)(\d)(\d*)", tag)
        if found is None or found[2] != "3":
            continue
        minor = int(found[3] or 0)
        if minor == wanted or (minor < wanted and (found[1] == "py" or abi == "abi3")):
            return None
    return f"for {pythons}-{abi}"


def requirements(house: Wheelhouse) -> bytes:
    """The list that pip installs from: exact versions with their hashes, pip itself left out."""
    return "".join(
        f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in house.wheels if wheel.name != "pip"
    ).encode()


def about(house: Wheelhouse) -> bytes:
    """`release.json`: what a device reads before it installs."""
    said = {"format": 1, "version": house.version, "python": house.python, "machine": "aarch64", "digest": house.digest}
    return json.dumps(said, indent=2).encode() + b"\n"


def check_unchanged(house: Wheelhouse) -> None:
    """Raises HashMismatchError when a wheel is no longer what was read."""
    for wheel in house.wheels:
        if file_sha256(house.folder / wheel.file) != wheel.sha256:
            raise HashMismatchError(f"{house.folder / wheel.file} changed while it was being used: start again")

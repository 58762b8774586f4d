"""Who gets into a device, and who becomes root there: accounts, keys, sudo, setuid programs, and what sshd takes.

What a package of the tree brings is taken as meant; what neither one of them nor the image's manifest lists is not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from starsd.edge.image_mounts import mounted_below
from starsd.edge.image_tree import inside
from starsd.edge.image_users import ACCOUNTS, entries
from starsd.shared.errors import UsageError

SETUID = stat.S_ISUID | stat.S_ISGID
KEY_FILES = ("authorized_keys", "authorized_keys2")  # that sshd looks for, below .ssh
SSHD = "etc/ssh/sshd_config"
_NO = {  # what sshd is not to take: keywords in lower case, older names of them too
    "passwordauthentication": "PasswordAuthentication",
    "kbdinteractiveauthentication": "KbdInteractiveAuthentication",
    "challengeresponseauthentication": "KbdInteractiveAuthentication",
    "permitrootlogin": "PermitRootLogin",
    "permitemptypasswords": "PermitEmptyPasswords",
}
_NO_UNLESS_SAID = ("PermitEmptyPasswords",)
_DEEPEST = 16  # files that include one another, as sshd has it


class Finding(msgspec.Struct, frozen=True):
    """`error` false: worth knowing, no reason not to flash."""

    check: str  # manifest, files, ownership, secrets, users, leftovers, mounts, units, driver
    path: str
    problem: str
    error: bool = True


def access(root: Path, listed: Collection[str], ours: Collection[str] = ()) -> Iterator[Finding]:
    """Every way in that is not as it should be. `listed` are the manifest's paths, `ours` folders seen to elsewhere."""
    yield from _accounts(root)
    yield from _keys(root, listed)
    found = [*_sudoers(root, listed), *_setuid(root, ours)]
    known = _of_packages(root, [path for path, _ in found])
    for path, problem in found:
        if path not in known:
            yield Finding("ownership", path, f"{problem}, and no package lists it")
    yield from _sshd(root)


def _accounts(root: Path) -> Iterator[Finding]:
    for path in ACCOUNTS:
        try:
            rows = entries(root, path)
        except UsageError as error:
            yield Finding("users", path, f"cannot be read: {error}")
            continue
        if "root" not in rows:
            yield Finding("users", path, "has no root, expected the accounts of the system: unpack the tree anew")
        for name, fields in rows.items() if path != "etc/group" else ():
            if path == "etc/passwd" and name != "root" and not fields[2].strip("0"):
                yield Finding("users", path, f"gives {name} the number of root, expected it for nobody else")
            if not fields[1]:
                yield Finding("users", path, f"lets {name} in without a password, expected keys only")
            elif fields[1][0] not in "!*" and (path, fields[1]) != ("etc/passwd", "x"):
                yield Finding("users", path, f"has a password for {name}, expected keys only", error=name == "root")


def _keys(root: Path, listed: Collection[str]) -> Iterator[Finding]:
    """Whose keys let them in. One that the manifest does not list is told of: a tree may have users of its own."""
    found = False
    for name, home in _homes(root):
        for path in (f"{home}/.ssh/{file}".lstrip("/") for file in KEY_FILES):
            place = inside(root, path)
            if not place.is_file() or not place.read_bytes().strip():
                continue
            found = True
            if name == "root":
                yield Finding("users", path, "lets root in by a key, expected nobody but a user")
            elif path not in listed:
                yield Finding("users", path, f"lets {name} in, and the manifest does not list it", error=False)
            owner = inside(root, home).stat().st_uid
            for one in (home, f"{home}/.ssh", path):
                about = inside(root, one).stat()
                if about.st_uid != owner or about.st_mode & 0o022:
                    yield Finding("users", one, "is not the user's alone, so that sshd ignores the key")
    if not found:
        yield Finding("users", "home", "holds no SSH key: nobody can log in", error=False)


def _homes(root: Path) -> list[tuple[str, str]]:
    try:
        rows = entries(root, "etc/passwd")
    except UsageError:  # said already
        rows = {}
    return sorted({("root", "root"), *((name, fields[5].strip("/")) for name, fields in rows.items())})


def _sudoers(root: Path, listed: Collection[str]) -> Iterator[tuple[str, str]]:
    """sudoers(5): names with a dot in them, or a tilde at their end, are not read."""
    for place in sorted(inside(root, "etc/sudoers.d").glob("*")):
        path = f"etc/sudoers.d/{place.name}"
        if path not in listed and "." not in place.name and not place.name.endswith("~"):
            yield path, "may let others become root, the manifest does not list it"


def _setuid(root: Path, ours: Collection[str]) -> Iterator[tuple[str, str]]:
    left_out = {root / path for path in ours} | set(mounted_below(root))
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if here / name not in left_out)
        for name in sorted(files):
            mode = (here / name).lstat().st_mode
            if stat.S_ISREG(mode) and mode & SETUID:
                yield str((here / name).relative_to(root)), f"has mode {stat.S_IMODE(mode):04o}"


def _of_packages(root: Path, paths: Sequence[str]) -> set[str]:
    """Those that Debian's package manager installed. Packages name files as before /bin became a link to /usr/bin."""
    names = {f"/{path}": path for path in paths}
    names.update({f"/{path.removeprefix('usr/')}": path for path in paths})
    found = set()
    for file in inside(root, "var/lib/dpkg/info").glob("*.list"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        found |= {names[line] for line in lines if line in names}
    return found


def _sshd(root: Path) -> Iterator[Finding]:
    """sshd_config(5): of each setting the first counts, and files are read where they are included."""
    if not inside(root, SSHD).is_file():
        return
    decided = set()
    for path, word, value, sometimes in _settings(root, SSHD):
        if (name := _NO.get(word)) is None or name in decided:
            continue
        if not sometimes:
            decided.add(name)
        if value != "no":
            yield Finding("users", path, f"has sshd take {name} {value[:40]}, expected no")
    for name in dict.fromkeys(_NO.values()):
        if name not in decided and name not in _NO_UNLESS_SAID:
            yield Finding("users", SSHD, f"says nothing of {name} and includes no file that does, expected no")


def _settings(root: Path, path: str, depth: int = 0) -> Iterator[tuple[str, str, str, bool]]:
    """File, keyword and value, both in lower case, and whether it counts for some connections only."""
    place, sometimes = inside(root, path), False
    if not place.is_file() or depth > _DEEPEST:
        return
    for line in place.read_text(encoding="utf-8", errors="replace").splitlines():
        word, *values = line.replace("=", " ", 1).replace('"', " ").split() or [""]
        if word.lower() == "match":
            sometimes = [value.lower() for value in values] != ["all"]
        elif word.lower() == "include":
            for file in (file for pattern in values for file in _included(root, pattern)):
                for where, name, value, part in _settings(root, file, depth + 1):
                    yield where, name, value, part or sometimes
        elif values and not word.startswith("#"):
            yield path, word.lower(), values[0].lower(), sometimes


def _included(root: Path, pattern: str) -> list[str]:
    folder, _, name = (pattern if pattern.startswith("/") else f"/etc/ssh/{pattern}").strip("/").rpartition("/")
    top = inside(root, folder)
    names = sorted(place.name for place in top.iterdir()) if top.is_dir() else []
    return [f"{folder}/{one}" for one in names if fnmatch(one, name) and not one.startswith(".")]

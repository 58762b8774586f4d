"""The people of a device: one user with an SSH key, without a password. passwd(5), shadow(5), group(5) from outside.

NVIDIA's own script puts the password on a command line and hashes it with MD5; here there is none to lose.
"""

from __future__ import annotations

import re
from pathlib import Path

from starsd.edge.image_tree import File, Folder, Step, inside
from starsd.shared.errors import UsageError

DEFAULT_USER = "edge"
FIRST_UID, LAST_UID = 1000, 60000
RESERVED = ("root", "starsd")
LOCKED = "!"  # no password fits
LAST_CHANGED = "20000"  # days since 1970, of shadow(5): fixed, so that two builds are the same
GROUPS = ("sudo", "video", "render", "i2c", "gpio")  # those that the tree has
ACCOUNTS = ("etc/passwd", "etc/shadow", "etc/group")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


def user_steps(root: Path, name: str, keys: bytes) -> list[Step]:
    """Steps that make the user, or leave it as it is where an earlier build made it.

    Raises UsageError for a name that cannot be, or that belongs to the system.
    """
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise UsageError(f"user is {name[:40]!r}, expected a-z, 0-9 and dashes, and neither root nor starsd")
    passwd, shadow, group = (entries(root, path) for path in ACCOUNTS)
    uid = _uid(passwd, group, name)
    passwd[name] = [name, "x", str(uid), str(uid), "", f"/home/{name}", "/bin/bash"]  # as people know it
    shadow[name] = [name, LOCKED, LAST_CHANGED, "0", "99999", "7", "", "", ""]
    group[name] = [name, "x", str(uid), ""]
    for other in GROUPS:
        if other in group and name not in (members := [m for m in group[other][3].split(",") if m]):
            group[other] = [*group[other][:3], ",".join([*members, name])]
    home = f"home/{name}"
    return [
        *_account_files(passwd, shadow, group),
        Folder(home, mode=0o750, uid=uid, gid=uid),
        Folder(f"{home}/.ssh", mode=0o700, uid=uid, gid=uid),
        File(f"{home}/.ssh/authorized_keys", keys, mode=0o600, uid=uid, gid=uid),
        File(f"etc/sudoers.d/50-{name}", f"{name} ALL=(ALL) NOPASSWD: ALL\n".encode(), mode=0o440),
    ]


def without_user(root: Path, name: str) -> list[Step]:
    """Steps that take a user out of the files of all users; what is in the home stays.

    None for a user of the system: the name is of a manifest, which may have come with the tree.
    """
    passwd, shadow, group = (entries(root, path) for path in ACCOUNTS)
    if name not in passwd or name in RESERVED or not FIRST_UID <= int(passwd[name][2]) <= LAST_UID:
        return []
    for rows in (passwd, shadow, group):
        rows.pop(name, None)
    for other, fields in group.items():
        members = [member for member in fields[3].split(",") if member not in ("", name)]
        group[other] = [*fields[:3], ",".join(members)]
    return _account_files(passwd, shadow, group)[::-1]  # etc/passwd last: by it a killed build is known


def entries(root: Path, path: str) -> dict[str, list[str]]:
    """The fields of one of ACCOUNTS by name; {} where it is missing. Raises UsageError for lines that cannot be."""
    place = inside(root, path)
    if not place.is_file():
        return {}
    text = place.read_bytes().decode("utf-8", "surrogateescape")  # people's names may be in any encoding
    rows = [line.split(":") for line in text.split("\n") if line.strip()]
    least = {"etc/passwd": 7, "etc/shadow": 2, "etc/group": 4}[path]
    found: dict[str, list[str]] = {}
    for row in rows:
        if len(row) < least:
            raise UsageError(f"{place} has a line of {len(row)} fields, expected {least}")
        if path != "etc/shadow" and re.fullmatch("[0-9]{1,10}", row[2]) is None:
            raise UsageError(f"{place} has the number {row[2][:40]!r} for {row[0][:40]!r}, expected digits")
        if row[0] in found:
            raise UsageError(f"{place} has {row[0][:40]!r} more than once, expected each name once")
        found[row[0]] = row
    return found


def _account_files(*files: dict[str, list[str]]) -> list[Step]:
    passwd, shadow, group = files
    shadow_gid = int(group["shadow"][2]) if "shadow" in group else 0
    return [
        File("etc/passwd", _lines(passwd)),
        File("etc/group", _lines(group)),
        File("etc/shadow", _lines(shadow), mode=0o640, gid=shadow_gid),
    ]


def _lines(rows: dict[str, list[str]]) -> bytes:
    return "".join(":".join(fields) + "\n" for fields in rows.values()).encode("utf-8", "surrogateescape")


def _uid(passwd: dict[str, list[str]], group: dict[str, list[str]], name: str) -> int:
    """The user's own number, or the first that neither a user nor a group has."""
    if name in passwd:
        uid = int(passwd[name][2])
        if not FIRST_UID <= uid <= LAST_UID:
            raise UsageError(f"user {name} belongs to the system, expected another name")
        return uid
    if name in group:
        raise UsageError(f"user {name} has the name of a group of the system, expected another name")
    taken = {int(fields[2]) for fields in [*passwd.values(), *group.values()]}
    return next(number for number in range(FIRST_UID, LAST_UID + 1) if number not in taken)

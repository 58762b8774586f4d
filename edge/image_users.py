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
LOCKED = "!"  # no password fits
LAST_CHANGED = "20000"  # days since 1970, of shadow(5): fixed, so that two builds are the same
GROUPS = ("sudo", "video", "render", "i2c", "gpio")  # those that the tree has
KEY_TYPES = (
    *("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_KEY = re.compile(r"(\S+) [A-Za-z0-9+/]{40,}={0,2}(?: [^\x00-\x1f]*)?")


def read_keys(path: Path) -> bytes:
    """The public keys of a file, one a line. Raises UsageError for anything else, a private key above all."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(f"key file {path} cannot be read: {reason}") from error
    if "PRIVATE KEY" in text:
        raise UsageError(f"{path} is a private key, expected the public one, usually {path.name}.pub")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"key file {path} holds no key, expected the like of ssh-ed25519 AAAA…")
    for key in keys:
        found = _KEY.fullmatch(key)
        if found is None or found[1] not in KEY_TYPES:
            kind = key.partition(" ")[0][:40]
            raise UsageError(f"key file {path} has a key of type {kind!r}, expected one of {', '.join(KEY_TYPES)}")
    return "".join(f"{key}\n" for key in keys).encode()


def user_steps(root: Path, name: str, keys: bytes) -> list[Step]:
    """Steps that make the user, or leave it as it is where an earlier build made it.

    Raises UsageError for a name that cannot be, or that belongs to the system.
    """
    if not _NAME.fullmatch(name) or name in ("root", "starsd"):
        raise UsageError(f"user is {name[:40]!r}, expected a-z, 0-9 and dashes, and neither root nor starsd")
    passwd, shadow, group = (_entries(root, f"etc/{file}") for file in ("passwd", "shadow", "group"))
    uid = _uid(passwd, group, name)
    passwd[name] = [name, "x", str(uid), str(uid), "", f"/home/{name}", "/bin/bash"]  # as people know it
    shadow[name] = [name, LOCKED, LAST_CHANGED, "0", "99999", "7", "", "", ""]
    group[name] = [name, "x", str(uid), ""]
    for other in GROUPS:
        if other in group and name not in (members := [m for m in group[other][3].split(",") if m]):
            group[other] = [*group[other][:3], ",".join([*members, name])]
    shadow_gid = int(group["shadow"][2]) if "shadow" in group else 0
    home = f"home/{name}"
    return [
        File("etc/passwd", _lines(passwd)),
        File("etc/group", _lines(group)),
        File("etc/shadow", _lines(shadow), mode=0o640, gid=shadow_gid),
        Folder(home, mode=0o750, uid=uid, gid=uid),
        Folder(f"{home}/.ssh", mode=0o700, uid=uid, gid=uid),
        File(f"{home}/.ssh/authorized_keys", keys, mode=0o600, uid=uid, gid=uid),
        File(f"etc/sudoers.d/50-{name}", f"{name} ALL=(ALL) NOPASSWD: ALL\n".encode(), mode=0o440),
    ]


def open_passwords(root: Path) -> list[str]:
    """Users whom a password, or none at all, lets in."""
    return [name for name, fields in _entries(root, "etc/shadow").items() if fields[1][:1] not in ("!", "*")]


def _entries(root: Path, path: str) -> dict[str, list[str]]:
    place = inside(root, path)
    if not place.is_file():
        return {}
    rows = [line.split(":") for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    least = {"passwd": 7, "shadow": 2, "group": 4}[place.name.rstrip("-")]
    if short := [row for row in rows if len(row) < least]:
        raise UsageError(f"{place} has a line of {len(short[0])} fields, expected {least}")
    return {row[0]: row for row in rows}


def _lines(entries: dict[str, list[str]]) -> bytes:
    return "".join(":".join(fields) + "\n" for fields in entries.values()).encode()


def _uid(passwd: dict[str, list[str]], group: dict[str, list[str]], name: str) -> int:
    """The user's own number, or the first that neither a user nor a group has."""
    if name in passwd:
        uid = int(passwd[name][2])
        if uid < FIRST_UID:
            raise UsageError(f"user {name} belongs to the system, expected another name")
        return uid
    taken = {int(fields[2]) for fields in [*passwd.values(), *group.values()]}
    return next(number for number in range(FIRST_UID, LAST_UID) if number not in taken)

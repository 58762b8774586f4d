"""Public keys of SSH, as `ssh-keygen` writes them: one a line, whole, and nothing else beside them.

The inside of a key: RFC 4253 section 6.6, RFC 5656 section 3.1, RFC 8709 section 4, OpenSSH's PROTOCOL.u2f.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from starsd.shared.errors import UsageError

LEAST_RSA = 1024  # bits, as sshd has it, RequiredRSASize in sshd_config(5)
_POINTS = {"nistp256": 65, "nistp384": 97, "nistp521": 133}  # bytes of a point that is not compressed
KEY_TYPES = (
    *("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
)
_KEY = re.compile(r"(\S+) ([A-Za-z0-9+/]+={0,2})(?: [^\x00-\x1f]*)?")


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
        kind = key.partition(" ")[0][:40]
        if kind not in KEY_TYPES:
            raise UsageError(f"key file {path} has a key of type {kind!r}, expected one of {', '.join(KEY_TYPES)}")
        found = _KEY.fullmatch(key)
        if problem := _problem(kind, found[2]) if found else "is no line of a public key":
            raise UsageError(f"key file {path} has a {kind} key that {problem}, expected all of what ssh-keygen wrote")
    return "".join(f"{key}\n" for key in keys).encode()


def _problem(kind: str, text: str) -> str | None:
    """Why it is no key of that type; None when it is one."""
    try:
        parts = _parts(base64.b64decode(text, validate=True))
    except ValueError:
        return "is cut off or changed"
    inner = parts[0].decode("ascii", "replace")
    if inner != kind:
        return f"is of type {inner[:40]!r} inside"
    if kind == "ssh-rsa":
        if len(parts) != 3:
            return "is cut off or changed"
        bits = int.from_bytes(parts[2], "big").bit_length()
        return None if bits >= LEAST_RSA else f"has {bits} bits, fewer than {LEAST_RSA}"
    return None if [len(part) for part in parts[1:]] in _lengths(kind, parts) else "is cut off or changed"


def _lengths(kind: str, parts: list[bytes]) -> list[list[int]]:
    """What its parts after the first may have, in bytes; a key on a token names an application at its end."""
    curve = next((name for name in _POINTS if name in kind), "")
    if curve and parts[1:2] != [curve.encode()]:
        return []
    lengths = [len(curve), _POINTS[curve]] if curve else [32]
    return [[*lengths, len(parts[-1])]] if kind.startswith("sk-") and parts[-1] else [lengths]


def _parts(raw: bytes) -> list[bytes]:
    """Strings with their lengths before them. Raises ValueError where one is cut off, or there is none."""
    parts, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        at += 4 + size
        if at > len(raw):
            raise ValueError("cut off")
        parts.append(raw[at - size : at])
    if not parts:
        raise ValueError("empty")
    return parts

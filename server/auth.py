"""Bearer tokens, one for each device. The file holds their hashes, so that reading it lets nobody in:

    device-name sha256-of-the-token

Lines that are empty or start with # mean nothing. Only its owner may read the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from starsd.shared.errors import UsageError

TOKEN_BYTES = 32  # random, so a plain hash is as good as a slow one
_NAME = re.compile(r"[\w.-]{1,64}")
_LINE = re.compile(r"([\w.-]{1,64})[ \t]+([0-9a-f]{64})")
_SCHEME = "bearer "


def read_tokens(file: Path) -> dict[str, str]:
    """Hashes by device name. Raises UsageError when the file is missing, open to others, or holds something else."""
    try:
        mode = file.stat().st_mode & 0o777
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {file} cannot be read: write one with starsd-server token") from error
    if mode & 0o077:
        raise UsageError(f"token file {file} has mode {mode:03o}, expected 600: run chmod 600 {file}")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (entry := line.strip()) or entry.startswith("#"):
            continue
        if (match := _LINE.fullmatch(entry)) is None:
            raise UsageError(f"{file}:{number} is no entry, expected a device name and 64 hexadecimal digits")
        name, digest = match.groups()
        if name in found:
            raise UsageError(f"{file}:{number} has {name} once more, expected one token a device")
        found[name] = digest
    return found


def add_token(name: str, file: Path) -> str:
    """A new token for a device, in place of its old one if it had any. Only its hash is stored."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"device name is {name[:80]!r}, expected up to 64 letters, digits, dots, dashes, underscores")
    tokens = read_tokens(file) if file.exists() else {}
    token = secrets.token_urlsafe(TOKEN_BYTES)
    tokens[name] = _hash(token)
    lines = "".join(f"{device} {digest}\n" for device, digest in tokens.items())
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w") as stream:
        stream.write(lines)
    part.replace(file)
    return token


def device_of(authorization: str | None, tokens: Mapping[str, str]) -> str | None:
    """The device whose token an `Authorization` header bears, None for nobody's.

    Looks at every entry whatever it finds, so that the time taken tells nothing.
    """
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    digest = _hash(authorization[len(_SCHEME) :].strip())
    found = None
    for name, expected in tokens.items():
        if hmac.compare_digest(digest, expected):
            found = name
    return found


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()

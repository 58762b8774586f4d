"""Signatures of minisign: Ed25519, with a key's number and a comment that is signed too.

The format is minisign's (https://jedisct1.github.io/minisign, "Signature format"), so that releases are signed by a
tool that people have, and keys stay where they are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

import msgspec

from starsd.shared.errors import HashMismatchError, MissingExtraError, UsageError

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
except ModuleNotFoundError as error:
    raise MissingExtraError("cryptography", "update") from error

PLAIN, HASHED = b"Ed", b"ED"  # what is signed: the file, or its BLAKE2b-512
_TRUSTED = "trusted comment: "
_UNTRUSTED = "untrusted comment:"


class SignatureError(HashMismatchError):
    """A file that the key's owner did not sign."""


class PublicKey(msgspec.Struct, frozen=True):
    number: bytes  # 8 bytes that tell keys apart
    key: bytes  # 32 bytes


def read_public_key(path: Path) -> PublicKey:
    """A key as `minisign -G` writes it. Raises UsageError for anything else."""
    lines = _lines(path, "public key")
    try:
        raw = base64.b64decode(lines[-1], validate=True)
    except (binascii.Error, IndexError):
        raw = b""
    if len(raw) != 42 or raw[:2] != PLAIN:
        raise UsageError(f"{path} is no public key of minisign, expected the file minisign.pub")
    return PublicKey(raw[2:10], raw[10:])


def check(file: Path, signature: Path, key: PublicKey) -> str:
    """The trusted comment of a file that `key` signed.

    Raises SignatureError when it did not sign this very file and comment, UsageError when there is no signature.
    """
    lines = _lines(signature, "signature")
    try:
        first, second, third, fourth = lines[:4]
        raw, whole = base64.b64decode(second, validate=True), base64.b64decode(fourth, validate=True)
    except (ValueError, binascii.Error):
        raw, whole, first, third = b"", b"", "", ""
    kinds = (PLAIN, HASHED)
    if len(raw) != 74 or len(whole) != 64 or raw[:2] not in kinds or not first.startswith(_UNTRUSTED):
        raise UsageError(f"{signature} is no signature of minisign: sign the release with minisign -Sm {file.name}")
    if not third.startswith(_TRUSTED):
        raise UsageError(f"{signature} has no trusted comment, expected one")
    number, signed = raw[2:10], raw[10:]
    if number != key.number:
        raise SignatureError(f"{file.name} is signed by key {_name(number)}, expected {_name(key.number)}")
    public = Ed25519PublicKey.from_public_bytes(key.key)
    comment = third.removeprefix(_TRUSTED)
    try:
        public.verify(signed, _blake2b(file) if raw[:2] == HASHED else file.read_bytes())
        public.verify(whole, signed + comment.encode())
    except InvalidSignature as error:
        raise SignatureError(f"{file.name} is not what key {_name(key.number)} signed: get it again") from error
    return comment


def _blake2b(path: Path) -> bytes:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _lines(path: Path, what: str) -> list[str]:
    try:
        if path.stat().st_size > 4096:
            raise UsageError(f"{what} {path} has {path.stat().st_size} bytes, expected at most 4096")
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(f"{what} {path} cannot be read: {reason}") from error


def _name(number: bytes) -> str:
    return number[::-1].hex().upper()  # as minisign prints it

"""Public keys of SSH: whole ones are taken as they are, and everything else is refused."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_bsp import KEY

from starsd.edge.image_keys import KEY_TYPES, read_keys
from starsd.shared.errors import UsageError


def pack(*parts: bytes) -> str:
    raw = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return base64.b64encode(raw).decode()


def rsa(bits: int) -> tuple[bytes, ...]:
    number = (1 << (bits - 1)) + 1
    return (b"ssh-rsa", b"\1\0\1", b"\0" + number.to_bytes(bits // 8, "big"))


WHOLE: dict[str, tuple[bytes, ...]] = {
    "ssh-ed25519": (b"ssh-ed25519", bytes(range(32))),
    "ssh-rsa": rsa(2048),
    "ecdsa-sha2-nistp256": (b"ecdsa-sha2-nistp256", b"nistp256", bytes(65)),
    "ecdsa-sha2-nistp384": (b"ecdsa-sha2-nistp384", b"nistp384", bytes(97)),
    "ecdsa-sha2-nistp521": (b"ecdsa-sha2-nistp521", b"nistp521", bytes(133)),
    "sk-ssh-ed25519@openssh.com": (b"sk-ssh-ed25519@openssh.com", bytes(32), b"ssh:"),
    "sk-ecdsa-sha2-nistp256@openssh.com": (b"sk-ecdsa-sha2-nistp256@openssh.com", b"nistp256", bytes(65), b"ssh:"),
}


def put(folder: Path, line: str) -> Path:
    (folder / "key").write_text(line + "\n")
    return folder / "key"


@pytest.mark.parametrize("kind", KEY_TYPES)
def test_keys_of_every_type_are_taken_whole_and_only_whole(tmp_path: Path, kind: str) -> None:
    text = pack(*WHOLE[kind])
    assert read_keys(put(tmp_path, f"{kind} {text} ada@desk")) == f"{kind} {text} ada@desk\n".encode()
    for shorter in (text[:-20], text[:-1], text[:-4], text[4:], text[:8]):
        with pytest.raises(UsageError, match=f"has a {kind} key that is .*, expected all of what ssh-keygen wrote"):
            read_keys(put(tmp_path, f"{kind} {shorter} ada@desk"))
    for parts in (WHOLE[kind][:-1], (*WHOLE[kind], b"more")):
        with pytest.raises(UsageError, match=f"has a {kind} key that is cut off or changed, expected all of"):
            read_keys(put(tmp_path, f"{kind} {pack(*parts)}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"ssh-rsa {pack(*WHOLE['ssh-ed25519'])}", "has a ssh-rsa key that is of type 'ssh-ed25519' inside, expected"),
        (f"ssh-rsa {pack(*rsa(768))}", "has a ssh-rsa key that has 768 bits, fewer than 1024, expected"),
        (f"ecdsa-sha2-nistp256 {pack(b'ecdsa-sha2-nistp256', b'nistp384', bytes(65))}", "key that is cut off or cha"),
        ("ssh-ed25519", "has a ssh-ed25519 key that is no line of a public key, expected"),
        ("ssh-ed25519 AAAA\x00", "has a ssh-ed25519 key that is no line of a public key, expected"),
    ],
)
def test_keys_that_are_not_what_they_say(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_keys(put(tmp_path, line))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_keys_of_ssh_keygen(tmp_path: Path, kind: str) -> None:
    bits = ["-b", "1024"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *bits, "-N", "", "-f", tmp_path / "k"], check=True)
    assert read_keys(tmp_path / "k.pub") == (tmp_path / "k.pub").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-----BEGIN OPENSSH " + "PRIVATE KEY-----\nx\n", "is a private key, expected the public one, usually key.pub"),
        ("# nobody\n\n", "holds no key, expected the like of ssh-ed25519 AAAA…"),
        ("ssh-dss " + "A" * 60 + " old\n", "has a key of type 'ssh-dss', expected one of ssh-ed25519, ssh-rsa, "),
        ('command="sh" ' + KEY, "has a key of type 'command=\"sh\"', expected one of"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_keys(tmp_path / "key")


def test_keys_are_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"# mine\n  {KEY}\n{KEY}")
    assert read_keys(tmp_path / "key").decode() == KEY + KEY

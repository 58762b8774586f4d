"""Tokens: made once, kept as hashes, compared whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from starsd.server.auth import add_token, device_of, read_tokens
from starsd.shared.errors import UsageError


def test_a_token_lets_its_device_in(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    one, two = add_token("orin-1", file), add_token("orin-2", file)
    assert len(one) >= 40
    assert one != two
    assert file.stat().st_mode & 0o777 == 0o600
    assert one not in file.read_text()
    tokens = read_tokens(file)
    assert tokens["orin-1"] == hashlib.sha256(one.encode()).hexdigest()
    assert device_of(f"Bearer {one}", tokens) == "orin-1"
    assert device_of(f"bearer  {two} ", tokens) == "orin-2"
    for wrong in (None, "", one, f"Basic {one}", f"Bearer {one[:-1]}", "Bearer ", f"Bearer {tokens['orin-1']}"):
        assert device_of(wrong, tokens) is None


def test_a_new_token_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    old, other = add_token("a", file), add_token("b", file)
    new = add_token("a", file)
    tokens = read_tokens(file)
    assert (device_of(f"Bearer {old}", tokens), device_of(f"Bearer {new}", tokens)) == (None, "a")
    assert device_of(f"Bearer {other}", tokens) == "b"
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


HASH = "0" * 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"a {HASH}\n\n# b\nc\n", r":4 is no entry, expected a device name and 64 hexadecimal digits"),
        (f"a {HASH}0", r":1 is no entry"),
        (f"a/b {HASH}", r":1 is no entry"),
        (f"a {HASH}\na {HASH}", r":2 has a once more, expected one token a device"),
    ],
)
def test_files_that_hold_something_else(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=message):
        read_tokens(file)


def test_files_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(UsageError, match="cannot be read: write one with starsd-server token"):
        read_tokens(file)
    add_token("a", file)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="has mode 640, expected 600: run chmod 600"):
        read_tokens(file)
    with pytest.raises(UsageError, match="has mode 640"):
        add_token("b", file)


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 65, "a/b"])
def test_names_that_would_break_the_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected up to 64 letters, digits, dots, dashes, underscores"):
        add_token(name, tmp_path / "tokens")
    assert not list(tmp_path.iterdir())

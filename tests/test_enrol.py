"""The per-device file: what is in it, what is refused, and that its secrets show nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from starsd.edge.enrol import Device, FromFile, Wifi, network_file, read_device, run_options
from starsd.shared.errors import UsageError

WHOLE: dict[str, Any] = {
    "hostname": "edge-7",
    "server": "wss://drafts.example:8443",
    "token": "t0ken-of-this-device",
    "model": "hf:org/name",
    "precision": "int4",
    "listen": "0.0.0.0",
    "api_key": "a-key-of-sixteen-or-more",
    "wifi": {"ssid": "café", "psk": "eight or more"},
}


def write(folder: Path, said: dict[str, Any], name: str = "device.json") -> Path:
    (folder / name).write_text(json.dumps(said))
    return folder / name


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    device = read_device(write(tmp_path, WHOLE))
    assert device == Device(**{**WHOLE, "wifi": Wifi(**WHOLE["wifi"])})
    assert read_device(write(tmp_path, {})) == Device()
    if sys.version_info >= (3, 11):
        lines = [f"{key} = {json.dumps(value)}" for key, value in WHOLE.items() if key != "wifi"]
        lines += ["[wifi]", *(f"{key} = {json.dumps(value)}" for key, value in WHOLE["wifi"].items())]
        (tmp_path / "device.toml").write_text("\n".join(lines))
        assert read_device(tmp_path / "device.toml") == device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokn": "x"}, "object contains unknown field `tokn`"),
        ({"wifi": {"ssid": "x"}}, r"object missing required field `psk` - at `\$.wifi`"),
        ({"hostname": "Edge_7"}, "hostname is 'Edge_7', expected a-z, 0-9 and dashes, up to 63"),
        ({"server": "https://x"}, "server is 'https://x', expected ws://host:port or wss://host:port"),
        ({"server": 'ws://x"'}, "server is 'ws://x\"', expected no spaces, quotes or any of"),
        ({"model": "a b"}, "model is 'a b', expected no spaces, quotes or any of"),
        ({"model": "$(x)"}, r"model is '\$\(x\)', expected no spaces, quotes or any of"),
        ({"precision": "int5"}, "precision is 'int5', expected one of fp32, fp16, int8, int4"),
        ({"token": "a b"}, "token has 3 characters, expected printable ASCII without spaces"),
        ({"api_key": ""}, "listen is '0.0.0.0', which lets others in: expected an api_key too"),
        ({"wifi": {"ssid": "", "psk": "12345678"}}, "wifi.ssid has 0 bytes, expected 1 to 32, printable"),
        ({"wifi": {"ssid": "a\nb", "psk": "12345678"}}, "wifi.ssid has 3 bytes, expected 1 to 32, printable"),
        ({"wifi": {"ssid": "x", "psk": "short"}}, "wifi.psk has 5 characters, expected 8 to 63 of printable ASCII"),
        ({"wifi": {"ssid": "x", "psk": "a line\nand another"}}, "wifi.psk has 18 characters, expected 8 to 63"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_device(write(tmp_path, {**WHOLE, **change}))


@pytest.mark.parametrize("name", ["device.json", "device.toml"])
def test_messages_never_quote_a_secret(tmp_path: Path, name: str) -> None:
    for text in ('{"token": hush-hush}', "token = hush-hush", 'token = "hush-hush', '{"token": ["hush-hush"]}'):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"device file .*{name} (cannot be used: |is TOML, which)") as raised:
            read_device(tmp_path / name)
        assert "hush" not in str(raised.value)
    with pytest.raises(UsageError, match=r"missing.json cannot be read: no such file or directory"):
        read_device(tmp_path / "missing.json")


def test_secrets_are_not_shown_nor_passed_as_options() -> None:
    device = Device(**{**WHOLE, "wifi": Wifi(**WHOLE["wifi"])})
    assert set(device.secrets()) == {WHOLE["token"], WHOLE["api_key"], "eight or more"}
    shown = f"{device!r} {device.wifi!r} {run_options(device)}"
    assert not [secret for secret in device.secrets() if secret in shown]
    assert run_options(device) == [
        *("--model", "hf:org/name", "--host", "0.0.0.0", "--precision", "int4"),
        *("--server", "wss://drafts.example:8443"),
    ]
    assert run_options(Device()) == ["--model", "smollm2-135m", "--host", "127.0.0.1"]


def test_a_credential_comes_from_the_file_or_not_at_all() -> None:
    assert FromFile().credential(Device(server="wss://x", token="abc")) == "abc"
    assert FromFile().credential(Device(server="ws://x")) == ""
    with pytest.raises(UsageError, match="names wss://x and no token: add one of starsd-server token"):
        FromFile().credential(Device(server="wss://x"))


def test_networks_cannot_break_out_of_their_line() -> None:
    raw = network_file(Wifi(ssid="é;[x]", psk=" a\\b c#;="), "some-uuid").decode()
    assert "ssid=195;169;59;91;120;93;\n" in raw
    assert "psk=\\sa\\\\b c#;=\n" in raw
    assert "uuid=some-uuid\n" in raw

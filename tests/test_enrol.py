"""The per-device file: what is in it, what is refused, and that its secrets show nowhere."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from starsd.edge import run
from starsd.edge.cli import main
from starsd.edge.enrol import Device, FromFile, Wifi, network_file, read_device, run_options
from starsd.edge.link import Link
from starsd.edge.run import check
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
        ({"model": ""}, "model is '', expected one of smollm2-135m, hf:org/name, model/flavour-precision or an abs"),
        ({"model": "--help"}, "model is '--help', expected one of smollm2-135m, hf:org/name"),
        ({"model": "smollm3"}, "model is 'smollm3', expected one of smollm2-135m, hf:org/name"),
        ({"model": "hf:a"}, "model is 'hf:a', expected one of smollm2-135m, hf:org/name"),
        ({"model": "m/ort-int8"}, "precision is int4, expected int8 for model m/ort-int8"),
        ({"server": "wss://h:abc"}, "server is no address, expected ws://host:port or wss://host:port"),
        ({"server": "wss://[h"}, "server is no address, expected ws://host:port or wss://host:port"),
        ({"server": "wss://h:0"}, "server is 'wss://h:0', expected ws://host:port or wss://host:port"),
        ({"server": "wss://"}, "server is 'wss://', expected ws://host:port or wss://host:port"),
        ({"server": "wss://u:hush@h"}, "server has more than an address, expected the like of wss://host:port and"),
        ({"server": 'wss://u:hu"sh@h'}, "server has more than an address, expected the like of wss://host:port and"),
        (
            {"server": "wss://h/?token=hush"},
            "server has more than an address, expected the like of wss://host:port and",
        ),
        ({"server": "ws://h"}, "server is 'ws://h', expected wss:// where a token is sent"),
        ({"token": "a b"}, "token has 3 characters, expected 1 to 1024 of printable ASCII, no spaces"),
        ({"token": "a" * 1025}, "token has 1025 characters, expected 1 to 1024 of printable ASCII, no spaces"),
        ({"api_key": "a" * 15}, "api_key has 15 characters, expected 16 to 4096 of printable ASCII, no spaces"),
        ({"listen": ""}, "listen is '', expected an address"),
        ({"listen": "--help"}, "listen is '--help', expected an address"),
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


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": "smollm2-135m", "listen": "::", "server": ""},
        {"model": "/var/lib/starsd/models/mine", "server": "ws://drafts.example:80/path", "token": ""},
        {"model": "tiny/portable-int4", "listen": "127.0.0.1", "api_key": "", "server": "ws://localhost:1"},
    ],
)
def test_what_a_device_file_may_say_the_services_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Up to the model: what it refuses would only show on the device, again and again."""
    device = read_device(write(tmp_path, {**WHOLE, **change}))
    seen: list[Any] = []

    def serve(model: str, precision: str | None, *, drafting: Any, settings: Any, **rest: Any) -> None:
        check(settings)
        if drafting.server:
            monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
            Link(drafting.server, token=drafting.token, make=lambda **channel: None)  # type: ignore[arg-type]
        seen.append((model, precision or "", settings.host))

    monkeypatch.setattr(run, "run", serve)
    for name, text in (("token", device.token), ("key", device.api_key)):
        (tmp_path / name).write_text(text)
    argv = ["run", *run_options(device), "--token-file", str(tmp_path / "token")]
    argv += ["--api-key-file", str(tmp_path / "key")] if device.api_key else []
    assert main(argv) == 0
    assert seen == [(device.model, device.precision, device.listen)]


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

"""Who a device is: its per-device file, and how it comes by the credential that its server knows it by.

Today the file holds the credential itself. A one-time code that is exchanged for one would be another Enrolment, and
nothing else would change.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from starsd.edge.api_settings import SHORTEST_KEY
from starsd.shared.config import DEFAULT_MODEL, FLAVOURS, PRECISIONS
from starsd.shared.errors import UsageError
from starsd.shared.home import PINNED_MODELS

DEVICE_FILE = "etc/starsd/device.json"  # below the root of the device's file system; 0600
_HOSTNAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")
_WORD = re.compile(r"[!-~]+")  # what systemd passes on as one argument unchanged, quotes and such aside
_UNSAFE = set("\"'\\$%;")
_HERE = ("localhost", "127.0.0.1", "::1")
_LONGEST_TOKEN = 1024  # that edge/link.py sends
_BUNDLE = re.compile(rf"\w[\w.-]*/(?:{'|'.join(FLAVOURS)})-({'|'.join(PRECISIONS)})")
_HUB = re.compile(r"hf:[\w.-]+/[\w.-]+")


class Wifi(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A WPA network to join."""

    ssid: str
    psk: str = msgspec.field()  # 8 to 63 characters, or 64 hexadecimal digits

    def __repr__(self) -> str:
        return f"Wifi(ssid={self.ssid!r}, psk=…)"


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs from device to device. Unknown keys are refused: a misspelt token must not go unnoticed."""

    hostname: str = ""
    server: str = ""  # of the drafter, ws:// or wss://; "": the device drafts alone
    token: str = ""  # the device's, of starsd-server token
    model: str = DEFAULT_MODEL
    precision: str = ""  # "": the default one
    listen: str = "127.0.0.1"  # address of the API; another one demands an API key
    api_key: str = ""
    wifi: Wifi | None = None

    def __repr__(self) -> str:
        return f"Device(hostname={self.hostname!r}, server={self.server!r}, model={self.model!r}, …)"

    def secrets(self) -> tuple[str, ...]:
        """Values that belong in files of mode 0600 and nowhere else."""
        return tuple(value for value in (self.token, self.api_key, self.wifi.psk if self.wifi else "") if value)


class Enrolment(Protocol):
    """How a device gets its credential, at its first boot."""

    def credential(self, device: Device) -> str:
        """The token to show to the server; "" for none. Raises UsageError when there is none to be had."""
        ...


class FromFile:
    """The token that the per-device file brings."""

    def credential(self, device: Device) -> str:
        if device.server.startswith("wss://") and not device.token:
            raise UsageError(f"the device file names {device.server} and no token: add one of starsd-server token")
        return device.token


def read_device(path: Path) -> Device:
    """The per-device file, JSON or (by its name's ending) TOML.

    Raises UsageError for a file that cannot be read or holds what no device can use; the message tells no secret.
    """
    try:
        raw = path.read_bytes()
        device = msgspec.toml.decode(raw, type=Device) if path.suffix == ".toml" else _from_json(raw)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"device file {path} cannot be read: {reason}") from error
    except ImportError as error:  # Python 3.10 brings no TOML
        raise UsageError(f"device file {path} is TOML, which Python {sys.version_info[1]} lacks: use JSON") from error
    except msgspec.MsgspecError as error:  # names keys and types, never values
        raise UsageError(f"device file {path} cannot be used: {str(error)[:1].lower()}{str(error)[1:]}") from error
    except ValueError as error:  # of TOML's syntax; its message may quote a secret
        raise UsageError(f"device file {path} cannot be used: it is not TOML") from error
    check_device(device, str(path))
    return device


def _from_json(raw: bytes) -> Device:
    return msgspec.json.decode(raw, type=Device)


def check_device(device: Device, source: str) -> None:
    """Raises UsageError, naming `source` and the key, for a value that cannot be."""
    if device.hostname and not _HOSTNAME.fullmatch(device.hostname):
        raise UsageError(f"{source}: hostname is {device.hostname[:80]!r}, expected a-z, 0-9 and dashes, up to 63")
    if "@" in device.server:  # a password, which no message may say
        raise UsageError(f"{source}: server has more than an address, expected the like of wss://host:port and a token")
    if device.precision and device.precision not in PRECISIONS:
        raise UsageError(f"{source}: precision is {device.precision[:80]!r}, expected one of {', '.join(PRECISIONS)}")
    for key in ("server", "model", "listen"):
        value = getattr(device, key)
        if value and (not _WORD.fullmatch(value) or set(value) & _UNSAFE):
            raise UsageError(f"{source}: {key} is {value[:80]!r}, expected no spaces, quotes or any of $ % ; \\")
    for key, least, most in (("token", 1, _LONGEST_TOKEN), ("api_key", SHORTEST_KEY, 4096)):
        value = getattr(device, key)
        if value and not (_WORD.fullmatch(value) and least <= len(value) <= most):
            raise UsageError(
                f"{source}: {key} has {len(value)} characters, expected {least} to {most} of printable ASCII, no spaces"
            )
    if device.server:
        _check_server(device, source)
    _check_model(device, source)
    if device.listen != "localhost":
        try:
            ipaddress.ip_address(device.listen)
        except ValueError:
            raise UsageError(f"{source}: listen is {device.listen[:80]!r}, expected an address") from None
    if device.listen not in _HERE and not device.api_key:
        raise UsageError(f"{source}: listen is {device.listen!r}, which lets others in: expected an api_key too")
    if device.wifi is not None:
        _check_wifi(device.wifi, source)


def _check_server(device: Device, source: str) -> None:
    """As edge/link.py takes it, and without a password: it is in the service's command line and in edge.env."""
    try:
        parts = urlsplit(device.server)
        plain = parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        raise UsageError(f"{source}: server is no address, expected ws://host:port or wss://host:port") from None
    if parts.query or parts.fragment:
        raise UsageError(f"{source}: server has more than an address, expected the like of wss://host:port and a token")
    if not plain:
        raise UsageError(f"{source}: server is {device.server[:80]!r}, expected ws://host:port or wss://host:port")
    if device.token and parts.scheme == "ws" and parts.hostname not in _HERE:
        raise UsageError(f"{source}: server is {device.server[:80]!r}, expected wss:// where a token is sent")


def _check_model(device: Device, source: str) -> None:
    """As edge/bundle.py takes it; whether the device will have such a folder is not known here."""
    model, named = device.model, _BUNDLE.fullmatch(device.model)
    if not (model in PINNED_MODELS or _HUB.fullmatch(model) or named or model.startswith("/")):
        raise UsageError(
            f"{source}: model is {model[:80]!r}, expected one of {', '.join(PINNED_MODELS)}, hf:org/name, "
            "model/flavour-precision or an absolute path"
        )
    if named and device.precision not in ("", named[1]):
        raise UsageError(f"{source}: precision is {device.precision}, expected {named[1]} for model {model}")


def _check_wifi(wifi: Wifi, source: str) -> None:
    if not 1 <= len(wifi.ssid.encode()) <= 32 or not wifi.ssid.isprintable():
        raise UsageError(f"{source}: wifi.ssid has {len(wifi.ssid.encode())} bytes, expected 1 to 32, printable")
    hexadecimal = len(wifi.psk) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in wifi.psk)
    if not (8 <= len(wifi.psk) <= 63 and wifi.psk.isascii() and wifi.psk.isprintable()) and not hexadecimal:
        raise UsageError(f"{source}: wifi.psk has {len(wifi.psk)} characters, expected 8 to 63 of printable ASCII")


def network_file(wifi: Wifi, uuid: str) -> bytes:
    """NetworkManager's key file for a network (its `nm-settings-keyfile` format): values as lists of bytes and escapes,
    so that no character can end a line."""
    ssid = "".join(f"{byte};" for byte in wifi.ssid.encode())
    psk = wifi.psk.replace("\\", "\\\\")
    if psk.startswith(" "):
        psk = f"\\s{psk[1:]}"
    lines = ["[connection]", "id=starsd", f"uuid={uuid}", "type=wifi", "", "[wifi]", "mode=infrastructure"]
    lines += [f"ssid={ssid}", "", "[wifi-security]", "key-mgmt=wpa-psk", f"psk={psk}", ""]
    lines += ["[ipv4]", "method=auto", "", "[ipv6]", "method=auto", ""]
    return "\n".join(lines).encode()


def run_options(device: Device) -> list[str]:
    """Options of `starsd-edge run` for this device; no secret is among them."""
    options = ["--model", device.model, "--host", device.listen]
    options += ["--precision", device.precision] if device.precision else []
    options += ["--server", device.server] if device.server else []
    return options

"""Updates: only what the key's owner signed, tried before it is used, and never half."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fake_bsp import make_bsp, make_wheels

from starsd.edge.cli import main
from starsd.edge.image_alone import alone
from starsd.edge.image_deb import write_release
from starsd.edge.image_wheels import read_wheelhouse
from starsd.edge.update import Updated, check_release, doctor, run_installer, unpack, update
from starsd.edge.update_sign import SignatureError, check, read_public_key
from starsd.edge.update_slots import Release, Slots, UpdateError
from starsd.shared.errors import UsageError

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
NUMBER = bytes(range(8))


class Signer:
    """minisign, as far as signing goes."""

    def __init__(self, number: bytes = NUMBER) -> None:
        self.number, self.key = number, Ed25519PrivateKey.generate()

    def public(self, path: Path) -> Path:
        raw = self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        path.write_text(f"untrusted comment: a key\n{base64.b64encode(b'Ed' + self.number + raw).decode()}\n")
        return path

    def sign(self, file: Path, comment: str = "starsd", *, hashed: bool = True) -> Path:
        content = file.read_bytes()
        signed = self.key.sign(hashlib.blake2b(content).digest() if hashed else content)
        line = base64.b64encode((b"ED" if hashed else b"Ed") + self.number + signed).decode()
        whole = base64.b64encode(self.key.sign(signed + comment.encode())).decode()
        path = file.with_name(f"{file.name}.minisig")
        path.write_text(f"untrusted comment: x\n{line}\ntrusted comment: {comment}\n{whole}\n")
        return path


@pytest.fixture
def signer() -> Signer:
    return Signer()


def make_release(folder: Path, signer: Signer, version: str = "0.2.0", python: str = HERE) -> Path:
    wheels = make_wheels(folder / f"wheels-{version}", version)
    for path in wheels.glob("numpy-*"):
        path.unlink()
    file = folder / f"starsd-{version}.tar"
    write_release(read_wheelhouse(wheels, python), file)
    signer.sign(file)
    return file


class Device:
    """Two environments, and what was asked of them; `broken` versions fail at that point."""

    def __init__(self, folder: Path, signer: Signer) -> None:
        self.slots = Slots(folder / "opt")
        self.key = signer.public(folder / "release.pub")
        self.said: list[str] = []
        self.does_not_install: set[str] = set()
        self.fails_its_test: set[str] = set()
        self.does_not_start: set[str] = set()
        self.started: list[str] = []

    def install(self, wheelhouse: Path, slot: Path) -> None:
        about = (wheelhouse / "release.json").read_bytes()
        slot.mkdir(exist_ok=True)
        (slot / "release.json").write_bytes(about)
        if json.loads(about)["version"] in self.does_not_install:
            raise UpdateError("the release cannot be installed: no room")

    def self_test(self, slot: Path) -> None:
        if self.slots.version(slot.name) in self.fails_its_test:
            raise UpdateError("the self-test of the release failed: BROKEN")

    def restart(self, link: Path) -> None:
        version = self.slots.version(os.readlink(link))
        self.started.append(version)
        if version in self.does_not_start:
            raise UpdateError("starsd-edge.service does not stay up")

    def update(self, file: Path, **options: Any) -> Updated:
        return update(
            file,
            self.key,
            self.slots,
            show=self.said.append,
            install=self.install,
            self_test=self.self_test,
            restart=self.restart,
            machine="aarch64",
            **options,
        )

    def runs(self) -> str:
        return self.slots.version(self.slots.current())


@pytest.fixture
def device(tmp_path: Path, signer: Signer) -> Device:
    """One that runs 0.1.0, in a."""
    made = Device(tmp_path, signer)
    made.update(make_release(tmp_path, signer, "0.1.0"))
    made.started.clear()
    return made


def test_updates_go_back_and_forth_between_two_environments(device: Device, tmp_path: Path, signer: Signer) -> None:
    assert (device.runs(), device.slots.current()) == ("0.1.0", "a")
    done = device.update(make_release(tmp_path, signer, "0.2.0"))
    assert done == Updated("0.2.0", "b", "0.1.0", "starsd")
    assert (device.runs(), device.started, os.readlink(device.slots.link)) == ("0.2.0", ["0.2.0"], "b")
    device.update(make_release(tmp_path, signer, "0.3.0"))
    assert (device.runs(), device.slots.current()) == ("0.3.0", "a")
    assert device.slots.version("b") == "0.2.0"
    assert sorted(path.name for path in device.slots.folder.iterdir()) == [".starsd.lock", "a", "b", "current"]


@pytest.mark.parametrize(
    ("where", "message", "started"),
    [
        ("does_not_install", "the release cannot be installed: no room", []),
        ("fails_its_test", "the self-test of the release failed: BROKEN", []),
        ("does_not_start", "0.2.0 did not come up, back at 0.1.0: starsd-edge.service does not", ["0.2.0", "0.1.0"]),
    ],
)
def test_a_bad_release_leaves_the_old_one_running(
    device: Device, tmp_path: Path, signer: Signer, where: str, message: str, started: list[str]
) -> None:
    getattr(device, where).add("0.2.0")
    with pytest.raises(UpdateError, match=message):
        device.update(make_release(tmp_path, signer, "0.2.0"))
    assert (device.runs(), device.started) == ("0.1.0", started)
    device.update(make_release(tmp_path, signer, "0.2.1"))
    assert device.runs() == "0.2.1"


def test_one_that_is_interrupted_before_it_was_seen_to_work_leaves_the_old_one(
    device: Device, tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(link: Path) -> None:
        device.started.append(device.runs())
        if device.runs() == "0.2.0":
            raise KeyboardInterrupt

    monkeypatch.setattr(device, "restart", interrupt)
    with pytest.raises(KeyboardInterrupt):
        device.update(make_release(tmp_path, signer, "0.2.0"))
    assert (device.runs(), device.started) == ("0.1.0", ["0.2.0", "0.1.0"])


@pytest.mark.parametrize("hashed", [True, False])
def test_signatures_of_either_kind(tmp_path: Path, signer: Signer, hashed: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    signature = signer.sign(file, "made on Monday", hashed=hashed)
    key = read_public_key(signer.public(tmp_path / "key"))
    assert check(file, signature, key) == "made on Monday"
    for change in (b"Content", b"conten", b""):
        file.write_bytes(change)
        with pytest.raises(SignatureError, match="file is not what key 0706050403020100 signed: get it again"):
            check(file, signature, key)
    file.write_bytes(b"content")
    signature.write_text(signature.read_text().replace("Monday", "Sunday"))
    with pytest.raises(SignatureError, match="file is not what key"):
        check(file, signature, key)


def test_other_keys_are_refused(tmp_path: Path, signer: Signer) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    key = read_public_key(signer.public(tmp_path / "key"))
    with pytest.raises(SignatureError, match="file is signed by key FFFFFFFFFFFFFFFF, expected 0706050403020100"):
        check(file, Signer(b"\xff" * 8).sign(file), key)
    with pytest.raises(SignatureError, match="is not what key 0706050403020100 signed"):
        check(file, Signer().sign(file), key)  # another key that claims to be ours


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is no signature of minisign: sign the release with minisign -Sm file"),
        (lambda text: text.replace("untrusted", "trusty"), "is no signature of minisign"),
        (lambda text: text.replace("\ntrusted comment", "\nsome comment"), "has no trusted comment, expected one"),
        (lambda text: text[:40], "is no signature of minisign"),
        (lambda text: text + "x" * 5000, r"signature .* has \d+ bytes, expected at most 4096"),
    ],
)
def test_signatures_that_are_none(tmp_path: Path, signer: Signer, change: Callable[[str], str], message: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    signature = signer.sign(file)
    signature.write_text(change(signature.read_text()))
    with pytest.raises(UsageError, match=message):
        check(file, signature, read_public_key(signer.public(tmp_path / "key")))


def test_keys_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("untrusted comment: x\nAAAA\n")
    with pytest.raises(UsageError, match=r"key is no public key of minisign, expected the file minisign\.pub"):
        read_public_key(tmp_path / "key")
    with pytest.raises(UsageError, match=r"public key .*missing cannot be read: no such file or directory"):
        read_public_key(tmp_path / "missing")


def test_an_unsigned_release_changes_nothing(device: Device, tmp_path: Path, signer: Signer) -> None:
    file = make_release(tmp_path, signer)
    file.with_name(f"{file.name}.minisig").unlink()
    with pytest.raises(UsageError, match=r"signature .*\.minisig cannot be read: no such file or directory"):
        device.update(file)
    file = make_release(tmp_path, signer, "0.9.0")
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(SignatureError, match=r"starsd-0\.9\.0\.tar is not what key"):
        device.update(file)
    assert sorted(path.name for path in device.slots.folder.iterdir()) == [".starsd.lock", "a", "current"]


def test_a_release_that_is_changed_meanwhile_is_not_installed(device: Device, tmp_path: Path, signer: Signer) -> None:
    """Its file may be anybody's."""
    file, other = make_release(tmp_path, signer), make_release(tmp_path, Signer(), "0.9.0")
    device.said = Exchange(file, other)
    with pytest.raises(SignatureError, match=r"starsd-0\.2\.0\.tar is not what key"):
        device.update(file)
    assert sorted(path.name for path in device.slots.folder.iterdir()) == [".starsd.lock", "a", "current"]


class Exchange(list[str]):
    """Puts another file in the place of one that was just called signed."""

    def __init__(self, file: Path, other: Path) -> None:
        self._file, self._other = file, other

    def append(self, text: str) -> None:
        if "is signed" in text:
            self._other.replace(self._file)


def test_older_releases_take_an_option(device: Device, tmp_path: Path, signer: Signer) -> None:
    file = make_release(tmp_path, signer, "0.0.9")
    with pytest.raises(UsageError, match=r"the release is 0\.0\.9, expected 0\.1\.0 or newer: or give --allow-older"):
        device.update(file)
    assert device.update(file, allow_older=True).version == "0.0.9"


@pytest.mark.parametrize(
    ("version", "installed", "older"),
    [
        ("0.10.0", "0.9.1", False),
        ("0.2.0rc1", "0.2.0", True),
        ("0.2.0", "0.2.0rc1", False),
        ("0.2.0", "0.2.0", False),
        ("0.2.0.post1", "0.2.0", False),
        ("0.2.0", "0.2.0.post1", True),
        ("0.2.0.dev3", "0.2.0rc1", True),
        ("0.2", "0.2.0", False),
    ],
)
def test_versions_are_ordered_by_number(version: str, installed: str, older: bool) -> None:
    release = Release(1, version, "3.12", "aarch64", "")
    if older:
        with pytest.raises(UsageError, match="or give --allow-older"):
            check_release(release, installed, False, "3.12", "aarch64")
    else:
        check_release(release, installed, False, "3.12", "aarch64")


def test_releases_for_other_machines_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the release is for Python 3\.12, expected 3\.10"):
        check_release(Release(1, "1", "3.12", "aarch64", ""), "", False, "3.10")
    with pytest.raises(UsageError, match="the release has format 2, expected 1"):
        check_release(Release(2, "1", "3.12", "aarch64", ""), "", False, "3.12")
    with pytest.raises(UsageError, match="the release is for x86_64, expected aarch64"):
        check_release(Release(1, "1", "3.12", "x86_64", ""), "", False, "3.12", "aarch64")
    with pytest.raises(UsageError, match=f"the release is for PDP-11, expected {platform.machine()}"):
        check_release(Release(1, "1", "3.12", "PDP-11", ""), "", False, "3.12")


@pytest.mark.parametrize("version", ["9" * 5000, "", "new", "1..2"])
def test_versions_that_are_none_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match=f"the release is '{version[:40]}', expected a version such as 0.2.0"):
        check_release(Release(1, version, "3.12", "aarch64", ""), "", True, "3.12", "aarch64")
    with pytest.raises(UsageError, match=r"what is installed is 'new', expected a version such as 0\.2\.0"):
        check_release(Release(1, "0.1", "3.12", "aarch64", ""), "new", False, "3.12", "aarch64")


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "info",
    [
        entry("../evil.whl"),
        entry("/etc/evil.whl"),
        entry("a/b.whl"),
        entry("x.sh"),
        entry("a.whl", tarfile.SYMTYPE, "/etc/passwd"),
        entry("a.whl", tarfile.LNKTYPE, "release.json"),
    ],
    ids=lambda info: f"{info.name}-{info.type.decode()}",
)
def test_only_plain_wheels_are_unpacked(tmp_path: Path, info: tarfile.TarInfo) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(info, io.BytesIO())
    (tmp_path / "to").mkdir()
    with pytest.raises(UsageError, match=r"x\.tar holds '.*', expected wheels, requirements\.txt and release\.json"):
        unpack(tmp_path / "x.tar", tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_files_that_are_no_release(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no tar")
    (tmp_path / "to").mkdir()
    with pytest.raises(UsageError, match="x is no release of starsd: "):
        unpack(tmp_path / "x", tmp_path / "to")
    with tarfile.open(tmp_path / "empty", "w"):
        pass
    with pytest.raises(UsageError, match="empty is no release of starsd: "):
        unpack(tmp_path / "empty", tmp_path / "to")


def test_two_updates_at_a_time_are_refused(device: Device, tmp_path: Path, signer: Signer) -> None:
    file = make_release(tmp_path, signer)
    left = device.slots.folder / ".update-of-a-killed-one"
    left.mkdir()
    refused = rf"another update of {device.slots.folder} is under way, process {os.getpid()}: wait for its end"
    with alone("update", device.slots.folder), pytest.raises(UsageError, match=refused):
        device.update(file)
    assert device.update(file).version == "0.2.0"
    assert not left.exists()


def test_a_switch_leaves_no_moment_without_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(tmp_path)
    slots.switch("a")
    (tmp_path / "next").symlink_to("left by a crash")
    seen: list[str] = []
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        seen.append(slots.current())
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    slots.switch("b")
    assert (seen, slots.current()) == (["a"], "b")


def test_what_the_installer_and_the_doctor_say_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(UpdateError, match="the release cannot be installed: "):
        run_installer(tmp_path / "nothing", tmp_path / "slot")
    program = tmp_path / "bin/starsd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(UpdateError, match="the self-test of the release failed: it is broken"):
        doctor(tmp_path)
    program.write_text("#!/bin/sh\n")
    doctor(tmp_path)


def test_it_takes_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["update", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == "starsd-edge: an update needs root, got user 1000: run it with sudo\n"


def test_without_cryptography_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what checks signatures needs it."""
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    for name in ("starsd.edge.update", "starsd.edge.update_sign"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert main(["update", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == "starsd-edge: cryptography is not installed: run pip install 'starsd[update]'\n"
    bsp, key = str(make_bsp(tmp_path)), tmp_path / "key"
    assert main(["image", "build", "--l4t", bsp, "--board", "orin-nano", "--dry-run", "--json"]) == 0
    assert main(["image", "build", "--l4t", bsp, "--board", "orin-nano", "--dry-run", "--release-key", str(key)]) == 1
    assert capsys.readouterr().err.endswith("run pip install 'starsd[update]'\n")

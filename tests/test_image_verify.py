"""The audit of an image: nothing to say of a good one, and a finding for every way in which one can be bad."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_bsp import KEY, fake_commands, make_bsp, make_wheels

from starsd.edge import image_verify
from starsd.edge.cli import main
from starsd.edge.enrol import Device
from starsd.edge.image_build import Builder
from starsd.edge.image_plan import Order
from starsd.edge.image_verify import verify
from starsd.edge.image_wheels import read_wheelhouse
from starsd.edge.l4t import Bsp, open_bsp
from starsd.edge.l4t_boards import BOARDS

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may make files of others, which is what is audited"
)
NANO = BOARDS["orin-nano"]


@pytest.fixture
def bsp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bsp:
    """A package whose root file system is a finished image."""
    folder = fake_commands(tmp_path / "bin", tmp_path / "calls")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    found = open_bsp(make_bsp(tmp_path))
    (found.rootfs / "etc/ssh/sshd_config").write_text(f"{INCLUDE}PermitRootLogin yes\nUsePAM yes\n")
    order = Order(
        bsp=found,
        board=NANO,
        openrm=False,
        device=Device(token="t"),
        user="edge",
        keys=KEY.encode(),
        house=read_wheelhouse(make_wheels(tmp_path / "wheels"), "3.10"),
    )
    Builder(order, tmp_path / "work").build()
    return found


def errors(bsp: Bsp, board: str = "orin-nano") -> list[tuple[str, str, str]]:
    return [(one.check, one.path, one.problem) for one in verify(bsp, BOARDS[board]) if one.error]


def test_a_good_image_has_no_errors(bsp: Bsp) -> None:
    assert errors(bsp) == []


def change(path: str, do: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: do(root / path)


def write(text: str = "x") -> Callable[[Path], object]:
    def do(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return do


def add(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text() + text)


def program(mode: int, text: str = "x") -> Callable[[Path], object]:
    def do(path: Path) -> None:
        write(text)(path)
        path.chmod(mode)

    return do


NO_ROOT = "has no root, expected the accounts of the system: unpack the tree anew"
INCLUDE = "Include /etc/ssh/sshd_config.d/*.conf\n"
BAD: list[tuple[Callable[[Path], object], tuple[str, str, str]]] = [
    (
        change("etc/hostname", write()),
        ("manifest", "etc/hostname", "is not what was written: its SHA-256 differs from the manifest's"),
    ),
    (change("etc/hostname", Path.unlink), ("manifest", "etc/hostname", "is missing")),
    (
        change("etc/hosts", lambda path: os.chown(path, 5, 6)),
        ("manifest", "etc/hosts", "belongs to 5:6, expected 0:0"),
    ),
    (
        change("etc/starsd/device.json", lambda path: path.chmod(0o644)),
        ("secrets", "etc/starsd/device.json", "has mode 0644, expected 0600"),
    ),
    (
        change("etc/starsd/.device.json.starsd", write()),
        ("secrets", "etc/starsd/.device.json.starsd", "is a half-written file, expected none"),
    ),
    (
        change("opt/starsd/a/bin/starsd", lambda path: path.chmod(0o4755)),
        ("ownership", "opt/starsd/a/bin/starsd", "has mode 4755, expected no setuid"),
    ),
    (
        change("opt/starsd/a/bin", lambda path: path.chmod(0o777)),
        ("ownership", "opt/starsd/a/bin", "has mode 0777, expected no writers"),
    ),
    (
        change("usr/lib/starsd/install-release", lambda path: os.chown(path, 1000, 0)),
        ("ownership", "usr/lib/starsd/install-release", "belongs to 1000:0, expected root"),
    ),
    (
        change("usr/bin/sudo", write()),
        ("ownership", "usr/bin/sudo", "is not setuid root: the tree was unpacked without sudo, or copied"),
    ),
    (
        change("usr/bin/qemu-aarch64-static", write()),
        (
            "leftovers",
            "usr/bin/qemu-aarch64-static",
            "is there, expected nothing: it is of the build, or of another device",
        ),
    ),
    (
        change("etc/ssh/ssh_host_ed25519_key", write()),
        (
            "leftovers",
            "etc/ssh/ssh_host_ed25519_key",
            "is there, expected nothing: it is of the build, or of another device",
        ),
    ),
    (
        change("etc/shadow", write("root:$6$x$y:1:0:99999:7:::\n")),
        ("users", "etc/shadow", "has a password for root, expected keys only"),
    ),
    (change("etc/passwd", Path.unlink), ("users", "etc/passwd", NO_ROOT)),
    (change("etc/passwd", write("ada:x:1000:1000::/:/bin/sh\n")), ("users", "etc/passwd", NO_ROOT)),
    (change("etc/group", Path.unlink), ("users", "etc/group", NO_ROOT)),
    (
        change("etc/shadow", add("ada::1:0:99999:7:::\n")),
        ("users", "etc/shadow", "lets ada in without a password, expected keys only"),
    ),
    (
        change("etc/passwd", add("ada::1001:1001::/:/bin/sh\n")),
        ("users", "etc/passwd", "lets ada in without a password, expected keys only"),
    ),
    (
        change("etc/passwd", add("ada:x:0:0::/:/bin/sh\n")),
        ("users", "etc/passwd", "gives ada the number of root, expected it for nobody else"),
    ),
    (
        change("root/.ssh/authorized_keys2", write(KEY)),
        ("users", "root/.ssh/authorized_keys2", "lets root in by a key, expected nobody but a user"),
    ),
    (
        change("etc/sudoers.d/ada", write("ada ALL=(ALL) NOPASSWD: ALL\n")),
        (
            "ownership",
            "etc/sudoers.d/ada",
            "may let others become root, the manifest does not list it, and no package lists it",
        ),
    ),
    (
        change("usr/bin/shell", program(0o4755)),
        ("ownership", "usr/bin/shell", "has mode 4755, and no package lists it"),
    ),
    (
        change("etc/ssh/sshd_config.d/00-more.conf", write("PasswordAuthentication=yes\n")),
        ("users", "etc/ssh/sshd_config.d/00-more.conf", "has sshd take PasswordAuthentication yes, expected no"),
    ),
    (
        change("etc/ssh/sshd_config", write(f"# x\nChallengeResponseAuthentication yes\n{INCLUDE}")),
        ("users", "etc/ssh/sshd_config", "has sshd take KbdInteractiveAuthentication yes, expected no"),
    ),
    (
        change("etc/ssh/sshd_config.d/00-more.conf", write('Match User ada\n  permitRootLogin "yes"\n')),
        ("users", "etc/ssh/sshd_config.d/00-more.conf", "has sshd take PermitRootLogin yes, expected no"),
    ),
    (
        change("etc/ssh/sshd_config", write("UsePAM yes\n")),
        (
            "users",
            "etc/ssh/sshd_config",
            "says nothing of PasswordAuthentication and includes no file that does, expected no",
        ),
    ),
    (
        change("etc/starsd/token", write("hush")),
        ("secrets", "etc/starsd/token", "is not in the manifest, and may be another device's: remove it"),
    ),
    (
        change("etc/NetworkManager/system-connections/cellar", write("[wifi-security]\npsk=hush\n")),
        (
            "secrets",
            "etc/NetworkManager/system-connections/cellar",
            "is not in the manifest, and may be another device's: remove it",
        ),
    ),
    (
        change("usr/sbin/policy-rc.d", program(0o755, "#!/bin/sh\nexit 101\n")),
        ("leftovers", "usr/sbin/policy-rc.d", "is the build's, and keeps services from starting: remove it"),
    ),
    (
        change(
            "etc/starsd/image.json", lambda path: path.write_text(path.read_text().replace(" true\n}", " false\n}"))
        ),
        ("manifest", "etc/starsd/image.json", "is of a build that was stopped: build the image again"),
    ),
    (
        change("home/edge/.ssh", lambda path: path.chmod(0o777)),
        ("users", "home/edge/.ssh", "is not the user's alone, so that sshd ignores the key"),
    ),
    (
        change("etc/systemd/system/multi-user.target.wants/starsd-edge.service", Path.unlink),
        (
            "units",
            "etc/systemd/system/multi-user.target.wants/starsd-edge.service",
            "is missing, so that the unit does not start",
        ),
    ),
    (
        change("opt/starsd/current", Path.unlink),
        ("files", "opt/starsd/current/bin/starsd-edge", "is missing, expected what the package installs"),
    ),
    (
        change("opt/starsd/a/units/starsd-edge.conf", Path.unlink),
        (
            "files",
            "usr/lib/systemd/system/starsd-edge.service.d/release.conf",
            "is missing, expected what the package installs",
        ),
    ),
]


@pytest.mark.parametrize(("spoil", "finding"), BAD, ids=[f"{one[1][0]}-{one[1][1]}" for one in BAD])
def test_a_bad_image_is_found_out(bsp: Bsp, spoil: Callable[[Path], object], finding: tuple[str, str, str]) -> None:
    spoil(bsp.rootfs)
    assert finding in errors(bsp)


def test_what_a_package_brings_is_taken_as_meant(bsp: Bsp) -> None:
    info = bsp.rootfs / "var/lib/dpkg/info"
    info.mkdir()
    (info / "sudo.list").write_text("/.\n/etc/sudoers.d/README\n/usr/bin/sudo\n")
    (info / "util-linux.list").write_text("/.\n/bin/su\n")  # as packages had it before /bin was a link
    for path in ("usr/bin/sudo", "usr/bin/su"):
        program(0o4755)(bsp.rootfs / path)
    for path in ("etc/sudoers.d/README", "etc/sudoers.d/ada.off", "etc/sudoers.d/ada~"):
        write()(bsp.rootfs / path)
    write("[wifi]\nssid=open\n")(bsp.rootfs / "etc/NetworkManager/system-connections/open")
    assert errors(bsp) == []


def test_others_who_may_come_in_are_told_of(bsp: Bsp) -> None:
    root = bsp.rootfs
    add("ada:x:1001:1001::/srv/ada:/bin/sh\nbob:hash:1002:1002::/:/bin/sh\n")(root / "etc/passwd")
    add("ada:$6$salt$hash:1:0:99999:7:::\n")(root / "etc/shadow")
    write(KEY)(root / "srv/ada/.ssh/authorized_keys")
    program(0o755)(root / "usr/sbin/policy-rc.d")
    listed = ("manifest", "etc/passwd", "is not what was written: its SHA-256 differs from the manifest's")
    assert errors(bsp) == [listed]
    assert {(one.path, one.problem) for one in verify(bsp, NANO) if not one.error} >= {
        ("etc/passwd", "has a password for bob, expected keys only"),
        ("etc/shadow", "has a password for ada, expected keys only"),
        ("srv/ada/.ssh/authorized_keys", "lets ada in, and the manifest does not list it"),
        ("usr/sbin/policy-rc.d", "decides what starts when a package is installed"),
    }


def test_accounts_that_cannot_be_read_are_an_error(bsp: Bsp) -> None:
    (bsp.rootfs / "etc/passwd").write_text("root:x\n")
    found = [problem for check, path, problem in errors(bsp) if (check, path) == ("users", "etc/passwd")]
    assert len(found) == 1
    assert found[0].startswith("cannot be read: ")
    assert found[0].endswith("etc/passwd has a line of 2 fields, expected 7")


def test_name_servers_of_this_machine_are_noticed(bsp: Bsp) -> None:
    here = Path("/etc/resolv.conf")
    if not here.is_file() or not here.read_bytes().strip():
        pytest.skip("this machine has no name servers")
    place = bsp.rootfs / "etc/resolv.conf"
    place.unlink()
    place.write_bytes(here.read_bytes())
    assert ("leftovers", "etc/resolv.conf", "is this machine's, expected the device's own") in errors(bsp)


def test_mounts_are_noticed(bsp: Bsp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_verify, "mounted_below", lambda root: [root / "proc"])
    assert errors(bsp) == [("mounts", "proc", "is mounted, expected nothing to be")]


def test_an_image_for_another_board_is_noticed(bsp: Bsp) -> None:
    assert errors(bsp, "orin-nx") == [
        ("manifest", "etc/starsd/image.json", "is of an image for orin-nano, expected orin-nx")
    ]


def test_the_command_has_a_row_for_each_finding(bsp: Bsp, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["image", "verify", "--l4t", str(bsp.folder), "--board", "orin-nano", "--json"]
    assert main(argv) == 0
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()] in ([], [False])
    (bsp.rootfs / "etc/starsd/image.json").unlink()
    assert main(argv) == 1
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row == {
        "check": "manifest",
        "path": "etc/starsd/image.json",
        "problem": "is missing: make the image with starsd-edge image build",
        "error": True,
    }
    assert main([*argv, "--dry-run"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(row) == ["argv", "cwd", "env"]
    assert row["argv"][:4] == ["systemd-analyze", "verify", "--man=no", f"--root={bsp.rootfs}"]

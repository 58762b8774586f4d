"""Building an image of a small tree: the same twice, killed anywhere, mounts undone, secrets kept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_bsp import KEY, calls_of, fake_commands, let_anyone_own, make_bsp, make_wheels, recorder

from starsd.edge import image_manifest, image_mounts
from starsd.edge.cli import main
from starsd.edge.enrol import Device, Wifi
from starsd.edge.image_alone import alone
from starsd.edge.image_build import STAGES, Builder, work_folder
from starsd.edge.image_mounts import mounted, mounted_below, undo_mounts
from starsd.edge.image_plan import Order, commands
from starsd.edge.image_wheels import read_wheelhouse
from starsd.edge.l4t import open_bsp
from starsd.edge.l4t_boards import BOARDS
from starsd.edge.l4t_command import Command, CommandError
from starsd.shared.errors import UsageError

DEVICE = Device(
    hostname="edge-7",
    server="wss://drafts.example",
    token="hush-token-1",
    api_key="hush-key-12345678",
    wifi=Wifi(ssid="cellar", psk="hush-psk-1"),
)
ONCE = ["l4t_flash_prerequisites.sh", "apply_binaries.sh", "chroot"]


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVIDIA's tools and the system's commands write down their calls."""
    let_anyone_own(monkeypatch)
    folder = fake_commands(tmp_path / "bin", tmp_path / "Linux_for_Tegra/calls")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def make_order(tmp_path: Path, board: str = "orin-nano", release: str = "36", **change: Any) -> Order:
    folder = tmp_path / "Linux_for_Tegra"
    if not folder.exists():
        make_bsp(tmp_path, release)
        make_wheels(tmp_path / "wheels")
    bsp = open_bsp(folder)
    order = Order(
        bsp=bsp,
        board=BOARDS[board],
        openrm=BOARDS[board].openrm,
        device=DEVICE,
        user="edge",
        keys=KEY.encode(),
        release_key=b"a public key\n",
        house=read_wheelhouse(tmp_path / "wheels", "3.10"),
    )
    return msgspec.structs.replace(order, **change)


def build(order: Order, tmp_path: Path, **hooks: Any) -> bytes:
    """The manifest, as it lies in the tree."""
    Builder(order, tmp_path / "work", **hooks).build()
    return (order.root / image_manifest.PLACE).read_bytes()


def state(root: Path) -> dict[str, tuple[Any, ...]]:
    """All that a tree is, times aside."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        content: Any = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.filemode(about.st_mode), about.st_uid, about.st_gid, content)
    return found


def names_called(tmp_path: Path) -> list[str]:
    return [call[0] for call in calls_of(tmp_path / "Linux_for_Tegra/calls") if call[0] not in ("mount", "umount")]


def test_an_image_has_everything_in_its_place(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path)
    root = order.root
    assert names_called(tmp_path) == ONCE
    assert (root / "etc/hostname").read_text() == "edge-7\n"
    assert (root / "etc/machine-id").read_bytes() == b""
    assert not (root / "etc/ssh/ssh_host_rsa_key").exists()
    assert "PasswordAuthentication no\n" in (root / "etc/ssh/sshd_config.d/10-starsd.conf").read_text()
    assert os.readlink(root / "etc/systemd/system/default.target") == "/lib/systemd/system/multi-user.target"
    assert os.readlink(root / "etc/systemd/system/nv-oem-config.service") == "/dev/null"
    wants = root / "etc/systemd/system/multi-user.target.wants"
    assert sorted(path.name for path in wants.iterdir()) == [
        *("starsd-edge.service", "starsd-first-boot.service", "starsd-ssh-keys.service"),
    ]
    assert json.loads((root / "etc/starsd/device.json").read_bytes())["token"] == "hush-token-1"
    assert "psk=hush-psk-1\n" in (root / "etc/NetworkManager/system-connections/starsd.nmconnection").read_text()
    assert (root / "home/edge/.ssh/authorized_keys").read_text() == KEY
    assert (root / "etc/starsd/release.pub").read_bytes() == b"a public key\n"
    assert not (root / "var/cache/starsd").exists()
    assert not (root / "opt/starsd/.starsd.lock").exists()
    assert not (root / "usr/sbin/policy-rc.d").exists()


def test_thor_gets_the_open_driver(tmp_path: Path) -> None:
    order = make_order(tmp_path, "agx-thor", "39")
    build(order, tmp_path)
    assert ["apply_binaries.sh", "--openrm"] in calls_of(order.bsp.folder / "calls")
    status = order.root / "var/lib/dpkg/status"
    status.write_text(status.read_text() + "\n\nPackage: nvidia-l4t-core\nStatus: install ok installed\n")
    with pytest.raises(UsageError, match="the binaries were applied without --openrm"):
        build(order, tmp_path)


def test_secrets_are_in_files_of_their_own_and_nowhere_else(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path, show=(said := []).append)
    holders = {}
    for folder in (order.root, tmp_path / "work"):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and b"hush" in path.read_bytes():
                holders[str(path.relative_to(folder))] = stat.S_IMODE(path.stat().st_mode)
    assert holders == {
        "etc/starsd/device.json": 0o600,
        "etc/NetworkManager/system-connections/starsd.nmconnection": 0o600,
    }
    assert "hush" not in json.dumps([calls_of(order.bsp.folder / "calls"), said])
    assert "hush" not in f"{order!r}{commands(order, tmp_path, '0')!r}"
    manifest = image_manifest.read(order.root)
    assert manifest is not None
    kinds = {entry.path: entry for entry in manifest.entries}
    for path in [*holders, "etc/shadow"]:
        assert (kinds[path].kind, kinds[path].sha256) == ("secret", "")


def test_two_builds_are_the_same(tmp_path: Path) -> None:
    manifests, trees = [], []
    for number in ("one", "two"):
        place = tmp_path / number
        place.mkdir()
        (tmp_path / "Linux_for_Tegra").mkdir(exist_ok=True)
        order = make_order(place)
        manifests.append(build(order, place))
        trees.append(state(order.root))
    assert manifests[0] == manifests[1]
    assert trees[0] == trees[1]


def test_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    first = build(order, tmp_path)
    before = state(order.root)
    said: list[Any] = []
    assert build(order, tmp_path, report=said.append) == first
    assert state(order.root) == before
    assert names_called(tmp_path) == ONCE
    if os.geteuid() == 0:
        assert [done.stage for done in said if done.done] == ["manifest"]


MOMENTS = [
    *(
        (stage, moment)
        for stage in STAGES
        if stage not in ("files", "wheelhouse", "manifest")
        for moment in ("before", "done", "marked")
    ),
    *(("files", "before"), ("files", "done"), ("manifest", "done")),
]


@pytest.mark.parametrize(("stage", "moment"), MOMENTS)
def test_stopped_anywhere_it_goes_on(tmp_path: Path, stage: str, moment: str) -> None:
    order = make_order(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = make_order(tmp_path / "whole")
    expected = build(whole, tmp_path / "whole"), state(whole.root)

    def at(*here: str) -> None:
        if here == (stage, moment):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(order, tmp_path, at=at)
    assert (build(order, tmp_path), state(order.root)) == expected


@pytest.mark.parametrize("stage", ["binaries", "install"])
def test_killed_anywhere_it_goes_on(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL, while a command runs: no code of ours gets to clean up."""
    order = make_order(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = make_order(tmp_path / "whole")
    expected = build(whole, tmp_path / "whole"), state(whole.root)
    program = {"binaries": order.bsp.folder / "apply_binaries.sh", "install": tmp_path / "bin/chroot"}[stage]
    kind = program.read_text()
    program.write_text(f"{kind.rpartition('exec')[0] or kind}\nkill -9 $PPID\n")
    script = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_image_build as t\n"
        "import pytest; patch = pytest.MonkeyPatch(); t.let_anyone_own(patch)\n"
        "place = Path(sys.argv[2]); t.build(t.make_order(place), place)"
    )
    argv = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    assert subprocess.run(argv, check=False, capture_output=True).returncode == -9
    program.write_text(kind)
    assert not (order.root / image_manifest.PLACE).exists()
    assert (build(order, tmp_path), state(order.root)) == expected


@pytest.mark.parametrize("moment", ["", "before", "done", "marked"])
def test_wheels_come_by_the_pip_of_the_devices_python(tmp_path: Path, fakes: Path, moment: str) -> None:
    order = make_order(tmp_path)
    (order.root / "usr/bin/python3").symlink_to("python3.99")
    next((tmp_path / "wheels").glob("numpy-*")).unlink()
    ours = tmp_path / "starsd-0.1.0-py3-none-any.whl"
    ours.touch()
    copy = f'while [ "$1" != --dest ]; do shift; done; cp {tmp_path}/wheels/* "$2"'
    recorder(fakes / "python3.99", order.bsp.folder / "calls", copy)
    order = msgspec.structs.replace(order, house=None, source=str(ours))

    def at(*here: str) -> None:
        if here == ("wheelhouse", moment):
            raise KeyboardInterrupt

    if moment:
        with pytest.raises(KeyboardInterrupt):
            build(order, tmp_path, at=at)
    first = build(order, tmp_path)
    assert build(order, tmp_path) == first
    asked = [call for call in calls_of(order.bsp.folder / "calls") if call[0] == "python3.99"]
    assert len(asked) == (2 if moment == "done" else 1)
    assert asked[0][-2:] == [f"starsd[export,update] @ file://{ours}", "pip"]
    ours.write_bytes(b"newer")
    build(order, tmp_path)
    assert names_called(tmp_path).count("python3.99") == len(asked) + 1


def test_one_build_at_a_time(tmp_path: Path) -> None:
    """Of a tree, whatever its work folder, and in a work folder; it is taken before anything is run."""
    order = make_order(tmp_path)
    under_way = f"is under way, process {os.getpid()}: wait for its end"
    with alone("build", order.bsp.folder), pytest.raises(UsageError, match=f"build or flash of .*Tegra {under_way}"):
        build(order, tmp_path)
    with alone("build", tmp_path / "work"), pytest.raises(UsageError, match=f"build in .*/work {under_way}"):
        build(order, tmp_path)
    assert names_called(tmp_path) == []

    def at(*here: str) -> None:
        with pytest.raises(UsageError, match=under_way):
            build(order, tmp_path / "elsewhere")

    build(order, tmp_path, at=at)
    assert names_called(tmp_path) == ONCE


def test_commands_of_a_build_hold_its_lock(tmp_path: Path) -> None:
    """So that they keep it when the build is killed."""
    order = make_order(tmp_path)
    tell = f"for one in /proc/self/fd/*; do readlink $one; done >{tmp_path}/open; true"
    recorder(order.bsp.folder / "apply_binaries.sh", order.bsp.folder / "calls", tell)
    build(order, tmp_path)
    held = {str(order.bsp.folder / ".starsd.lock"), str(tmp_path / "work/.starsd.lock")}
    assert held <= set((tmp_path / "open").read_text().splitlines())


def test_a_tree_that_was_unpacked_anew_is_built_anew(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path)
    (order.root / "usr").rename(order.root / "old")
    (order.root / "usr").mkdir()
    build(order, tmp_path)
    assert names_called(tmp_path) == [*ONCE, "apply_binaries.sh", "chroot"]


def test_what_an_earlier_image_had_goes(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path)
    wifi = order.root / "etc/NetworkManager/system-connections/starsd.nmconnection"
    assert wifi.exists()
    build(msgspec.structs.replace(order, device=Device(hostname="other"), release_key=b""), tmp_path)
    assert not wifi.exists()
    assert not (order.root / "etc/starsd/release.pub").exists()
    assert (order.root / "etc/hostname").read_text() == "other\n"


@pytest.mark.parametrize(("user", "keys"), [("ada", KEY.encode()), ("edge", b"")])
def test_a_user_that_an_earlier_image_had_goes_and_others_stay(tmp_path: Path, user: str, keys: bytes) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path)
    build(msgspec.structs.replace(order, user=user, keys=keys), tmp_path)
    names = ["root", "nobody", *(["ada"] if keys else [])]
    for name in ("passwd", "shadow"):
        lines = (order.root / "etc" / name).read_text().splitlines()
        assert [line.partition(":")[0] for line in lines] == names
    group = (order.root / "etc/group").read_text()
    assert f"sudo:x:27:{'ada' if keys else ''}\n" in group
    assert "edge" not in group
    assert not (order.root / "home/edge").exists()
    assert not (order.root / "etc/sudoers.d/50-edge").exists()


def test_a_release_that_was_stated_wrong_is_found_out_when_the_tree_tells(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    folder = order.bsp.folder
    (folder / "nv_tegra/bsp_version").unlink()
    order = msgspec.structs.replace(order, bsp=open_bsp(folder, "36.5.0"))
    brings = f"echo '# R36 (release), REVISION: 4.3' >{folder}/rootfs/etc/nv_tegra_release"
    recorder(folder / "apply_binaries.sh", folder / "calls", brings)
    with pytest.raises(UsageError, match=r"nv_tegra_release says R36\.4\.3, expected R36\.5\.0 as --l4t-release has"):
        build(order, tmp_path)
    assert names_called(tmp_path) == ONCE[:2]


def test_mounts_are_undone_however_it_ends(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    mounts = tmp_path / "mountinfo"
    ran: list[Command] = []
    with pytest.raises(KeyboardInterrupt), mounted(order.root, ran.append):
        raise KeyboardInterrupt
    places = [command.argv[-1] for command in ran if command.argv[0] == "mount"]
    assert places[0] == f"{order.root}/proc"
    lines = [
        f"1 1 0:1 / {place} rw - tmpfs tmpfs rw" for place in (*places, str(order.root), "/proc", f"{order.root}2/x")
    ]
    mounts.write_text("\n".join(lines).replace("rootfs/tmp", "rootfs/with\\040space"))
    below = mounted_below(order.root, mounts)
    assert len(below) == len(places)
    assert order.root / "with space" in below
    assert below.index(order.root / "dev/null") < below.index(order.root / "dev")
    ran.clear()
    assert undo_mounts(order.root, ran.append, mounts) == below
    assert [command.argv for command in ran] == [("umount", "--lazy", str(place)) for place in below]


def test_leftover_mounts_go_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = make_order(tmp_path)
    left = [[order.root / "proc"], []]
    monkeypatch.setattr(image_mounts, "mounted_below", lambda root, info=None: left.pop(0) if left else [])
    build(order, tmp_path)
    assert calls_of(order.bsp.folder / "calls")[0] == ["umount", "--lazy", str(order.root / "proc")]


def test_a_failing_command_says_so_and_leaves_no_mount(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    (tmp_path / "bin/chroot").write_text("#!/bin/sh\necho 'dpkg: error: no room' >&2; exit 2\n")
    with pytest.raises(
        CommandError, match=r"chroot failed with status 2: dpkg: error: no room; all of it is in .*build\.log"
    ):
        build(order, tmp_path)
    assert not (order.root / "var/cache/starsd").exists()
    assert not (order.root / "usr/sbin/policy-rc.d").exists()
    (tmp_path / "bin/chroot").write_text("#!/bin/sh\necho 'chroot: Exec format error' >&2; exit 126\n")
    with pytest.raises(
        UsageError, match="aarch64 do not run here, expected qemu-user-static with binfmt-support to be"
    ):
        build(order, tmp_path)


def test_without_a_tree_it_says_what_to_unpack(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    (order.root / "usr").rename(order.root / "nothing")
    with pytest.raises(
        UsageError, match="rootfs holds no root file system: unpack NVIDIA's sample root file system there"
    ):
        build(order, tmp_path)


def test_the_work_folder_is_named_by_what_decides(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    same = work_folder(order, tmp_path)
    assert work_folder(msgspec.structs.replace(order, device=Device(token="another")), tmp_path) == same
    (tmp_path / "wheels/pip-25.0-py3-none-any.whl").write_bytes(b"newer")
    for change in (
        {"lock": {"a": "b"}},
        {"openrm": True},
        {"board": BOARDS["orin-nx"]},
        {"house": read_wheelhouse(tmp_path / "wheels", "3.10")},
    ):
        assert work_folder(msgspec.structs.replace(order, **change), tmp_path) != same


def test_dry_run_shows_every_command(
    tmp_path: Path, starsd_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    order = make_order(tmp_path)
    device, key = tmp_path / "device.json", tmp_path / "key.pub"
    device.write_bytes(msgspec.json.encode(DEVICE))
    device.chmod(0o644)
    key.write_text(KEY)
    argv = ["image", "build", "--l4t", str(order.bsp.folder), "--board", "orin-nano", "--device-file", str(device)]
    argv += ["--ssh-key", str(key), "--json"]
    assert main([*argv, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert all(list(row) == ["argv", "cwd", "env"] for row in rows)
    assert [row["argv"][0] for row in rows] == [
        *("./tools/l4t_flash_prerequisites.sh", "./apply_binaries.sh", "python3.10", "python3.10"),
        *["mount"] * 4, "touch", *["mount"] * 4, "chroot", *["umount"] * 8,
    ]  # fmt: skip
    assert "hush" not in out + err
    assert f"{device} has mode 0644 and may hold secrets: run chmod 600 {device}" in err
    assert not starsd_home.exists()
    assert calls_of(order.bsp.folder / "calls") == []
    assert main(argv) == 1
    assert capsys.readouterr().err.endswith("building an image needs root, got user 1000: run it with sudo\n")
    assert main([*argv, "--dry-run", "--openrm"]) == 1
    assert "orin-nano with --openrm has no GPU, expected it without" in capsys.readouterr().err
    device.write_bytes(msgspec.json.encode(msgspec.structs.replace(DEVICE, token="")))
    assert main([*argv, "--dry-run"]) == 1
    assert "the device file names wss://drafts.example and no token: add one of" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="an image is built by root")
def test_the_command_builds(tmp_path: Path, starsd_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = make_order(tmp_path)
    argv = ["image", "build", "--l4t", str(order.bsp.folder), "--board", "orin-nano", "--wheelhouse"]
    assert main([*argv, str(tmp_path / "wheels"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["stage"] for line in out.splitlines()] == [
        *("prerequisites", "binaries", "package", "install", "files", "manifest"),
    ]
    assert "no --ssh-key: nobody can log in to this image" in err
    (work,) = (starsd_home / "images").iterdir()
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert (work / "build.log").is_file()

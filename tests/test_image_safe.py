"""What a build must never do: leave one image's secrets in another, or reach past its tree, whatever the tree holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_bsp import calls_of, fake_commands, let_anyone_own, make_wheels
from test_image_build import build, make_order, names_called, state

from starsd.edge import image_alone, image_build, image_manifest
from starsd.edge.enrol import DEVICE_FILE, Device
from starsd.edge.flash import plan_flash
from starsd.edge.image_mounts import check_places, mounted, mounted_below
from starsd.edge.image_plan import RELEASE_KEY, WIFI_FILE, Order
from starsd.edge.image_tree import File, apply
from starsd.edge.image_users import ACCOUNTS
from starsd.edge.image_wheels import read_wheelhouse
from starsd.edge.l4t_boards import BOARDS
from starsd.edge.l4t_command import Command
from starsd.shared.errors import UsageError


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_anyone_own(monkeypatch)
    folder = fake_commands(tmp_path / "bin", tmp_path / "Linux_for_Tegra/calls")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def files(root: Path) -> dict[str, Any]:
    return {path: content for path, (*_, content) in state(root).items() if content is not None}


def stop_behind(last: str, order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is interrupted once it has written `last`."""

    def stop(root: Path, step: Any) -> None:
        apply(root, step)
        if step.path == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(image_build, "apply", stop)
        with pytest.raises(KeyboardInterrupt):
            build(order, tmp_path)


@pytest.mark.parametrize("last", ["etc/shadow", "etc/sudoers.d/50-edge", RELEASE_KEY, DEVICE_FILE, WIFI_FILE])
def test_nothing_of_an_image_that_was_stopped_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """One device's secrets must not end up in another's image, nor its user, nor the key that it updates by."""
    change: dict[str, Any] = {"device": None, "keys": b"", "release_key": b""}
    order = make_order(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = make_order(tmp_path / "whole", **change)
    expected = build(whole, tmp_path / "whole"), files(whole.root)

    stop_behind(last, order, tmp_path, monkeypatch)
    assert (order.root / last).exists()
    begun = image_manifest.read(order.root)
    assert begun is not None
    assert not begun.finished
    assert {last, "home/edge/.ssh/authorized_keys"} <= {entry.path for entry in begun.entries}
    (order.root / "etc/starsd/.device.json.starsd").write_text("hush")  # as one is left in mid-writing
    order = make_order(tmp_path, **change)
    assert (build(order, tmp_path), files(order.root)) == expected
    assert not (order.root / "home/edge").exists()


def test_a_device_file_that_no_manifest_lists_goes(tmp_path: Path) -> None:
    order = make_order(tmp_path, device=Device(hostname="other"))
    for path in (DEVICE_FILE, WIFI_FILE, "etc/starsd/token", "etc/starsd/api-key"):
        apply(order.root, File(path, b"hush", mode=0o600))
    build(order, tmp_path)
    assert not [path for path in order.root.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]


def test_a_user_is_taken_out_however_often_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = make_order(tmp_path)
    before = state(order.root)
    build(order, tmp_path)
    without = msgspec.structs.replace(order, keys=b"")
    for last in ("etc/shadow", "etc/group"):
        stop_behind(last, without, tmp_path, monkeypatch)
    build(without, tmp_path)
    after = state(order.root)
    for path in ACCOUNTS:
        assert after[path][-1] == before[path][-1].replace(b"\n\n", b"\n")


PLANTED = [
    *[{"path": path, "kind": "file"} for path in ("", "usr", "/", "usr/..", "etc/passwd")],
    {"path": "usr/lib", "kind": "link", "target": "x"},
    {"path": "etc", "kind": "folder"},
]


def test_a_manifest_that_came_with_the_tree_takes_no_folder_and_no_user_of_the_system(tmp_path: Path) -> None:
    order = make_order(tmp_path, keys=b"")
    (order.root / "usr/bin/env").write_text("the device's")
    build(order, tmp_path)
    place = order.root / image_manifest.PLACE
    made, before = json.loads(place.read_bytes()), state(order.root)
    for user in ("root", "nobody"):
        place.write_text(json.dumps({**made, "user": user, "entries": PLANTED}))
        build(order, tmp_path)
        assert state(order.root) == before


UNREADABLE: list[tuple[dict[str, Any] | None, str]] = [
    (None, "cannot be read: "),
    ({"format": 99}, "has format 99, expected 1"),
    ({"entries": [{"path": "a\0", "kind": "file"}]}, "cannot be read: it has a path that cannot be"),
]


@pytest.mark.parametrize(("change", "problem"), UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_replaced(
    tmp_path: Path, change: dict[str, Any] | None, problem: str
) -> None:
    order = make_order(tmp_path)
    first = build(order, tmp_path)
    (order.root / image_manifest.PLACE).write_text("{" if change is None else json.dumps(json.loads(first) | change))
    said: list[str] = []
    assert build(order, tmp_path, show=said.append) == first
    assert f"image.json {problem}" in said[-1]
    assert said[-1].endswith("; what else that image had stays in the tree: unpack it anew to be rid of it")


def test_there_is_one_environment_however_often_it_was_installed(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        build(order, tmp_path, at=lambda *here: stop_at(here, ("install", "done")))
    build(order, tmp_path)
    make_wheels(tmp_path / "newer", "0.2.0")
    build(msgspec.structs.replace(order, house=read_wheelhouse(tmp_path / "newer", "3.10")), tmp_path)
    assert names_called(tmp_path).count("chroot") == 3
    assert sorted(path.name for path in (order.root / "opt/starsd").iterdir()) == ["a", "current"]
    assert os.readlink(order.root / "opt/starsd/current") == "a"


def stop_at(here: tuple[str, ...], there: tuple[str, ...]) -> None:
    if here == there:
        raise KeyboardInterrupt


def test_the_package_lies_where_no_link_leads(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    (order.root / "var/cache").mkdir(parents=True)
    (order.root / "var/cache/starsd").symlink_to("/etc")
    build(order, tmp_path)
    assert (order.root / "etc/passwd").is_file()
    (order.root / "var/cache").rmdir()
    (order.root / "var/cache").symlink_to("/etc")
    with pytest.raises(UsageError, match=r"rootfs/etc is where var/cache of .*rootfs leads, expected no link"):
        build(order, tmp_path / "elsewhere")


def test_the_trees_own_say_over_services_stays(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    policy = order.root / "usr/sbin/policy-rc.d"
    policy.write_text("theirs")
    seen = tmp_path / "seen"
    kind = (tmp_path / "bin/chroot").read_text()
    (tmp_path / "bin/chroot").write_text(f"#!/bin/sh\ncat {policy} >>{seen}\nkill -9 $PPID\n")
    build_until_killed(tmp_path)
    (tmp_path / "bin/chroot").write_text(kind)
    build(order, tmp_path)
    assert seen.read_text() == "#!/bin/sh\nexit 101\n"
    assert policy.read_text() == "theirs"
    assert sorted(path.name for path in policy.parent.iterdir()) == ["policy-rc.d"]


def test_flashing_tells_of_an_image_that_is_not_for_this_board_or_not_whole(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    build(order, tmp_path)

    def notices(board: str) -> list[str]:
        said = plan_flash(order.bsp, BOARDS[board]).notices
        return [notice.removeprefix(f"{order.root} ") for notice in said if "missing" not in notice]

    assert notices("orin-nano") == []
    assert notices("agx-orin") == ["holds an image for orin-nano, expected one for agx-orin: build it again"]
    place = order.root / image_manifest.PLACE
    place.write_text(place.read_text().replace('"finished": true', '"finished": false'))
    assert notices("orin-nano") == ["holds an image whose build was stopped: build it again"]
    place.write_text("{")
    assert notices("orin-nano")[0].startswith(f"{place} cannot be read: ")


def build_until_killed(tmp_path: Path) -> None:
    """In a process of its own, which one of its commands kills."""
    script = "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_image_build as t\n"
    script += "t.let_anyone_own(t.pytest.MonkeyPatch()); place = Path(sys.argv[2]); t.build(t.make_order(place), place)"
    argv = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    assert subprocess.run(argv, check=False, capture_output=True).returncode == -9


def test_nothing_is_unmounted_under_what_a_killed_build_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, chroot = make_order(tmp_path), tmp_path / "bin/chroot"
    kind, end = chroot.read_text(), tmp_path / "end"
    chroot.write_text(f"#!/bin/sh\nkill -9 $PPID\nfor i in $(seq 400); do [ -e {end} ] || sleep 0.05; done\n")
    build_until_killed(tmp_path)
    monkeypatch.setattr(image_alone, "GRACE", 0.1)
    before = calls_of(order.bsp.folder / "calls")
    with pytest.raises(UsageError, match=r"build or flash of .*, was killed, and what it started still runs: wait for"):
        build(order, tmp_path)
    assert calls_of(order.bsp.folder / "calls") == before
    end.touch()
    monkeypatch.setattr(image_alone, "GRACE", 30.0)
    chroot.write_text(kind)
    build(order, tmp_path)


@pytest.mark.parametrize("name", ["proc", "run", "tmp", "dev"])
def test_nothing_is_mounted_outside_the_tree(tmp_path: Path, name: str) -> None:
    order = make_order(tmp_path)
    (tmp_path / "outside").mkdir()
    (order.root / name).rmdir()
    (order.root / name).symlink_to(tmp_path / "outside")
    ran: list[Command] = []
    problem = rf"rootfs/{name} leads to .*/outside, expected a folder of its own: unpack the root file system anew"
    with pytest.raises(UsageError, match=problem), mounted(order.root, ran.append):
        pass
    with pytest.raises(UsageError, match=problem):
        build(order, tmp_path)
    assert ran == []
    assert names_called(tmp_path) == []
    (order.root / name).unlink()
    with pytest.raises(UsageError, match=f"rootfs/{name} is no folder, expected a folder of its own"):
        check_places(order.root)


def test_this_machine_is_no_tree(tmp_path: Path) -> None:
    (tmp_path / "rootfs").symlink_to("/")
    with pytest.raises(UsageError, match="rootfs is this machine's own file system, expected a device's"):
        check_places(tmp_path / "rootfs")


def test_mounts_of_a_tree_behind_a_link_are_found(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "rootfs").symlink_to("disk")
    (tmp_path / "mountinfo").write_text(f"1 1 0:1 / {tmp_path.resolve()}/disk/proc rw - proc proc rw\n")
    assert mounted_below(tmp_path / "rootfs", tmp_path / "mountinfo") == [tmp_path.resolve() / "disk/proc"]

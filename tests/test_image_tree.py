"""Changing a device's root file system from outside: no path leaves it, and doing a thing twice changes nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fake_bsp import KEY, let_anyone_own, make_tree

from starsd.edge.image_tree import File, Folder, Gone, Link, Step, apply, inside, is_applied
from starsd.edge.image_users import user_steps
from starsd.shared.errors import UsageError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    let_anyone_own(monkeypatch)
    make_tree(tmp_path / "rootfs")
    return tmp_path / "rootfs"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("etc/hostname", "etc/hostname"),
        ("/lib/x.so", "usr/lib/x.so"),
        ("absolute/x", "etc/x"),
        ("climbing/x", "etc/x"),
        ("../../etc/../x", "x"),
        ("etc/./../etc//x", "etc/x"),
        ("chain", "etc/end"),
    ],
)
def test_links_are_followed_as_the_device_would(root: Path, path: str, expected: str) -> None:
    (root / "absolute").symlink_to("/etc")
    (root / "climbing").symlink_to("../../../../etc")
    (root / "chain").symlink_to("/absolute/link")
    (root / "etc/link").symlink_to("end")
    assert inside(root, path) == root / expected


def test_links_in_a_circle_are_refused(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(UsageError, match=r"a/x in .* is a link without an end"):
        inside(root, "a/x")


def test_nothing_is_written_outside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "etc/evil").symlink_to(outside)
    (root / "etc/file").symlink_to(outside / "file")
    apply(root, File("etc/evil/x", b"in"))
    apply(root, File("etc/file", b"in"))
    apply(root, Gone("etc/evil"))
    assert list(outside.iterdir()) == []
    assert (root / "etc/file").read_bytes() == b"in"
    assert not (root / "etc/file").is_symlink()


STEPS: list[Step] = [
    File("etc/a/b/file", b"text", mode=0o640),
    File("etc/secret", b"hush", mode=0o600, secret=True),
    Folder("home/x", mode=0o750),
    Link("etc/link", "/usr/lib/x"),
    Gone("etc/ssh"),
]


@pytest.mark.parametrize("step", STEPS)
@ROOT_ONLY
def test_steps_are_done_once(root: Path, step: Step) -> None:
    assert not is_applied(root, step)
    apply(root, step)
    assert is_applied(root, step)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*") if not path.is_symlink())
    apply(root, Gone("nothing/there"))
    assert before == sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*") if not path.is_symlink())
    apply(root, step)
    assert is_applied(root, step)


@ROOT_ONLY
def test_every_difference_is_noticed(root: Path) -> None:
    file = File("etc/x", b"text", mode=0o640, uid=7, gid=8)
    place = root / "etc/x"
    for change in (
        lambda: place.write_bytes(b"tex!"),
        lambda: place.chmod(0o644),
        lambda: os.chown(place, 0, 8),
        lambda: os.chown(place, 7, 0),
        place.unlink,
        lambda: (place.unlink(), place.mkdir()),
    ):
        if place.is_dir():
            place.rmdir()
        apply(root, file)
        assert is_applied(root, file)
        change()
        assert not is_applied(root, file)
    apply(root, Link("etc/l", "a"))
    assert not is_applied(root, Link("etc/l", "b"))
    assert not is_applied(root, Gone("etc/l"))


def test_a_folder_in_the_way_is_refused(root: Path) -> None:
    (root / "etc/taken").mkdir()
    with pytest.raises(UsageError, match="etc/taken is a folder, expected a file or nothing"):
        apply(root, File("etc/taken", b""))
    with pytest.raises(UsageError, match="etc/passwd is no folder, expected one"):
        apply(root, File("etc/passwd/x", b""))


def test_secrets_are_never_readable_by_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (seen.append(stat.S_IMODE(os.fstat(handle).st_mode)), original(handle))
    )
    monkeypatch.setattr(os, "umask", os.umask)
    apply(root, File("etc/secret", b"hush", mode=0o600, secret=True))
    assert seen == [0o600]
    assert "hush" not in repr(File("etc/secret", b"hush", secret=True))


def test_a_user_gets_in_by_key_alone(root: Path) -> None:
    for step in user_steps(root, "edge", KEY.encode()):
        apply(root, step)
    assert "edge:x:1000:1000::/ho" + "me/edge:/bin/bash\n" in (root / "etc/passwd").read_text()
    assert "edge:!:20000:0:99999:7:::\n" in (root / "etc/shadow").read_text()
    group = (root / "etc/group").read_text().splitlines()
    assert {"edge:x:1000:", "sudo:x:27:edge", "video:x:44:ada,edge"} <= set(group)
    assert not [line for line in group if line.startswith(("render", "i2c"))]
    keys = root / "home/edge/.ssh/authorized_keys"
    assert keys.read_text() == KEY
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (keys, keys.parent, keys.parent.parent)}
    assert modes == {"authorized_keys": 0o600, ".ssh": 0o700, "edge": 0o750}
    assert stat.S_IMODE((root / "etc/sudoers.d/50-edge").stat().st_mode) == 0o440
    again = user_steps(root, "edge", KEY.encode())
    assert [step.content for step in again if isinstance(step, File)] == [
        (root / step.path).read_bytes() for step in again if isinstance(step, File)
    ]


def test_numbers_of_others_are_left_alone(root: Path) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write("ada:x:1000:1000::/nowhere:/bin/sh\n")
    with (root / "etc/group").open("a") as file:
        file.write("builders:x:1001:\n")
    (passwd, *_) = [step.content for step in user_steps(root, "edge", b"") if isinstance(step, File)]
    assert b"edge:x:1002:1002:" in passwd


@pytest.mark.parametrize("name", ["root", "starsd", "Edge", "a:b", ""])
def test_users_that_cannot_be(root: Path, name: str) -> None:
    with pytest.raises(
        UsageError, match=f"user is '{name}', expected a-z, 0-9 and dashes, and neither root nor starsd"
    ):
        user_steps(root, name, b"")


def test_a_users_name_that_the_system_has_is_refused(root: Path) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write("daemon:x:1:1::/:/bin/sh\n")
    with pytest.raises(UsageError, match="user daemon belongs to the system, expected another name"):
        user_steps(root, "daemon", b"")


@pytest.mark.parametrize("name", ["nobody", "many"])
def test_a_number_outside_those_of_people_is_the_systems(root: Path, name: str) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write("many:x:60001:60001::/:/bin/sh\n")
    with pytest.raises(UsageError, match=f"user {name} belongs to the system, expected another name"):
        user_steps(root, name, b"")


@pytest.mark.parametrize("name", ["sudo", "video", "nogroup"])
def test_a_name_that_only_a_group_has_is_refused(root: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"user {name} has the name of a group of the system, expected another name"):
        user_steps(root, name, b"")


def test_names_of_people_in_any_encoding_stay(root: Path) -> None:
    with (root / "etc/passwd").open("ab") as file:
        file.write(b"ada:x:1000:1000:Ad\xe9:/:/bin/sh\n")
    (passwd, *_) = [step.content for step in user_steps(root, "edge", b"") if isinstance(step, File)]
    assert b":Ad\xe9:" in passwd


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ada:x", "etc/passwd has a line of 2 fields, expected 7"),
        ("+::::::", r"etc/passwd has the number '' for '\+', expected digits"),
        ("ada:x:ten:10::/:/bin/sh", "etc/passwd has the number 'ten' for 'ada', expected digits"),
        ("root::0:0:root:/:/bin/bash", "etc/passwd has 'root' more than once, expected each name once"),
    ],
)
def test_accounts_that_cannot_be_are_refused(root: Path, line: str, message: str) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError, match=message):
        user_steps(root, "edge", b"")


@pytest.mark.parametrize("path", ["", "/", "usr/..", "usr/."])
def test_the_tree_itself_is_no_path_in_it(root: Path, path: str) -> None:
    for step in (Gone(path), File(path, b""), Link(path, "x")):
        with pytest.raises(UsageError, match=rf"got path '{path}', expected one below .*rootfs"):
            apply(root, step)
    assert (root / "usr").is_dir()


def test_half_written_files_go_with_what_they_were_for(root: Path) -> None:
    part = root / "etc/.secret.starsd"
    apply(root, File("etc/secret", b"new", mode=0o600))
    for step in (File("etc/secret", b"new", mode=0o600), Gone("etc/secret"), Gone("etc/secret")):
        part.write_text("another device's")
        assert not is_applied(root, step)
        apply(root, step)
        assert not part.exists()
    part.mkdir()
    apply(root, File("etc/secret", b"new"))
    assert not part.exists()

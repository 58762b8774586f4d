"""NVIDIA's package: its release, the boards it fits, what it was unpacked from, and running its commands."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from fake_bsp import make_bsp

from starsd.edge.cli import main
from starsd.edge.l4t import Release, installed_packages, open_bsp, parse_release
from starsd.edge.l4t_boards import (
    BOARDS,
    check_openrm,
    check_release,
    config_of,
    driver_problem,
    find_board,
    storage_of,
)
from starsd.edge.l4t_command import Command, CommandError, run
from starsd.edge.l4t_lock import check_archives, encode, locked, make_lock, read_lock
from starsd.shared.errors import HashMismatchError, UsageError


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n", Release(36, 4, 3)),
        ("# R38 (release), REVISION: 2.0\n", Release(38, 2, 0)),
        ("# comment\nBSP_BRANCH=39\nBSP_MAJOR=2\nBSP_MINOR=1\nBSP_VERSION=x\n", Release(39, 2, 1)),
        ("R36.5.0\n", Release(36, 5, 0)),
        ("39.2", Release(39, 2, 0)),
    ],
)
def test_releases(text: str, release: Release) -> None:
    assert parse_release(text, "it") == release


def test_a_package_says_its_release(tmp_path: Path) -> None:
    bsp = open_bsp(make_bsp(tmp_path, "39"))
    assert (str(bsp.release), bsp.python) == ("39.4.3", "3.12")
    (bsp.folder / "nv_tegra/bsp_version").unlink()
    with pytest.raises(UsageError, match=r"is no Linux_for_Tegra, expected one of nv_tegra/bsp_version, "):
        open_bsp(bsp.folder)
    (bsp.rootfs / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 5.0\n")
    bsp = open_bsp(bsp.folder)
    assert (str(bsp.release), bsp.python) == ("36.5.0", "3.10")
    (bsp.rootfs / "usr/bin/python3").symlink_to("python3.13")
    assert bsp.python == "3.13"
    (bsp.rootfs / "etc/nv_tegra_release").write_text("nothing of use\n")
    with pytest.raises(UsageError, match=r"begins with 'nothing of use', expected the like of '# R36 \(release\)"):
        open_bsp(bsp.folder)
    with pytest.raises(UsageError, match="missing is not a folder, expected an unpacked Linux_for_Tegra"):
        open_bsp(tmp_path / "missing")


def test_only_releases_that_run_on_a_board() -> None:
    for board, runs in (
        ("orin-nano", "36.4.3 36.5.0 39.2.0"),
        ("agx-orin", "36.2.0 39.2.0"),
        ("agx-thor", "38.2.1 39.2.0"),
    ):
        for text in runs.split():
            check_release(BOARDS[board], parse_release(text, ""))
    for board, text, expected in (("orin-nx", "38.4.0", "R36 or R39"), ("agx-thor", "36.4.3", "R38 or R39")):
        with pytest.raises(UsageError, match=f"Jetson Linux is R{text}, expected {expected} for {board}"):
            check_release(BOARDS[board], parse_release(text, ""))
    with pytest.raises(UsageError, match="board is 'nano', expected one of orin-nano, orin-nx, agx-orin, agx-thor"):
        find_board("nano")


def test_storage_and_configuration() -> None:
    usual = {name: storage_of(board, None) for name, board in BOARDS.items()}
    assert usual == {"orin-nano": "nvme", "orin-nx": "nvme", "agx-orin": "emmc", "agx-thor": "nvme"}
    refused = {"orin-nano": "emmc", "orin-nx": "sd", "agx-orin": "ufs", "agx-thor": "emmc"}
    for name, kind in refused.items():
        with pytest.raises(UsageError, match=rf"storage is '{kind}', expected one of .* for {name}"):
            storage_of(BOARDS[name], kind)
    assert config_of(BOARDS["orin-nx"], Release(36, 4, 0)) == "jetson-orin-nano-devkit"
    assert config_of(BOARDS["orin-nx"], Release(36, 4, 3)) == "jetson-orin-nano-devkit-super"
    assert config_of(BOARDS["agx-thor"], Release(39, 2, 0)) == "jetson-agx-thor-devkit"


def test_thor_needs_the_open_driver(tmp_path: Path) -> None:
    thor, nano = BOARDS["agx-thor"], BOARDS["orin-nano"]
    assert [check_openrm(board, None) for board in (thor, nano)] == [True, False]
    assert check_openrm(thor, True) is True
    with pytest.raises(UsageError, match="agx-thor without --openrm has no GPU, expected it with"):
        check_openrm(thor, False)
    with pytest.raises(UsageError, match="orin-nano with --openrm has no GPU, expected it without"):
        check_openrm(nano, True)
    for number, packages, problem in (
        (0, (), False),
        (1, ("nvidia-l4t-core", "nvidia-l4t-kernel"), True),
        (2, ("nvidia-l4t-core", "nvidia-l4t-firmware-openrm"), False),
    ):
        bsp = open_bsp(make_bsp(tmp_path / str(number), "39", packages))
        assert (driver_problem(thor, bsp) is not None) is problem
        assert driver_problem(nano, bsp) is None


def test_packages_that_were_removed_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "var/lib/dpkg/status"
    assert installed_packages(tmp_path) is None
    file.parent.mkdir(parents=True)
    file.write_text("Package: a\nStatus: install ok installed\n\nPackage: b\nStatus: deinstall ok config-files\n")
    assert installed_packages(tmp_path) == {"a"}


def test_a_lock_file_pins_both_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bsp, rootfs, file = (tmp_path / name for name in ("Jetson.tbz2", "Sample.tbz2", "lock.json"))
    bsp.write_bytes(b"package")
    rootfs.write_bytes(b"tree")
    assert main(["image", "lock", str(bsp), str(rootfs), "--lock", str(file)]) == 0
    lock = read_lock(file)
    assert lock == make_lock(bsp, rootfs)
    assert lock.hashes() == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (bsp, rootfs)}
    assert check_archives(lock, tmp_path) == (bsp, rootfs)
    argv = ["image", "unpack", "--archives", str(tmp_path), "--dest", str(tmp_path / "to"), "--lock", str(file)]
    capsys.readouterr()
    assert main([*argv, "--dry-run", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["argv"][:3] for row in rows] == [["tar", "-xpf", str(bsp)], ["tar", "-xpf", str(rootfs)]]
    assert rows[1]["argv"][-1] == str(tmp_path / "to/Linux_for_Tegra/rootfs")
    rootfs.write_bytes(b"another tree")
    with pytest.raises(HashMismatchError, match=r"Sample.tbz2 has SHA-256 \w{64}, expected \w{64}"):
        check_archives(lock, tmp_path)
    rootfs.unlink()
    with pytest.raises(UsageError, match="is missing, expected the archive that the lock file pins"):
        check_archives(lock, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "cannot be read: Object missing required field `bsp`"),
        (
            '{"bsp": {"file": "../a", "sha256": "00"}, "rootfs": {"file": "b", "sha256": "00"}}',
            r"pins '\.\./a', expected a",
        ),
    ],
)
def test_lock_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lock").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_lock(tmp_path / "lock")


def test_a_package_remembers_its_lock(tmp_path: Path) -> None:
    assert locked(tmp_path) == {}
    (tmp_path / "a").write_bytes(b"a")
    lock = make_lock(tmp_path / "a", tmp_path / "a")
    (tmp_path / "starsd-lock.json").write_bytes(encode(lock))
    assert locked(tmp_path) == lock.hashes()


def test_commands_are_streamed_and_logged(tmp_path: Path) -> None:
    seen: list[str] = []
    code = "import os, sys; print('one', flush=True); print(os.environ['HOW'], os.getcwd(), file=sys.stderr)"
    run(Command((sys.executable, "-c", code), str(tmp_path), {"HOW": "well"}), tmp_path / "logs/log", seen.append)
    assert seen == ["one", f"well {tmp_path}"]
    log = (tmp_path / "logs/log").read_text()
    assert log.startswith(f"$ cd {tmp_path} && HOW=well {sys.executable} -c ")
    assert log.endswith(f"one\nwell {tmp_path}\n# status 0\n")


def test_failures_name_the_last_lines_and_the_log(tmp_path: Path) -> None:
    code = "print('first'); print('no space left'); raise SystemExit(3)"
    log = tmp_path / "log"
    with pytest.raises(CommandError, match=rf"failed with status 3: first / no space left; all of it is in {log}"):
        run(Command((sys.executable, "-c", code), str(tmp_path)), log)
    with pytest.raises(CommandError, match=r"nothing-here cannot be run in .*: no such file or directory"):
        run(Command(("nothing-here",), str(tmp_path)), log)

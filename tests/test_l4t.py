"""NVIDIA's package: its release, the boards it fits, what it was unpacked from, and running its commands."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_bsp import make_bsp

from starsd.edge.cli import main
from starsd.edge.l4t import Release, check_stated, installed_packages, open_bsp, parse_release
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
from starsd.shared.errors import StorageError, UsageError


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
    looked = (
        r"does not say its release, looked for nv_tegra/bsp_version, nv_tegra/release, nv_tegra/nv_tegra_release, "
        r"rootfs/etc/nv_tegra_release in it: expected .*, or its release as --l4t-release 36\.4\.3"
    )
    with pytest.raises(UsageError, match=looked):
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


def test_a_release_may_be_stated_where_no_file_tells(tmp_path: Path) -> None:
    folder = make_bsp(tmp_path)
    file = folder / "nv_tegra/bsp_version"
    assert open_bsp(folder, "R36.4.3") == open_bsp(folder)
    with pytest.raises(UsageError, match=r"nv_tegra/bsp_version says R36\.4\.3, expected R36\.5\.0 as --l4t-release"):
        open_bsp(folder, "36.5")
    brought = folder / "rootfs/etc/nv_tegra_release"
    brought.write_text("# R36 (release), REVISION: 5.0\n")
    with pytest.raises(UsageError, match=r"rootfs/etc/nv_tegra_release says R36\.5\.0, expected R36\.4\.3 as --l4t-r"):
        open_bsp(folder, "36.4.3")  # not the first file, yet a file
    brought.unlink()
    file.unlink()
    bsp = open_bsp(folder, "36.5.0")
    assert (bsp.release, bsp.stated, bsp.python) == (Release(36, 5, 0), True, "3.10")
    check_stated(bsp)
    brought.write_text("# R36 (release), REVISION: 4.3\n")
    with pytest.raises(UsageError, match=r"says R36\.4\.3, expected R36\.5\.0 as --l4t-release has it"):
        check_stated(bsp)
    for text in ("36", "JetPack 6.2", "36.4.3 or so"):
        with pytest.raises(UsageError, match=f"--l4t-release is '{text}', expected the like of 36.4.3"):
            open_bsp(folder, text)


@pytest.mark.parametrize("command", [["image", "build"], ["image", "verify"], ["flash"]], ids="-".join)
def test_commands_take_a_stated_release(
    tmp_path: Path, starsd_home: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    folder = make_bsp(tmp_path)
    (folder / "nv_tegra/bsp_version").unlink()
    argv = [*command, "--l4t", str(folder), "--board", "orin-nano", "--dry-run", "--json"]
    assert main(argv) == 1
    assert capsys.readouterr().err.endswith("or its release as --l4t-release 36.4.3\n")
    assert main([*argv, "--l4t-release", "36.4.3"]) == 0
    assert capsys.readouterr().out.startswith('{"argv":[')
    assert main([*argv, "--l4t-release", "38.2"]) == 1
    message = "starsd-edge: Jetson Linux is R38.2.0, expected R36 or R39 for orin-nano\n"
    assert capsys.readouterr().err == message


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


def test_commands_are_streamed_and_logged(tmp_path: Path) -> None:
    seen: list[str] = []
    code = "import os, sys; print('one', flush=True); print(os.environ['HOW'], os.getcwd(), file=sys.stderr)"
    run(Command((sys.executable, "-c", code), str(tmp_path), {"HOW": "well"}), tmp_path / "logs/log", seen.append)
    assert seen == ["one", f"well {tmp_path}"]
    log = (tmp_path / "logs/log").read_text()
    assert stat.S_IMODE((tmp_path / "logs/log").stat().st_mode) == 0o600
    assert log.startswith(f"$ cd {tmp_path} && HOW=well {sys.executable} -c ")
    assert log.endswith(f"one\nwell {tmp_path}\n# status 0\n")


def test_failures_name_the_last_lines_and_the_log(tmp_path: Path) -> None:
    code = "print('first'); print('no space left'); raise SystemExit(3)"
    log = tmp_path / "log"
    with pytest.raises(CommandError, match=rf"failed with status 3: first / no space left; all of it is in {log}"):
        run(Command((sys.executable, "-c", code), str(tmp_path)), log)
    with pytest.raises(CommandError, match=r"nothing-here cannot be run in .*: no such file or directory"):
        run(Command(("nothing-here",), str(tmp_path)), log)


def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    """Though it holds the command's output open, and goes on talking."""
    left = tmp_path / "left"
    seen: list[str] = []
    script = (
        f"(trap '' PIPE; for _ in $(seq 400); do echo more; sleep 0.05; done) & echo $! >{left}; printf 'last word'"
    )
    started = time.monotonic()
    try:
        run(Command(("sh", "-c", script), str(tmp_path)), tmp_path / "log", seen.append)
        assert "last word" in "".join(seen)
        assert time.monotonic() - started < 10
        os.kill(int(left.read_text()), 0)  # it is left alone
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert (tmp_path / "log").read_text().endswith("# status 0\n")


def test_a_command_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="sh failed with status 7: it said nothing"):
        run(Command(("sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 7"), str(tmp_path)), tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_command_with_all_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """It is given time to tidy up."""
    log, tidied, alive = tmp_path / "log", tmp_path / "tidied", tmp_path / "alive"
    script = f"trap 'echo undone; echo tidied >{tidied}; exit 1' TERM; "
    script += f"sh -c 'echo $$ >{alive}; sleep 60; :' & echo ready; wait"
    program = (
        "import sys; from pathlib import Path; from starsd.edge.l4t_command import Command, run; "
        "run(Command(('sh', '-c', sys.argv[1]), '/'), Path(sys.argv[2]), print)"
    )
    with subprocess.Popen([sys.executable, "-c", program, script, str(log)], stderr=subprocess.DEVNULL) as child:
        wait_for(lambda: log.exists() and "ready" in log.read_text() and alive.exists() and alive.read_text())
        started = int(alive.read_text())
        child.send_signal(number)
        assert child.wait(20) == (128 + number if number != signal.SIGINT else -number)
    assert tidied.exists()
    wait_for(lambda: not lives(started))
    assert log.read_text().endswith("ready\nundone\n# interrupted\n")


def lives(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def wait_for(done: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"log .*/file/log cannot be written: (not a directory|file exists)"):
        run(Command(("true",), str(tmp_path)), tmp_path / "file/log")

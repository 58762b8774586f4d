"""Flashing: NVIDIA's commands for every board and storage, and what keeps the wrong board from being erased."""

from __future__ import annotations

import io
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from fake_bsp import calls_of, make_bsp, recorder

from starsd.edge import flash_run
from starsd.edge.cli import main
from starsd.edge.flash import plan_flash
from starsd.edge.image_alone import alone
from starsd.edge.l4t import open_bsp
from starsd.edge.l4t_boards import BOARDS
from starsd.edge.l4t_command import CommandError
from starsd.shared.errors import UsageError

TOOL = "./tools/kernel_flash/l4t_initrd_flash.sh"
T234 = ["-c", "tools/kernel_flash/flash_l4t_t234_nvme.xml"]
QSPI = ["-p", "-c bootloader/generic/cfg/flash_t234_qspi.xml"]
LOUD = ["--showlogs", "--network", "usb0"]
NANO = "jetson-orin-nano-devkit-super"
AGX = "jetson-agx-orin-devkit"
NVME_FIRST = {"ADDITIONAL_DTB_OVERLAY_OPT": "BootOrderNvme.dtbo"}
PLANS = [
    ("orin-nano", "36", "nvme", ["--external-device", "nvme0n1p1", *T234, *QSPI, *LOUD, NANO, "internal"], {}),
    ("orin-nano", "39", "sd", ["--external-device", "mmcblk0p1", *T234, *QSPI, *LOUD, NANO, "internal"], {}),
    ("orin-nx", "36", "usb", ["--external-device", "sda1", *T234, *QSPI, *LOUD, NANO, "internal"], {}),
    ("agx-orin", "36", None, [*LOUD, AGX, "internal"], {}),
    ("agx-orin", "39", "nvme", ["--external-device", "nvme0n1p1", *T234, *LOUD, AGX, "external"], NVME_FIRST),
    ("agx-orin", "36", "sd", ["--external-device", "mmcblk1p1", *T234, *LOUD, AGX, "external"], {}),
    ("agx-thor", "39", None, ["jetson-agx-thor-devkit", "internal"], {}),
]


def lsusb(*lines: str) -> tuple[str, ...]:
    """A program that says that."""
    return (sys.executable, "-c", f"print({chr(10).join(lines)!r})")


def usb(product: str, device: int = 7) -> str:
    return f"Bus 001 Device {device:03d}: ID 0955:{product} NVIDIA Corp. APX"


@pytest.mark.parametrize(("board", "release", "storage", "argv", "env"), PLANS)
def test_commands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    board: str,
    release: str,
    storage: str | None,
    argv: list[str],
    env: dict[str, str],
) -> None:
    bsp = make_bsp(tmp_path, release)
    options = ["--storage", storage] if storage else []
    assert main(["flash", "--l4t", str(bsp), "--board", board, *options, "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"argv": [TOOL, *argv], "cwd": str(bsp), "env": env}]
    assert err == f"starsd-edge: {bsp}/rootfs holds no image of starsd: make one with starsd-edge image build\n"
    assert calls_of(bsp / "calls") == []


def test_newer_packages_have_the_tool_in_their_root(tmp_path: Path) -> None:
    bsp = make_bsp(tmp_path, "39")
    (bsp / "l4t_initrd_flash.sh").touch()
    plan = plan_flash(open_bsp(bsp), BOARDS["agx-thor"])
    assert plan.commands[0].argv == ("./l4t_initrd_flash.sh", "jetson-agx-thor-devkit", "internal")


def test_many_boards_are_flashed_from_images_made_before(tmp_path: Path) -> None:
    bsp = open_bsp(make_bsp(tmp_path))
    make, write = plan_flash(bsp, BOARDS["orin-nano"], massflash=5, environment={"FAB": "301"}).commands
    many = ("--massflash", "5", "--network", "usb0")
    assert make.argv == (TOOL, "--external-device", "nvme0n1p1", *T234, *QSPI, "--no-flash", *many, NANO, "internal")
    assert make.env == {"BOARDID": "3767", "BOARDSKU": "0005", "FAB": "301", "BOARDREV": ""}
    assert write.argv == (TOOL, "--flash-only", *many, "--showlogs", NANO, "internal")
    assert write.env == {}
    (bsp.rootfs / "etc/starsd").mkdir()
    (bsp.rootfs / "etc/starsd/device.json").touch()
    assert plan_flash(bsp, BOARDS["orin-nano"], massflash=5).notices[-1] == (
        f"{bsp.rootfs} holds one device's file: all boards get its name and its token"
    )
    for number in (0, 33):
        with pytest.raises(UsageError, match=f"massflash is {number}, expected 1 to 32"):
            plan_flash(bsp, BOARDS["orin-nano"], massflash=number)


def test_a_tree_without_a_gpu_is_refused(tmp_path: Path) -> None:
    bsp = open_bsp(make_bsp(tmp_path, "39", ("nvidia-l4t-core",)))
    with pytest.raises(
        UsageError, match=r"rootfs: the binaries were applied without --openrm, expected apply_binaries"
    ):
        plan_flash(bsp, BOARDS["agx-thor"])
    assert plan_flash(bsp, BOARDS["orin-nano"]).commands


def test_what_is_missing_of_the_package_is_said(tmp_path: Path) -> None:
    bsp = make_bsp(tmp_path)
    for name in (
        "tools/kernel_flash/l4t_initrd_flash.sh",
        f"{NANO}.conf",
        "tools/kernel_flash/flash_l4t_t234_nvme.xml",
    ):
        (bsp / name).unlink()
    notices = plan_flash(open_bsp(bsp), BOARDS["orin-nano"]).notices
    assert [notice.partition(" is missing")[0].removeprefix(f"{bsp}/") for notice in notices[:3]] == [
        "tools/kernel_flash/l4t_initrd_flash.sh",
        f"{NANO}.conf",
        "tools/kernel_flash/flash_l4t_t234_nvme.xml",
    ]


@pytest.mark.parametrize(
    ("lines", "massflash", "message"),
    [
        ([], None, "got no board in recovery mode, expected a Jetson Orin Nano: hold FORCE RECOVERY"),
        ([usb("7020")], None, "got a running Jetson and no board in recovery mode"),
        (
            ["Bus 001 Device 002: ID 0955:7214 NVIDIA Corp. SHIELD"],
            None,
            "got another device of NVIDIA, 7214 and no board",
        ),
        ([usb("7323")], None, "the board in recovery mode is Orin NX 16GB, expected orin-nano"),
        (
            [usb("7E19")],
            None,
            "the board in recovery mode at 001-007 is of a kind that is not known here, 7e19, expected orin-nano: "
            "where you know better, run what --dry-run shows",
        ),
        ([usb("7523"), usb("7c18", 8)], 2, "at 001-008 is of a kind that is not known here, 7c18, expected orin-nano"),
        (
            [usb("7523"), usb("7523", 8)],
            None,
            r"got 2 boards in recovery mode \(001-007, 001-008\), expected one: "
            "disconnect the others, or give --massflash 2",
        ),
        ([usb("7523"), usb("7023", 8)], 2, "the board in recovery mode is AGX Orin, expected orin-nano"),
        (
            [usb("7523"), usb("7523", 8), usb("7623", 9)],
            2,
            "got 3 boards in recovery mode, expected at most --massflash 2",
        ),
    ],
)
def test_other_boards_are_never_flashed(lines: list[str], massflash: int | None, message: str) -> None:
    found, others = flash_run.find_boards(lsusb(*lines))
    with pytest.raises(UsageError, match=message):
        flash_run.check_boards(found, others, BOARDS["orin-nano"], massflash)


@pytest.mark.parametrize(
    ("lines", "massflash"),
    [([usb("7523")], None), ([usb("7623")], 4), ([usb("7523"), usb("7523", 8)], 2), ([usb("7523"), usb("7020")], None)],
)
def test_the_right_boards_are_found(lines: list[str], massflash: int | None) -> None:
    found, others = flash_run.find_boards(lsusb(*lines))
    flash_run.check_boards(found, others, BOARDS["orin-nano"], massflash)
    assert found[0].place == "001-007"


def test_what_a_device_calls_itself_may_be_no_text() -> None:
    said = usb("7523").encode() + b" \xff\n"
    program = f"import sys; sys.stdout.buffer.write({said!r})"
    found, _ = flash_run.find_boards((sys.executable, "-c", program))
    assert [one.product for one in found] == ["7523"]


def test_without_lsusb_one_line_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="no-lsusb cannot be run, which finds boards: install usbutils"):
        flash_run.find_boards(("no-lsusb",))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our lsusb, which shows one Orin Nano, and root's rights as far as the command asks for them."""
    script = tmp_path / "bin/lsusb"
    recorder(script, tmp_path / "lsusb-calls", f"echo '{usb('7523')}'")
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(flash_run, "LOCKS", tmp_path / "locks")
    return script


def test_a_board_is_flashed_and_the_log_is_kept(
    tmp_path: Path, on_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bsp, logs = make_bsp(tmp_path), tmp_path / "logs"
    recorder(bsp / TOOL, bsp / "calls", "echo 'writing 50 %'")
    argv = ["flash", "--l4t", str(bsp), "--board", "orin-nano", "--logs", str(logs), "--json"]
    monkeypatch.setattr("sys.stdin", io.StringIO("orin-nano\n"))
    assert main(argv) == 0
    out, err = capsys.readouterr()
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["argv"][0], row["cwd"], row["env"]) == (TOOL, str(bsp), {})
    assert calls_of(bsp / "calls") == [["l4t_initrd_flash.sh", *PLANS[0][3]]]
    assert calls_of(tmp_path / "lsusb-calls") == [["lsusb", "-d", "0955:"]]
    assert "found Orin Nano 8GB at 001-007" in err
    assert "This erases the nvme. Type orin-nano to go on: writing 50 %\n" in err
    assert "writing 50 %\n# status 0\n" in Path(row["log"]).read_text()
    assert Path(row["log"]).parent == logs


@pytest.mark.parametrize("answer", ["", "y\n", "orin-nx\n"])
def test_nothing_is_flashed_unless_the_boards_name_is_typed(
    tmp_path: Path,
    on_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
) -> None:
    bsp = make_bsp(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["flash", "--l4t", str(bsp), "--board", "orin-nano"]) == 1
    assert f"got {answer.strip()!r}, expected orin-nano: nothing was flashed" in capsys.readouterr().err
    assert calls_of(bsp / "calls") == []
    assert main(["flash", "--l4t", str(bsp), "--board", "orin-nano", "--yes", "--logs", str(tmp_path)]) == 0
    assert len(calls_of(bsp / "calls")) == 1


def test_one_flash_at_a_time(tmp_path: Path, on_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bsp, locks = make_bsp(tmp_path), tmp_path / "locks"
    argv = ["flash", "--l4t", str(bsp), "--board", "orin-nano", "--yes", "--logs", str(tmp_path)]
    with alone("build", bsp):
        assert main(argv) == 1
    other = f"is under way, process {os.getpid()}: wait for its end\n"
    assert capsys.readouterr().err.endswith(f"starsd-edge: another build or flash of {bsp} {other}")
    with alone("flash", locks, "usb-001-007.lock"):
        assert main(argv) == 1
    assert capsys.readouterr().err.endswith(f"starsd-edge: another flash of the board at 001-007 {other}")
    with alone("flash", locks, "usb-001-008.lock"):
        assert calls_of(bsp / "calls") == []
        assert main(argv) == 0
    assert len(calls_of(bsp / "calls")) == 1


def test_a_failure_ends_a_massflash_before_boards_are_touched(tmp_path: Path) -> None:
    bsp = make_bsp(tmp_path)
    recorder(bsp / TOOL, bsp / "calls", "echo 'no such partition' >&2; exit 9")
    plan = plan_flash(open_bsp(bsp), BOARDS["orin-nano"], massflash=2)
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    with pytest.raises(CommandError, match=r"failed with status 9: no such partition; all of it is in .*T030405Z\.log"):
        flash_run.flash(plan, tmp_path, report=lambda done: None, show=lambda line: None, now=lambda: now)
    assert len(calls_of(bsp / "calls")) == 1
    (log,) = tmp_path.glob("*.log")
    with pytest.raises(CommandError, match=r"all of it is in .*T030405Z-2\.log"):  # in the same second
        flash_run.flash(plan, tmp_path, report=lambda done: None, show=lambda line: None, now=lambda: now)
    assert log.read_text().count("# status 9") == 1


def test_flashing_takes_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["flash", "--l4t", str(make_bsp(tmp_path)), "--board", "orin-nano", "--yes"]) == 1
    assert capsys.readouterr().err.endswith("starsd-edge: flashing needs root, got user 1000: run it with sudo\n")

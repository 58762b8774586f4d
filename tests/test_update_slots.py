"""A release that is being tried: whatever stops its update, the one before comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
from fake_bsp import calls_of, recorder
from test_update import Device, Signer, make_release

from starsd.edge.image_alone import alone
from starsd.edge.image_deb import _POSTINST, INSTALLER, SLOTS
from starsd.edge.update_slots import UpdateError, run_program

HANGS = """
import os, shutil, sys, time
from pathlib import Path
from starsd.edge.update import update
from starsd.edge.update_slots import Slots

file, key, folder = map(Path, sys.argv[1:])
told = []

def install(wheels, slot):
    slot.mkdir(exist_ok=True)
    shutil.copy(wheels / "release.json", slot)

def restart(link):
    told.append(os.readlink(link))
    print("restart", told[-1], flush=True)
    if len(told) == 1:
        time.sleep(60)

update(file, key, Slots(folder), install=install, self_test=lambda slot: None, restart=restart, machine="aarch64")
"""


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """One that runs 0.1.0, in a; releases 0.2.0 and 0.3.0 lie beside it."""
    signer = Signer()
    made = Device(tmp_path, signer)
    made.update(make_release(tmp_path, signer, "0.1.0"))
    made.started.clear()
    for version in ("0.2.0", "0.3.0"):
        make_release(tmp_path, signer, version)
    return made


def stopped(device: Device, number: signal.Signals) -> tuple[int, list[str]]:
    """The status of an update to 0.2.0 that hears a signal while it watches the edge, and what it had restarted."""
    folder = device.slots.folder
    argv = [sys.executable, "-c", HANGS, str(folder.parent / "starsd-0.2.0.tar"), str(device.key), str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline().strip()]
        child.send_signal(number)
        said += child.stdout.read().splitlines()
    return child.returncode, said


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGINT, -signal.SIGINT)],
)
def test_one_that_is_told_to_end_goes_back(device: Device, number: signal.Signals, status: int) -> None:
    assert stopped(device, number) == (status, ["restart b", "restart a"])
    assert (device.runs(), (device.slots.folder / "trying").exists()) == ("0.1.0", False)


def test_the_next_update_goes_back_from_one_that_was_killed(device: Device) -> None:
    assert stopped(device, signal.SIGKILL) == (-9, ["restart b"])
    assert (device.runs(), (device.slots.folder / "trying").read_text()) == ("0.2.0", "b a\n")
    done = device.update(device.slots.folder.parent / "starsd-0.3.0.tar")
    assert (done.slot, done.before, device.started) == ("b", "0.1.0", ["0.1.0", "0.3.0"])
    assert "an update was stopped before it was seen to work: back at 0.1.0" in device.said
    assert sorted(path.name for path in device.slots.folder.iterdir()) == [".starsd.lock", "a", "b", "current"]


def test_an_update_goes_on_although_what_it_went_back_to_does_not_start(device: Device) -> None:
    stopped(device, signal.SIGKILL)
    device.does_not_start.add("0.1.0")
    assert device.update(device.slots.folder.parent / "starsd-0.3.0.tar").version == "0.3.0"


def take_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Status and words of what systemd runs before the edge."""
    place = device.slots.folder.parent
    recorder(place / "bin/systemctl", place / "calls")
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    script = str(resources.files("starsd.edge").joinpath("units", "take-back.sh"))
    argv = ["sh", script, str(device.slots.folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    return done.returncode, done.stderr


def test_the_next_start_of_the_edge_goes_back_from_one_that_was_killed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = device.slots.folder.parent / "calls"
    assert take_back(device, monkeypatch) == (0, "")
    stopped(device, signal.SIGKILL)
    with alone("update", device.slots.folder):  # one that is under way watches the edge itself
        assert take_back(device, monkeypatch) == (0, "")
    assert (device.runs(), calls_of(calls)) == ("0.2.0", [])
    said = "the update of b was stopped before it was seen to work: back to a\n"
    assert take_back(device, monkeypatch) == (1, said)
    assert (device.runs(), calls_of(calls)) == ("0.1.0", [["systemctl", "daemon-reload"]])
    assert take_back(device, monkeypatch) == (0, "")
    assert device.runs() == "0.1.0"


@pytest.mark.parametrize("note", ["a b\n", "b\n", "", "a ../b\n", "b a\n"])
def test_a_note_that_says_nothing_of_use_is_removed(device: Device, monkeypatch: pytest.MonkeyPatch, note: str) -> None:
    """Such as one of an update that was stopped just before it switched, or one that leads to no release."""
    (device.slots.folder / "trying").write_text(note)
    assert not device.slots.go_back()
    assert take_back(device, monkeypatch) == (0, "")
    assert (device.runs(), (device.slots.folder / "trying").exists()) == ("0.1.0", False)


def test_the_packages_installation_is_nothing_to_go_back_from(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, place = device.slots.folder, device.slots.folder.parent
    stopped(device, signal.SIGKILL)
    for name in ("systemd-sysusers", "systemctl"):
        recorder(place / "bin" / name, place / "calls")
    recorder(place / "bin/install-release", place / "calls", f"[ ! -e {folder}/trying ]")  # what was before goes now
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    script = _POSTINST.replace(SLOTS, str(folder)).replace(f"/{INSTALLER}", f"{place}/bin/install-release")
    subprocess.run(["sh", "-c", script, "postinst", "configure"], check=True)
    called = next(call for call in calls_of(place / "calls") if call[:1] == ["install-release"])
    assert called[2] == str(folder / "a")
    assert (device.slots.current(), (folder / "trying").exists()) == ("a", False)


def test_the_edges_unit_goes_back_first() -> None:
    lines = resources.files("starsd.edge").joinpath("units", "starsd-edge.conf").read_text().splitlines()
    before = lines.index("ExecStartPre=+/bin/sh /opt/starsd/current/units/take-back.sh")
    assert before < next(number for number, line in enumerate(lines) if line.startswith("ExecStart="))
    assert "Restart=on-failure" in lines  # with the settings of the release that runs then


def test_a_release_is_noted_only_while_it_is_tried(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    restart = device.restart

    def look(link: Path) -> None:
        seen.append((device.slots.folder / "trying").read_text())
        restart(link)

    monkeypatch.setattr(device, "restart", look)
    device.does_not_start.add("0.2.0")
    with pytest.raises(UpdateError, match=r"0\.2\.0 did not come up, back at 0\.1\.0"):
        device.update(device.slots.folder.parent / "starsd-0.2.0.tar")
    assert seen == ["b a\n"] * 2
    assert not (device.slots.folder / "trying").exists()


def test_what_an_interrupted_program_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from starsd.edge.update_slots import run_program\n"
        "from starsd.shared.signals import ended_by_signals\n"
        "with ended_by_signals(): run_program(['sh', '-c', sys.argv[1]], 'no')"
    )
    alive = tmp_path / "alive"
    script = f"sh -c 'echo $$ >{alive}; exec sleep 60' & wait"
    with subprocess.Popen([sys.executable, "-c", program, script]) as child:
        until = time.monotonic() + 20
        while not (alive.exists() and alive.read_text().strip()):
            assert time.monotonic() < until
            time.sleep(0.05)
        child.terminate()
        assert child.wait(20) == 128 + signal.SIGTERM
    stat = Path(f"/proc/{alive.read_text().strip()}/stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_programs_are_quoted() -> None:
    assert run_program(["sh", "-c", "printf '\\377'; echo ' x'"], "no") == "\ufffd x\n"
    with pytest.raises(UpdateError, match="it failed: status 3"):
        run_program(["sh", "-c", "exit 3"], "it failed")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not on the path")
def test_the_way_back_is_clean_shell() -> None:
    subprocess.run(["shellcheck", str(resources.files("starsd.edge").joinpath("units", "take-back.sh"))], check=True)

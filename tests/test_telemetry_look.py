"""One look at the sensors, as the doctor takes it: what is told, and a reason for whatever is not."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from telemetry_trees import fake_jtop, orin_nano, plain_pc, thor, write

from starsd.edge import telemetry_child, telemetry_jtop, telemetry_nvidia
from starsd.edge.telemetry_child import look
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_look import COMMAND, LACKING, Look, describe, explain, take_a_look
from starsd.edge.telemetry_reading import NOTHING, Reading

NO_JTOP = "jtop: jetson-stats is not installed"
NO_DRIVER = "nvidia: neither nvidia-ml-py nor nvidia-smi is installed"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither jetson-stats nor a driver, whatever this machine has."""
    monkeypatch.setattr(telemetry_jtop, "find", lambda every: None)
    monkeypatch.setattr(telemetry_nvidia, "find", lambda every: None)
    monkeypatch.setattr(telemetry_child, "PAUSE", 0.01)


class Source:
    """Says that, raises it, or hangs."""

    every = 1.0

    def __init__(self, name: str, says: Reading | Exception | None) -> None:
        self.name, self._says = name, says

    def sample(self) -> Reading:
        if self._says is None:
            threading.Event().wait()
        if isinstance(self._says, Exception):
            raise self._says
        return self._says or NOTHING


def test_a_board_that_tells_all_lacks_nothing(tmp_path: Path) -> None:
    found = look(Files(orin_nano(tmp_path)))
    assert (found.reading.source, found.reading.power_w) == ("sysfs+proc", pytest.approx(7.4))
    assert found.missing == {}


def test_what_a_pc_does_not_tell_has_a_reason(tmp_path: Path) -> None:
    found = look(Files(plain_pc(tmp_path)))
    assert found.missing["power_w"] == f"{LACKING['power_w']}; {NO_JTOP}; {NO_DRIVER}"
    assert found.missing["gpu_load"] == f"{LACKING['gpu_load']}; {NO_JTOP}; {NO_DRIVER}"
    assert "memory_total" not in found.missing


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = look(Files(tmp_path))
    assert found.reading == NOTHING
    assert found.missing.keys() == LACKING.keys()
    assert found.missing["memory_total"] == "no /proc/meminfo"


def test_sources_that_fail_or_hang_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_jtop, "find", lambda every: Source("jtop", PermissionError("not in group\njtop")))
    monkeypatch.setattr(telemetry_nvidia, "find", lambda every: Source("nvidia", None))
    began = time.monotonic()
    found = look(Files(thor(tmp_path)), seconds=0.3)
    assert time.monotonic() - began < 5
    assert found.missing["gpu_load"].endswith("; jtop: not in group jtop; nvidia: says nothing for 0.3 s")


def test_a_source_is_waited_for_and_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Reading(source="nvml", gpu_load=0.5)
    monkeypatch.setattr(telemetry_nvidia, "find", lambda every: Source("nvidia", told))
    found = look(Files(write(tmp_path, {})), seconds=20)
    assert found.reading.gpu_load == 0.5
    assert found.missing["power_w"] == f"{LACKING['power_w']}; {NO_JTOP}; nvidia: does not tell"
    assert "gpu_load" not in found.missing


def test_the_process_looks(tmp_path: Path) -> None:
    found = take_a_look([*COMMAND, "--root", str(orin_nano(tmp_path))])
    assert found.reading.power_w == pytest.approx(7.4)


def test_strange_libraries_do_not_hold_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_jtop(tmp_path / "jtop").items():
        monkeypatch.setenv(name, value)
    found = take_a_look([*COMMAND, "--root", str(orin_nano(tmp_path / "orin"))])
    assert found.reading.source.startswith("jtop+sysfs")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["no-such-program"], "the process that asks sensors cannot be started: no such file or directory"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "the process that asks sensors hangs"),
        ([sys.executable, "-c", "raise SystemExit('no luck')"], "the process that asks sensors ended with 1: no luck"),
        ([sys.executable, "-c", "print('nonsense')"], "the process that asks sensors ended with 0: silent"),
    ],
    ids=["missing", "hangs", "fails", "nonsense"],
)
def test_without_the_process_everything_has_that_reason(
    command: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starsd.edge.telemetry_look.START_SECONDS", -3.0 if "sleep" in command[-1] else 15.0)
    found = take_a_look(command)
    assert found == Look(missing=dict.fromkeys(LACKING, why))
    assert [text for _, text in describe(found)] == [f"none: {why}"] * 5


def test_what_holds_clocks_down_is_said() -> None:
    told = dict(describe(explain(Reading(source="x", throttled=True, power_w=0.0, power_of="gpu"), {}, [])))
    assert (told["throttled"], told["power"]) == ("clocks are held down", "0.0 W of the gpu")
    assert all(len(name) <= 12 for name in told)

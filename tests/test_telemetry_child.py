"""The process that asks the sensors: what it says of a whole machine, strange libraries, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from telemetry_trees import fake_jtop, fake_smi, orin_nano, plain_pc, thor

from starsd.edge.telemetry_child import Aside, readings
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_reading import BOARD, GPU, NOTHING, Reading

EVERY = 0.05
DEADLINE = 20.0
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "starsd.edge.telemetry_child", "--every", "0.05"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child(root: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "starsd.edge.telemetry_child", "--every", str(EVERY), "--root", str(root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[bytes], right: Callable[[Reading], bool]) -> Reading:
    """Its first reading for which that holds; every line before has to be one, too."""
    assert process.stdout is not None
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        reading = msgspec.json.decode(process.stdout.readline(), type=Reading)
        if right(reading):
            return reading
    raise AssertionError(f"newest reading is {reading}")


def test_an_orin_nano_without_jetson_stats(tmp_path: Path) -> None:
    with child(orin_nano(tmp_path)) as process:
        told = until(process, lambda reading: True)
    assert (told.source, told.power_w, told.power_of) == ("sysfs+proc", pytest.approx(7.4), BOARD)
    assert (told.temperature_c, told.throttled, told.cpu_load) == (53.5, False, pytest.approx(0.25))


def test_jetson_stats_is_believed_and_what_it_lacks_comes_from_elsewhere(tmp_path: Path) -> None:
    env = fake_jtop(tmp_path / "modules")
    with child(orin_nano(tmp_path / "root"), env) as process:
        told = until(process, lambda reading: "jtop" in reading.source)
    assert told.source == "jtop+sysfs"
    assert (told.power_w, told.gpu_load, told.temperature_c) == (pytest.approx(7.4), 0.625, 48.5)
    assert (told.memory_used, told.throttled) == (2_000_000 << 10, False)


def test_a_thor_whose_jetson_stats_knows_no_gpu(tmp_path: Path) -> None:
    env = fake_jtop(tmp_path / "modules", power="{}", gpu="raise KeyError('load')")
    env["PATH"] = f"{fake_smi(tmp_path / 'bin', '[N/A], 45, 30, 0x20')}{os.pathsep}{env['PATH']}"
    with child(thor(tmp_path / "root"), env) as process:
        told = until(process, lambda reading: reading.gpu_load is not None and "jtop" in reading.source)
    assert (told.power_w, told.power_of, told.gpu_load) == (pytest.approx(31.5), BOARD, pytest.approx(0.3))
    assert (told.temperature_c, told.throttled) == (48.5, True)


@pytest.mark.parametrize("start", ["raise RuntimeError('the service is not active')", "time.sleep(3600)"])
def test_a_jetson_stats_that_fails_or_hangs_holds_up_nothing(tmp_path: Path, start: str) -> None:
    env = fake_jtop(tmp_path / "modules", start=start)
    with child(orin_nano(tmp_path / "root"), env) as process:
        told = [until(process, lambda reading: True) for _ in range(3)]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE) == 0  # though one of its threads hangs
    assert {reading.source for reading in told} == {"sysfs+proc"}


def test_a_card_in_a_pc(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{fake_smi(tmp_path / 'bin', '71.5, 41, 30, 0x4')}{os.pathsep}{os.environ['PATH']}"}
    with child(plain_pc(tmp_path / "root"), env) as process:
        told = until(process, lambda reading: reading.power_w is not None)
    assert (told.source, told.power_w, told.power_of) == ("sysfs+nvidia-smi+proc", 71.5, GPU)


def test_it_ends_with_its_parent() -> None:
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        assert alive(number)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + DEADLINE
    while alive(number) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(number)


def alive(number: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_it_ends_when_nobody_listens(tmp_path: Path) -> None:
    with child(orin_nano(tmp_path)) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(DEADLINE) == 0


def test_the_process_that_answers_never_loads_jetson_stats(tmp_path: Path) -> None:
    code = (
        "import sys, starsd.edge.cli, starsd.edge.telemetry_process\n"
        "telemetry = starsd.edge.telemetry_process.ProcessTelemetry()\n"
        "telemetry.close()\n"
        "print({'jtop', 'pynvml', 'starsd.edge.telemetry_jtop'} & sys.modules.keys())"
    )
    env = fake_jtop(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


class Slow:
    name, every = "slow", 0.05

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Event()

    def sample(self) -> Reading:
        self.asked += 1
        self.go.wait(DEADLINE)
        self.go.clear()
        if self.asked == 1:
            raise OSError
        return Reading(source="slow", gpu_load=self.asked / 10)


def test_a_source_aside_is_asked_again_and_its_word_ages() -> None:
    source, now = Slow(), [0.0]
    aside = Aside(source, retry=0.0, now=lambda: now[0])
    assert aside.latest == NOTHING
    source.go.set()
    eventually(lambda: source.asked == 2)
    assert aside.latest == NOTHING
    source.go.set()
    eventually(lambda: aside.latest != NOTHING)
    assert aside.latest == Reading(source="slow", gpu_load=0.2)
    now[0] += 3 * source.every + 0.01
    assert aside.latest == NOTHING


def eventually(right: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not right():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_board_that_tells_all_needs_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("starsd.edge.telemetry_nvidia.find", asked.append)
    next(readings(Files(orin_nano(tmp_path / "orin")), 1.0))
    assert not asked
    next(readings(Files(thor(tmp_path / "thor")), 1.0))
    assert asked == [1.0]

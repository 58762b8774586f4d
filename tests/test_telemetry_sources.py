"""What is made of the sensors of an Orin Nano, an AGX Orin, a Thor and a plain PC, and of what is missing there."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from telemetry_trees import (
    COOLER,
    GPU_LOAD,
    HWMON,
    MEMINFO,
    ORIN_TOTAL,
    OVERCURRENT,
    STAT,
    agx_orin,
    fake_smi,
    linux,
    orin_nano,
    plain_pc,
    thor,
    write,
)

from starsd.edge import telemetry_jtop, telemetry_nvidia
from starsd.edge.telemetry_board import HOLD, LOOK_AGAIN, Board
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_nvidia import Nvml, read_smi
from starsd.edge.telemetry_reading import BOARD, GPU, NOTHING, Reading, merge
from starsd.edge.telemetry_system import Memory, System, memory
from starsd.shared.errors import StarsdError


class Hand:
    """A clock that a test moves."""

    time = 50.0

    def __call__(self) -> float:
        return self.time


def test_an_orin_nano(tmp_path: Path) -> None:
    board = Board(Files(orin_nano(tmp_path)))
    assert board.sample() == Reading(
        source="sysfs",
        power_w=pytest.approx(7.4),
        power_of=BOARD,
        temperature_c=53.5,
        throttled=False,
        gpu_load=pytest.approx(0.634),
    )


def test_without_a_rail_that_feeds_all_their_sum_counts(tmp_path: Path) -> None:
    assert Board(Files(agx_orin(tmp_path))).sample().power_w == pytest.approx(3.2 + 1.6 + 4.0 + 1.0)


def test_a_thor(tmp_path: Path) -> None:
    assert Board(Files(thor(tmp_path))).sample() == Reading(
        source="sysfs", power_w=pytest.approx(31.5), power_of=BOARD, temperature_c=44.0
    )


def test_a_plain_pc(tmp_path: Path) -> None:
    assert Board(Files(plain_pc(tmp_path))).sample() == Reading(source="sysfs", temperature_c=61.0, throttled=False)


def test_nothing_at_all(tmp_path: Path) -> None:
    files = Files(tmp_path / "missing")
    assert merge([Board(files).sample(), System(files).sample()]) == NOTHING
    assert memory(files) is None


def test_heat_throttles_while_it_lasts(tmp_path: Path) -> None:
    board = Board(Files(orin_nano(tmp_path)))
    write(tmp_path, {COOLER: 1})
    assert board.sample().throttled is True
    write(tmp_path, {COOLER: 0})
    assert board.sample().throttled is False


@pytest.mark.parametrize("kind", ["Processor", "thermal-cpufreq-0", "devfreq-17000000.gpu", "cpu-throttle-alert"])
def test_limits_on_clocks_are_throttling(tmp_path: Path, kind: str) -> None:
    orin_nano(tmp_path)
    write(tmp_path, {COOLER: 3, COOLER.replace("cur_state", "type"): kind})
    assert Board(Files(tmp_path)).sample().throttled is True


@pytest.mark.parametrize("kind", ["pwm-fan", "hot-surface-alert", "TCC Offset"])
def test_other_cooling_is_not(tmp_path: Path, kind: str) -> None:
    orin_nano(tmp_path)
    write(tmp_path, {COOLER: 3, COOLER.replace("cur_state", "type"): kind})
    assert Board(Files(tmp_path)).sample().throttled is False


@pytest.mark.parametrize(("tree", "count"), [(orin_nano, OVERCURRENT), (plain_pc, "package_throttle_count")])
def test_events_throttle_for_a_moment(tmp_path: Path, tree: Callable[[Path], Path], count: str) -> None:
    now = Hand()
    board = Board(Files(tree(tmp_path)), now)
    file = next(tmp_path.rglob(Path(count).name))
    assert board.sample().throttled is False  # whatever was before us
    file.write_text("40\n")
    assert board.sample().throttled is True
    now.time += HOLD - 0.1
    assert board.sample().throttled is True
    now.time += 0.2
    assert board.sample().throttled is False


def test_a_counter_that_does_not_throttle_is_not_counted(tmp_path: Path) -> None:
    orin_nano(tmp_path)
    write(tmp_path, {OVERCURRENT.replace("event_cnt", "throt_en"): 0})
    board = Board(Files(tmp_path))
    board.sample()
    write(tmp_path, {OVERCURRENT: 99})
    assert board.sample().throttled is False


def test_drivers_that_come_late_are_found(tmp_path: Path) -> None:
    now = Hand()
    board = Board(Files(linux(tmp_path, 8_000_000, 5_000_000, 6)), now)
    assert board.sample().power_w is None
    orin_nano(tmp_path)
    assert board.sample().power_w is None
    now.time += LOOK_AGAIN
    assert board.sample().power_w == pytest.approx(7.4)


def test_what_becomes_unreadable_is_left_out(tmp_path: Path) -> None:
    board = Board(Files(orin_nano(tmp_path)))
    board.sample()
    write(tmp_path, {f"{HWMON}1/curr1_input": "garbage", GPU_LOAD: 70_000})
    shutil.rmtree(tmp_path / "sys/class/thermal")
    told = board.sample()
    assert told.power_w == pytest.approx(2.0 + 1.5)  # of the rails that are left
    assert (told.temperature_c, told.gpu_load, told.throttled) == (None, None, False)


def test_memory_and_load(tmp_path: Path) -> None:
    system = System(Files(orin_nano(tmp_path)))
    assert system.sample() == Reading(
        source="proc",
        memory_used=1024 * (ORIN_TOTAL - 5_000_000),
        memory_total=1024 * ORIN_TOTAL,
        cpu_load=pytest.approx(1.5 / 6),
    )
    write(tmp_path, {"proc/stat": STAT.format(busy=1300, idle=3100)})
    assert system.sample().cpu_load == pytest.approx(0.75)
    write(tmp_path, {"proc/stat": "intr 7"})
    assert system.sample().cpu_load == pytest.approx(1.5 / 6)
    write(tmp_path, {"proc/loadavg": "", "proc/meminfo": ""})
    assert system.sample() == Reading(source="proc")


def test_old_kernels_have_no_available_memory(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 8000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 3 kB"})
    assert memory(Files(tmp_path)) == Memory(8000 << 10, 123 << 10)


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    files, slices = Files(orin_nano(tmp_path)), "sys/fs/cgroup/system.slice"
    write(tmp_path, {f"{slices}/memory.max": "max", f"{slices}/memory.current": 1 << 30})
    assert memory(files) == Memory(ORIN_TOTAL << 10, 5_000_000 << 10)
    unit = f"{slices}/starsd.service"
    write(tmp_path, {f"{unit}/memory.max": 2 << 30, f"{unit}/memory.current": 3 << 29})
    assert memory(files) == Memory(2 << 30, 1 << 29)
    write(tmp_path, {f"{unit}/memory.stat": f"anon 5\ninactive_file {1 << 28}\nactive_file 7"})
    assert memory(files) == Memory(2 << 30, (1 << 29) + (1 << 28))
    write(tmp_path, {"proc/meminfo": MEMINFO.format(total=ORIN_TOTAL, available=1000)})
    assert memory(files) == Memory(2 << 30, 1000 << 10)


@pytest.mark.parametrize("most", ["nan", "inf", "-inf", "-5", "1e400", "9" * 400, "²", "", "some"])
@pytest.mark.parametrize("used", ["nan", "inf", "5", "1e30"])
def test_limits_that_are_none_count_for_nothing(tmp_path: Path, most: str, used: str) -> None:
    files, group = Files(orin_nano(tmp_path)), "sys/fs/cgroup/system.slice/starsd.service"
    write(tmp_path, {f"{group}/memory.max": most, f"{group}/memory.current": used})
    assert memory(files) == Memory(ORIN_TOTAL << 10, 5_000_000 << 10)


def test_a_group_that_has_used_more_than_all_has_nothing_left(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice/starsd.service"
    limits = {
        f"{group}/memory.max": 2 << 30,
        f"{group}/memory.current": "1e30",
        f"{group}/memory.stat": "inactive_file ²",
    }
    assert memory(Files(write(orin_nano(tmp_path), limits))) == Memory(2 << 30, 0)


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 16, "²", "٣٤٥", "-1", "1_000"])
def test_numbers_that_no_linux_writes_are_unknown(tmp_path: Path, number: str) -> None:
    root = orin_nano(tmp_path)
    write(
        root, {"proc/meminfo": f"MemTotal: {number} kB", "proc/stat": f"cpu 1 {number} 1 1 1", "proc/loadavg": number}
    )
    system = System(Files(root))
    for _ in range(2):
        assert msgspec.json.decode(msgspec.json.encode(system.sample()), type=Reading).memory_total is None


@pytest.mark.parametrize("words", ["nan", "inf", "9" * 400, "-1", ""])
def test_a_load_that_is_none_is_unknown(tmp_path: Path, words: str) -> None:
    assert System(Files(write(orin_nano(tmp_path), {"proc/loadavg": words}))).sample().cpu_load is None


@pytest.mark.parametrize("word", ["nan", "inf", "1e400", "0x" + "f" * 400])
def test_smi_says_nothing_by_numbers_that_are_none(word: str) -> None:
    assert read_smi(f"{word}, {word}, {word}, {word}") == Reading(source="nvidia-smi")


def test_the_first_that_knows_is_believed_and_any_that_throttles() -> None:
    card = Reading(source="nvml", power_w=50.0, power_of=GPU, gpu_load=0.5, throttled=True)
    board = Reading(source="sysfs", power_w=7.0, power_of=BOARD, throttled=False)
    both = {"gpu_load": 0.5, "throttled": True}
    assert merge([board, card]) == Reading(source="sysfs+nvml", power_w=7.0, power_of=BOARD, **both)
    assert merge([card, board]) == Reading(source="nvml", power_w=50.0, power_of=GPU, **both)
    assert merge([NOTHING, Reading(source="sysfs"), board]) == board


def test_smi_lines_are_read() -> None:
    assert read_smi("71.50, 41, 30, 0x0000000000000000\n28.5, 39, 10, 0x0000000000000004\n") == Reading(
        source="nvidia-smi", power_w=100.0, power_of=GPU, temperature_c=41.0, throttled=False, gpu_load=0.2
    )
    hot = read_smi("[N/A], 88, [Not Supported], 0x0000000000000020")
    assert hot == Reading(source="nvidia-smi", temperature_c=88.0, throttled=True)
    assert read_smi("12.0, 50, 7") == Reading(
        source="nvidia-smi", power_w=12.0, power_of=GPU, temperature_c=50.0, gpu_load=0.07
    )
    assert read_smi("no devices were found") == Reading(source="nvidia-smi")


def test_smi_is_asked_as_its_driver_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_smi(tmp_path, "9.5, 40, 50, 0x8", refuses="clocks_event")))
    monkeypatch.setattr(telemetry_nvidia, "find_spec", lambda name: None)
    smi = telemetry_nvidia.find(1.0)
    assert smi is not None
    assert smi.every >= 10
    expected = Reading(source="nvidia-smi", power_w=9.5, power_of=GPU, temperature_c=40.0, gpu_load=0.5, throttled=True)
    assert [smi.sample(), smi.sample()] == [expected, expected]
    fake_smi(tmp_path, "", refuses="power.draw")
    with pytest.raises(StarsdError, match="nvidia-smi ended with 1: "):
        smi.sample()


def test_without_module_and_command_the_driver_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(telemetry_nvidia, "find_spec", lambda name: None)
    assert telemetry_nvidia.find(1.0) is None


class Unsupported(Exception):
    pass


def nvml(**calls: Any) -> types.ModuleType:
    """A module `pynvml` with two GPUs."""
    module = types.ModuleType("pynvml")
    module.nvmlInit = lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = lambda: 2  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    for name, call in calls.items():
        setattr(module, f"nvmlDeviceGet{name}", call)
    return module


def refuse(*args: Any) -> Any:
    raise Unsupported


def test_nvml_is_asked_about_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nvml(
        PowerUsage=lambda handle: [70_500, 29_500][handle],
        Temperature=lambda handle, kind: [41, 55][handle],
        UtilizationRates=lambda handle: types.SimpleNamespace(gpu=[100, 50][handle]),
        CurrentClocksEventReasons=lambda handle: [0, 0x40][handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert Nvml(1.0).sample() == Reading(
        source="nvml", power_w=100.0, power_of=GPU, temperature_c=55.0, throttled=True, gpu_load=0.75
    )


def test_a_library_that_does_not_work_gives_way_to_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_smi(tmp_path, "9.5, 40, 50, 0x0")))
    monkeypatch.setattr(telemetry_nvidia, "find_spec", lambda name: "found")
    module = nvml()
    module.nvmlInit = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    driver = telemetry_nvidia.find(1.0)
    assert driver is not None
    assert (driver.every, driver.sample().source, driver.every) == (1.0, "nvidia-smi", 10.0)


def test_nvml_of_an_older_driver_and_an_integrated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nvml(
        PowerUsage=refuse,
        Temperature=refuse,
        UtilizationRates=lambda handle: types.SimpleNamespace(gpu=20),
        CurrentClocksThrottleReasons=lambda handle: 0x1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert Nvml(1.0).sample() == Reading(source="nvml", throttled=False, gpu_load=pytest.approx(0.2))


def test_jtop_tells_what_it_has() -> None:
    told = types.SimpleNamespace(
        power={"rail": {}, "tot": {"power": 7400}},
        memory={"RAM": {"tot": 7_620_000, "used": 2_000_000}},
        temperature={"cpu": {"temp": 48.5}, "gpu": {"temp": 50.25}, "cv0": {"temp": -256}},
        gpu={"ga10b": {"status": {"load": 62.5}}},
        cpu={"total": {"idle": 75.0}},
    )
    assert telemetry_jtop.read_jtop(told) == Reading(
        source="jtop",
        power_w=pytest.approx(7.4),
        power_of=BOARD,
        temperature_c=50.25,
        memory_used=2_000_000 << 10,
        memory_total=7_620_000 << 10,
        gpu_load=0.625,
        cpu_load=0.25,
    )


@pytest.mark.parametrize(
    "told",
    [
        types.SimpleNamespace(),
        types.SimpleNamespace(power={}, memory={}, temperature={}, gpu={}, cpu={}),
        types.SimpleNamespace(power=None, memory=3, temperature=[1], gpu="none", cpu={"total": None}),
        types.SimpleNamespace(power={"tot": {"power": "7 W"}}, gpu={"gpu": {}}, temperature={"cpu": {}}),
        types.SimpleNamespace(memory={"RAM": {"tot": 0, "used": 7}}, cpu={"total": {"idle": 250}}),
    ],
)
def test_jtop_with_missing_or_strange_keys(told: Any) -> None:
    assert telemetry_jtop.read_jtop(told) == Reading(source="jtop")


def test_a_property_that_raises_is_one_that_is_missing() -> None:
    class Thor:
        def __init__(self) -> None:
            self.temperature = {"cpu": {"temp": 48.5}}

        @property
        def gpu(self) -> Any:
            raise KeyError("load")

    assert telemetry_jtop.read_jtop(Thor()) == Reading(source="jtop", temperature_c=48.5)

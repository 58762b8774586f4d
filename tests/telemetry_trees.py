"""Small trees of /proc and /sys as three machines have them, and modules and commands that stand for strange ones."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

MEMINFO = "MemTotal:        {total} kB\nMemFree:          500000 kB\nMemAvailable:    {available} kB\n"
STAT = "cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 0 0 1 0 0 0 0 0 0\n"
ORIN_TOTAL = 7_620_000  # kilobytes
HWMON, THERMAL = "sys/class/hwmon/hwmon", "sys/class/thermal/"
OVERCURRENT = f"{HWMON}3/oc3_event_cnt"
GPU_LOAD = "sys/class/devfreq/17000000.gpu/device/load"
COOLER = f"{THERMAL}cooling_device1/cur_state"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def linux(root: Path, total: int, available: int, cores: int) -> Path:
    """`total` and `available` in kilobytes."""
    return write(
        root,
        {
            "proc/meminfo": MEMINFO.format(total=total, available=available),
            "proc/stat": STAT.format(busy=1000, idle=3000),
            "proc/loadavg": "1.50 1.00 0.50 2/345 6789",
            "proc/cpuinfo": "".join(f"processor\t: {core}\nBogoMIPS\t: 62.50\n\n" for core in range(cores)),
            "proc/self/cgroup": "0::/system.slice/starsd.service",
        },
    )


def orin_nano(root: Path) -> Path:
    """JetPack 6: an INA3221 whose first rail feeds the others, over-current counters, devfreq with a load."""
    linux(root, ORIN_TOTAL, 5_000_000, 6)
    rails = {"1": ("VDD_IN", 5000, 1480), "2": ("VDD_CPU_GPU_CV", 5000, 400), "3": ("VDD_SOC", 5000, 300)}
    for number, (label, millivolts, milliamperes) in rails.items():
        files = {"label": label, "input": millivolts}
        write(root, {f"{HWMON}1/in{number}_{name}": value for name, value in files.items()})
        write(root, {f"{HWMON}1/curr{number}_input": milliamperes})
    return write(
        root,
        {
            f"{HWMON}1/name": "ina3221",
            f"{HWMON}1/in7_label": "sum of shunt voltages",
            f"{HWMON}0/name": "pwmfan",
            f"{HWMON}3/name": "soctherm_oc",
            **{f"{HWMON}3/oc{n}_throt_en": 1 for n in (1, 2, 3)},
            **{f"{HWMON}3/oc{n}_event_cnt": 0 for n in (1, 2)},
            OVERCURRENT: 37,
            f"{THERMAL}thermal_zone0/type": "cpu-thermal",
            f"{THERMAL}thermal_zone0/temp": 51_250,
            f"{THERMAL}thermal_zone1/type": "cv0-thermal",
            f"{THERMAL}thermal_zone1/temp": -256_000,
            f"{THERMAL}thermal_zone2/type": "tj-thermal",
            f"{THERMAL}thermal_zone2/temp": 53_500,
            f"{THERMAL}cooling_device0/type": "pwm-fan",
            f"{THERMAL}cooling_device0/cur_state": 2,
            f"{THERMAL}cooling_device1/type": "gpu-throttle-alert",
            COOLER: 0,
            GPU_LOAD: 634,
            "sys/class/devfreq/15340000.vic/device/load": 999,
        },
    )


def agx_orin(root: Path) -> Path:
    """Two INA3221 without a rail that feeds all others; the second has one input in use."""
    linux(root, 64_000_000, 60_000_000, 12)
    rails = {
        "1/{}1": ("VDD_GPU_SOC", 20_000, 160),
        "1/{}2": ("VDD_CPU_CV", 20_000, 80),
        "1/{}3": ("VIN_SYS_5V0", 5000, 800),
        "2/{}1": ("NC", 5000, 100),
        "2/{}2": ("VDDQ_VDD2_1V8AO", 5000, 200),
    }
    for place, (label, millivolts, milliamperes) in rails.items():
        path = f"{HWMON}{place}"
        write(root, {path.format("in") + "_label": label, path.format("in") + "_input": millivolts})
        write(root, {path.format("curr") + "_input": milliamperes})
    return write(root, {f"{HWMON}1/name": "ina3221", f"{HWMON}2/name": "ina3221"})


def thor(root: Path) -> Path:
    """JetPack 7: the board's input has a monitor of its own, devfreq has no load, and some zones do not answer."""
    linux(root, 125_000_000, 100_000_000, 14)
    (root / f"{THERMAL}thermal_zone1/temp").mkdir(parents=True)  # cannot be read
    return write(
        root,
        {
            f"{HWMON}2/name": "ina238",
            f"{HWMON}2/power1_input": 31_500_000,
            f"{HWMON}2/in1_input": 19_000,
            f"{HWMON}2/curr1_input": 1658,
            f"{HWMON}1/name": "ina3221",
            f"{HWMON}1/in1_label": "VDD_GPU",
            f"{HWMON}1/in1_input": 19_000,
            f"{HWMON}1/curr1_input": 300,
            f"{THERMAL}thermal_zone0/type": "gpu-thermal",
            f"{THERMAL}thermal_zone0/temp": 44_000,
            "sys/class/devfreq/gpu-gpc-0/cur_freq": 1_575_000_000,
        },
    )


def plain_pc(root: Path) -> Path:
    """No power, no thermal zone; coretemp, and a counter of the processor's own throttling."""
    linux(root, 32_000_000, 20_000_000, 8)
    return write(
        root,
        {
            f"{HWMON}0/name": "coretemp",
            f"{HWMON}0/temp1_input": 61_000,
            f"{HWMON}0/temp2_input": 58_000,
            f"{HWMON}1/name": "nvme",
            f"{HWMON}1/temp1_input": 70_000,
            "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": 12,
        },
    )


def fake_smi(folder: Path, answer: str, *, refuses: str = "no field is called so") -> Path:
    """A command `nvidia-smi` that answers, and refuses whatever asks for `refuses`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nvidia-smi"
    lines = [f"#!{sys.executable}", "import sys"]
    lines += [f"if {refuses!r} in sys.argv[1]:", "    sys.exit('not a valid field')", f"print({answer!r})"]
    file.write_text("\n".join(lines) + "\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


JTOP = """
import multiprocessing, time

multiprocessing.set_start_method("fork", force=True)
print("a library that prints")


class jtop:
    def __init__(self, interval):
        self.interval = interval

    def start(self):
        {start}

    def ok(self):
        time.sleep(self.interval)
        return True

    power = {power}
    memory = {{"RAM": {{"tot": 7620000, "used": 2000000, "free": 100}}}}
    temperature = {{"cpu": {{"temp": 48.5, "online": True}}, "cv0": {{"temp": -256, "online": False}}}}
    cpu = {{"total": {{"user": 20.0, "idle": 75.0}}}}

    @property
    def gpu(self):
        {gpu}
"""


def fake_jtop(
    folder: Path,
    *,
    start: str = "pass",
    power: str = "{'rail': {}, 'tot': {'volt': 5000, 'power': 7400, 'avg': 7000}}",
    gpu: str = "return {'ga10b': {'status': {'load': 62.5}}}",
) -> dict[str, str]:
    """An environment in which `import jtop` finds a module that says this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jtop.py").write_text(JTOP.format(start=start, power=power, gpu=gpu))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

"""What a board's own sensors tell, from /sys: power rails, temperatures, throttling, and a Jetson's GPU load."""

from __future__ import annotations

import time
from collections.abc import Callable

from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_reading import BOARD, Reading, load, power, temperature

LOOK_AGAIN = 60.0  # seconds after which sensors are looked for anew: drivers come late
HOLD = 5.0  # seconds that a count of events which rose stands for
TOTALS = ("VIN", "VDD_IN", "POM_5V_IN")  # rails that feed all others: of the carrier board, else of the module
_MONITORS = ("ina3221", "ina238")
_CPU_SENSORS = ("coretemp", "k10temp")  # asked where there are no thermal zones
_GPUS = ("gpu", "gv11b", "gp10b", "ga10b", "gb10b")
_OLD_LOADS = ("sys/devices/gpu.0/load", "sys/devices/platform/gpu.0/load")
_OVERCURRENT = "soctherm_oc"
_PACKAGE = "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"


class Board:
    """Asked again and again; sensors that are missing, off or unreadable are left out."""

    def __init__(self, files: Files, now: Callable[[], float] = time.monotonic) -> None:
        self._files, self._now = files, now
        self._looked: float | None = None
        self._counts: dict[str, float] = {}
        self._rose: float | None = None

    def sample(self) -> Reading:
        if self._looked is None or self._now() - self._looked >= LOOK_AGAIN:
            self._look()
        watts, hottest = self._power(), self._temperature()
        return Reading(
            source="sysfs",
            power_w=watts,
            power_of=None if watts is None else BOARD,
            temperature_c=hottest,
            throttled=self._throttled(),
            gpu_load=self._gpu_load(),
        )

    def _look(self) -> None:
        files, self._looked = self._files, self._now()
        chips = [(path, files.text(f"{path}/name") or "") for path in files.find("sys/class/hwmon/hwmon*")]
        self._rails = [rail for path, name in chips if name in _MONITORS for rail in self._rails_of(path, name)]
        self._thermal = files.find("sys/class/thermal/thermal_zone*/temp") or [
            file for path, name in chips if name in _CPU_SENSORS for file in files.find(f"{path}/temp*_input")
        ]
        self._coolers = [
            f"{path}/cur_state"
            for path in files.find("sys/class/thermal/cooling_device*")
            if _holds_down(files.text(f"{path}/type") or "")
        ]
        self._counters = [
            file
            for path, name in chips
            if name == _OVERCURRENT
            for file in files.find(f"{path}/oc*_event_cnt")
            if files.number(file.replace("_event_cnt", "_throt_en")) != 0
        ]
        self._counters += files.find(_PACKAGE)
        self._loads = [
            file
            for path in files.find("sys/class/devfreq/*")
            if any(gpu in path.rpartition("/")[2] for gpu in _GPUS)
            for file in files.find(f"{path}/device/load")
        ]
        self._loads = self._loads or [path for path in _OLD_LOADS if files.text(path) is not None]

    def _rails_of(self, path: str, name: str) -> list[tuple[str, str]]:
        """Labels, and what the files of a rail's sensor begin with: `…/power1` or `…/curr1`."""
        if self._files.text(f"{path}/power1_input") is not None:  # a monitor of one rail: the supply's input
            return [(self._files.text(f"{path}/in1_label") or TOTALS[0], f"{path}/power1")]
        labels = [(file, self._files.text(file) or "") for file in self._files.find(f"{path}/in[1-3]_label")]
        numbered = [(label, file.rpartition("/")[2][2]) for file, label in labels]
        return [(label, f"{path}/curr{number}") for label, number in numbered if label not in ("", "NC")]

    def _power(self) -> float | None:
        """Watts of the rail that feeds all others; without one the sum of those that are measured."""
        known = {label: watts for label, stem in self._rails if (watts := self._rail(stem)) is not None}
        total = next((known[label] for label in TOTALS if label in known), None)
        return total if total is not None else power(sum(known.values())) if known else None

    def _rail(self, stem: str) -> float | None:
        value = self._files.number(f"{stem}_input")
        if value is None or stem.rpartition("/")[2].startswith("power"):
            return power(value, 1e-6)
        volts = self._files.number(f"{stem.replace('/curr', '/in')}_input")
        return None if volts is None else power(value * volts, 1e-6)  # mA and mV

    def _temperature(self) -> float | None:
        known = (temperature(self._files.number(path), 1e-3) for path in self._thermal)
        return max((celsius for celsius in known if celsius is not None), default=None)

    def _throttled(self) -> bool | None:
        """Whether heat holds clocks down now, or current or heat did a moment ago."""
        states = [state for path in self._coolers if (state := self._files.number(path)) is not None]
        counts = {path: count for path in self._counters if (count := self._files.number(path)) is not None}
        if any(count > self._counts.get(path, count) for path, count in counts.items()):
            self._rose = self._now()
        self._counts = counts
        if not states and not counts:
            return None
        return any(state > 0 for state in states) or (self._rose is not None and self._now() - self._rose < HOLD)

    def _gpu_load(self) -> float | None:
        known = (load(self._files.number(path), 1e-3) for path in self._loads)
        return max((share for share in known if share is not None), default=None)


def _holds_down(kind: str) -> bool:
    """Whether a cooling device is a limit on clocks. Fans are cooling devices, too."""
    return kind == "Processor" or any(part in kind for part in ("throttle-alert", "cpufreq", "devfreq"))

"""One look at a machine's sensors, for people: what they say, and for what is unknown who was asked in vain.

telemetry_child looks, in a process of its own; `take_a_look` waits for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from starsd.edge.children import end_all
from starsd.edge.telemetry_reading import NOTHING, Reading

LOOK_SECONDS = 5.0  # to wait for sources that are slow
START_SECONDS = 15.0  # for the process to start and to end, on a slow device
LACKING = {  # where each value would be, if not in jetson-stats or NVIDIA's driver
    "power_w": "no power rail (INA3221, INA238) that can be read in /sys/class/hwmon",
    "temperature_c": "no temperature that can be read in /sys/class/thermal or /sys/class/hwmon",
    "throttled": "no cooling device and no count of throttling in /sys",
    "gpu_load": "no GPU in /sys/class/devfreq",
    "memory_total": "no /proc/meminfo",
}
_ELSEWHERE = ("power_w", "temperature_c", "throttled", "gpu_load")  # what a GPU's driver tells, too


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """`missing` says why for each value of the reading that is None, by its name."""

    reading: Reading = NOTHING
    missing: dict[str, str] = {}


COMMAND = (sys.executable, "-m", "starsd.edge.telemetry_child", "--look")


def take_a_look(command: Sequence[str] = COMMAND) -> Look:
    """What the sensors of this machine say now. Takes a second, and some more where sources hang; raises nothing."""
    try:
        with subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that it can be ended whole
        ) as child:
            try:
                said, complaints = child.communicate(timeout=LOOK_SECONDS + START_SECONDS)
            finally:
                end_all(child)  # with a command that hangs
        return msgspec.json.decode(said, type=Look)
    except subprocess.TimeoutExpired:
        why = "the process that asks sensors hangs"
    except OSError as error:
        why = f"the process that asks sensors cannot be started: {(error.strerror or str(error)).lower()}"
    except msgspec.MsgspecError:
        lines = complaints.decode("utf-8", "replace").strip().splitlines()
        why = f"the process that asks sensors ended with {child.returncode}: {lines[-1][:200] if lines else 'silent'}"
    return Look(missing=dict.fromkeys(LACKING, why))


def describe(look: Look) -> Iterator[tuple[str, str]]:
    """A line for people for each value, unknown ones with the reason; names are of 12 characters at most."""
    told = look.reading

    def known(name: str, text: str) -> str:
        return f"none: {look.missing.get(name, 'not told')}" if getattr(told, name) is None else text

    yield "power", known("power_w", f"{told.power_w or 0:.1f} W of the {told.power_of}")
    yield "temperature", known("temperature_c", f"{told.temperature_c or 0:.1f} °C at the hottest sensor")
    yield "throttled", known("throttled", "clocks are held down" if told.throttled else "no")
    used, total = (told.memory_used or 0) / 1e9, (told.memory_total or 0) / 1e9
    yield "memory used", known("memory_total", f"{used:.1f} of {total:.1f} GB")
    yield "gpu load", known("gpu_load", f"{100 * (told.gpu_load or 0):.0f} %")


def explain(reading: Reading, silent: Mapping[str, str], answering: Sequence[str]) -> Look:
    """`silent` are sources that said nothing, and why; `answering` may still not know everything."""
    missing = {}
    for name, nowhere in LACKING.items():
        if getattr(reading, name) is None:
            others = [f"{source}: {why}" for source, why in silent.items()]
            others += [f"{source}: does not tell" for source in answering]
            missing[name] = "; ".join([nowhere, *(others if name in _ELSEWHERE else [])])
    return Look(reading=reading, missing=missing)

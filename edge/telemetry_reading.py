"""What a device's sensors said at one moment, and how several sources make one reading."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

BOARD, GPU = "board", "gpu"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """None where nobody knows. Loads are shares of 1."""

    source: str = ""  # who knew something, such as jtop+sysfs+proc
    power_w: float | None = None
    power_of: str | None = None  # BOARD: all of it, or its module; GPU: that alone
    temperature_c: float | None = None  # of the hottest sensor
    throttled: bool | None = None  # clocks are held down by heat or by current
    memory_used: int | None = None  # bytes that programs could not have
    memory_total: int | None = None
    gpu_load: float | None = None
    cpu_load: float | None = None
    age_s: float | None = None  # seconds since it was taken


NOTHING = Reading()
_VALUES = tuple(name for name in Reading.__struct_fields__ if name not in ("source", "age_s"))


def merge(readings: Iterable[Reading]) -> Reading:
    """Every value from the first that knows it; throttled where any says so. What a power is of comes with it."""
    found: dict[str, float | bool | str] = {}
    sources: list[str] = []
    for reading in readings:
        news = {
            name: value
            for name in _VALUES
            if name != "power_of" and name not in found and (value := getattr(reading, name)) is not None
        }
        if "power_w" in news:
            news["power_of"] = reading.power_of
        found |= news
        if reading.throttled:
            found["throttled"] = True
        if news:
            sources.append(reading.source)
    return msgspec.convert({"source": "+".join(sources), **found}, Reading)


def within(value: object, low: float, high: float, scale: float = 1.0) -> float | None:
    """A number times `scale` where that is plausible. Sensors that are off say nonsense, such as -256 °C."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    scaled = float(value) * scale
    return scaled if math.isfinite(scaled) and low <= scaled <= high else None


def power(watts: object, scale: float = 1.0) -> float | None:
    """Of a board or a GPU, from a value in 1/`scale` watts."""
    return within(watts, 0.0, 5000.0, scale)


def temperature(celsius: object, scale: float = 1.0) -> float | None:
    return within(celsius, -40.0, 150.0, scale)


def load(share: object, scale: float = 1.0) -> float | None:
    return within(share, 0.0, 1.0, scale)

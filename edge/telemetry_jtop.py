"""What jetson-stats tells on a Jetson. Only the telemetry's child process imports this: jetson-stats is AGPL-3.0, and
importing it changes how a process starts others.

Which keys there are differs between boards and versions, so each is a wish: on a Thor there may be no GPU at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from starsd.edge.telemetry_reading import BOARD, Reading, load, power, temperature
from starsd.shared.errors import StarsdError


class Jtop:
    """Connects to jetson-stats' service with the first sample, which waits for its next figures, as all do.

    Raises whatever jetson-stats raises, and StarsdError when it has ended.
    """

    name = "jtop"

    def __init__(self, every: float) -> None:
        self.every = every
        self._jtop: Any = None

    def sample(self) -> Reading:
        if self._jtop is None:
            opened = importlib.import_module("jtop").jtop(interval=self.every)
            opened.start()
            self._jtop = opened
        try:
            if not self._jtop.ok():
                raise StarsdError("jetson-stats has ended")
        except Exception:
            self._jtop = None  # a new one next time
            raise
        return read_jtop(self._jtop)


def find(every: float) -> Jtop | None:
    return Jtop(every) if find_spec("jtop") is not None else None


def read_jtop(told: Any) -> Reading:
    """`told` is a running jtop. Milliwatts, degrees, kilobytes and per cent."""
    watts = power(_dig(told, "power", "tot", "power"), 1e-3)
    used, total = _dig(told, "memory", "RAM", "used"), _dig(told, "memory", "RAM", "tot")
    sized = isinstance(used, int) and isinstance(total, int) and 0 < used <= total
    idle = _dig(told, "cpu", "total", "idle")
    return Reading(
        source=Jtop.name,
        power_w=watts,
        power_of=None if watts is None else BOARD,
        temperature_c=_most(told, "temperature", temperature, "temp"),
        memory_used=1024 * used if sized else None,
        memory_total=1024 * total if sized else None,
        gpu_load=_most(told, "gpu", lambda value: load(value, 1e-2), "status", "load"),
        cpu_load=load(100 - idle, 1e-2) if isinstance(idle, (int, float)) else None,
    )


def _most(told: Any, name: str, read: Any, *keys: str) -> float | None:
    """The largest of what all entries of a mapping have under these keys."""
    entries = _dig(told, name)
    values = [read(_dig(entry, *keys)) for entry in entries.values()] if isinstance(entries, Mapping) else []
    return max((value for value in values if value is not None), default=None)


def _dig(thing: Any, *names: str) -> Any:
    """An attribute's or a mapping's entry, of an entry and so on; None where there is none."""
    for name in names:
        try:
            thing = thing[name] if isinstance(thing, Mapping) else getattr(thing, name)
        except Exception:  # jtop's properties compute, and raise what they will
            return None
    return thing

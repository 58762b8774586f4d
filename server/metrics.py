"""What a drafter did lately, and how the devices fare that it drafts for, as figures for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from starsd.shared.messages import EDGE_FIGURES

HIGHEST = 1e15  # of a figure that is believed


class Metrics:
    """Counts between reports. A drafter is idle while no pass runs."""

    def __init__(self, now: float, every: float) -> None:
        self.listener: Callable[[dict[str, float]], None] = lambda values: None
        self._every = every
        self._begin(now)

    def passed(self, rows: int, seconds: float) -> None:
        self._passes += 1
        self._rows += rows
        self._busy += seconds

    def told(self, nodes: int) -> None:
        self._nodes += nodes

    def due(self, now: float, sessions: int) -> dict[str, float] | None:
        """The figures since the last report, once every so many seconds; None in between."""
        seconds = now - self._since
        if seconds < self._every:
            return None
        values = {
            "sessions": float(sessions),
            "drafter_idle": round(max(0.0, 1 - self._busy / seconds), 4),
            "passes_per_s": round(self._passes / seconds, 2),
            "rows_per_s": round(self._rows / seconds, 1),
            "nodes_per_s": round(self._nodes / seconds, 1),
            "pass_ms": round(1000 * self._busy / self._passes, 3) if self._passes else 0.0,
        }
        self._begin(now)
        self.listener(values)
        return values

    def _begin(self, now: float) -> None:
        self._since, self._busy = now, 0.0
        self._passes = self._rows = self._nodes = 0


def edge_figures(values: Mapping[str, float]) -> dict[str, float]:
    """Those of an edge's Stats that we know, where they can be."""
    known = {name: values[name] for name in EDGE_FIGURES if name in values}
    return {name: value for name, value in known.items() if math.isfinite(value) and abs(value) <= HIGHEST}


def fleet(edges: Iterable[Mapping[str, float]]) -> dict[str, float | int | None]:
    """Of all devices together, each with what it last said. None: not known."""
    told = [edge for edge in edges if edge]
    watts = [edge["power_w"] for edge in told if "power_w" in edge]
    return {
        "reporting": len(told),
        "power_w": round(sum(watts), 2) if watts else None,
        "hottest_c": max((edge["temperature_c"] for edge in told if "temperature_c" in edge), default=None),
        "throttled": sum(edge.get("throttled", 0) > 0 for edge in told),
    }

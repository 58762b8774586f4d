"""What a drafter did lately, as figures for people."""

from __future__ import annotations

from collections.abc import Callable


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

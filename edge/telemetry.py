"""What is known of the device now: its newest reading, the energy it used, whether its clocks are held down.

telemetry_process has the child process that asks the sensors (telemetry_child, with a file for each kind of source),
telemetry_energy counts joules and tokens, telemetry_memory finds a context that fits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec

from starsd.edge.telemetry_energy import Energy, Mark, Work, spent
from starsd.edge.telemetry_reading import NOTHING, Reading
from starsd.shared.clock import REAL
from starsd.shared.messages import EDGE_FIGURES

STALE = 10.0  # seconds after which a reading says nothing any more


class Telemetry:
    """Told by whoever reads sensors, asked by any thread; by itself it knows nothing, and then nothing reacts."""

    def __init__(self, now: Callable[[], float] = REAL.now) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._newest: tuple[float, Reading] | None = None
        self._energy, self._work = Energy(), Work()

    def saw(self, reading: Reading) -> None:
        """The sensors say this now."""
        with self._lock:
            at = self._now()
            self._newest = at, reading
            self._energy.saw(at, reading.power_w)

    def reading(self) -> Reading:
        """The newest with its age, `NOTHING` where that is too old."""
        newest = self._newest
        if newest is None or (age := self._now() - newest[0]) > STALE:
            return NOTHING
        return msgspec.structs.replace(newest[1], age_s=round(age, 3))

    def throttled(self) -> bool:
        """Whether clocks are held down, as far as is known. Costs next to nothing."""
        newest = self._newest
        return newest is not None and newest[1].throttled is True and self._now() - newest[0] <= STALE

    def figures(self) -> dict[str, float]:
        """What a server may hear, by the names of EDGE_FIGURES; those that are known."""
        reading = self.reading()
        values = {name: getattr(reading, name) for name in EDGE_FIGURES}
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}

    def mark(self) -> Mark | None:
        """This moment, for `spent`."""
        with self._lock:
            return self._energy.mark(self._now())

    def spent(self, since: Mark | None) -> float | None:
        """Joules that the device used since then, whatever for; None where its power was not always known."""
        return spent(since, self.mark())

    @property
    def joules(self) -> float:
        """All that the device used while its power was known."""
        return self._energy.joules

    def begin(self) -> None:
        """An answer begins."""
        with self._lock:
            self._work.begin(self._energy.mark(self._now()))

    def end(self, tokens: int) -> None:
        """An answer that began is over, with so many tokens."""
        with self._lock:
            self._work.end(self._energy.mark(self._now()), tokens)

    @property
    def answer_joules(self) -> float:
        """What the device used while it answered."""
        return self._work.joules

    @property
    def tokens_per_joule(self) -> float | None:
        """Of all answers so far whose energy is known."""
        return self._work.tokens_per_joule

    def close(self) -> None:
        """No more readings come."""

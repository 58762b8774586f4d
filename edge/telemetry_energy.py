"""How much energy a device used, and how many tokens it answered with for it. Pure: times and watts are given."""

from __future__ import annotations

from typing import NamedTuple

LONGEST = 5.0  # seconds that a power holds when nothing newer is known


class Mark(NamedTuple):
    """A moment, as `Energy` counts."""

    joules: float  # since the first known power
    gaps: int  # times so far that the power was unknown


class Energy:
    """Between two moments the earlier one's power holds."""

    def __init__(self) -> None:
        self._joules, self._gaps = 0.0, 0
        self._last: tuple[float, float] | None = None  # when, watts

    def saw(self, at: float, watts: float | None) -> None:
        """The power at a moment, None where it is unknown. Moments never go back."""
        mark = self.mark(at)
        if mark is None:
            self._gaps += 1
        else:
            self._joules = mark.joules
        self._last = None if watts is None else (at, watts)

    def mark(self, at: float) -> Mark | None:
        """None: the power is not known now."""
        if self._last is None or at - self._last[0] > LONGEST:
            return None
        return Mark(self._joules + self._last[1] * (at - self._last[0]), self._gaps)

    @property
    def joules(self) -> float:
        """All that was seen so far, up to the newest power."""
        return self._joules


def spent(before: Mark | None, after: Mark | None) -> float | None:
    """Joules between two moments, None where the power was not known all the while."""
    if before is None or after is None or before.gaps != after.gaps:
        return None
    return after.joules - before.joules


class Work:
    """Answers under way, and what the device used meanwhile: time that several share counts once."""

    def __init__(self) -> None:
        self.tokens, self.joules = 0, 0.0
        self._under_way = 0
        self._since: Mark | None = None

    @property
    def tokens_per_joule(self) -> float | None:
        """Of all answers that ended; None before one of known energy."""
        return self.tokens / self.joules if self.joules > 0 else None

    def begin(self, now: Mark | None) -> None:
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def end(self, now: Mark | None, tokens: int) -> None:
        """An answer of so many tokens is over."""
        self._under_way -= 1
        if (used := spent(self._since, now)) is not None:
            self.joules += used
            self.tokens += tokens
        self._since = now

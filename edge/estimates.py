"""What the edge learns while it runs: what a pass costs, how often drafts are right, how long the server takes."""

from __future__ import annotations

import math
from bisect import bisect_left

from starsd.edge.drafts import Node

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NEW = 0.25  # weight of a new observation
_GUESS = 0.03  # of a plain step: what a row is taken to cost before anything is known
_OUTLIER = 3.0  # an observation this many times the estimate counts as that many times


class PassCosts:
    """Seconds of a pass by its rows, learned; never falling."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._curve = [math.nan] * (_KNOTS[-1] + 1)

    @property
    def known(self) -> bool:
        return bool(self._known)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        knot = min(_KNOTS, key=lambda k: abs(k - rows))
        before = self._known.get(knot)
        if before is None:
            self._known[knot] = seconds
        else:
            self._known[knot] = before + _NEW * (min(seconds, _OUTLIER * before) - before)
        self._draw()

    def seconds(self, rows: int) -> float:
        """Expected seconds; before any observation rows cost relative to a step of one second."""
        if not self._known:
            return 1 + _GUESS * (rows - 1)
        return self._curve[min(rows, _KNOTS[-1])]

    def _draw(self) -> None:
        """The whole curve, lines between what is known, rising from the first and last known knot by the guess."""
        knots = sorted(self._known)
        highest = 0.0
        for rows in range(1, _KNOTS[-1] + 1):
            at = bisect_left(knots, rows)
            if at == len(knots):
                found = self._known[knots[-1]] * (1 + _GUESS * (rows - knots[-1]))
            elif at == 0:
                found = self._known[knots[0]] / (1 + _GUESS * (knots[0] - rows))
            else:
                a, b = knots[at - 1], knots[at]
                share = (rows - a) / (b - a)
                found = self._known[a] * (1 - share) + self._known[b] * share
            highest = max(highest, found)
            self._curve[rows] = highest


class Calibration:
    """How often drafts are right, their parent being right: counts by source, by what the source itself says, and by
    whether the server proposed others instead.

    They fade, so that a change of subject is noticed, and start as `_WEIGHT` observations of the source's own word, of
    which `_TRUST` is believed: drafters are sure of themselves, and learning otherwise takes passes.
    """

    _WEIGHT = 6.0
    _TRUST = 0.8
    _PASSED_OVER = 0.15  # of their own word is left of drafts that a better informed server did not make
    _FADE = 0.985
    _CLASSES = 12

    def __init__(self) -> None:
        self._right: dict[tuple[int, int, bool], float] = {}
        self._tried: dict[tuple[int, int, bool], float] = {}

    def probability(self, node: Node) -> float:
        if node.sure:
            return 0.97
        key, said = self._class(node)
        tried = self._tried.get(key, 0.0)
        return (self._right.get(key, 0.0) + self._WEIGHT * self._TRUST * said) / (tried + self._WEIGHT)

    def observe(self, node: Node, right: bool) -> None:
        """A node whose parent was right turned out so."""
        if node.sure:
            return
        key, _ = self._class(node)
        self._right[key] = self._FADE * self._right.get(key, 0.0) + right
        self._tried[key] = self._FADE * self._tried.get(key, 0.0) + 1

    def _class(self, node: Node) -> tuple[tuple[int, int, bool], float]:
        said = min(math.exp(node.step), 0.98)
        key = node.source, int(said * self._CLASSES), node.passed_over
        return key, said * self._PASSED_OVER if node.passed_over else said


class Response:
    """Seconds from a verdict's sending to the first draft that knows it: mean and spread, as TCP keeps them."""

    def __init__(self) -> None:
        self.mean = math.inf
        self.spread = 0.0

    def observe(self, seconds: float) -> None:
        if math.isinf(self.mean):
            self.mean, self.spread = seconds, seconds / 2
            return
        self.spread += _NEW * (abs(seconds - self.mean) - self.spread)
        self.mean += _NEW / 2 * (seconds - self.mean)

    @property
    def late(self) -> float:
        """What takes longer than this is not coming any time soon."""
        return self.mean + 4 * self.spread


class Average:
    """A fading mean that starts at the first value it sees."""

    def __init__(self, weight: float = 0.05, start: float = math.nan) -> None:
        self._weight = weight
        self.value = start

    def observe(self, value: float) -> None:
        self.value = value if math.isnan(self.value) else self.value + self._weight * (value - self.value)


def ngram_step(matched: int) -> float:
    """Log-probability that what followed a match of so many tokens follows again: a first guess, then calibrated."""
    return math.log(min(0.9, 0.15 * matched))

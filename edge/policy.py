"""When to wait for the drafter and how much to verify: decisions from what the edge has learned, nothing else.

Both maximise tokens per second in the long run. A pass of n drafts takes V(n) seconds and commits 1 + Σ p tokens, p
being the chance that a draft's whole path is right. The best n is where that ratio is largest. Waiting w seconds for a
draft from the tip is worth it where it beats what the same seconds earn otherwise: at the present rate ρ they are worth
ρ · w tokens (the average-reward criterion of a semi-Markov decision process).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from starsd.edge.estimates import Average, PassCosts

MOST_DRAFTS = 63  # of a pass
# Of a pass while clocks are held down. What a plain step takes, to read the weights, cannot be saved; rows beyond are
# arithmetic, so heat, and the likeliest few bring most of the tokens.
MOST_THROTTLED = 6


class Policy(str, Enum):
    """Where drafts come from, and who waits for whom."""

    PLAIN = "plain"  # no drafts
    STOP_AND_WAIT = "stop-and-wait"  # one draft, one pass, one draft: what everybody does; for comparison
    NEVER_WAIT = "never-wait"


@dataclass(frozen=True)
class Budget:
    """How many drafts to verify, and how many tokens the pass is expected to commit in how many seconds."""

    drafts: int
    tokens: float
    seconds: float


def budget(probabilities: Sequence[float], costs: PassCosts, rate: float = 0.0) -> Budget:
    """The drafts that earn most: `probabilities` of their paths, falling. `rate` is what a second earns otherwise.

    Without a rate the pass itself is the measure: tokens per second of it. With one, tokens less what its time would
    have earned.
    """
    best, tokens = Budget(0, 1.0, costs.seconds(1)), 1.0
    worth = _worth(best, rate)
    for count, probability in enumerate(probabilities, start=1):
        tokens += probability
        found = Budget(count, tokens, costs.seconds(count + 1))
        if (value := _worth(found, rate)) > worth:
            best, worth = found, value
    return best


def _worth(budget: Budget, rate: float) -> float:
    return budget.tokens - rate * budget.seconds if rate else budget.tokens / budget.seconds


HOPE = Budget(0, 3.0, 1.5)  # of a fresh draft, in plain steps, until one was seen: so that one is waited for once


class Patience:
    """Whether to wait for a fresh draft before the next pass; learned from how passes with and without one fared."""

    def __init__(self) -> None:
        self._fresh = Average(0.1)  # tokens less cost that a pass with a fresh draft was expected to bring
        self._tokens = Average(0.05)
        self._seconds = Average(0.05)

    @property
    def rate(self) -> float:
        """Tokens per second of late, 0 before any."""
        return self._tokens.value / self._seconds.value if self._seconds.value > 0 else 0.0

    def passed(self, tokens: int, seconds: float) -> None:
        """A step, waiting included, committed so many tokens."""
        self._tokens.observe(tokens)
        self._seconds.observe(seconds)

    def saw_fresh(self, budget: Budget) -> None:
        """A draft from the tip was at hand, or was waited for in vain, and this is what there was."""
        self._fresh.observe(budget.tokens - self.rate * budget.seconds)

    def worth_waiting(self, held: Budget, seconds: float) -> bool:
        """Whether a fresh draft in so many seconds promises more than the pass that could begin now."""
        if not self.rate:
            return False
        fresh = HOPE.tokens - HOPE.seconds if math.isnan(self._fresh.value) else self._fresh.value
        return fresh - self.rate * seconds > held.tokens - self.rate * held.seconds

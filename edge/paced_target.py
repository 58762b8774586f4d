"""Any target at a device's pace: passes and prefill take what a profile says, on a clock of choice.

What the real computation leaves of that time is slept. A computation that took longer than the device would is counted:
figures of such a run are those of this machine, not of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from starsd.edge.target import Floats, Target
from starsd.shared.clock import REAL, Clock
from starsd.shared.console import Progress, no_progress
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.profiles import Profile


class PacedTarget:
    """A `Target` around another. `late` counts the passes that took longer than the profile's time, prefill included,
    `late_seconds` by how much altogether; `rows` and `busy_seconds` are those of all scored trees."""

    def __init__(self, target: Target, profile: Profile, clock: Clock = REAL) -> None:
        self._target, self._profile, self._clock = target, profile, clock
        self.late = 0
        self.late_seconds = 0.0
        self.rows, self.busy_seconds = 0, 0.0

    @property
    def shape(self) -> ModelShape:
        return self._target.shape

    @property
    def features(self) -> FeatureSpec:
        return self._target.features

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def context(self) -> int:
        return self._target.context

    @property
    def noise(self) -> float:
        return self._target.noise

    @property
    def branch_noise(self) -> float:
        return self._target.branch_noise

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Floats:
        started = self._clock.now()
        features = self._target.prefill(tokens, progress)
        self._last_until(started + self._profile.prefill_seconds(len(tokens)))
        return features

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        started = self._clock.now()
        logits = self._target.score(tokens, parents)
        seconds = self._profile.pass_seconds(len(tokens))
        self.rows += len(tokens)
        self.busy_seconds += seconds
        self._last_until(started + seconds)
        return logits

    def commit(self, rows: Sequence[int]) -> Floats:
        return self._target.commit(rows)

    def truncate(self, length: int) -> None:
        self._target.truncate(length)

    def sibling(self) -> PacedTarget:
        """At the same pace, each by itself: siblings of a real device would share its time."""
        return PacedTarget(self._target.sibling(), self._profile, self._clock)

    def adopt(self, other: Target, length: int) -> None:
        self._target.adopt(other._target if isinstance(other, PacedTarget) else other, length)

    def _last_until(self, end: float) -> None:
        rest = end - self._clock.now()
        if rest < 0:
            self.late += 1
            self.late_seconds -= rest
        else:
            self._clock.sleep(rest)

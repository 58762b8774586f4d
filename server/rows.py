"""Which rows of a session a window holds, and which of them come from true features. No tensors here.

Row i pairs feature i with token i + 1. Its K/V lies at place i % window, until row i + window overwrites it. A row is
*missing* (no K/V: attention skips it), *provisional* (made from the drafter's own output) or *true*.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from starsd.server.drafter import Ints
from starsd.shared.errors import UsageError


class Rows:
    """Rows 0 … `count` - 1 of one session, of which the last `window` can be held.

    A query at position p sees held rows p - window + 1 … p, exactly like a head with a sliding window.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = 0
        self.tip: int | None = None  # the newest token, None before the first or when it is no longer known
        self._started = False
        self._known = 0  # the first row whose token after it is known
        self._following = np.zeros(window, np.int64)  # token i + 1 of row i
        self._held = np.full(window, -1)
        self._true = np.zeros(window, np.bool_)

    @property
    def last(self) -> int:
        return self.count - 1

    @property
    def tokens(self) -> int:
        """Committed tokens, the newest included."""
        return self.count + self._started

    @property
    def root(self) -> int:
        """The newest token, 0 where it is not known."""
        return self.tip or 0

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens; each but a session's very first makes a row, missing for now."""
        ids = np.asarray(tokens, np.int64)
        if not len(ids):
            return
        following = ids if self._started else ids[1:]
        self.tip, self._started = int(ids[-1]), True
        self.count += len(following)
        self._known = max(self._known, self.count - self.window)
        kept = following[-self.window :]
        places = np.arange(self.count - len(kept), self.count) % self.window
        self._following[places] = kept
        self._held[places] = -1
        self._true[places] = False

    def begin(self, tokens: int) -> None:
        """Forget everything; the text goes on behind `tokens` tokens that stay unknown."""
        self._following[:] = 0
        self._held[:] = -1
        self._true[:] = False
        self._started, self.tip = tokens > 0, None
        self.count = self._known = max(tokens - 1, 0)

    def following(self, rows: Ints) -> Ints:
        """The token after each of these rows."""
        ids: Ints = self._following[rows % self.window]
        return ids

    def wanted(self, start: int, count: int) -> Ints:
        """Rows among `start` … `start + count - 1` that the window still has room for."""
        if start < 0 or start + count > self.count:
            raise UsageError(
                f"features are for rows {start} to {start + count - 1}, expected rows below {self.count}: "
                "a feature needs the token after it"
            )
        return np.arange(max(start, self._known), start + count)

    def hold(self, rows: Ints, *, true: bool) -> None:
        """K/V of these rows is in place."""
        places = rows % self.window
        self._held[places] = rows
        self._true[places] = true

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, hence one row less, and forget the rest."""
        if not 0 <= tokens <= self.tokens:
            raise UsageError(f"truncate to {tokens} tokens, expected 0 to {self.tokens}")
        self.count = max(tokens - 1, 0)
        gone = self._held >= self.count
        self._held[gone] = -1
        self._true[gone] = False
        self._started = tokens > 0
        known, self._known = self._known, min(self._known, self.count)
        self.tip = int(self._following[self.last % self.window]) if self.last >= known else None

    @property
    def newest_true(self) -> int:
        """The newest row made from a true feature, -1 when there is none."""
        return int(self._held[self._true].max(initial=-1))

    @property
    def missing(self) -> int:
        """Rows of the window that no true feature has reached."""
        return min(self.count, self.window) - int(np.count_nonzero(self._true))

    @property
    def used(self) -> int:
        """Places in use lie below it."""
        return min(self.count, self.window)

    def seen(self, positions: Ints) -> NDArray[np.bool_]:
        """Which of the places in use queries at these positions (n,) see, (n, used)."""
        held, position = self._held[: self.used], positions[:, None]
        visible: NDArray[np.bool_] = (held >= 0) & (held <= position) & (held > position - self.window)
        return visible

"""The features of a conversation's last rows, and which of them the server has not been sent."""

from __future__ import annotations

import numpy as np

from starsd.shared.features import Floats, holdable


class FeatureRows:
    """A ring of `window` rows, float16 of `width` each: row i lies at place i % window. Not locked."""

    def __init__(self, window: int, width: int) -> None:
        self.window, self._width = window, width
        self._rows = np.empty((0, width), np.float16)  # made when the first row comes
        self.held = np.full(window, -1)  # the row at each place
        self._unsent = np.zeros(window, np.bool_)

    def put(self, start: int, rows: Floats) -> None:
        """Rows `start` and on, float32 (n, width); they wait to be sent."""
        if not len(self._rows):
            self._rows = np.empty((self.window, self._width), np.float16)
        numbers = np.arange(start, start + len(rows))[-self.window :]
        places = numbers % self.window
        self._rows[places] = holdable(rows[-self.window :])
        self.held[places], self._unsent[places] = numbers, True

    def forget(self, start: int) -> None:
        """Rows from `start` on are of another text now."""
        gone = self.held >= start
        self.held[gone] = -1
        self._unsent[gone] = False

    def resend(self, start: int) -> None:
        """Rows from `start` on wait to be sent, whether or not they were."""
        self._unsent |= self.held >= start

    def last(self, start: int, stop: int) -> tuple[int, Floats]:
        """Of rows `start` to `stop` the last that are here without a gap, and the first one's number."""
        rows = np.arange(start, stop)[-self.window :]
        missing = np.flatnonzero(self.held[rows % self.window] != rows)
        rows = rows[missing[-1] + 1 :] if len(missing) else rows
        return stop - len(rows), self._rows[rows % self.window].astype(np.float32)

    def newest_unsent(self, start: int, stop: int) -> int:
        """Of rows `start` to `stop`, -1 when none of them waits."""
        ready = self._unsent & (self.held < stop) & (self.held >= start)
        return int(self.held[ready].max(initial=-1))

    def take(self, newest: int, oldest: int, most: int) -> tuple[int, Floats]:
        """The first row's number, and up to `most` waiting rows that end with `newest`, none before `oldest`. They
        count as sent."""
        first = newest
        while newest - first + 1 < most and first > oldest and self._waits(first - 1):
            first -= 1
        places = np.arange(first, newest + 1) % self.window
        self._unsent[places] = False
        return first, self._rows[places].astype(np.float32)

    def _waits(self, row: int) -> bool:
        place = row % self.window
        return bool(self._unsent[place]) and int(self.held[place]) == row

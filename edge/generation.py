"""An answer that somebody takes piece by piece, and may end at any time, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

from starsd.edge.answer import Piece
from starsd.shared.errors import EngineError


class Generation(Generator[Piece, None, None]):
    """A generator of pieces, each a step. `done` is called once, when the last step is over, however it ended.

    Unlike a plain generator it may be closed while another thread waits for its next piece: then it ends with the step
    it is at. One that was never started, or that nobody holds any more, ends too.
    """

    def __init__(self, pieces: Generator[Piece, None, None], done: Callable[[], None]) -> None:
        self.closing = False
        self._pieces, self._done = pieces, done
        self._stepping = threading.Lock()
        self._over = False

    def send(self, value: None = None) -> Piece:
        """The next piece; the same as `next`. Raises EngineError while another thread is taking one."""
        if not self._stepping.acquire(blocking=False):
            raise EngineError("generation is at a step already, expected one consumer at a time")
        try:
            if self.closing or self._over:
                self._end()
                raise StopIteration
            try:
                piece = next(self._pieces)
            except BaseException:
                self._end()
                raise
            if piece.outcome is not None:
                self._end()
        finally:
            self._stepping.release()
            if self.closing:
                self.close()
        return piece

    def throw(self, *raised: Any) -> Piece:
        """End it, then raise."""
        self.close()
        return super().throw(*raised)

    def close(self) -> None:
        """End it: at once, or with the step that another thread is at."""
        self.closing = True
        if self._stepping.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._stepping.release()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            try:
                self._pieces.close()
            finally:
                self._done()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # half made, or the interpreter is ending
            self.close()

"""An answer for asyncio: its steps are taken in threads, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from starsd.edge.answer import Piece
from starsd.edge.generation import Generation
from starsd.shared.errors import EngineError

Submit = Callable[[Callable[[], Any]], "Future[Any]"]  # runs something in a thread


class AsyncGeneration(AsyncGenerator[Piece, None]):
    """The pieces of the answer that `begin` begins, once the first one is asked for.

    It ends at once when it is closed, or when nobody holds it any more: an `async for` that is left by `break` or an
    exception needs no `aclose`. Cancelled while it waits, it ends with the step that it is at.
    """

    def __init__(self, begin: Callable[[], Generation], submit: Submit) -> None:
        self._begin, self._submit = begin, submit
        self._pieces: Generation | None = None
        self._waiting = self._over = False

    async def asend(self, value: None = None) -> Piece:
        """The next piece; the same as `anext`. Raises EngineError while another task waits for one."""
        if self._waiting:
            raise EngineError("generation is at a step already, expected one consumer at a time")
        if self._over:
            raise StopAsyncIteration
        self._waiting = True
        try:
            if self._pieces is None:
                self._pieces = await self._opened()
            piece: Piece | None = None
            if not self._over:
                piece = await asyncio.wrap_future(self._submit(partial(next, self._pieces, None)))
        except BaseException:
            self._end()
            raise
        finally:
            self._waiting = False
        if piece is None or piece.outcome is not None:
            self._end()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def athrow(self, *raised: Any) -> Piece:
        """End it, then raise."""
        self._end()
        return await super().athrow(*raised)

    async def aclose(self) -> None:
        """End it: at once, or with the step that another task waits for."""
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._pieces is not None:
            self._pieces.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # half made, or the interpreter is ending
            self._end()  # a thread that took a piece may hold the answer for another moment

    async def _opened(self) -> Generation:
        opening: Future[Generation] = self._submit(self._begin)
        try:
            pieces = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_discard)
            raise
        if self._over:  # closed meanwhile
            pieces.close()
        return pieces


def _discard(opening: Future[Generation]) -> None:
    """Of an answer that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()

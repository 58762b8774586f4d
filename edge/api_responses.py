"""Sends answers, streamed (server-sent events) or whole, while the client is there to read them.

A client that leaves ends its generation within a step. So does one that stops reading, after a while, and the server's
own end. What goes wrong before the first byte is an error of HTTP's; later it is the stream's last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from starsd.edge.api_answers import Answers, Event
from starsd.edge.api_errors import INTERNAL, ApiError, ending, from_starsd
from starsd.edge.api_grammars import Grammars
from starsd.edge.api_line import Line
from starsd.edge.api_metrics import Metrics
from starsd.edge.api_orders import Order
from starsd.edge.api_shapes import Json, Shape

DONE = b"data: [DONE]\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def refusal(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), error.status, error.headers)


@dataclass
class Desk:
    """What every answer needs. `ending` is set when the server's time is up."""

    line: Line
    metrics: Metrics
    grammars: Grammars
    ending: asyncio.Event
    stall_seconds: float


class AnswerResponse(Response):
    """Answers an order when it is called."""

    def __init__(self, desk: Desk, answers: Answers, shape: Shape) -> None:
        super().__init__()
        self.desk, self.answers, self.shape = desk, answers, shape
        self._began = time.monotonic()
        self._sending = False

    @property
    def order(self) -> Order:
        return self.answers.order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream(send) if self.order.stream else self._whole(scope, receive, send)
        try:
            if not await attended(answer, receive, self.desk.ending):
                raise ending()
        except Exception as error:
            if not self._sending:
                raise
            told = error if isinstance(error, ApiError) else from_starsd(error)
            with contextlib.suppress(Gone):
                await self._send(send, [told.body()], more=False)
            if told.status == INTERNAL:
                raise  # for the log

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._events() as told:
            events = [self._seen(event) async for event in told]
        await JsonResponse({**self.shape.whole(events), "usage": self._usage()})(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        usage = {"usage": None} if self.order.include_usage else {}
        async with self._events() as told:
            async for event in told:
                self._seen(event)
                if chunks := self.shape.chunks(event):
                    await self._send(send, [chunk | usage for chunk in chunks])
        last = [{**self.shape.last(), "usage": self._usage()}]
        await self._send(send, last if self.order.include_usage else [], done=True, more=False)

    @asynccontextmanager
    async def _events(self) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """What happens, when it is our turn. Whatever ends it, what came of it is counted."""
        if (form := self.order.form) is not None:
            self.answers.grammar = await self.desk.grammars.of(form)
        async with self.desk.line.turn():
            try:
                async with aclosing(self.answers.events()) as events:
                    yield events
            finally:
                self.desk.metrics.answered(self.answers.tally, self.order.prompt_tokens)

    def _seen(self, event: Event) -> Event:
        if self._began and event.piece is not None and event.piece.tokens:
            self.desk.metrics.first_token(time.monotonic() - self._began)
            self._began = 0.0
        return event

    def _usage(self) -> Json:
        return self.answers.tally.shape(self.order.prompt_tokens)

    async def _send(self, send: Send, chunks: Iterable[Json], *, done: bool = False, more: bool = True) -> None:
        body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + DONE * done
        if not self._sending:
            self._sending = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            headers.append((b"x-accel-buffering", b"no"))  # proxies must not collect pieces
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        message = {"type": "http.response.body", "body": body, "more_body": more}
        sending = asyncio.ensure_future(_sent(send, message))  # wait_for loses a cancellation that comes as it is done
        try:
            read, _ = await asyncio.wait([sending], timeout=self.desk.stall_seconds)
        finally:
            sending.cancel()
        if not read:
            raise Gone
        sending.result()


class Gone(Exception):
    """The client no longer reads."""


async def attended(work: Coroutine[Any, Any, None], receive: Receive, closing: asyncio.Event) -> bool:
    """Do `work` while its client is there and until `closing` is set; False when it had to end for that.

    The body has been read, so that what `receive` gives next is the end of the connection.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    closed = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait([working, watching, closed], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            with contextlib.suppress(Gone):
                working.result()
        return working.done() or watching.done()
    finally:
        for task in (working, watching, closed):
            task.cancel()
        await asyncio.gather(working, watching, closed, return_exceptions=True)


async def _sent(send: Send, message: Message) -> None:
    await send(message)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

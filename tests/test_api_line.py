"""The line before the engine, and what happens to answers whose client leaves, or whose server ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from api_helpers import Served, SlowTarget, open_runtime, served, wait_until

from starsd.edge.api_answers import Event
from starsd.edge.api_errors import ApiError
from starsd.edge.api_line import FIRST_GUESS, MEMORY, Line
from starsd.edge.api_responses import AnswerResponse, Desk
from starsd.edge.api_settings import Settings

HEAVY = "a model by a long name " * 1000  # so that a stream soon fills what sockets hold
CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is this so?"}]
LONG = {"messages": ASKED, "max_tokens": 3000}
SHORT = {"messages": ASKED, "max_tokens": 2}
STEP = 10 * SlowTarget.pause  # one, and some patience with a busy machine


class Slow:
    """A server of one conversation and one place in the line, on an engine that shows when it works."""

    def __init__(self, place: Served, target: SlowTarget) -> None:
        self.place, self.target = place, target

    def busy(self) -> bool:
        return self.place.app.state.line.running == 1

    def is_still(self) -> None:
        """Nothing computes any more, a step from now at the latest, and the next answer comes at once."""
        time.sleep(STEP)
        passes = len(self.target.passes)
        time.sleep(STEP)
        assert len(self.target.passes) == passes
        assert self.place.runtime.status().busy == 0
        assert self.place.chat(**SHORT)["usage"]["completion_tokens"] == 2

    def open(self, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.place.port, timeout=30)
        connection.request("POST", CHAT, json.dumps(body).encode())
        return connection


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    targets: list[SlowTarget] = []

    def make(context: int) -> SlowTarget:
        targets.append(SlowTarget(context))
        return targets[-1]

    runtime = open_runtime(tmp_path, make, conversations=1)
    settings = Settings(name=HEAVY, conversations=1, queue=1, stall_seconds=0.3)
    with served(runtime, settings) as place:
        yield Slow(place, targets[0])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(slow: Slow, stream: bool) -> None:
    connection = slow.open({**LONG, "stream": stream})
    wait_until(lambda: len(slow.target.passes) > 3)
    if stream:
        assert connection.getresponse().read(6) == b"data: "
    connection.close()
    assert connection.sock is None
    if stream:  # http.client's response keeps the socket until it is dropped
        del connection
    wait_until(lambda: not slow.busy(), STEP)
    slow.is_still()


def test_a_client_that_leaves_the_line_is_forgotten(slow: Slow) -> None:
    first = slow.open(LONG)
    wait_until(slow.busy)
    second = slow.open(LONG)
    wait_until(lambda: slow.place.app.state.line.waiting == 1)
    second.close()
    wait_until(lambda: slow.place.app.state.line.waiting == 0)
    third = slow.open(SHORT)
    wait_until(lambda: slow.place.app.state.line.waiting == 1)
    first.close()
    answer = third.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["usage"]["completion_tokens"] == 2
    slow.is_still()


def test_a_full_line_sends_away(slow: Slow) -> None:
    first = slow.open(LONG)
    wait_until(slow.busy)
    second = slow.open(SHORT)
    wait_until(lambda: slow.place.app.state.line.waiting == 1)
    status, headers, said = slow.place.ask("POST", CHAT, SHORT)
    assert (status, headers["retry-after"]) == (429, "10")  # twice the first guess
    assert said["error"] == {
        "message": "1 answers are under way and 1 requests wait, expected at most 1 and 1: try again later",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    state = slow.place.ask("GET", "/v1/starsd/status")[2]
    assert (state["running"], state["queue"]) == (1, 1)
    first.close()
    assert second.getresponse().status == 200
    assert slow.place.ask("POST", CHAT, SHORT)[0] == 200


def test_a_client_that_stops_reading_is_not_waited_for(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowTarget, "pause", 0.0)
    body = json.dumps({**LONG, "stream": True, "model": HEAVY}).encode()
    with socket.create_connection(("127.0.0.1", slow.place.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
        )
        client.sendall(body)
        wait_until(slow.busy)
        wait_until(lambda: not slow.busy())
        assert len(slow.target.passes) < 3000
        slow.is_still()


def test_requests_take_turns_in_order(slow: Slow) -> None:
    ended: list[int] = []

    def ask(number: int) -> None:
        slow.place.chat(**{**SHORT, "max_tokens": 12 - 5 * number})
        ended.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    threads[0].start()
    wait_until(slow.busy)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert ended == [0, 1]


def test_answers_share_an_engine(tmp_path: Path) -> None:
    with served(open_runtime(tmp_path, SlowTarget), Settings(conversations=2)) as place:
        slow = Slow(place, SlowTarget())
        connection = slow.open({**LONG, "stream": True})
        response = connection.getresponse()
        response.read(6)
        assert place.chat(**SHORT)["usage"]["completion_tokens"] == 2
        assert slow.busy()
        response.close()
        connection.close()


def test_a_crowd_is_answered_or_sent_away(tmp_path: Path) -> None:
    """Some of them leave, in the line or in the middle of their answer."""
    with served(open_runtime(tmp_path, SlowTarget), Settings(conversations=2, queue=4)) as place:
        statuses: list[int] = []

        def ask(number: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
            body = {"messages": ASKED, "max_tokens": 20 if number % 5 else 3000, "stream": number % 2 == 0}
            with contextlib.closing(connection):
                connection.request("POST", CHAT, json.dumps(body).encode())
                if number % 5 == 0:
                    time.sleep(0.01 * number)
                    return
                answer = connection.getresponse()
                said = answer.read()
                assert answer.status != 429 or int(answer.headers["retry-after"]) >= 1
                assert number % 2 or answer.status != 200 or said.endswith(b"data: [DONE]\n\n")
                statuses.append(answer.status)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(statuses) == 24
        assert set(statuses) == {200, 429}
        wait_until(lambda: (place.app.state.line.running, place.app.state.line.waiting) == (0, 0))
        wait_until(lambda: place.runtime.status().busy == 0)
        assert "failed" not in " ".join(place.log)


def test_the_end_of_a_server_is_a_streams_last_event(slow: Slow) -> None:
    connection = slow.open({**LONG, "stream": True})
    response = connection.getresponse()
    response.read(6)
    slow.place.end()
    *_, last, rest = response.read().decode().split("\n\n")
    assert rest == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == (
        "the server is ending, expected to be asked again later",
        "server_error",
    )
    status, headers, said = slow.place.ask("POST", CHAT, SHORT)
    assert (status, headers["retry-after"], said["error"]["code"]) == (503, "5", "server_ending")
    assert slow.place.ask("GET", "/health")[2] == {"status": "ending"}


def test_the_end_of_a_server_refuses_who_waits(slow: Slow) -> None:
    first, second = slow.open(LONG), None
    wait_until(slow.busy)
    second = slow.open(SHORT)
    wait_until(lambda: slow.place.app.state.line.waiting == 1)
    slow.place.end()
    for connection in (first, second):
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "server_ending")


@pytest.mark.parametrize("turns", range(8))
def test_an_end_is_heard_whenever_it_comes(turns: int) -> None:
    """It may come while a piece is being sent, or at the very moment when that is done."""

    async def run() -> None:
        closing = asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def events() -> AsyncIterator[Event]:
            for _ in range(1000):
                yield Event(0, "so")

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 5:
                closing.set()
            for _ in range(turns if len(sent) == 5 else 1):
                await asyncio.sleep(0)

        desk = Desk(Line(1, 0), Mock(), Mock(), closing, stall_seconds=10)
        answers = Mock(events=events, order=Mock(stream=True, include_usage=False, form=None))
        shape = Mock(chunks=lambda event: [{"text": event.text}])
        forever = asyncio.Event().wait
        await asyncio.wait_for(AnswerResponse(desk, answers, shape)({}, forever, send), 5)  # type: ignore[arg-type]
        assert b'"code":"server_ending"' in sent[-1]["body"]
        assert sent[-1]["more_body"] is False
        assert len(sent) < 20  # and no more of the answer was made
        assert desk.line.running == 0

    asyncio.run(run())


def test_a_lines_waits() -> None:
    now = 0.0
    line = Line(turns=2, places=1, now=lambda: now)

    async def run() -> None:
        nonlocal now
        assert line.wait() == FIRST_GUESS / 2
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(line.turn())
            await stack.enter_async_context(line.turn())
            waiting = asyncio.ensure_future(stack.enter_async_context(line.turn()))
            await asyncio.sleep(0)
            assert (line.running, line.waiting) == (2, 1)
            assert line.wait() == FIRST_GUESS
            with pytest.raises(ApiError, match="2 answers are under way and 1 requests wait, expected at most 2 and 1"):
                await stack.enter_async_context(line.turn())
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (line.running, line.waiting) == (2, 0)
            now = 100.0
        assert (line.running, line.waiting) == (0, 0)
        once = MEMORY * FIRST_GUESS + (1 - MEMORY) * 100
        assert line.wait() == pytest.approx((MEMORY * once + (1 - MEMORY) * 100) / 2)
        now = 1e9
        async with line.turn():
            now = 2e9
        assert line.wait() == 600

    asyncio.run(run())

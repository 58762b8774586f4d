"""Honest peers whose messages cross, at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from two_sides import HELLO, LAYOUT, WELCOME, answer, draft, features, prefix, request, verdict

from starsd.shared.codec import encode
from starsd.shared.errors import RemoteProtocolError
from starsd.shared.messages import (
    Close,
    Draft,
    Error,
    Message,
    Open,
    Prefix,
    Verdict,
)
from starsd.shared.protocol import Connection, Role, SessionState


class Edge:
    """Does what an edge may do, at random."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.connection = chance, Connection(Role.EDGE)
        self.epoch = dict.fromkeys((1, 2), 0)
        self.known, self.seq, self.nodes = ({1: 0, 2: 0} for _ in range(3))

    def act(self) -> bytes:
        """The next frame, empty for none."""
        n = self.chance.choice((1, 2))
        match self.connection.state_of(n):
            case SessionState.CLOSED | SessionState.CLOSING:
                self.epoch[n] = 0
                return self.connection.send(request(n))
            case SessionState.OPENING:
                return self.connection.send(Close(n)) if self.chance.random() < 0.1 else b""
            case SessionState.BARE:
                return self._prefix(n)
        doing = [self._prefix, *[self._verdict] * 5, *[self._features] * 3, self._close, self._fail]
        return self.chance.choice(doing)(n)

    def take(self, frame: bytes) -> None:
        message = self.connection.receive(frame)
        if isinstance(message, Draft):
            assert message.epoch == self.epoch[message.session]
            self.nodes[message.session] += len(message.tokens)

    def _verdict(self, n: int) -> bytes:
        start, count = self.known[n], self.chance.randrange(3)
        self.seq[n], self.known[n] = self.seq[n] + 1, start + count
        return self.connection.send(verdict(n, self.epoch[n], self.seq[n], start, self.nodes[n], count))

    def _features(self, n: int) -> bytes:
        return self.connection.send(features(n, self.epoch[n], self.known[n] - 2))

    def _close(self, n: int) -> bytes:
        return self.connection.send(Close(n))

    def _fail(self, n: int) -> bytes:
        return self.connection.fail(RemoteProtocolError("suspicious", n))

    def _prefix(self, n: int) -> bytes:
        start = self.chance.randint(0, self.known[n]) if self.epoch[n] else 0
        self.epoch[n] += self.chance.randint(1, 3)
        self.known[n], self.seq[n], self.nodes[n] = start + 3, 0, 0
        return self.connection.send(prefix(n, self.epoch[n], start))


class Worker:
    """Behind a gateway: knows only what it was passed, and knows it later."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.sessions: dict[int, list[int]] = {}  # epoch, seq, known, sent, received

    def take(self, message: Message) -> list[Message]:
        match message:
            case Open(session=n):
                if self.chance.random() < 0.2:
                    return [Error(n, "no room", 1.0)]
                self.sessions[n] = [0, 0, 0, 0, 0]
                return [answer(n)]
            case Close(session=n) | Error(session=n):
                return [Close(n)] if self.sessions.pop(n, None) is not None else []
            case Prefix(session=n) if n in self.sessions:
                self.sessions[n] = [message.epoch, 0, message.start + len(message.tokens), 0, 0]
            case Verdict(session=n) if n in self.sessions:
                epoch, _, known, sent, _ = self.sessions[n]
                self.sessions[n] = [epoch, message.seq, known + len(message.tokens), sent, message.received]
        return []

    def act(self) -> list[Message]:
        for n, (epoch, seq, known, sent, received) in self.sessions.items():
            if epoch and self.chance.random() < 0.5:
                if self.chance.random() < 0.05:
                    del self.sessions[n]
                    return [Error(n, "fault")]
                count = min(self.chance.randint(0, 4), 10 - sent + received)
                self.sessions[n][3] += count
                return [draft(n, epoch, seq, known, sent, count)]
        return []


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_honest_peers_never_fault_each_other(seed: int) -> None:
    """However late messages are, between edge and gateway and between gateway and worker."""
    chance = random.Random(seed)
    edge, gateway, worker = Edge(chance), Connection(Role.SERVER), Worker(chance)
    gateway.receive(edge.connection.send(HELLO))
    edge.connection.receive(gateway.send(WELCOME))
    up, down, inside, back = (deque[Any]() for _ in range(4))

    def act() -> None:
        if frame := edge.act():
            up.append(frame)

    def arrive_up() -> None:
        if up and (message := gateway.receive(up.popleft())) is not None:
            inside.append(message)

    def work() -> None:
        answers = worker.take(inside.popleft()) if inside else worker.act()
        back.extend(encode(message, LAYOUT) for message in answers)

    def forward() -> None:
        if back and gateway.forward(frame := back.popleft()):
            down.append(frame)

    def arrive_down() -> None:
        if down:
            edge.take(down.popleft())

    steps: list[Callable[[], None]] = [act, arrive_up, work, forward, arrive_down]
    weights = [chance.randint(1, 5) for _ in steps]
    for _ in range(300):
        chance.choices(steps, weights)[0]()
    worker.act = list  # type: ignore[method-assign]
    while up or inside or back or down:
        for step in steps[1:]:
            step()
    assert edge.connection.closing == gateway.closing == ()
    for n in (1, 2):
        assert edge.connection.state_of(n) is gateway.state_of(n), n

"""Both sides of a connection in any state, and messages that are right for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from starsd.shared.codec import Layout
from starsd.shared.messages import (
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)
from starsd.shared.protocol import Connection, ConnectionState, Role, SessionState

LAYOUT = Layout(vocab=100, row_bytes=6)
HELLO, WELCOME = Hello(2, 2, "edge 1.0"), Welcome(2, "server 1.0", (), 3, 2_000)


def request(session: int = 1) -> Open:
    return Open(session, "f", LAYOUT.vocab, "int4", padding=2)


def answer(session: int = 1, max_nodes: int = 10) -> Opened:
    return Opened(session, "h", 4, 64, max_nodes)


def prefix(session: int = 1, epoch: int = 1, start: int = 0, count: int = 3) -> Prefix:
    return Prefix(session, epoch, start, np.arange(count))


def verdict(
    session: int = 1, epoch: int = 1, seq: int = 1, start: int = 3, received: int = 0, count: int = 1
) -> Verdict:
    return Verdict(session, epoch, seq, start, received, 0, np.arange(count))


def features(session: int = 1, epoch: int = 1, start: int = 0, count: int = 1) -> Features:
    return Features(session, epoch, start, bytes(LAYOUT.row_bytes * count))


def draft(session: int = 1, epoch: int = 1, seq: int = 0, base: int = 3, first: int = 0, count: int = 2) -> Draft:
    nodes = np.arange(count)
    return Draft(session, epoch, seq, base, first, nodes - 1, nodes, np.zeros(count, np.float32), not count)


# One of each type, right for a session 1 that has just got `prefix()`, as far as its type is right at all.
EXAMPLES: dict[type[Any], Message] = {
    type(message): message
    for message in (
        HELLO,
        WELCOME,
        request(),
        answer(),
        Close(1),
        Error(1, "no"),
        Stats({}),
        prefix(epoch=2),
        verdict(),
        features(),
        draft(),
        Ack(0),
    )
}


class Pair:
    """Both sides, and messages that arrive at once."""

    def __init__(self) -> None:
        self.edge, self.server = Connection(Role.EDGE), Connection(Role.SERVER)

    def side(self, role: Role) -> Connection:
        return self.edge if role is Role.EDGE else self.server

    def up(self, message: Message) -> Message | None:
        return self.server.receive(self.edge.send(message))

    def down(self, message: Message) -> Message | None:
        return self.edge.receive(self.server.send(message))

    def states(self, session: int = 1) -> tuple[SessionState, SessionState]:
        return self.edge.state_of(session), self.server.state_of(session)


def greeted(pair: Pair | None = None) -> Pair:
    pair = Pair() if pair is None else pair
    pair.up(HELLO)
    pair.down(WELCOME)
    return pair


def active(pair: Pair | None = None, session: int = 1, **limits: int) -> Pair:
    pair = greeted() if pair is None else pair
    pair.up(request(session))
    pair.down(answer(session, **limits))
    pair.up(prefix(session))
    return pair


def connection_at(state: ConnectionState) -> Pair:
    pair = Pair()
    if state is ConnectionState.CLOSED:
        pair.down(Error(0, "bye"))
    if state in (ConnectionState.GREETED, ConnectionState.OPEN):
        pair.up(HELLO)
    if state is ConnectionState.OPEN:
        pair.down(WELCOME)
    assert pair.edge.state is pair.server.state is state
    return pair


def session_at(state: SessionState) -> Pair:
    pair = greeted()
    if state is not SessionState.CLOSED:
        pair.up(request())
    if state in (SessionState.BARE, SessionState.ACTIVE, SessionState.CLOSING):
        pair.down(answer())
    if state in (SessionState.ACTIVE, SessionState.CLOSING):
        pair.up(prefix())
    if state is SessionState.CLOSING:
        pair.up(Close(1))
    assert pair.states() == (state, state)
    return pair

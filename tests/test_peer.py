"""The gateway's side of one connection, without sockets."""

from __future__ import annotations

import msgspec
import numpy as np
from server_helpers import SMALL, TARGET, opening

from starsd.server.peer import Peer
from starsd.shared import codec
from starsd.shared.limits import Layout
from starsd.shared.messages import (
    VERSION,
    Ack,
    Close,
    Draft,
    Error,
    HeadInfo,
    Hello,
    Message,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)
from starsd.shared.protocol import Connection, Role

HEADS = (HeadInfo(TARGET, "ab", "tiny"),)
OPENED = Opened(1, "ab", 96, 64, 100)
LAYOUT = Layout.of(opening(), OPENED)


class Pair:
    """An edge and the gateway's peer, with a list between them."""

    def __init__(self) -> None:
        self.peer = Peer(b"1", "", SMALL)
        self.edge = Connection(Role.EDGE)
        self.heard: list[Message] = []
        assert self.say(Hello(2, 2, "edge")) == []

    def say(self, *messages: Message, room: bool = True) -> list[bytes]:
        """What the worker is sent of it."""
        frames = [self.edge.send(message) for message in messages]
        return [sent for frame in frames for sent in self.raw(frame, room=room)]

    def raw(self, frame: bytes, *, room: bool = True) -> list[bytes]:
        out = self.peer.take(frame, HEADS, room=room)
        self.hear()
        return out

    def back(self, message: Message) -> list[bytes]:
        """The worker says something; what it is sent of it."""
        out = self.peer.back(codec.encode(message, LAYOUT))
        self.hear()
        return out

    def hear(self) -> None:
        while self.peer.waiting:
            if (message := self.edge.receive(self.peer.pop())) is not None:
                self.heard.append(message)
        assert self.peer.waiting_bytes == 0

    def errors(self) -> list[tuple[int, str, float]]:
        return [(e.session, e.message, e.retry_after) for e in self.heard if isinstance(e, Error)]


def test_welcome_names_heads_and_limits() -> None:
    pair = Pair()
    (welcome,) = pair.heard
    assert isinstance(welcome, Welcome)
    assert welcome.heads == HEADS
    assert (welcome.version, welcome.max_sessions, welcome.max_message) == (VERSION, SMALL.sessions, SMALL.max_message)
    assert welcome.server.startswith("starsd ")


def test_messages_of_sessions_pass_through_as_they_are() -> None:
    pair = Pair()
    assert pair.say(opening()) == [codec.encode(opening())]
    pair.back(OPENED)
    prefix = Prefix(1, 1, 0, np.array([1, 2, 3]))
    assert pair.say(prefix) == [codec.encode(prefix, LAYOUT)]
    draft = Draft(1, 1, 0, 3, 0, np.array([-1]), np.array([4]), np.zeros(1, np.float32))
    pair.back(draft)
    assert pair.say(Stats({"x": 1.0})) == []  # the gateway's own affair
    assert [type(message) for message in pair.heard] == [Welcome, Opened, Draft]


def test_older_epochs_go_no_further() -> None:
    pair = Pair()
    pair.say(opening())
    pair.back(OPENED)
    pair.say(Prefix(1, 1, 0, np.array([1, 2, 3])), Prefix(1, 2, 0, np.array([1, 2])))
    pair.back(Draft(1, 1, 0, 3, 0, np.array([-1]), np.array([4]), np.zeros(1, np.float32)))
    assert not any(isinstance(message, Draft) for message in pair.heard)
    assert not pair.errors()


def test_what_is_not_read_holds_the_socket() -> None:
    pair = Pair()
    pair.peer._limits = msgspec.structs.replace(SMALL, unread=SMALL.max_message)
    sent = sum(map(len, pair.say(opening())))
    pair.back(OPENED)
    assert (pair.peer.unread, pair.peer.held) == (sent, False)
    pair.back(Ack(sent))
    assert pair.peer.unread == 0
    epoch = 0
    while not pair.peer.held:
        epoch += 1
        (frame,) = pair.say(Prefix(1, epoch, 0, np.zeros(100_000, np.int64)))
        sent += len(frame)
    assert SMALL.max_message < pair.peer.unread <= SMALL.max_message + len(frame)
    pair.back(Ack(sent - len(frame)))
    assert not pair.peer.held
    assert pair.peer.unread == len(frame)


def test_acks_count_all_that_came_and_come_once() -> None:
    pair = Pair()
    pair.peer.ack()
    pair.peer.ack()
    pair.hear()
    assert [message for message in pair.heard if isinstance(message, Ack)] == [Ack(pair.edge.sent_bytes)]
    silent = Peer(b"2", "", SMALL)
    silent.take(b"\xff", HEADS, room=True)
    silent.ack()  # nothing was agreed on
    assert len(silent.waiting) == 1
    assert silent.over


def test_a_malformed_message_ends_the_session_at_the_worker_too() -> None:
    pair = Pair()
    pair.say(opening())
    pair.back(OPENED)
    pair.say(Prefix(1, 1, 0, np.array([1, 2, 3])))
    assert pair.raw(codec.encode(Verdict(1, 1, 7, 3, 0, 0, np.array([1])), LAYOUT)) == [codec.encode(Close(1))]
    assert pair.errors() == [(1, "verdict has seq 7, expected 1", -1.0)]
    # the number is used again while the worker has not heard of it yet
    pair.say(opening())
    before = len(pair.heard)
    pair.back(Draft(1, 1, 0, 3, 0, np.array([-1]), np.array([4]), np.zeros(1, np.float32)))
    pair.back(Error(1, "of the old one"))
    pair.back(Close(1))
    assert len(pair.heard) == before
    pair.back(OPENED)
    assert pair.heard[-1] == OPENED
    assert pair.edge.closing == ()


def test_an_edges_close_is_answered_once() -> None:
    pair = Pair()
    pair.say(opening())
    pair.back(OPENED)
    assert pair.say(Close(1)) == [codec.encode(Close(1))]
    pair.say(opening())
    pair.back(Error(1, "of the old one"))  # it and the Close were under way together
    assert pair.edge.closing == (1,)
    pair.back(Close(1))
    assert pair.edge.closing == ()
    pair.back(OPENED)
    assert pair.heard[-1] == OPENED
    assert not pair.errors()


def test_an_edges_error_is_a_close() -> None:
    pair = Pair()
    pair.say(opening())
    pair.back(OPENED)
    assert pair.say(Error(1, "i have had enough")) == [codec.encode(Close(1))]
    pair.back(Close(1))
    assert pair.edge.closing == ()


def test_nothing_is_opened_while_there_is_no_worker() -> None:
    pair = Pair()
    assert pair.say(opening(), room=False) == []
    assert pair.errors() == [(1, "the drafter is starting: open the session again", SMALL.retry_seconds)]
    assert len(pair.say(opening(2))) == 1


def test_a_lost_worker_ends_its_sessions() -> None:
    pair = Pair()
    pair.say(opening(1), opening(2))
    pair.back(OPENED)
    pair.say(Close(1))
    pair.say(opening(1))
    pair.peer.lose()
    pair.hear()
    assert sorted(pair.errors()) == [(n, "the drafter was restarted: open the session again", 0.0) for n in (1, 2)]
    assert (pair.edge.closing, pair.edge.sessions) == ((), ())
    assert (pair.peer.unread, pair.peer.held) == (0, False)
    assert len(pair.say(opening(2))) == 1
    pair.back(msgspec.structs.replace(OPENED, session=2))
    assert pair.edge.sessions == (2,)


def test_a_worker_that_breaks_the_protocol_harms_one_session() -> None:
    pair = Pair()
    for number in (1, 2):
        pair.say(opening(number))
        pair.back(msgspec.structs.replace(OPENED, session=number))
        pair.say(Prefix(number, 1, 0, np.array([1, 2, 3])))
    wrong = Draft(1, 1, 0, 9, 0, np.array([-1]), np.array([4]), np.zeros(1, np.float32))
    assert pair.back(wrong) == [codec.encode(Close(1))]
    assert pair.errors() == [(1, "draft has base 9, expected 1 to 3", 0.0)]
    assert pair.edge.sessions == (2,)
    assert not pair.peer.over


def test_slow_readers_are_known_by_what_waits() -> None:
    peer = Peer(b"1", "", msgspec.structs.replace(SMALL, unsent=100))
    peer.take(codec.encode(Hello(2, 2, "edge")), HEADS, room=True)
    assert peer.waiting_bytes == sum(map(len, peer.waiting)) > 100
    assert peer.overflows
    peer.pop()
    assert not peer.overflows

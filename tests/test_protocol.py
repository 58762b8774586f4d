"""The state machine of a connection: its tables, the rules of a session, versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from two_sides import (
    EXAMPLES,
    HELLO,
    LAYOUT,
    Pair,
    active,
    answer,
    connection_at,
    draft,
    features,
    greeted,
    prefix,
    request,
    session_at,
    verdict,
)

from starsd.shared.codec import TAGS, Layout, encode
from starsd.shared.errors import LocalProtocolError, RemoteProtocolError
from starsd.shared.messages import (
    SESSION_MESSAGES,
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Message,
    Opened,
    Prefix,
    Verdict,
    Welcome,
)
from starsd.shared.protocol import Connection, ConnectionState, Role, SessionState
from starsd.shared.transitions import CONNECTION_TABLE, SESSION_TABLE


@pytest.mark.parametrize("kind", TAGS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", ConnectionState)
def test_every_message_in_every_state_of_a_connection(state: ConnectionState, role: Role, kind: type[Any]) -> None:
    pair, message = connection_at(state), EXAMPLES[kind]
    if kind is Error:
        message = Error(0, "bye")
    sender, receiver = pair.side(role), pair.side(role.peer)
    after = CONNECTION_TABLE.get((state, role, kind))
    if after is not None:
        assert receiver.receive(sender.send(message)) is not None
        assert sender.state is receiver.state is after
        return
    if state is ConnectionState.OPEN and kind not in (Hello, Welcome, Ack):
        return  # a session's message: the next test
    text = f"{role.value} sent {kind.__name__.lower()} while the connection is {state.value}, expected "
    with pytest.raises(LocalProtocolError) as error:
        sender.send(message)
    assert str(error.value).startswith(text)
    assert error.value.session == 0
    if state is ConnectionState.CLOSED:
        assert str(error.value) == text + "nothing"
        assert receiver.receive(encode(message, LAYOUT)) is None
        return
    with pytest.raises(RemoteProtocolError) as seen:
        receiver.receive(encode(message, LAYOUT))
    assert (str(seen.value), seen.value.session) == (str(error.value), 0)
    assert sender.state is receiver.state is state


# What is ignored although the state does not allow it: it was sent before the sender knew, or answers nothing.
LATE = {
    *((state, Role.SERVER, Close) for state in SessionState if state is not SessionState.CLOSING),
    *((SessionState.CLOSING, Role.SERVER, kind) for kind in (Opened, Draft)),
    *((SessionState.CLOSED, role, Error) for role in Role),
    (SessionState.CLOSING, Role.EDGE, Error),
}


@pytest.mark.parametrize("kind", SESSION_MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", SessionState)
def test_every_message_in_every_state_of_a_session(state: SessionState, role: Role, kind: type[Any]) -> None:
    pair, message = session_at(state), EXAMPLES[kind]
    sender, receiver = pair.side(role), pair.side(role.peer)
    after = SESSION_TABLE.get((state, role, kind))
    if after is not None:
        receiver.receive(sender.send(message))
        assert pair.states() == (after, after)
        return
    text = f"{role.value} sent {kind.__name__.lower()} while session 1 is {state.value}, expected "
    with pytest.raises(LocalProtocolError) as error:
        sender.send(message)
    assert str(error.value).startswith(text)
    assert error.value.session == 1
    frame = encode(message, LAYOUT)
    if (state, role, kind) in LATE:
        assert receiver.receive(frame) is None
    else:
        with pytest.raises(RemoteProtocolError) as seen:
            receiver.receive(frame)
        assert (str(seen.value), seen.value.session) == (str(error.value), 1)
    assert pair.states() == (state, state)


def test_refusals_name_what_is_expected() -> None:
    with pytest.raises(LocalProtocolError) as error:
        session_at(SessionState.BARE).edge.send(verdict())
    assert str(error.value) == "edge sent verdict while session 1 is bare, expected prefix, close or error"
    with pytest.raises(LocalProtocolError) as error:
        Pair().edge.send(verdict())
    assert str(error.value) == "edge sent verdict while the connection is new, expected hello or error"
    with pytest.raises(LocalProtocolError) as error:
        greeted().server.send(HELLO)
    assert str(error.value) == (
        "server sent hello while the connection is open, expected ack, stats, error or messages of sessions"
    )


# A session's rules

ACTIVE_RULES: list[tuple[Message, str]] = [
    (prefix(epoch=5), "prefix has epoch 5, expected 6 or more"),
    (prefix(epoch=6, start=5), "prefix has start 5, expected at most 4"),
    (verdict(epoch=6), "verdict has epoch 6, expected 5"),
    (verdict(epoch=5, seq=1), "verdict has seq 1, expected 2"),
    (verdict(epoch=5, seq=3), "verdict has seq 3, expected 2"),
    (verdict(epoch=5, seq=2, start=3), "verdict has start 3, expected 4"),
    (verdict(epoch=5, seq=2, start=5), "verdict has start 5, expected 4"),
    (verdict(epoch=5, seq=2, start=4, received=1), "verdict has received 1, expected 2 to 6"),
    (verdict(epoch=5, seq=2, start=4, received=7), "verdict has received 7, expected 2 to 6"),
    (features(epoch=6), "features has epoch 6, expected 5"),
    (features(epoch=5, start=2, count=2), "features have rows 2 to 3, expected 0 to 2"),
    (draft(epoch=6), "draft has epoch 6, expected 5"),
    (draft(epoch=5, seq=2, base=4, first=6), "draft has seq 2, expected at most 1"),
    (draft(epoch=5, base=5, first=6), "draft has base 5, expected 1 to 4"),
    (draft(epoch=5, base=4, first=5), "draft has first 5, expected 6"),
    (draft(epoch=5, base=4, first=7), "draft has first 7, expected 6"),
    (draft(epoch=5, base=4, first=6, count=7), "draft makes 11 nodes under way, expected at most 10"),
]


@pytest.mark.parametrize(("message", "text"), ACTIVE_RULES, ids=[text for _, text in ACTIVE_RULES])
def test_rules_of_a_session(message: Message, text: str) -> None:
    """Of a session with 3 + 1 tokens, 6 nodes sent and 2 of them confirmed; sent or received, the error is the same."""
    pair = active()
    pair.up(prefix(epoch=5))
    pair.down(draft(epoch=5, count=6))
    pair.up(verdict(epoch=5, received=2))
    role = Role.SERVER if isinstance(message, Draft) else Role.EDGE
    with pytest.raises(LocalProtocolError) as local:
        pair.side(role).send(message)
    with pytest.raises(RemoteProtocolError) as remote:
        pair.side(role.peer).receive(encode(message, LAYOUT))
    assert str(local.value) == str(remote.value) == text
    assert local.value.session == remote.value.session == 1
    # and nothing has changed
    assert pair.up(verdict(epoch=5, seq=2, start=4, received=6)) is not None
    assert pair.down(draft(epoch=5, seq=2, base=5, first=6, count=10)) is not None


def test_tokens_and_rows_are_checked_as_the_session_was_opened() -> None:
    pair = active()
    with pytest.raises(RemoteProtocolError, match=r"^verdict has token 100, expected 0 to 99$"):
        pair.server.receive(encode(Verdict(1, 1, 1, 3, 0, 0, np.array([100])), Layout(128, 6)))
    with pytest.raises(RemoteProtocolError, match=r"^features have 5 bytes of rows, expected a multiple of 6$"):
        pair.server.receive(encode(Features(1, 1, 0, bytes(5)), Layout(128, 5)))


def test_a_resumed_session_knows_only_its_window() -> None:
    pair = greeted()
    pair.up(request())
    pair.down(answer())
    pair.up(prefix(epoch=7, start=50, count=10))
    with pytest.raises(LocalProtocolError, match=r"^features have rows 48 to 48, expected 49 to 58$"):
        pair.edge.send(features(epoch=7, start=48))
    pair.up(features(epoch=7, start=49))
    with pytest.raises(LocalProtocolError, match=r"^draft has base 50, expected 51 to 60$"):
        pair.server.send(draft(epoch=7, base=50))
    pair.up(prefix(epoch=8, start=20, count=5))
    pair.up(features(epoch=8, start=20))
    assert pair.down(draft(epoch=8, base=25)) is not None


def test_a_new_epoch_starts_all_counts_anew() -> None:
    pair = active()
    pair.down(draft(count=10))
    pair.up(verdict(received=4))
    pair.up(prefix(epoch=3, start=2))
    assert pair.down(draft(epoch=3, base=5, count=10)) is not None
    assert pair.up(verdict(epoch=3, seq=1, start=5, received=10)) is not None


def test_a_draft_may_only_say_that_the_tree_rests() -> None:
    pair = active(max_nodes=2)
    pair.down(draft(count=2))
    got = pair.down(draft(first=2, count=0))
    assert isinstance(got, Draft)
    assert got.rest
    assert len(got.tokens) == 0


def test_old_epochs_are_ignored() -> None:
    pair = active()
    old = pair.server.send(draft())
    pair.up(prefix(epoch=2))
    assert pair.edge.receive(old) is None
    for message in (verdict(), features(), prefix()):
        assert pair.server.receive(encode(message, LAYOUT)) is None
    with pytest.raises(LocalProtocolError, match=r"^draft has epoch 1, expected 2$"):
        pair.server.send(draft())
    assert pair.down(draft(epoch=2)) is not None


def test_as_many_sessions_as_the_server_allows() -> None:
    pair = greeted()
    for session in (1, 2, 3):
        pair.up(request(session))
    text = r"^3 sessions are open, expected at most 3: close one$"
    with pytest.raises(LocalProtocolError, match=text):
        pair.edge.send(request(4))
    with pytest.raises(RemoteProtocolError, match=text) as error:
        pair.server.receive(encode(request(4)))
    assert pair.edge.receive(pair.server.fail(error.value)) is None  # no such session here
    pair.up(Close(2))
    assert pair.up(request(4)) == request(4)
    assert pair.edge.sessions == pair.server.sessions == (1, 3, 4)


def test_frames_as_long_as_the_server_allows() -> None:
    pair = active()
    text = r"^prefix takes 2641 bytes, expected at most 2000$"
    with pytest.raises(LocalProtocolError, match=text):
        pair.edge.send(Prefix(1, 2, 0, np.zeros(3000, int)))
    with pytest.raises(RemoteProtocolError, match=text) as error:
        pair.server.receive(encode(Prefix(1, 2, 0, np.zeros(3000, int)), LAYOUT))
    assert error.value.session == 1


def test_acks_count_what_came() -> None:
    pair = active()
    assert pair.server.received_bytes == pair.edge.sent_bytes > 0
    assert pair.edge.received_bytes == pair.server.sent_bytes > 0
    pair.down(Ack(pair.server.received_bytes))
    assert pair.edge.acked_bytes == pair.edge.sent_bytes
    sent = pair.edge.sent_bytes
    for wrong in (sent - 1, sent + 1):
        text = rf"^ack has received {wrong}, expected {sent} to {sent}$"
        with pytest.raises(LocalProtocolError, match=text):
            pair.server.send(Ack(wrong))
        with pytest.raises(RemoteProtocolError, match=text):
            pair.edge.receive(encode(Ack(wrong)))


# Versions


@pytest.mark.parametrize(
    ("edge", "server", "agreed"), [((1, 1), (1, 1), 1), ((1, 4), (2, 3), 3), ((2, 3), (1, 9), 3), ((3, 5), (1, 3), 3)]
)
def test_versions_that_overlap(edge: tuple[int, int], server: tuple[int, int], agreed: int) -> None:
    ours, theirs = (
        Connection(Role.EDGE, lowest=edge[0], highest=edge[1]),
        Connection(Role.SERVER, lowest=server[0], highest=server[1]),
    )
    theirs.receive(ours.send(Hello(*edge, "edge")))
    assert theirs.version == agreed
    with pytest.raises(LocalProtocolError, match=rf"^welcome has version {agreed + 1}, expected {agreed}$"):
        theirs.send(Welcome(agreed + 1, "server", (), 1, 2000))
    ours.receive(theirs.send(Welcome(agreed, "server", (), 1, 2000)))
    assert ours.version == agreed


@pytest.mark.parametrize(
    ("edge", "server", "text"),
    [
        ((3, 4), (1, 1), "client speaks protocol 3 to 4, expected 1 to 1: update the server"),
        ((1, 2), (3, 5), "client speaks protocol 1 to 2, expected 3 to 5: update the client"),
    ],
)
def test_versions_that_do_not(edge: tuple[int, int], server: tuple[int, int], text: str) -> None:
    ours = Connection(Role.EDGE, lowest=edge[0], highest=edge[1])
    theirs = Connection(Role.SERVER, lowest=server[0], highest=server[1])
    with pytest.raises(RemoteProtocolError) as error:
        theirs.receive(ours.send(Hello(*edge, "edge")))
    assert str(error.value) == text
    assert ours.receive(theirs.fail(error.value)) == Error(0, text)
    assert ours.state is theirs.state is ConnectionState.CLOSED


@pytest.mark.parametrize(("version", "older"), [(1, "server"), (5, "client")])
def test_an_edge_refuses_a_version_it_does_not_speak(version: int, older: str) -> None:
    edge, server = Connection(Role.EDGE, lowest=2, highest=4), Connection(Role.SERVER, lowest=1, highest=5)
    server.receive(edge.send(Hello(2, 4, "edge")))
    text = f"server speaks protocol {version}, expected 2 to 4: update the {older}"
    with pytest.raises(RemoteProtocolError) as error:
        edge.receive(encode(Welcome(version, "server", (), 1, 2000)))
    assert (str(error.value), error.value.session) == (text, 0)
    assert server.receive(edge.fail(error.value)) == Error(0, text)


def test_an_edge_says_the_versions_it_speaks() -> None:
    with pytest.raises(LocalProtocolError, match=r"^hello has versions 2 to 3, expected 2 to 2$"):
        Connection(Role.EDGE).send(Hello(2, 3, "edge"))

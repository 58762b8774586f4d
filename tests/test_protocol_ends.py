"""How sessions and connections end, what is late then, and frames that are passed on."""

from __future__ import annotations

import pytest
from two_sides import LAYOUT, active, answer, draft, features, greeted, prefix, request, verdict

from starsd.shared.codec import encode
from starsd.shared.errors import LocalProtocolError, RemoteProtocolError
from starsd.shared.messages import (
    Close,
    Draft,
    Error,
)
from starsd.shared.protocol import CLOSED_LATELY, ConnectionState, SessionState


def test_an_error_ends_one_session_alone() -> None:
    pair = active(active(), session=2)
    with pytest.raises(RemoteProtocolError) as error:
        pair.server.receive(encode(verdict(seq=9), LAYOUT))
    assert pair.edge.receive(pair.server.fail(error.value)) == Error(1, "verdict has seq 9, expected 1")
    assert pair.states(1) == (SessionState.CLOSED, SessionState.CLOSED)
    assert pair.up(verdict(2)) is not None
    assert pair.down(draft(2)) is not None


def test_what_was_under_way_to_a_failed_session_is_ignored() -> None:
    pair = active()
    under_way = [pair.edge.send(message) for message in (verdict(), features(), Close(1))]
    pair.edge.receive(pair.server.send(Error(1, "no")))
    assert [pair.server.receive(frame) for frame in under_way] == [None, None, None]
    assert pair.states() == (SessionState.CLOSED, SessionState.CLOSED)
    assert pair.up(request()) is not None
    assert pair.down(answer()) is not None
    pair.up(Close(1))
    pair.down(Close(1))
    with pytest.raises(RemoteProtocolError, match=r"^edge sent verdict while session 1 is closed, expected open$"):
        pair.server.receive(under_way[0])  # the edge knew of this end


def test_a_number_may_be_opened_again_at_once() -> None:
    """What the server said of the older session is ignored, also its end, whichever that was."""
    for end in (Close(1), Error(1, "no")):
        pair = active()
        up = [pair.edge.send(Close(1)), pair.edge.send(request())]
        down = [pair.server.send(draft())]
        if isinstance(end, Error):
            down.append(pair.server.send(end))
        for frame in up:
            pair.server.receive(frame)
        if isinstance(end, Close):
            assert pair.server.closing == (1,)
            with pytest.raises(LocalProtocolError, match=r"while session 1 is closing, expected error or close$"):
                pair.server.send(answer())
            down.append(pair.server.send(end))
        assert [pair.edge.receive(frame) for frame in down] == [None, None]
        assert pair.down(answer()) == answer()
        assert pair.states() == (SessionState.BARE, SessionState.BARE)
        assert pair.edge.closing == pair.server.closing == ()


def test_sessions_that_the_server_does_not_answer_are_bounded() -> None:
    pair = greeted()
    for _ in range(CLOSED_LATELY):
        pair.up(request())
        pair.up(Close(1))
    text = r"^too many sessions are closing, expected the server to answer first$"
    with pytest.raises(LocalProtocolError, match=text):
        pair.edge.send(request())
    with pytest.raises(RemoteProtocolError, match=text):
        pair.server.receive(encode(request()))
    pair.down(Close(1))
    assert pair.up(request()) is not None


def test_numbers_that_were_never_used_are_an_error() -> None:
    pair = greeted()
    with pytest.raises(RemoteProtocolError) as error:
        pair.edge.receive(encode(draft(9), LAYOUT))
    assert str(error.value) == "server sent draft while session 9 is closed, expected nothing"
    assert pair.server.receive(pair.edge.fail(error.value)) is None
    assert pair.edge.receive(encode(draft(9), LAYOUT)) is None  # told once, that is enough


def test_closed_sessions_are_forgotten_in_the_end() -> None:
    pair = greeted()
    for session in range(1, CLOSED_LATELY + 2):
        pair.up(request(session))
        pair.down(Error(session, "no"))
    assert pair.server.receive(encode(verdict(2), LAYOUT)) is None
    with pytest.raises(RemoteProtocolError, match=r"^edge sent verdict while session 1 is closed, expected open$"):
        pair.server.receive(encode(verdict(1), LAYOUT))
    assert len(pair.server._lately) == CLOSED_LATELY
    assert not pair.server._sessions


def test_what_has_no_session_ends_the_connection() -> None:
    pair = active()
    with pytest.raises(RemoteProtocolError, match=r"^frame has tag 0xff") as error:
        pair.server.receive(b"\xff")
    assert pair.edge.receive(pair.server.fail(error.value)) == Error(0, str(error.value))
    assert pair.edge.state is pair.server.state is ConnectionState.CLOSED
    assert pair.edge.sessions == pair.server.sessions == ()
    assert pair.server.fail(error.value) == b""
    assert pair.server.receive(b"anything") is None
    assert not pair.server.forward(encode(draft(), LAYOUT))


def test_long_reasons_are_cut() -> None:
    pair = active()
    got = pair.edge.receive(pair.server.fail(RemoteProtocolError("x" * 5000, 1), retry_after=2.0))
    assert got == Error(1, "x" * 1000, 2.0)


# Frames of another process


def test_forwarding_is_sending() -> None:
    pair = active()
    frame = encode(draft(), LAYOUT)
    assert pair.server.forward(frame)
    assert isinstance(pair.edge.receive(frame), Draft)
    assert pair.server.sent_bytes == pair.edge.received_bytes
    with pytest.raises(LocalProtocolError, match=r"^draft has first 0, expected 2$") as error:
        pair.server.forward(frame)
    assert error.value.session == 1
    pair.up(prefix(epoch=2))
    sent = pair.server.sent_bytes
    assert not pair.server.forward(frame)
    assert pair.server.sent_bytes == sent
    pair.up(Close(1))
    assert not pair.server.forward(frame)
    assert pair.server.forward(encode(Close(1)))
    assert not pair.server.forward(encode(Close(1)))
    pair.up(request())
    assert pair.server.forward(encode(Error(1, "no")))
    assert not pair.server.forward(frame)

"""One connection of the edge: who speaks next, who gets what arrives, and what ends what."""

from __future__ import annotations

import numpy as np
import pytest
from edge_ends import FINGERPRINT, HEAD, MODEL, WIDTH, WINDOW, Hands, OneChannel, draft, of, rows

from starsd.edge.channel import MISBEHAVED_SECONDS, MOST_SESSIONS, Channel, Model
from starsd.edge.remote import RemoteSession
from starsd.shared.codec import encode
from starsd.shared.errors import RemoteProtocolError, UsageError
from starsd.shared.limits import Layout
from starsd.shared.messages import (
    Ack,
    Close,
    Error,
    Features,
    HeadInfo,
    Open,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)
from starsd.shared.protocol import CLOSED_LATELY

LAYOUT = Layout(100, 2 * WIDTH)


class Projector:
    width, hidden = WIDTH, 2

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return values[:, :2]


def talking(count: int = 2, **options: int) -> tuple[OneChannel, list[RemoteSession]]:
    """Sessions that are open and have said their first text, but no features; the last of them spoke last."""
    one = OneChannel()
    one.connect(**options)
    sessions = [one.channel.session(MODEL) for _ in range(count)]
    one.open()
    for session in sessions:
        session.begin(list(range(60)), 0)
        one.say()
    return one, sessions


def test_nothing_but_hello_before_welcome() -> None:
    one = OneChannel()
    session = one.channel.session(MODEL)
    assert one.channel.next_frame() is None
    one.connect(welcome=False)
    assert (one.say(), session.live) == ([], False)
    one.hear(Welcome(2, "s", (HeadInfo(FINGERPRINT, HEAD, "tiny"),), 9, 1 << 20))
    assert one.say() == [Open(1, FINGERPRINT, 100, "fp16")]


def test_tokens_of_one_go_before_features_of_another() -> None:
    one, (first, second) = talking()
    first.features(0, rows(0, 50))
    second.commit([1])
    second.features(59, rows(59, 1))
    said = one.say()
    assert [(type(message), message.session) for message in said[:3]] == [(Verdict, 2), (Features, 2), (Features, 1)]


def test_those_of_an_urgency_take_turns() -> None:
    one, sessions = talking(3)
    for session in sessions:
        session.commit([1])
    assert [message.session for message in one.say(2)] == [1, 2]
    sessions[0].commit([2])
    sessions[1].commit([2])
    assert [message.session for message in one.say()] == [3, 1, 2]


def test_without_room_nothing_but_tokens_goes_out() -> None:
    one, (first, second) = talking()
    second.commit([1])
    first.features(0, rows(0, 59))
    one.channel.uplink.window = 1.0
    assert [type(message) for message in one.say()] == [Verdict]
    one.hear(Ack(one.server.received_bytes))
    one.channel.uplink.window = 1e6
    assert {type(message) for message in one.say()} == {Features}


def test_chunks_are_small_where_the_window_is() -> None:
    one, (first, _) = talking()
    first.features(0, rows(0, 59))
    one.hear(Ack(one.server.received_bytes))
    one.channel.uplink.window = 8.0 * 2 * WIDTH
    assert [len(message.rows) // (2 * WIDTH) for message in one.say(1)] == [4]


def test_no_more_sessions_than_the_server_lets_us_have() -> None:
    one = OneChannel()
    one.connect(sessions=2)
    sessions = [one.channel.session(MODEL) for _ in range(3)]
    assert [message.session for message in one.say()] == [1, 2]
    assert one.channel.notice == "server lets us have 2 sessions, which are all in use"
    sessions[0].close()
    assert one.say() == [Close(1), Open(3, FINGERPRINT, 100, "fp16")]


def test_closed_sessions_are_let_go_and_numbers_used_least_lately() -> None:
    one = OneChannel()
    one.connect()
    stays = one.channel.session(MODEL)
    one.open()
    one.channel._number = MOST_SESSIONS - 1
    for number in (MOST_SESSIONS, 2, 3):
        session = one.channel.session(MODEL)
        one.open()
        assert session.number == number
        session.close()
        assert one.say() == [Close(number)]
    assert one.channel._numbered == {1: stays}
    assert one.channel._sessions == [stays]


def test_closing_without_an_answer_is_bounded_and_breaks_nothing() -> None:
    one = OneChannel()
    one.connect()
    for _ in range(CLOSED_LATELY + 20):
        session = one.channel.session(MODEL)
        one.say()
        session.close()
        one.say()
    assert len(one.server.closing) == CLOSED_LATELY
    one.hear(Close(1))
    one.channel.session(MODEL)
    assert [type(message) for message in one.say()] == [Open]


def test_sessions_of_other_models_are_told_what_there_is() -> None:
    one = OneChannel()
    one.connect()
    one.channel.session(Model("0" * 64, MODEL.shape, MODEL.features))
    assert (one.say(), one.channel.notice) == ([], "server has no drafter for this model, only for tiny")


def test_drafts_reach_their_session_alone() -> None:
    one, (first, second) = talking()
    one.hear(draft(second, 60, [7]))
    assert (first.drafts(0.0), [d.tokens.tolist() for d in second.drafts(0.0)]) == ([], [[7]])
    assert second.bytes_down > first.bytes_down == 0


def test_a_session_in_which_the_server_breaks_the_rules_is_opened_again_later() -> None:
    one, (first, second) = talking()
    answer = one.channel.received(encode(draft(first, 61, [7]), LAYOUT))
    assert answer is not None
    error = one.server.receive(answer)
    assert error == Error(1, "draft has base 61, expected 45 to 60", -1.0)
    assert one.channel.notice == "draft has base 61, expected 45 to 60"
    assert (first.live, second.live) == (False, True)
    one.hear(draft(second, 60, [7]))
    assert len(second.drafts(0.0)) == 1
    one.clock.time += MISBEHAVED_SECONDS - 0.1
    assert one.say() == []
    one.clock.time += 0.2
    assert [type(message) for message in one.say()] == [Open]
    assert first.number == 3


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Error(0, "bye"), "server says: bye"),
        (Ack(10**6), "ack has received 1000000, expected "),
        (Welcome(2, "again", (), 9, 1 << 20), "server sent welcome while the connection is open"),
    ],
)
def test_what_belongs_to_no_session_ends_the_connection(message: Error, reason: str) -> None:
    one, _ = talking()
    with pytest.raises(RemoteProtocolError, match=f"^{reason}") as found:
        one.channel.received(encode(message))
    assert found.value.session == 0


def test_a_server_that_takes_only_tiny_messages_is_of_no_use() -> None:
    one = OneChannel()
    one.connect(welcome=False)
    with pytest.raises(RemoteProtocolError, match=r"^server takes messages of 1024 bytes, expected 65600 or more$"):
        one.hear(Welcome(2, "s", (), 9, 1024))


def test_a_refusal_says_why_and_when() -> None:
    one, (first, second) = talking()
    one.hear(Error(1, "all slots are taken", 3.0))
    assert one.channel.notice == "server says: all slots are taken"
    assert (first.live, second.live) == (False, True)
    assert one.say() == []
    one.clock.time += 3.1
    assert [message.session for message in one.say()] == [3]


def test_the_next_connection_begins_from_the_beginning() -> None:
    one, sessions = talking()
    epochs = [session.epoch for session in sessions]
    one.channel.disconnected()
    assert one.channel.next_frame() is None
    for session in sessions:
        session.commit([5])
        assert not session.live
    one.connect()
    one.open()
    prefixes = of(one.say(), Prefix)
    assert [prefix.epoch for prefix in prefixes] == [epoch + 1 for epoch in epochs]
    assert [prefix.tokens[-1] for prefix in prefixes] == [5, 5]
    assert all(session.live for session in sessions)


def test_features_of_another_width_are_refused() -> None:
    one = OneChannel()
    one.connect()
    session = one.channel.session(MODEL)
    one.say()
    answer = one.hear(Opened(1, HEAD, WIDTH + 1, WINDOW, 60))
    assert answer is not None
    assert one.server.receive(answer) == Error(1, "server expects features 5 wide, ours are 4", -1.0)
    assert not session.live


def test_a_projector_is_used_as_soon_as_it_is_there() -> None:
    one = OneChannel()
    one.connect(projector_bytes=9)
    session = one.channel.session(MODEL)
    session.begin([1, 2, 3], 0)
    session.features(0, rows(0, 2))
    one.open()
    assert [len(message.rows) for message in of(one.say(), Features)] == [2 * 2 * WIDTH]
    one.projectors[HEAD] = Projector()
    one.channel.offer_heads()
    one.channel.session(MODEL)  # which offers it once more
    said = one.say()
    assert of(said, Close) == [Close(1)]
    assert [(request.session, request.projected) for request in of(said, Open)] == [(2, True), (3, True)]
    for request in of(said, Open):
        one.hear(Opened(request.session, HEAD, 2, WINDOW, 60))
    assert [len(message.rows) for message in of(one.say(), Features)] == [2 * 2 * 2]


def test_a_projector_of_a_head_that_was_replaced_is_not_used() -> None:
    one = OneChannel()
    one.projectors[HEAD] = Projector()
    one.connect(projector_bytes=9)
    session = one.channel.session(MODEL)
    session.begin([1, 2, 3], 0)
    (request,) = one.say()
    assert request.projected
    one.hear(Opened(1, HEAD, 2, WINDOW, 60))
    one.say()
    one.hear(Error(1, "the head was replaced: open the session again", 0.0))
    one.clock.time += 1
    (request,) = one.say()
    one.hear(Opened(2, "cd" * 8, 2, WINDOW, 60))
    assert one.asked[-1] == HeadInfo(FINGERPRINT, "cd" * 8, "tiny", 9)
    close, request = one.say()
    assert (close, request.projected) == (Close(2), False)
    one.projectors["cd" * 8] = Projector()  # has come
    one.hear(Opened(3, "cd" * 8, WIDTH, WINDOW, 60))
    one.channel.offer_heads()
    close, request = one.say()
    assert (close, request.projected) == (Close(3), True)
    one.hear(Opened(4, "cd" * 8, 2, WINDOW, 60))
    assert session.live or one.say()


def test_figures_of_the_server_are_kept() -> None:
    one, _ = talking()
    one.hear(Stats({"sessions": 2.0}))
    assert one.channel.server_stats == {"sessions": 2.0}


def test_all_bytes_are_counted() -> None:
    one, sessions = talking()
    assert one.channel.bytes_up == one.server.received_bytes
    assert one.channel.bytes_down == one.server.sent_bytes
    assert 0 < sum(session.bytes_up for session in sessions) < one.channel.bytes_up


def test_codecs_are_checked_at_once() -> None:
    with pytest.raises(UsageError, match="codec 'int5' is unknown, expected one of fp16, int8, int4"):
        Channel(client="x", clock=Hands(), codec_name="int5")

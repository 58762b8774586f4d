"""A conversation that does nothing for long gives up its place at the server, and has one again when it goes on."""

from __future__ import annotations

import pytest
from edge_ends import FINGERPRINT, HEAD, MODEL, WIDTH, WINDOW, OneChannel, OneSession, draft, rows, shown

from starsd.shared.messages import Close, Open, Opened

TEXT = list(range(20, 30))


def told() -> OneSession:
    """A session that the server has been told all of."""
    one = OneSession(idle_seconds=60.0)
    one.session.begin(TEXT, 0)
    one.open()
    one.session.features(0, rows(0, len(TEXT) - 1))
    one.say()
    return one


def test_who_is_idle_leaves_the_server_until_it_is_used_again() -> None:
    one = told()
    old, epoch = draft(one.session, 10, [1]), one.session.epoch
    one.clock.time += 59.0
    assert (one.say(), one.session.live) == ([], True)
    one.clock.time += 1.5
    assert (one.say(), one.session.live) == ([Close(1)], False)
    one.session.arrived(old, 20)
    assert one.session.drafts(0.0) == []
    one.clock.time += 1e4
    one.session.offer(None)  # such as after a reconnect: not a use
    assert one.say() == []
    one.session.commit([5])
    assert [type(message) for message in one.say()] == [Open]
    one.hear(Opened(2, HEAD, WIDTH, WINDOW, 60))
    prefix, features = one.say()
    assert (prefix.epoch, prefix.start, prefix.tokens.tolist()) == (epoch + 1, 0, [*TEXT, 5])
    assert shown([features]) == [list(range(9))]
    assert one.session.live


@pytest.mark.parametrize("use", ["begin", "commit", "features"])
def test_whatever_a_conversation_does_is_a_use(use: str) -> None:
    one = told()
    one.clock.time += 59.0
    if use == "begin":
        one.session.begin([*TEXT, 5], 10)
    elif use == "commit":
        one.session.commit([5])
    else:
        one.session.features(9, rows(9, 1))
    one.say()
    one.clock.time += 59.0
    assert one.say() == []
    one.clock.time += 2.0
    assert [type(message) for message in one.say()] == [Close]


def test_who_was_never_opened_is_not_closed_for_idling() -> None:
    one = OneSession(idle_seconds=60.0)
    one.clock.time += 61.0
    one.session.offer(None)
    assert one.say() == []
    one.session.begin(TEXT, 0)
    assert [type(message) for message in one.say()] == [Open]


def test_idle_sessions_are_let_go_and_come_back_under_another_number() -> None:
    one = OneChannel(idle_seconds=60.0)
    one.connect()
    first, second = (one.channel.session(MODEL) for _ in range(2))
    one.open()
    first.begin(list(range(60)), 0)
    one.say()
    one.clock.time += 50.0
    second.begin(list(range(9)), 0)
    one.say()
    one.clock.time += 20.0
    assert one.say() == [Close(1)]
    assert list(one.channel._numbered) == [2]
    first.begin(list(range(61)), 60)
    assert one.say() == [Open(3, FINGERPRINT, 100, "fp16")]

"""What messages do to sessions, without sockets: epochs, credit, isolation, refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from head_builder import VOCAB
from server_helpers import SMALL, WIDTH, Local, Receiver, best_paths, opening, text, tiny_drafter

from starsd.server.batch import BatchDrafter
from starsd.server.sessions import GONE
from starsd.shared.errors import RemoteProtocolError
from starsd.shared.messages import (
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Opened,
    Prefix,
    Race,
    Stats,
    Verdict,
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> BatchDrafter:
    return tiny_drafter(tmp_path_factory.mktemp("sessions"))


@pytest.fixture
def local(drafter: BatchDrafter) -> Any:
    made = Local(drafter)
    yield made
    for peer in made.sessions.peers:
        made.sessions.apply(peer, GONE)
    assert drafter.pool.free == SMALL.slots  # whatever happened


def begun(local: Local, peer: bytes = b"a", session: int = 1, count: int = 12, seed: int = 1) -> np.ndarray:
    """Open a session with a text and let its tree come to rest; the text."""
    tokens, data, _ = text(count, seed)
    local.say(peer, opening(session))
    local.turn()
    local.say(peer, Prefix(session, 1, 0, tokens), Features(session, 1, 0, data))
    local.turn(20)
    return tokens


def received(local: Local, tokens: np.ndarray, peer: bytes = b"a") -> Receiver:
    receiver = Receiver()
    receiver.begin(tokens)
    for draft in local.of(Draft, peer):
        receiver.take(draft)
    return receiver


def test_a_prefix_says_how_its_answer_is_drawn_until_the_next(local: Local) -> None:
    tokens, found = begun(local), []
    for epoch, race in enumerate([None, Race(1.0, 7, 0, len(tokens)), None], start=2):
        local.heard.clear()
        local.say(b"a", Prefix(1, epoch, 0, tokens, race), Features(1, epoch, 0, text(12, 1)[1]))
        local.turn(20)
        found.append([draft.tokens.tolist() for draft in local.of(Draft)])
    assert found[0] == found[2] != found[1]
    assert found[1]


def test_opening_says_what_there_is(local: Local) -> None:
    local.say(b"a", opening(7, "int4"))
    local.turn()
    assert local.heard == [(b"a", Opened(7, "ab", WIDTH, 64, 100))]
    assert local.sessions.layout_of(b"a", 7) is not None
    assert local.sessions.layout_of(b"b", 7) is None
    local.say(b"a", opening(8, projected=True))
    local.turn()
    assert local.of(Opened)[1].width == 32  # of the head, not of three taps


def test_a_text_gets_its_tree(local: Local, drafter: BatchDrafter) -> None:
    tokens = begun(local)
    receiver = received(local, tokens)
    assert best_paths(drafter, tokens, text(12)[2], SMALL.nodes) <= receiver.below(13)
    assert {draft.base for draft in local.of(Draft)} == {13}
    assert {draft.seq for draft in local.of(Draft)} == {0}
    first = local.of(Draft)[0]
    assert (first.first, first.parents.tolist()) == (0, [-1] * SMALL.top_k)  # the first level, at once
    assert ((first.steps < 0) & (first.steps > -20)).all()


def test_a_verdict_moves_on(local: Local, drafter: BatchDrafter) -> None:
    tokens = begun(local)
    receiver = received(local, tokens)
    inside = next(path for path in receiver.paths if len(path) == 15)[13:]
    told = len(receiver.paths)
    local.heard.clear()
    local.say(b"a", Verdict(1, 1, 1, 13, told, 0, np.array(inside)))
    local.turn(20)
    receiver.tokens += inside
    for draft in local.of(Draft):
        assert (draft.base, draft.seq, draft.epoch) == (15, 1, 1)
        receiver.take(draft)
    session = next(iter(local.sessions))
    assert session.live.tree.best(SMALL.nodes).tokens.tolist()[0] == inside[-1]
    assert len(receiver.below(15)) >= SMALL.nodes - 1


def test_peers_with_equal_numbers_are_strangers(local: Local, drafter: BatchDrafter) -> None:
    mine, theirs = begun(local, b"a", 1, 12, 1), begun(local, b"b", 1, 9, 2)
    assert best_paths(drafter, mine, text(12, 1)[2], SMALL.nodes) <= received(local, mine, b"a").below(13)
    assert best_paths(drafter, theirs, text(9, 2)[2], SMALL.nodes) <= received(local, theirs, b"b").below(10)
    before = [session.live.base for session in local.sessions]
    local.heard.clear()
    for message in (
        Verdict(1, 1, 1, 13, 0, 0, np.array([1])),
        Prefix(1, 2, 0, np.array([1, 2])),
        Features(1, 1, 0, text(2)[1]),
    ):
        local.say(b"c", message)
        local.turn()
    local.say(b"c", Close(1), GONE)
    local.turn()
    assert [error.message for error in local.of(Error, b"c")] == ["session 1 is not open"] * 3
    assert [session.live.base for session in local.sessions] == before
    local.say(b"a", Close(1))
    local.turn()
    assert [session.peer for session in local.sessions] == [b"b"]
    assert local.sessions.peers == (b"a", b"b")


def wrong(message: Any, reason: str) -> Any:
    return pytest.param(message, reason, id=reason[:40])


ROWS = text(12)[1]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        wrong(opening(1), "session 1 is open already"),
        wrong(Prefix(1, 2, 14, np.array([1])), "prefix has start 14, expected at most 13"),
        wrong(Prefix(1, 2, 3, np.array([VOCAB])), "token ids run from 96 to 96, expected 0 to 95"),
        wrong(Verdict(1, 1, 2, 13, 0, 0, np.array([1])), "verdict has seq 2, expected 1"),
        wrong(Verdict(1, 1, 1, 12, 0, 0, np.array([1])), "verdict has start 12, expected 13"),
        wrong(Verdict(1, 1, 1, 13, 99, 0, np.array([1])), "verdict has received 99, expected 0 to "),
        wrong(Verdict(1, 1, 1, 13, 0, 0, np.array([-1])), "token ids run from -1 to -1"),
        wrong(
            Verdict(1, 2, 1, 13, 0, 0, np.array([1])), "epoch is 2, expected at most 1: a prefix begins the next one"
        ),
        wrong(Features(1, 1, 12, ROWS[: 2 * WIDTH]), "features are for rows 12 to 12, expected rows below 12"),
        wrong(Features(1, 1, 0, ROWS[:-1]), "features take 2303 bytes, expected a multiple of 192"),
        wrong(Features(1, 1, 0, b"\xff" * 2 * WIDTH), "features are not finite"),
        wrong(RemoteProtocolError("draft is nothing that an edge sends", 1), "draft is nothing that an edge sends"),
    ],
)
def test_a_wrong_message_ends_its_session_and_no_other(local: Local, message: Any, reason: str) -> None:
    begun(local)
    begun(local, session=2, seed=2)
    local.heard.clear()
    local.say(b"a", message)
    local.turn()
    (error,) = local.of(Error)
    assert (error.session, error.retry_after) == (1, -1.0)
    assert error.message.startswith(reason)
    assert [session.number for session in local.sessions] == [2]
    local.heard.clear()
    local.say(b"a", Verdict(1, 1, 1, 13, 0, 0, np.array([1])))  # was under way: nobody's fault
    local.say(b"a", Verdict(2, 1, 1, 13, 0, 0, np.array([1])))
    local.turn(3)
    assert not local.of(Error)
    assert {draft.session for draft in local.of(Draft)} == {2}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (opening(1, fingerprint="0" * 64), "no head is for the target '000000000000': there are heads for tiny"),
        (msgspec.structs.replace(opening(1), vocab=95), "vocabulary has 95 tokens, expected the head's 96"),
        (
            msgspec.structs.replace(opening(1), codec="int5"),
            "codec 'int5' is unknown, expected one of fp16, int8, int4, rot4, rot3, rot2",
        ),
        (opening(1, padding=65536), "a feature row takes 65728 bytes, expected at most 65536"),
        (Hello(2, 2, "x"), "got hello, expected what an edge sends"),
        (Ack(4), "got ack, expected what an edge sends"),
    ],
)
def test_what_is_refused(local: Local, message: Any, reason: str) -> None:
    local.say(b"a", message)
    local.turn()
    (error,) = local.of(Error)
    assert error.message == reason
    assert not len(local.sessions)


def test_older_epochs_are_ignored(local: Local, drafter: BatchDrafter) -> None:
    begun(local)
    tokens, data, features = text(9, seed=4)
    local.heard.clear()
    local.say(b"a", Prefix(1, 3, 0, tokens))
    local.say(b"a", Verdict(1, 1, 1, 13, 0, 0, np.array([1])), Features(1, 1, 5, data), Prefix(1, 2, 0, tokens[:2]))
    local.say(b"a", Features(1, 3, 0, data))
    local.turn(20)
    assert not local.of(Error)
    receiver = received(local, tokens)
    assert best_paths(drafter, tokens, features, SMALL.nodes) <= receiver.below(10)
    assert local.of(Draft)[0].first == 0  # numbers begin anew
    assert {draft.epoch for draft in local.of(Draft)} == {3}


def test_a_prefix_keeps_what_comes_before_it(local: Local, drafter: BatchDrafter) -> None:
    tokens = begun(local)
    local.heard.clear()
    changed = np.concatenate([tokens[:8], [5, 6, 7]])
    local.say(b"a", Prefix(1, 2, 8, changed[8:]))
    _, _data, features = text(12)
    _, fresh, fresh_features = text(3, seed=9)
    local.say(b"a", Features(1, 2, 7, fresh))
    local.turn(20)
    wanted = best_paths(drafter, changed, np.concatenate([features[:7], fresh_features]), SMALL.nodes)
    assert wanted <= received(local, changed).below(11)


def test_a_session_may_begin_anywhere(drafter: BatchDrafter) -> None:
    """After a resume: only the window's tokens and features, at their true positions."""
    limits = msgspec.structs.replace(SMALL, window=16)
    small = BatchDrafter(drafter.layer, limits.slot_limits, limits.tree)
    tokens, data, features = text(45, seed=2)
    wanted = best_paths(small, tokens, features, limits.nodes)
    local = Local(small, limits)
    start = 30
    local.say(b"a", opening())
    local.turn()
    size = 2 * WIDTH
    local.say(b"a", Prefix(1, 4, start, tokens[start:]), Features(1, 4, start - 1, data[(start - 1) * size :]))
    local.turn(20)
    assert not local.of(Error)
    receiver = received(local, tokens)
    assert {draft.base for draft in local.of(Draft)} == {46}
    assert wanted <= receiver.below(46)
    # rows whose next token was never told cannot be made
    local.say(b"a", Features(1, 4, start - 3, data[: 2 * size]))
    local.turn()
    assert next(iter(local.sessions)).live.rows.missing == 0


def test_nodes_under_way_are_limited(drafter: BatchDrafter) -> None:
    limits = msgspec.structs.replace(SMALL, max_nodes=60)
    local = Local(drafter, limits)
    tokens = begun(local)
    told = [len(received(local, tokens).paths)]
    for number in range(1, 30):
        # tokens that the tree does not hold: every root is a new one
        local.say(b"a", Verdict(1, 1, number, 12 + number, 0, 0, np.array([number])))
        local.turn(12)
        told.append(sum(len(draft.tokens) for draft in local.of(Draft)))
        assert told[-1] <= 60
    assert told[-1] == 60
    local.say(b"a", Verdict(1, 1, 30, 42, 60, 0, np.array([3])))
    local.turn(12)
    assert 60 < sum(len(draft.tokens) for draft in local.of(Draft)) <= 120
    local.say(b"a", GONE)
    local.turn()


def test_verdicts_that_waited_are_applied_together(local: Local) -> None:
    begun(local)
    local.heard.clear()
    local.say(b"a", *(Verdict(1, 1, n, 12 + n, 0, 0, np.array([n])) for n in range(1, 6)))
    local.turn(20)
    assert {(draft.base, draft.seq) for draft in local.of(Draft)} == {(18, 5)}


def test_an_empty_verdict_only_tells_what_arrived(local: Local) -> None:
    tokens = begun(local)
    told = len(received(local, tokens).paths)
    local.say(b"a", Verdict(1, 1, 1, 13, told, 0, np.zeros(0, np.int64)))
    local.turn()
    (session,) = local.sessions
    assert (session.seq, session.received, session.credit, session.live.base) == (1, told, SMALL.max_nodes, 13)


def test_padding_means_nothing(local: Local, drafter: BatchDrafter) -> None:
    tokens, data, features = text(12)
    local.say(b"a", opening(1, padding=10))
    local.turn()
    size = 2 * WIDTH
    padded = b"".join(data[at : at + size] + b"\xff" * 10 for at in range(0, len(data), size))
    local.say(b"a", Prefix(1, 1, 0, tokens), Features(1, 1, 0, memoryview(padded)))
    local.turn(20)
    assert best_paths(drafter, tokens, features, SMALL.nodes) <= received(local, tokens).below(13)
    local.say(b"a", Features(1, 1, 0, padded[:-1]))
    local.turn()
    assert local.of(Error)[0].message == "features take 2423 bytes, expected a multiple of 202"


def test_full_means_full_and_room_is_made_at_once(local: Local) -> None:
    for number in range(1, 8):
        local.say(b"a", opening(number))
    local.turn()
    (error,) = local.of(Error)
    assert (error.session, error.retry_after) == (7, SMALL.retry_seconds)
    assert error.message == "all 6 drafter slots are taken: close a session or raise the limit"
    local.say(b"a", Close(3))
    local.say(b"b", opening(3))
    local.turn()
    assert len(local.of(Opened, b"b")) == 1
    assert local.of(Close) == [Close(3)]
    local.say(b"a", GONE)
    local.say(b"b", *(opening(number) for number in range(10, 15)))
    local.turn()
    assert len(local.of(Opened, b"b")) == 6


def test_a_connection_has_a_limit_of_its_own(drafter: BatchDrafter) -> None:
    local = Local(drafter, msgspec.structs.replace(SMALL, sessions=2))
    local.say(b"a", opening(1), opening(2), opening(3))
    local.say(b"b", opening(1))
    local.turn()
    (error,) = local.of(Error)
    assert error.message == "2 sessions are open, expected at most 2"
    assert error.retry_after == SMALL.retry_seconds
    assert len(local.of(Opened, b"b")) == 1
    local.say(b"a", GONE)
    local.say(b"b", GONE)
    local.turn()


def test_nothing_of_a_text_remains(local: Local, drafter: BatchDrafter) -> None:
    begun(local, count=40)
    (session,) = local.sessions
    live, slot = session.live, session.live.slot
    local.say(b"a", Features(1, 1, 0, text(40)[1]), Close(1))
    local.turn()
    pool = drafter.pool
    assert not any(tensor[slot].any() for tensor in (pool.keys, pool.values, pool.hidden))
    assert not live.rows._following.any()
    assert not live.tree.nodes._whole[0].any()
    assert not live.waiting
    assert live.rows.tip is None


def test_only_so_many_closed_sessions_are_remembered(local: Local) -> None:
    for number in range(1, 300):
        local.say(b"a", opening(number), Close(number))
        local.turn()
    local.heard.clear()
    late = [Verdict(number, 1, 1, 1, 0, 0, np.array([1])) for number in (299, 44, 43)]
    local.say(b"a", *late)
    local.turn()
    assert [error.session for error in local.of(Error)] == [43]


def test_heads_can_be_replaced(local: Local, drafter: BatchDrafter) -> None:
    begun(local)
    old = local.head
    local.head = type(old)(msgspec.structs.replace(old.info, head="cd"), drafter, VOCAB, True)
    local.sessions.replace([local.head], "the head was replaced: open the session again")
    assert local.of(Error) == [Error(1, "the head was replaced: open the session again", 0.0)]
    local.say(b"a", opening(1))
    local.turn()
    assert local.of(Opened)[-1].head == "cd"
    local.sessions.replace([local.head], "never said")  # nothing changed for those that have it
    assert len(local.sessions) == 1
    local.say(b"a", Stats({"x": 1.0}))
    local.turn()
    assert len(local.of(Error)) == 1


def test_an_edge_hears_when_nothing_more_will_come(local: Local) -> None:
    begun(local)
    assert [draft.rest for draft in local.of(Draft)].count(True) == 1
    assert local.of(Draft)[-1].rest
    told = sum(len(draft.tokens) for draft in local.of(Draft))
    local.heard.clear()
    local.say(b"a", Verdict(1, 1, 1, 13, told, 0, np.array([4])))
    local.turn(20)
    assert not any(draft.rest for draft in local.of(Draft))  # the newest row has no true feature yet
    local.say(b"a", Features(1, 1, 12, text(1, 5)[1]))
    local.turn(20)
    assert [draft.rest for draft in local.of(Draft)].count(True) == 1
    assert local.of(Draft)[-1].rest
    local.turn(5)
    assert [draft.rest for draft in local.of(Draft)].count(True) == 1


def test_nodes_that_wait_for_credit_are_still_to_come(drafter: BatchDrafter) -> None:
    local = Local(drafter, msgspec.structs.replace(SMALL, max_nodes=60))
    begun(local)
    seq = 0
    while next(iter(local.sessions)).credit:
        seq += 1
        local.say(b"a", Verdict(1, 1, seq, 12 + seq, 0, 0, np.array([seq])), Features(1, 1, 11 + seq, text(1, 5)[1]))
        local.turn(12)
    assert sum(len(draft.tokens) for draft in local.of(Draft)) == 60
    assert not local.of(Draft)[-1].rest
    local.say(b"a", GONE)
    local.turn()

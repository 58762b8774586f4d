"""One session of the edge: what it says, in which order, and what becomes of it when things change."""

from __future__ import annotations

import numpy as np
import pytest
from edge_ends import FINGERPRINT, VOCAB, WIDTH, WINDOW, OneSession, draft, of, rows, shown

from starsd.edge.remote import MAX_PREFIX, MAX_VERDICT, MOST_WAITING, REOPEN_SECONDS, Due, RemoteSession, Urgency
from starsd.shared.features import codec
from starsd.shared.messages import Close, Error, Features, Open, Opened, Prefix, Race, Verdict

TEXT = list(range(20, 30))


class Halving:
    """A projector."""

    def __init__(self, width: int = WIDTH) -> None:
        self.width, self.hidden = width, 2

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, :2]


def begun(text: list[int] = TEXT, **options: int) -> OneSession:
    """Open, with a text whose features have all been computed, and nothing said of it."""
    one = OneSession(**options)
    one.session.begin(text, 0)
    one.open()
    one.session.features(0, rows(0, len(text) - 1))
    return one


def told(text: list[int] = TEXT, **options: int) -> OneSession:
    one = begun(text, **options)
    one.say()
    return one


def test_it_waits_for_an_offer_and_an_answer() -> None:
    one = OneSession()
    one.session.begin(TEXT, 0)
    assert (one.say(), one.session.urgency()) == ([], Urgency.NOTHING)
    one.session.offer(None)
    assert one.say() == [Open(1, FINGERPRINT, VOCAB, "fp16")]
    assert (one.say(), one.session.live) == ([], False)
    one.hear(Opened(1, "h", WIDTH, WINDOW, 60))
    (prefix,) = one.say()
    assert (prefix.epoch, prefix.start, prefix.tokens.tolist()) == (one.session.epoch, 0, TEXT)
    assert one.session.live


def test_tokens_come_first_then_the_newest_rows_then_older_ones() -> None:
    one = begun()
    found = []
    while (urgency := one.session.urgency()) is not Urgency.NOTHING:
        (message,) = one.say(1, chunk=3 * 8)
        found.append((urgency, type(message)))
    assert found == [(Urgency.TOKENS, Prefix), (Urgency.NEWEST, Features), *[(Urgency.BACKFILL, Features)] * 2]


def test_rows_go_in_chunks_newest_first_each_once() -> None:
    one = begun()
    assert shown(one.say(chunk=4 * 2 * WIDTH)) == [[5, 6, 7, 8], [1, 2, 3, 4], [0]]
    assert one.say() == []


def test_a_row_that_is_larger_than_a_chunk_goes_alone() -> None:
    assert shown(begun().say(chunk=3)) == [[row] for row in range(8, -1, -1)]


def test_a_row_waits_for_the_token_after_it() -> None:
    one = begun()
    one.session.features(9, rows(9, 1))  # of the newest token
    assert shown(one.say()) == [list(range(9))]
    one.session.commit([7])
    verdict, features = one.say()
    assert (verdict.start, verdict.tokens.tolist(), shown([features])) == (10, [7], [[9]])


def test_verdicts_that_wait_are_one() -> None:
    one = told()
    for token in (1, 2, 3):
        one.session.commit([token])
    (verdict,) = one.say()
    assert (verdict.seq, verdict.start, verdict.tokens.tolist()) == (1, 10, [1, 2, 3])
    one.session.commit([4, 5])
    (verdict,) = one.say()
    assert (verdict.seq, verdict.start, verdict.tokens.tolist()) == (2, 13, [4, 5])


def test_what_is_too_long_for_one_message_follows_in_the_next() -> None:
    one = told()
    one.session.commit([1] * (MAX_VERDICT + 5))
    assert [len(verdict.tokens) for verdict in of(one.say(), Verdict)] == [MAX_VERDICT, 5]
    one.session.begin(text := [2] * (2 * MAX_PREFIX), 0)
    said = one.say()
    assert [type(message) for message in said] == [Prefix, *[Verdict] * (MAX_PREFIX // MAX_VERDICT)]
    assert sum(len(message.tokens) for message in said) == len(text)


def test_how_an_answer_is_drawn_is_said_with_its_text_and_again_after_a_loss() -> None:
    one, race = OneSession(), Race(0.5, 7, 1, len(TEXT))
    one.session.begin(TEXT, 0, race)
    one.open()
    assert [message.race for message in of(one.say(), Prefix)] == [race]
    one.session.commit([1, 2])
    one.session.lost()
    one.connect()
    one.open()
    assert [(len(message.tokens), message.race) for message in of(one.say(), Prefix)] == [(len(TEXT) + 2, race)]
    one.session.begin([*TEXT, 1, 2, 3], len(TEXT))
    assert [message.race for message in of(one.say(), Prefix)] == [None]


def test_a_text_of_one_token_has_no_rows() -> None:
    one = OneSession()
    one.session.begin([5], 0)
    one.open()
    assert [type(message) for message in one.say()] == [Prefix]
    assert one.session.urgency() is Urgency.NOTHING


def test_verdicts_tell_what_has_arrived_and_how_late() -> None:
    one = told()
    one.session.commit([1, 2])
    one.hear(draft(one.session, 10, [4, 5, 6]))
    (verdict,) = one.say()
    assert (verdict.received, verdict.lag) == (3, 2)
    assert [d.tokens.tolist() for d in one.session.drafts(0.0)] == [[4, 5, 6]]
    assert one.session.drafts(0.0) == []


def test_after_a_loss_it_says_the_last_window_again() -> None:
    one = told(list(range(50)))
    old, epoch = draft(one.session, 50, [1]), one.session.epoch
    one.session.lost()
    assert not one.session.live
    assert one.say() == []
    one.session.arrived(old, 20)
    assert one.session.drafts(0.0) == []
    one.connect()
    one.open()
    said = one.say(chunk=8 * 2 * WIDTH)
    assert (said[0].epoch, said[0].start, said[0].tokens.tolist()) == (epoch + 1, 34, list(range(34, 50)))
    assert sorted(row for chunk in shown(said) for row in chunk) == list(range(33, 49))
    assert shown(said)[0][-1] == 48
    assert one.session.live


def test_a_server_with_a_smaller_window_is_told_less() -> None:
    one = OneSession()
    one.session.begin(list(range(50)), 0)
    one.session.features(0, rows(0, 49))
    one.open(window=5)
    said = one.say()
    assert (said[0].start, shown(said)) == (45, [[44, 45, 46, 47, 48]])


def test_of_a_long_next_turn_only_rows_that_the_drafter_sees_are_sent() -> None:
    one = OneSession()
    one.session.begin([1, 2, 3], 0)
    one.session.features(0, rows(0, 2))
    one.open(window=5)
    one.say()
    one.session.begin(list(range(50)), 0)
    one.session.features(0, rows(0, 40))
    said = one.say()
    assert (said[0].start, len(said[0].tokens), shown(said)) == (0, 50, [])
    one.session.features(40, rows(40, 9))
    assert shown(one.say()) == [[44, 45, 46, 47, 48]]


def test_the_next_turn_says_what_is_new() -> None:
    one = told()
    one.session.commit([1])
    one.say()
    one.session.begin([*TEXT[:6], 50, 51, 52], 6)
    one.session.features(6, rows(60, 2))
    said = one.say()
    assert (said[0].epoch, said[0].start, said[0].tokens.tolist()) == (2, 6, [50, 51, 52])
    assert shown(said) == [[5, 60, 61]]  # row 5 is made of token 6, too; the feature is what it was


def test_an_edit_before_anything_was_said_begins_further_back() -> None:
    one = told()
    one.session.begin([*TEXT, 60, 61, 62], 10)
    one.session.begin([*TEXT, 60, 70], 11)
    (prefix,) = of(one.say(), Prefix)
    assert (prefix.epoch, prefix.start, prefix.tokens.tolist()) == (3, 10, [60, 70])


def test_features_beyond_the_window_are_let_go() -> None:
    one = OneSession()
    one.session.begin(list(range(60)), 0)
    one.open(window=1000)
    one.session.features(0, rows(0, 59))
    assert shown(one.say()) == [list(range(43, 59))]


def test_padding_stands_behind_every_row() -> None:
    (_, features) = begun(padding=3).say()
    assert len(features.rows) == 9 * (2 * WIDTH + 3)
    assert features.rows[8:11] == bytes(3)


def test_what_no_codec_holds_is_clipped() -> None:
    one = OneSession()
    one.session.begin(TEXT, 0)
    one.open()
    wild = rows(0, 9)
    wild[3] = [np.inf, -np.inf, np.nan, 1e9]
    one.session.features(0, wild)
    (_, features) = one.say()
    assert codec("fp16").decode(features.rows, WIDTH)[3].tolist() == [65504.0, -65504.0, 0.0, 65504.0]


def test_what_was_refused_is_tried_again_when_the_server_says() -> None:
    one = told()
    one.hear(Error(1, "full", 3.0))
    one.session.refused(3.0)
    one.clock.time += 2.9
    assert (one.say(), one.session.live) == ([], False)
    one.clock.time += 0.2
    assert [type(message) for message in one.say()] == [Open]
    one.hear(Opened(one.session.number, "h", WIDTH, WINDOW, 60))
    assert [message.epoch for message in one.say()] == [2, 2]


def test_what_is_hopeless_waits_for_another_offer() -> None:
    one = told()
    one.hear(Error(1, "no", -1.0))
    one.session.refused(-1.0)
    one.clock.time += 1e6
    assert one.say() == []
    one.session.offer(None)
    assert [type(message) for message in one.say()] == [Open]


def test_it_is_never_opened_again_at_once() -> None:
    one = told()
    one.hear(Error(1, "no", 0.0))
    one.session.refused(0.0)
    assert one.say() == []
    one.clock.time += REOPEN_SECONDS
    assert [type(message) for message in one.say()] == [Open]


@pytest.mark.parametrize("again", [1, 2])
def test_a_projector_that_comes_late_opens_it_anew(again: int) -> None:
    one, projector = told(), Halving()
    for _ in range(again):  # other sessions are offered theirs meanwhile
        one.session.offer(projector)  # type: ignore[arg-type]
    assert [type(message) for message in one.say()] == [Close, Open]
    one.hear(Opened(2, "h", 2, WINDOW, 60))
    (prefix, features) = one.say()
    assert (prefix.start, len(features.rows)) == (0, 9 * 2 * 2)
    one.session.offer(projector)  # type: ignore[arg-type]
    assert one.say() == []
    one.session.offer(None)  # the head is another one, whose projector is not here yet
    close, request = one.say()
    assert (close, request.projected) == (Close(2), False)


def test_an_answer_to_the_old_request_is_not_taken_for_the_new_one() -> None:
    one = OneSession()
    one.session.begin(TEXT, 0)
    one.session.offer(None)
    one.say()
    one.session.offer(Halving())  # type: ignore[arg-type]
    assert one.session.opened(Opened(1, "h", WIDTH, WINDOW, 60))
    assert [type(message) for message in one.say()] == [Close, Open]


def test_a_projector_of_another_width_is_of_no_use() -> None:
    one = OneSession()
    one.session.begin(TEXT, 0)
    assert not one.open(projector=Halving(WIDTH + 1)).projected


def test_features_of_another_width_are_noticed() -> None:
    one = OneSession()
    one.session.offer(None)
    one.say()
    assert not one.session.opened(Opened(1, "h", WIDTH + 1, WINDOW, 60))


def test_what_nobody_takes_is_bounded() -> None:
    one = told()
    for first in range(0, 100 * 50, 50):
        one.session.arrived(draft(one.session, 10, [1] * 50, first=first), 50)
    assert 0 < sum(1 + len(d.tokens) for d in one.session.drafts(0.0)) <= MOST_WAITING
    one.session.arrived(draft(one.session, 10, [1], first=5000), 50)
    assert len(one.session.drafts(0.0)) == 1
    for _ in range(2 * MOST_WAITING):
        one.session.arrived(draft(one.session, 10, [], rest=True), 20)
    assert len(one.session.drafts(0.0)) == MOST_WAITING


def test_when_the_next_draft_is_due() -> None:
    one = told()
    assert one.session.due is None  # never seen yet
    one.session.commit([1])
    one.say()
    one.clock.time += 0.1
    one.hear(draft(one.session, 11, [4], seq=1, rest=True))
    assert one.session.resting
    one.session.commit([2])
    assert one.session.due == pytest.approx(Due(0.1, 0.3))  # once it is said
    one.say()
    one.clock.time += 0.04
    assert one.session.due == pytest.approx(Due(0.06, 0.26))
    assert not one.session.resting
    one.clock.time += 0.3
    assert one.session.due is None  # overdue


def test_closing() -> None:
    never = OneSession()
    never.session.close()
    assert (never.session.closed, never.say()) == (True, [])
    one = told()
    one.session.close()
    assert not one.session.live
    assert (one.say(), one.session.closed, one.say()) == ([Close(1)], True, [])
    cut = told()
    cut.session.close()
    cut.session.lost()
    assert (cut.say(), cut.session.closed) == ([], True)


def test_features_are_handed_over_as_far_back_as_there_is_no_gap() -> None:
    session = OneSession(window=8).session
    session.begin(list(range(12)), 0)
    for start, count in ((0, 3), (4, 3)):
        session.features(start, rows(start, count))
    assert [held_rows(session, *asked) for asked in ((0, 7), (0, 3), (2, 4), (6, 6))] == [[4, 5, 6], [0, 1, 2], [], []]
    session.features(7, rows(7, 4))  # the oldest make room
    assert held_rows(session, 0, 11) == [4, 5, 6, 7, 8, 9, 10]


def held_rows(session: RemoteSession, start: int, stop: int) -> list[int]:
    first, found = session.held(start, stop)
    assert found[:, 0].tolist() == list(range(first, stop))
    return list(range(first, stop))

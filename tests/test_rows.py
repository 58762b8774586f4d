"""Rows of one session: which are held, true and visible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd.server.rows import Rows
from starsd.shared.errors import UsageError


def visible(rows: Rows, position: int) -> list[int]:
    """Rows that a query at this position sees."""
    places = np.flatnonzero(rows.seen(np.array([position]))[0])
    return sorted(int(rows._held[place]) for place in places)


def test_a_row_needs_the_token_after_it() -> None:
    rows = Rows(8)
    assert (rows.tip, rows.tokens, rows.last) == (None, 0, -1)
    rows.append([5])
    assert (rows.tip, rows.tokens, rows.count) == (5, 1, 0)
    rows.append([6, 7])
    assert (rows.tip, rows.tokens, rows.count) == (7, 3, 2)
    assert rows.following(np.array([0, 1])).tolist() == [6, 7]
    assert rows.wanted(0, 2).tolist() == [0, 1]
    with pytest.raises(UsageError, match="features are for rows 1 to 2, expected rows below 2"):
        rows.wanted(1, 2)
    with pytest.raises(UsageError, match="features are for rows -1 to 0"):
        rows.wanted(-1, 2)


def test_queries_see_held_rows_of_their_window() -> None:
    rows = Rows(4)
    rows.append(range(12))  # rows 0 … 10, of which 7 … 10 can be held
    assert rows.wanted(5, 6).tolist() == [7, 8, 9, 10]
    rows.hold(np.array([7, 8, 10]), true=True)
    assert visible(rows, 10) == [7, 8, 10]
    assert visible(rows, 11) == [8, 10]
    assert visible(rows, 13) == [10]
    assert visible(rows, 9) == [7, 8]
    assert (rows.newest_true, rows.missing) == (10, 1)
    rows.hold(np.array([9]), true=False)
    assert visible(rows, 10) == [7, 8, 9, 10]
    assert rows.missing == 1


def test_new_tokens_take_the_places_of_old_rows() -> None:
    rows = Rows(4)
    rows.append(range(5))
    rows.hold(np.arange(4), true=True)
    rows.append([50, 51])
    assert rows.missing == 2
    assert visible(rows, 5) == [2, 3]
    assert rows.following(np.array([3, 4, 5])).tolist() == [4, 50, 51]
    rows.append(range(100, 109))
    assert (rows.missing, rows.newest_true) == (4, -1)
    assert rows.following(np.arange(11, 15)).tolist() == [105, 106, 107, 108]


@pytest.mark.parametrize(("tokens", "count", "tip"), [(0, 0, None), (1, 0, None), (4, 3, 3), (9, 8, 8), (3, 2, None)])
def test_truncate(tokens: int, count: int, tip: int | None) -> None:
    """With a window of 6 over rows 0 … 7, the tokens after rows 0 and 1 are no longer known."""
    rows = Rows(6)
    rows.append(range(9))
    rows.hold(np.arange(2, 8), true=True)
    rows.truncate(tokens)
    assert (rows.tokens, rows.count, rows.tip) == (tokens, count, tip)
    assert rows.newest_true == (count - 1 if count > 2 else -1)
    rows.append([70, 71])
    assert rows.tokens == tokens + 2
    assert rows.tip == 71


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_dictionary_does_the_same(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 6))
    rows, held, tokens = Rows(window), {}, []
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["append", "hold", "truncate"])):
            case "append":
                new = data.draw(st.lists(st.integers(0, 99), max_size=8))
                rows.append(new)
                tokens += new
            case "hold" if rows.count:
                row = data.draw(st.integers(max(0, rows.count - window), rows.last))
                held[row] = data.draw(st.booleans())
                rows.hold(np.array([row]), true=held[row])
            case "truncate":
                tokens = tokens[: data.draw(st.integers(max(0, len(tokens) - 3), len(tokens)))]
                rows.truncate(len(tokens))
        held = {row: true for row, true in held.items() if rows.count > row}
        # a place that newer tokens took is lost, also when they are truncated again
        held = {row: true for row, true in held.items() if rows._held[row % window] == row}
        inside = [row for row in held if row >= rows.count - window]
        assert rows.tokens == len(tokens)
        assert rows.newest_true == max((row for row in held if held[row]), default=-1)
        for position in range(rows.last, rows.last + 4):
            assert visible(rows, position) == sorted(row for row in inside if position - window < row <= position)


def test_a_text_that_begins_somewhere() -> None:
    """Behind 9 tokens that nobody knows, row 8 needs the first known one and is the oldest that can be made."""
    rows = Rows(6)
    rows.begin(9)
    assert (rows.tokens, rows.count, rows.tip) == (9, 8, None)
    rows.append([90, 91, 92])
    assert (rows.tokens, rows.last, rows.tip) == (12, 10, 92)
    assert rows.following(np.array([8, 9, 10])).tolist() == [90, 91, 92]
    assert rows.wanted(4, 7).tolist() == [8, 9, 10]
    rows.hold(np.array([8, 9, 10]), true=True)
    assert visible(rows, 11) == [8, 9, 10]
    rows.truncate(10)
    assert (rows.tokens, rows.tip) == (10, 90)
    assert visible(rows, 9) == [8]
    rows.truncate(5)  # before anything known
    assert (rows.tokens, rows.tip) == (5, None)
    rows.append([50])
    assert rows.wanted(0, 5).tolist() == [4]
    rows.begin(0)
    assert (rows.tokens, rows.tip, rows.used) == (0, None, 0)
    assert not rows._following.any()


def test_rows_whose_next_token_was_overwritten_are_not_wanted() -> None:
    """Before a truncation the window had moved on: what it held of older rows is lost."""
    rows = Rows(4)
    rows.append(range(21))  # the tokens after rows 16 … 19 are known
    rows.truncate(19)
    rows.append([70])
    assert rows.wanted(12, 7).tolist() == [16, 17, 18]
    assert rows.following(np.array([16, 17, 18])).tolist() == [17, 18, 70]

from __future__ import annotations

import pytest

from starsd.edge.ngram import LONGEST, PROPOSED, NgramIndex


def test_what_followed_last_time_is_proposed() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    assert NgramIndex(text).propose() == (2, [4, 5, 6, 9, 2, 3])


def test_the_longest_match_counts_and_of_those_the_newest() -> None:
    text = [1, 2, 3, 70, 9, 2, 3, 80, 8, 2, 3, 90, 1, 2, 3]
    matched, tokens = NgramIndex(text).propose()
    assert (matched, tokens[0]) == (3, 70)
    text[-3] = 7
    matched, tokens = NgramIndex(text).propose()
    assert (matched, tokens[0]) == (2, 90)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3], [2, 1]])
def test_nothing_repeats_nothing_is_proposed(text: list[int]) -> None:
    assert NgramIndex(text).propose() == (0, [])


def test_it_follows_the_conversation() -> None:
    text = [1, 2, 3]
    index = NgramIndex(text)
    assert index.propose() == (0, [])
    text += [1, 2]
    assert index.propose() == (2, [3, 1, 2])
    text += [3, 1, 2, 3, 1, 2]
    assert index.propose() == (LONGEST, [3, 1, 2])
    text[:] = [8, 9, 8, 9]
    index.begin()
    assert index.propose() == (2, [8, 9])


def test_a_proposal_is_bounded() -> None:
    text = [1, 2, *range(100, 160), 1, 2]
    assert NgramIndex(text).propose() == (2, list(range(100, 100 + PROPOSED)))

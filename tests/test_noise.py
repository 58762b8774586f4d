"""The noise is Philox and Gumbel as described, so that anybody can recompute it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from starsd.shared.noise import from_words, gumbel, to_word, words

MASK = (1 << 64) - 1
ALPHA = 1e-4  # draws are fixed by the seed: a test passes always or never


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x64-10 in plain integers, from the paper's description."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & MASK, (first >> 64) ^ c[3] ^ k[1], first & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_philox_matches_the_published_known_answer() -> None:
    """Random123's known-answer file, philox4x64 with 10 rounds, all words zero."""
    known = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox([0, 0, 0, 0], [0, 0]) == known


@pytest.mark.parametrize(("seed", "choice", "index"), [(0, 0, 0), (7, 3, 11), (-1, 0, 5), (2**63, 9, 2**40)])
def test_noise_is_what_its_description_says(seed: int, choice: int, index: int) -> None:
    noise = gumbel(seed, choice, index, 10)
    for token in range(10):
        word = philox([1 + token // 4, index, 0, 0], [seed % 2**64, choice])[token % 4]
        assert noise[token] == pytest.approx(-math.log(-math.log(((word >> 12) + 0.5) / 2**52)), rel=1e-14)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    np.testing.assert_array_equal(gumbel(1, 2, 3, 1000)[:17], gumbel(1, 2, 3, 17))


def test_noise_is_finite_at_both_ends_and_grows_with_the_word() -> None:
    low, high = from_words(np.array([0, MASK], np.uint64))
    assert -3.7 < low < -3.5
    assert 36 < high < 37
    drawn = words(3, 0, 0, 4000)
    assert np.all(from_words(drawn[drawn <= to_word(2.0)]) <= 2.0 + 1e-9)
    assert np.all(from_words(drawn[drawn > to_word(2.0)]) >= 2.0 - 1e-9)


def test_noise_is_gumbel_distributed() -> None:
    assert stats.kstest(gumbel(5, 0, 0, 20000), "gumbel_r").pvalue > ALPHA


def test_any_two_of_many_choices_are_uncorrelated() -> None:
    noise = np.stack([gumbel(1, choice, index, 500) for choice, index in itertools.product(range(4), range(4))])
    correlation = np.corrcoef(noise) - np.eye(len(noise))
    assert np.abs(correlation).max() < 5 / math.sqrt(500)

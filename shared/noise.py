"""Gumbel noise that anybody can recompute: a function of (seed, choice, output index, token id) and of nothing else.

The generator is Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). For token `t`:

    key      = (seed mod 2^64, choice)
    counter  = (1 + t // 4, index, 0, 0)                least significant word first
    word     = output word t mod 4 of that block        64 bits
    uniform  = ((word >> 12) + 1/2) / 2^52              exact in float64, strictly between 0 and 1
    noise    = -ln(-ln(uniform))                        float64

The first counter word starts at 1 because numpy's generator increments before it draws.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

WORD = 1 << 64


def words(seed: int, choice: int, index: int, count: int) -> NDArray[np.uint64]:
    """The random words of tokens 0 to count - 1; noise grows with the word. Shape (count,)."""
    key = np.array([seed % WORD, choice], np.uint64)
    counter = np.array([0, index, 0, 0], np.uint64)
    drawn: NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(count)
    return drawn


def from_words(drawn: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of these words, same shape; lies between -3.6 and 36.8."""
    uniform = ((drawn >> np.uint64(12)) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def to_word(noise: float) -> np.uint64:
    """A word such that every word up to it has at most this noise, to within 1e-9. For 0 < noise < 20."""
    return np.uint64(int(math.exp(-math.exp(-noise)) * 2.0**52) << 12)


def gumbel(seed: int, choice: int, index: int, count: int) -> NDArray[np.float64]:
    """Noise of tokens 0 to count - 1 at one output index, shape (count,)."""
    return from_words(words(seed, choice, index, count))

"""One conversation on two engines that have to agree."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch_helpers import tokens

from starsd.edge.target import Target

TREE = (-1, 0, 0, 1, 2, 2, 5, 0, 6)
PATH = (0, 2, 5, 6)


def close(one: Any, other: Any, tolerance: float = 1e-4) -> bool:
    return one.shape == other.shape and np.abs(one - other).max(initial=0) < tolerance


def walk(one: Target, other: Target, rounds: int = 4, tolerance: float = 1e-4) -> None:
    """A prompt in chunks, trees of which a path stays, plain steps between them."""
    vocab = one.shape.vocab
    prompt = tokens(25, vocab)
    assert close(one.prefill(prompt), other.prefill(prompt), tolerance)
    for turn in range(rounds):
        drafted = tokens(len(TREE), vocab, seed=turn)
        assert close(one.score(drafted, TREE), other.score(drafted, TREE), tolerance)
        assert close(one.commit(PATH), other.commit(PATH), tolerance)
        for token in tokens(3, vocab, seed=turn + 10):
            assert close(one.score([token], [-1]), other.score([token], [-1]), tolerance)
            assert close(one.commit([0]), other.commit([0]), tolerance)
    assert one.length == other.length

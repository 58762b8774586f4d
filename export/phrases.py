"""Counts a phrasebook (`starsd.shared.phrases`) over chats that a target wrote."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.staging import replace
from starsd.export.train_data import Chats, Ints, Role
from starsd.shared.phrases import STEPS

FOLLOWERS = 4  # of a context: more are seldom worth a row of a pass
RAREST = 0.03  # share of a context's sightings; no device verifies a row for less
SEEN = 2  # sightings of a pair that make it known


def count_phrases(chats: Chats, vocab: int) -> dict[str, NDArray[Any]]:
    """The arrays of a phrasebook. What the template dictates is left out, and no phrase runs over a chat's end."""
    tokens = chats.tokens
    starts = np.zeros(len(tokens), np.bool_)
    starts[chats.offsets[:-1]] = True
    chosen = chats.roles != Role.TEMPLATE
    after_one = np.flatnonzero(chosen & ~starts)
    after_two = after_one[~starts[after_one - 1]]
    singles = _table(tokens[after_one - 1], tokens[after_one], least=1, vocab=vocab)
    pairs = _table(tokens[after_two - 2] << 32 | tokens[after_two - 1], tokens[after_two], least=SEEN, vocab=vocab)
    named = {f"singles_{part}": array for part, array in singles.items()}
    named |= {f"pairs_{part}": array for part, array in pairs.items()}
    return {**named, "vocab": np.array(vocab, np.int64)}


def write_phrases(file: Path, arrays: dict[str, NDArray[Any]]) -> int:
    """Write them, whole or not at all; bytes of the file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    replace(file, buffer.getvalue())
    return len(buffer.getvalue())


def _table(contexts: Ints, followers: Ints, *, least: int, vocab: int) -> dict[str, NDArray[Any]]:
    """Contexts with `least` sightings or more, and what follows them oftest."""
    order = np.lexsort((followers, contexts))
    contexts, followers = contexts[order], followers[order]
    changes = np.flatnonzero((np.diff(contexts) != 0) | (np.diff(followers) != 0)) + 1
    begins = np.concatenate([[0], changes])[: len(contexts)]
    counts = np.diff(np.append(begins, len(contexts)))
    contexts, followers = contexts[begins], followers[begins]
    keys, where = np.unique(contexts, return_inverse=True)
    seen = np.bincount(where, counts, len(keys))

    # of a context the oftest seen first, among equals the smaller token
    order = np.lexsort((followers, -counts, where))
    where, followers, counts = where[order], followers[order], counts[order]
    rank = np.arange(len(where)) - np.searchsorted(where, where)
    share = counts / (seen[where] + 1)  # one more sighting, of something else
    kept = (rank < FOLLOWERS) & (share >= RAREST) & (seen[where] >= least)
    where, followers, share = where[kept], followers[kept], share[kept]
    known, first = np.unique(where, return_index=True)
    return {
        "keys": keys[known],
        "first": np.append(first, len(where)).astype(np.int32),
        "tokens": followers.astype(np.uint16 if vocab <= 1 << 16 else np.int32),
        "steps": np.minimum(np.round(-np.log(share) * STEPS), 255).astype(np.uint8),
    }

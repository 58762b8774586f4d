"""A phrasebook: which tokens often follow one token, or two, in text that a target wrote.

It drafts where nothing else is at hand: on the device itself, at no distance, for about a megabyte. What it says is
weak beside an EAGLE head's word, but it is never late. Counted by `starsd-export phrases` over the target's own chats;
no word of any user is in it. A file is an .npz of, for `singles` (after one token) and `pairs` (after two):

    {which}_keys    int64  (n,)    the token, or older << 32 | newer; ascending
    {which}_first   int32  (n + 1,) where each key's followers begin
    {which}_tokens  uint16 or int32 (m,)  followers, a key's likeliest first
    {which}_steps   uint8  (m,)    their log-probabilities, in steps of -1/32

and `vocab` int64 (), below which all tokens lie.
"""

from __future__ import annotations

import zipfile
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ModelError

STEPS = 32  # to a unit of log-probability
MOST_BYTES = 64_000_000  # of the arrays of a file
_KINDS = {"keys": "i", "first": "i", "tokens": "iu", "steps": "u"}


class Phrasebook:
    """What may follow; made from a file by `read_phrases`."""

    def __init__(self, singles: _Table, pairs: _Table) -> None:
        self._singles, self._pairs = singles, pairs

    def follow(self, older: int, newer: int) -> list[tuple[int, float]]:
        """Tokens that may come behind these two (`older` -1: there is but one), with their log-probabilities, likeliest
        first. What is known of both tokens counts, else what is known of the newer one."""
        return (older >= 0 and self._pairs.row(older << 32 | newer)) or self._singles.row(newer)

    def __len__(self) -> int:
        """How many contexts it knows."""
        return len(self._singles) + len(self._pairs)


class _Table:
    """Plain arrays: looking one key up in numpy takes four times as long."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._keys = array("q", arrays["keys"].astype(np.int64).tobytes())
        self._first = array("q", arrays["first"].astype(np.int64).tobytes())
        self._tokens = array("q", arrays["tokens"].astype(np.int64).tobytes())
        self._steps = array("B", arrays["steps"].astype(np.uint8).tobytes())

    def __len__(self) -> int:
        return len(self._keys)

    def row(self, key: int) -> list[tuple[int, float]]:
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            return []
        span = range(self._first[place], self._first[place + 1])
        return [(self._tokens[i], -self._steps[i] / STEPS) for i in span]


def read_phrases(file: Path, vocab: int) -> Phrasebook:
    """The phrasebook of a file, for a target of so many tokens. Raises ModelError when the file is not whole or is
    another target's."""
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MOST_BYTES:
            raise ModelError(f"{file} unpacks to {size} bytes, expected at most {MOST_BYTES}")
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError) as error:
        raise ModelError(f"phrasebook {file} cannot be read: {error}") from error
    named = {f"{which}_{part}" for which in ("singles", "pairs") for part in _KINDS} | {"vocab"}
    if arrays.keys() != named:
        raise ModelError(f"phrasebook {file} has {sorted(arrays)}, expected {sorted(named)}")
    if arrays["vocab"].shape != () or arrays["vocab"] != vocab:
        raise ModelError(f"phrasebook {file} is for {arrays['vocab']} tokens, the target has {vocab}")
    tables = []
    for which in ("singles", "pairs"):
        parts = {part: arrays[f"{which}_{part}"] for part in _KINDS}
        _check(file, which, parts, vocab)
        tables.append(_Table(parts))
    return Phrasebook(*tables)


def _check(file: Path, which: str, parts: dict[str, NDArray[Any]], vocab: int) -> None:
    for part, kinds in _KINDS.items():
        if parts[part].ndim != 1 or parts[part].dtype.kind not in kinds:
            got = f"{parts[part].dtype} of shape {list(parts[part].shape)}"
            raise ModelError(f"phrasebook {file} has {which}_{part} as {got}, expected integers in one dimension")
    keys, first, tokens, steps = (parts[part] for part in _KINDS)
    if len(first) != len(keys) + 1 or first[0] != 0 or first[-1] != len(tokens) or (np.diff(first) < 0).any():
        raise ModelError(f"phrasebook {file}: {which}_first does not rise from 0 to its {len(tokens)} tokens")
    if len(steps) != len(tokens) or (np.diff(keys) <= 0).any():
        raise ModelError(f"phrasebook {file}: {which} has {len(steps)} steps, or keys that do not ascend")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ModelError(f"phrasebook {file}: {which} names tokens {tokens.min()} to {tokens.max()} of {vocab}")

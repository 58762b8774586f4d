"""Chats as tokens: the file layout, who wrote which token, and which chats make a batch.

An .npz of chats holds `tokens` uint16 or uint32 (all chats end to end), `offsets` (n + 1) and `answer_start` (n): chat
i is `tokens[offsets[i]:offsets[i + 1]]` and its first answer starts `answer_start[i]` tokens in. `roles` uint8, as long
as `tokens`, is optional: without it everything behind `answer_start` is an answer, which one-turn chats are.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import UsageError

Ints = NDArray[np.int64]
SHORTEST = 4  # tokens of a chat: fewer hold no row whose label is known
FEWEST = 8  # chats to train on and hold out
_JITTER = 0.1  # how far a batch's chats may differ in length, so that every epoch groups them anew
_REQUIRED = ("tokens", "offsets", "answer_start")


class Role(IntEnum):
    """Who a token is from."""

    TEMPLATE = 0
    USER = 1
    ANSWER = 2


@dataclass(frozen=True)
class Chats:
    """`tokens` int64 and `roles` uint8 (n,) of all chats, `offsets` int64 (chats + 1,)."""

    tokens: Ints
    roles: NDArray[np.uint8]
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def rows(self, chat: int) -> slice:
        """Where a chat's tokens are."""
        return slice(int(self.offsets[chat]), int(self.offsets[chat + 1]))

    def pick(self, order: Sequence[int] | Ints, longest: int = 0) -> Chats:
        """These chats in this order, each cut to `longest` tokens."""
        spans = [self.rows(int(chat)) for chat in order]
        spans = [slice(s.start, min(s.stop, s.start + longest) if longest else s.stop) for s in spans]
        lengths = [s.stop - s.start for s in spans]
        return Chats(
            np.concatenate([self.tokens[:0], *(self.tokens[s] for s in spans)]),
            np.concatenate([self.roles[:0], *(self.roles[s] for s in spans)]),
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        )


def joined(chats: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Chats:
    """Chats from their tokens and roles."""
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens, _ in chats])]).astype(np.int64)
    tokens = np.array([t for tokens, _ in chats for t in tokens], np.int64)
    return Chats(tokens, np.array([r for _, roles in chats for r in roles], np.uint8), offsets)


def read_chats(place: Path, vocab: int) -> Chats:
    """The chats of a file, or of every .npz of a folder. Raises UsageError saying what is wrong with which array."""
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if not files:
        raise UsageError(f"{place} holds no .npz of chats")
    parts = [_read_file(file, vocab) for file in files]
    lengths = np.concatenate([part.lengths for part in parts])
    return Chats(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.roles for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def write_chats(path: Path, chats: Chats) -> None:
    """Write a file that `read_chats` reads, `tokens` as uint16 where ids allow it."""
    wide = np.uint32 if len(chats.tokens) and chats.tokens.max() > np.iinfo(np.uint16).max else np.uint16
    first = [int(np.argmax(chats.roles[chats.rows(i)] == Role.ANSWER)) for i in range(len(chats))]
    np.savez_compressed(
        path,
        tokens=chats.tokens.astype(wide),
        offsets=chats.offsets,
        answer_start=np.array(first, np.int32),
        roles=chats.roles,
    )


def _read_file(file: Path, vocab: int) -> Chats:
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UsageError(f"{file} is a single array, expected {', '.join(_REQUIRED)} in an .npz")
        with loaded:
            arrays = dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if missing := [name for name in _REQUIRED if name not in arrays]:
        raise UsageError(f"{file} lacks {', '.join(missing)}, expected {', '.join(_REQUIRED)}")
    for name in (*_REQUIRED, *({"roles"} & arrays.keys())):
        if arrays[name].dtype.kind not in "iu" or arrays[name].ndim != 1:
            got = f"{arrays[name].dtype} of shape {list(arrays[name].shape)}"
            raise UsageError(f"{file}: {name} is {got}, expected integers in one dimension")
    tokens, offsets, starts = (arrays[name].astype(np.int64) for name in _REQUIRED)
    _check(file, tokens, offsets, starts, vocab)
    if "roles" not in arrays:
        return Chats(tokens, _guessed_roles(tokens, offsets, starts), offsets)
    roles = arrays["roles"]
    if roles.shape != tokens.shape or not np.isin(roles, list(Role)).all():
        raise UsageError(f"{file}: roles are {len(roles)} values, expected {len(tokens)} of 0, 1 and 2")
    return Chats(tokens, roles.astype(np.uint8), offsets)


def _check(file: Path, tokens: Ints, offsets: Ints, starts: Ints, vocab: int) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise UsageError(
            f"{file}: token ids run from {tokens.min()} to {tokens.max()}, the target has 0 to {vocab - 1}: "
            "these chats are another model's"
        )
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) <= 0).any():
        raise UsageError(f"{file}: offsets do not rise from 0 to the {len(tokens)} tokens there are")
    if len(starts) != len(offsets) - 1 or (starts < 0).any() or (starts > np.diff(offsets)).any():
        raise UsageError(f"{file}: answer_start does not name a place in each of the {len(offsets) - 1} chats")


def _guessed_roles(tokens: Ints, offsets: Ints, starts: Ints) -> NDArray[np.uint8]:
    """What all chats begin with is the template's; then comes the user, from `answer_start` on the answer."""
    first = tokens[: offsets[1]]
    shared = int(min(np.diff(offsets).min(), starts.min()))
    for begin in offsets[1:-1]:
        differs = tokens[begin : begin + shared] != first[:shared]
        shared = int(np.argmax(differs)) if differs.any() else shared
    roles = np.full(len(tokens), Role.USER, np.uint8)
    for begin, end, start in zip(offsets[:-1], offsets[1:], starts, strict=True):
        roles[begin : begin + shared if len(offsets) > 2 else begin] = Role.TEMPLATE
        roles[begin + start : end] = Role.ANSWER
    return roles


def choose(chats: Chats, limit: int, longest: int, seed: int) -> Chats:
    """Up to `limit` tokens (0: all) of chats in a random order that depends on the seed only; the too short are left
    out. Raises UsageError when fewer than FEWEST remain."""
    lengths = np.minimum(chats.lengths, longest)
    order = np.random.default_rng(seed).permutation(len(chats))
    order = order[lengths[order] >= SHORTEST]
    if limit:
        order = order[np.cumsum(lengths[order]) - lengths[order] < limit]
    require_enough(len(order))
    return chats.pick(order, longest)


def require_enough(count: int) -> None:
    if count < FEWEST:
        raise UsageError(f"there are {count} chats of {SHORTEST} tokens or more, expected at least {FEWEST}")


def held_out(count: int, wanted: int) -> int:
    """How many chats, the first ones, are kept from training."""
    return max(1, min(wanted, count // 8))


def batches(lengths: Ints, chosen: Ints, tokens: int, rng: np.random.Generator) -> list[Ints]:
    """Groups of `chosen` chats of nearly equal length, each at most `tokens` with its padding (a longer chat is alone),
    in random order."""
    noisy = lengths[chosen] * (1 + _JITTER * rng.uniform(-1, 1, len(chosen)))
    groups: list[Ints] = []
    begin, widest = 0, 0
    ordered = chosen[np.argsort(noisy, kind="stable")]
    for place, chat in enumerate(ordered):
        wider = max(widest, int(lengths[chat]))
        if place > begin and (place + 1 - begin) * wider > tokens:
            groups.append(ordered[begin:place])
            begin, wider = place, int(lengths[chat])
        widest = wider
    groups.append(ordered[begin:])
    return [groups[i] for i in rng.permutation(len(groups))]

"""Recorded rounds of a target for a drafter to answer: the `trees_*.npz` layout of `tests/golden/README.md`.

Read are `prompt`, `root0`, `r0_feat` (the prompt's features), and for each later round r `r{r}_feat`,
`r{r}_accepted_tokens` (the root first) and `r{r}_bonus`. Whatever else the file holds is not looked at.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import UsageError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

T = TypeVar("T")

_OF_A_ROUND = re.compile(r"r(\d+)_(?:feat|accepted_tokens|bonus)")


@dataclass(frozen=True)
class Round:
    """Features (n, width) of n newly committed tokens and the token that follows each of them (n,)."""

    features: Floats
    next_tokens: Ints


def read_recording(path: Path, width: int, vocab: int) -> list[Round]:
    """The rounds of a recording for a head that takes features of `width`. Raises UsageError saying what is wrong."""
    return read_arrays(path, lambda arrays: read_rounds(arrays, width, vocab))


def read_arrays(path: Path, parse: Callable[[Arrays], T]) -> T:
    """What `parse` makes of an .npz file. Raises UsageError when it is broken or lacks something."""
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise UsageError(f"recording {path} is a single array, expected several named arrays (.npz)")
        with arrays:
            return parse(Arrays(path, arrays))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"recording {path} cannot be read: {error}") from error


class Arrays:
    """Arrays of one file, checked as they are asked for."""

    def __init__(self, path: Path, arrays: np.lib.npyio.NpzFile) -> None:
        self._path = path
        self._arrays = arrays
        self.names = frozenset(arrays.files)

    def ids(self, name: str, vocab: int, *, single: bool = False) -> Ints:
        values = self._get(name)
        if values.dtype.kind not in "iu" or values.ndim != (0 if single else 1) or values.size == 0:
            wanted = "one integer" if single else "integers in one dimension"
            raise UsageError(f"{name} is {values.dtype} of shape {list(values.shape)}, expected {wanted}")
        if not 0 <= values.min() <= values.max() < vocab:
            raise UsageError(f"{name} has ids {values.min()} to {values.max()}, expected 0 to {vocab - 1}")
        return values.astype(np.int64)

    def features(self, name: str, rows: int, width: int) -> Floats:
        values = self._get(name)
        if values.dtype.kind != "f" or values.shape != (rows, width):
            got = f"{values.dtype} of shape {list(values.shape)}"
            raise UsageError(f"{name} is {got}, expected floats of shape {[rows, width]}")
        return values.astype(np.float32)

    def _get(self, name: str) -> NDArray[np.generic]:
        if name not in self.names:
            raise UsageError(f"recording {self._path} lacks {name}")
        values: NDArray[np.generic] = self._arrays[name]
        return values


def read_rounds(arrays: Arrays, width: int, vocab: int) -> list[Round]:
    """See `read_recording`."""
    prompt, root = arrays.ids("prompt", vocab), arrays.ids("root0", vocab, single=True)
    rounds = [Round(arrays.features("r0_feat", len(prompt), width), np.append(prompt[1:], root))]
    numbers = [int(found[1]) for name in arrays.names if (found := _OF_A_ROUND.fullmatch(name))]
    for number in range(1, max(numbers) + 1):
        accepted = arrays.ids(f"r{number}_accepted_tokens", vocab)
        if accepted[0] != root:
            raise UsageError(f"r{number}_accepted_tokens starts with {accepted[0]}, expected the root {root}")
        root = arrays.ids(f"r{number}_bonus", vocab, single=True)
        features = arrays.features(f"r{number}_feat", len(accepted), width)
        rounds.append(Round(features, np.append(accepted[1:], root)))
    return rounds

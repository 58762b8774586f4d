"""Token trees: a list of tokens and a list of parents; depth, mask and paths are derived, never sent.

Row 0 is the root, the newest committed token, with parent -1. Every other node's parent comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROOT = 0


def check(parents: Sequence[int]) -> None:
    """Raise ValueError unless `parents` describes one tree rooted at row 0, parents before children."""
    if len(parents) == 0:
        raise ValueError("tree is empty, expected at least the root")
    if parents[ROOT] != -1:
        raise ValueError(f"root has parent {parents[ROOT]}, expected -1")
    for row, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < row:
            raise ValueError(f"node {row} has parent {parent}, expected 0 to {row - 1}")


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """Depth of each node, root 0. Shape (n,)."""
    out = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents[1:], start=1):
        out[row] = out[parent] + 1
    return out


def ancestor_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which rows each row sees: itself and its ancestors. Shape (n, n), row sees column."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents[1:], start=1):
        mask[row] |= mask[parent]
    return mask


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root down to `row`, both included."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def trunk(parents: Sequence[int]) -> int:
    """How many leading rows form a path from the root: the part of a tree that lies as plain decoding would lay it."""
    return next((row for row, parent in enumerate(parents) if parent != row - 1), len(parents))


def chain(length: int) -> list[int]:
    """Parents of a tree that is a single path of `length` nodes, root included."""
    return list(range(-1, length - 1))


def beyond_window(positions: NDArray[np.int64], past: int, window: int) -> NDArray[np.bool_]:
    """Which columns lie `window` positions or further before each row of a pass. Shape (n, past + n).

    Columns are the `past` committed rows, at their positions, then the rows of the pass at theirs.
    """
    columns = np.concatenate([np.arange(past), positions])
    return np.asarray(positions[:, None] - columns >= window, np.bool_)

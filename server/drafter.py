"""What the server needs from a drafter, and how one is chosen.

A session is fed *rows*: row i is the target's feature of token i beside token i + 1, at position i. So after a prompt
of P tokens and its first root there are P rows; a verdict that accepts a tokens and adds a bonus brings a + 1 more.
A draft grows from the newest token, which has no feature yet, and leaves no trace in the session.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.manifest import FeatureSpec

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): expand the `top_k` best nodes of each level `depth` times, then keep the
    best `total` - 1 of all candidates. `total` counts the root. The defaults are the published API's."""

    total: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        for name, least in (("total", 1), ("depth", 0), ("top_k", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if self.total > self.candidates + 1:
            raise UsageError(
                f"depth {self.depth} and top_k {self.top_k} give {self.candidates + 1} nodes, expected {self.total}"
            )

    @property
    def candidates(self) -> int:
        return self.top_k + self.depth * self.top_k**2


def chain(length: int) -> DynamicTree:
    """A single path of `length` drafted tokens, the best at each step."""
    return DynamicTree(total=length + 1, depth=max(length - 1, 0), top_k=1)


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: each path lists ranks from the root down, (0, 2) being the third best child of the best child.

    Nodes come out by depth, then by path. Every path's prefix must be a path too.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        if len(known) != len(self.paths) + 1 or any(rank < 0 for path in self.paths for rank in path):
            raise UsageError("static tree has a path twice, an empty path or a negative rank")
        if orphans := [path for path in self.paths if path[:-1] not in known]:
            raise UsageError(f"static tree has path {list(orphans[0])} without its parent {list(orphans[0][:-1])}")


TreeShape = DynamicTree | StaticTree
Total = int | Sequence[int] | None  # nodes of the trees of a pass: of all, of each, or the default


def each(total: Total, count: int, default: int) -> Sequence[int]:
    """Nodes of each of `count` trees."""
    if total is None or isinstance(total, int):
        return [default if total is None else total] * count
    return total


@dataclass(frozen=True)
class SlotLimits:
    """Sizes of the pool: sessions at a time, rows of context each keeps, tree nodes each may have expanded."""

    slots: int = 64
    window: int = 2048
    entries: int = 128

    def __post_init__(self) -> None:
        for name in ("slots", "window", "entries"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class Draft:
    """A tree, root first and in generation order: `tokens`, `parents` int64 (T,), `scores` float32 (T,).

    A score is the sum of the drafter's log-probabilities from the root down; the root has 0 and parent -1.
    """

    tokens: Ints
    parents: Ints
    scores: Floats


class DraftSession(Protocol):
    """One conversation in the drafter."""

    @property
    def rows(self) -> int:
        """Rows made from true features."""
        ...

    def extend(self, features: Floats, next_tokens: Ints) -> None:
        """Append rows: the target's features (n, width) beside the token after each of them (n,)."""
        ...

    def draft(self, shape: TreeShape) -> Draft:
        """Grow a tree from the last `next_tokens`; the session's rows stay as they are."""
        ...

    def truncate(self, rows: int) -> None:
        """Forget every row from `rows` on; nothing can be drafted until more come."""
        ...


class Drafter(Protocol):
    """One head's weights, shared by all sessions."""

    @property
    def features(self) -> FeatureSpec: ...

    @property
    def vocab(self) -> int:
        """The target's token ids are below it."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the head, though it loads."""
        ...

    def open(self) -> DraftSession: ...


# kind → (module, function making a Drafter from references to a head and its target, extra that brings its libraries)
_KINDS: dict[str, tuple[str, str, str]] = {"eagle": ("starsd.server.drafter_eagle", "open_drafter", "server")}


def open_drafter(kind: str, head: str, target: str, *, dtype: str = "fp32", device: str = "cpu") -> Drafter:
    """Load the head of this kind for a target; see `eagle_heads.load_head` for what is refused."""
    if kind not in _KINDS:
        raise UsageError(f"drafter {kind!r} is unknown, expected one of {', '.join(_KINDS)}")
    module, function, extra = _KINDS[kind]
    try:
        factory: Callable[..., Drafter] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or module, extra) from error
    drafter: Any = factory(head, target, dtype=dtype, device=device)
    return drafter  # type: ignore[no-any-return]

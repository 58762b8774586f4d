"""The bookkeeping that every engine shares: what is committed, which pass is open, what fits."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from starsd.edge.target import Floats, Target
from starsd.shared import tree
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.manifest import FeatureSpec, ModelShape

Own = TypeVar("Own", bound="CachedTarget")


class CachedTarget(ABC):
    """A `Target` but for the arithmetic and the place of its K/V. See `Target` for the contract."""

    def __init__(self, shape: ModelShape, features: FeatureSpec, context: int, chunk: int) -> None:
        self._shape, self._features, self._context, self._chunk = shape, features, context, chunk
        self._length = 0
        self._pass: tuple[list[int], Floats] | None = None  # parents and features of the newest pass, while it is open

    def sibling(self: Own) -> Own:
        other = copy.copy(self)
        other._length, other._pass = 0, None
        other._start_cache()
        return other

    def adopt(self, other: Target, length: int) -> None:
        if not isinstance(other, type(self)) or other._shape is not self._shape:
            raise EngineError("rows of another engine cannot be adopted, expected a sibling's")
        if not 0 <= length <= other.length:
            raise EngineError(f"adopt {length} rows of a sibling, expected 0 to {other.length}")
        self.truncate(0)
        self._make_room(length)
        self._copy(other, length)
        self._length = length

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def features(self) -> FeatureSpec:
        return self._features

    @property
    def length(self) -> int:
        return self._length

    @property
    def context(self) -> int:
        return self._context

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Floats:
        self._pass = None
        self._require(tokens)
        features = np.empty((len(tokens), self._features.width), np.float32)
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            _, features[start : start + len(chunk)] = self._run(chunk, None)
            self._length += len(chunk)
            progress("reading the prompt", start + len(chunk), len(tokens))
        return features

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        if len(tokens) != len(parents):
            raise EngineError(f"{len(tokens)} tokens and {len(parents)} parents, expected as many")
        try:
            tree.check(parents)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self._pass = None
        self._require(tokens)
        logits, features = self._run(tokens, parents)
        self._pass = list(parents), features
        return logits

    def commit(self, rows: Sequence[int]) -> Floats:
        if self._pass is None:
            raise EngineError("commit without a pass: score a tree first")
        parents, features = self._pass
        if not rows or not 0 <= rows[-1] < len(parents) or list(rows) != tree.path_to(parents, rows[-1]):
            raise EngineError(f"rows {list(rows)} are not a path from the root of the newest pass")
        self._pass = None
        if rows[-1] != len(rows) - 1:
            self._keep(rows)
        self._length += len(rows)
        return features[list(rows)]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise EngineError(f"truncate to {length} rows, expected 0 to {self._length}")
        self._pass = None
        self._length = length

    def _require(self, tokens: Sequence[int]) -> None:
        """Make room for `tokens`. Raises ContextOverflowError past the context, UsageError for what is no token."""
        needed = self._length + len(tokens)
        if needed > self._context:
            raise ContextOverflowError(f"{needed} tokens do not fit, the context holds {self._context}")
        if bad := [token for token in tokens if not 0 <= token < self._shape.vocab]:
            raise UsageError(f"token id {bad[0]} is outside the vocabulary, expected 0 to {self._shape.vocab - 1}")
        self._make_room(needed)

    @abstractmethod
    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        """One pass of rows behind the committed ones: logits and features of every row.

        Without `parents` the rows are a stretch of text, and nobody wants its logits: there may be none.
        """

    @abstractmethod
    def _keep(self, rows: Sequence[int]) -> None:
        """Move K/V of these rows of the newest pass to the front of it."""

    @abstractmethod
    def _copy(self, other: Any, length: int) -> None:
        """Take over the first `length` rows of a sibling, for which there is room."""

    @abstractmethod
    def _start_cache(self) -> None:
        """Have a cache of one's own, without rows in it."""

    @abstractmethod
    def _make_room(self, length: int) -> None:
        """Hold at least `length` rows; on any failure what is there stays."""

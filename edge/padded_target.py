"""Dummy rows behind a pass's own: as many as make passes of every row count agree, and what differs even then.

Promise 2, row independence: a kernel for one row may round differently from the kernel for many, and which of them do
depends on processor and precision. So an engine measures it on opening, with passes of its own, and pads with the
fewest rows that make every count agree to the last bit. A dummy sees no tree node and none sees it. What still differs
then is `noise`, and `branch_noise` behind the trunk: a node that others separate from its ancestors lies in another
column than in plain decoding, so attention adds up in another order, and int8 activations amplify the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from starsd.edge import probe
from starsd.edge.cached_target import CachedTarget
from starsd.edge.target import Floats
from starsd.shared.config import Engine
from starsd.shared.errors import EngineError, UsageError
from starsd.shared.tensorrt_key import MAX_ROWS

BUCKETS = (1, 2, 4, 8, 16, 32, MAX_ROWS)  # rows of a pass over a tree on a GPU, dummies included
_FLOORS = (1, 2, 4, 8)  # buckets that may be the smallest
_PROBE_ROWS = (1, 2, 3, 5)  # row counts that are compared with many


class Rows(Protocol):
    """How many rows a pass has; `graph_contract.Padding` is one."""

    @property
    def attending(self) -> int:
        """Attention has at least as many."""
        ...

    def rows(self, count: int) -> int:
        """Of a pass whose own rows are `count`."""
        ...


class Bucket(NamedTuple):
    """One of BUCKETS, and at least `least`; a longer pass has no dummies."""

    least: int
    attending: int = 0

    def rows(self, count: int) -> int:
        return next((rows for rows in BUCKETS if rows >= max(count, self.least)), count)


class Cache(Protocol):
    """One conversation's K/V, wherever they lie."""

    @property
    def bytes(self) -> int: ...

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows from `start` on keep these, ascending, one behind the other."""
        ...

    def copy(self, other: Any, length: int) -> None:
        """Take over the first `length` rows of another conversation's."""
        ...


class PaddedTarget(CachedTarget):
    """A `CachedTarget` whose passes are padded as it finds best; see `Target` for the contract."""

    _cache: Cache
    _padding: Rows
    _noise: float
    _branch_noise: float

    @property
    def noise(self) -> float:
        return self._noise

    @property
    def branch_noise(self) -> float:
        return self._branch_noise

    @property
    def padding(self) -> Rows:
        return self._padding

    @property
    def cache_bytes(self) -> int:
        """Memory that K/V of this conversation take now, wherever they lie."""
        return self._cache.bytes

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        if isinstance(self._padding, Bucket) and len(tokens) > MAX_ROWS:
            raise EngineError(f"a pass of {len(tokens)} rows, expected at most {MAX_ROWS}")
        return super().score(tokens, parents)

    def _keep(self, rows: Sequence[int]) -> None:
        self._cache.keep(self._length, rows)

    def _copy(self, other: PaddedTarget, length: int) -> None:
        self._cache.copy(other._cache, length)

    def _choose_padding(self, paddings: Sequence[Rows]) -> None:
        """Settle on the first under which row counts agree; where none makes them, on the one that comes nearest."""
        self._choose(paddings, 1, lambda padding: 0.0)

    def _choose_bucket(self) -> None:
        """The same among buckets: all that are used have to agree, and a few bits less are not worth more rows."""
        logits = {}
        for rows in BUCKETS:
            self._padding = Bucket(rows)
            logits[rows] = self.score([1 % self.shape.vocab], [-1])
        self.truncate(0)
        apart = {rows: float(np.abs(values - logits[MAX_ROWS]).max()) for rows, values in logits.items()}
        floors = [Bucket(least) for least in _FLOORS]
        self._choose(floors, 2, lambda floor: max(apart[rows] for rows in BUCKETS if rows >= floor.rows(1)))

    def _choose(self, paddings: Sequence[Rows], near: float, more: Callable[[Rows], float]) -> None:
        """The first padding whose difference is 0, or within `near` times the least; `more` adds to what is probed."""
        differences: list[float] = []
        for self._padding in paddings:
            counts = probe.count_noise(self, _PROBE_ROWS)
            differences.append(max(more(self._padding), counts, probe.path_noise(self, probe.TRUNK)))
            if differences[-1] == 0:
                break
        least = min(differences)
        best = next((i for i, difference in enumerate(differences) if difference <= near * least), 0)
        self._padding, self._noise = paddings[best], differences[best]
        self._branch_noise = max(self._noise, probe.path_noise(self, probe.COMB))


def context_of(config: Engine, least: int, most: int, everything: str = "all") -> int:
    """Tokens of context that `config` asks for. Raises UsageError for sizes that are out of range."""
    context = config.max_context or most
    if not least <= context <= most:
        raise UsageError(f"context is {context} tokens, expected {least} to {most}, or 0 for {everything}")
    if config.prefill_chunk < 1:
        raise UsageError(f"prefill chunk is {config.prefill_chunk} tokens, expected at least 1")
    return context

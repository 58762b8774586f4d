"""The EAGLE drafter: rows from true features, and the trees that grow from them.

The lasting cache of a session holds K/V of rows made from true features only. In a one-layer head these depend on
nothing but their own feature, token and position, so attention runs for the last row alone, whose output is where a
tree starts. A growing tree writes its K/V behind the lasting rows, where the next rows overwrite them.

Trees follow `tests/golden/README.md` (*Growing the tree*); all scores are sums of log-probabilities from the root.
"""

from __future__ import annotations

import numpy as np
import torch

from starsd.server.drafter import Draft, DynamicTree, Floats, Ints, StaticTree, TreeShape
from starsd.server.dynamic_tree import grow
from starsd.server.eagle_heads import load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.selftest import self_test
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.home import parse_ref
from starsd.shared.manifest import FeatureSpec

_FIRST_CAPACITY = 256  # rows of K/V a session starts with; doubles when full


def open_drafter(head: str, target: str, *, dtype: str = "fp32", device: str = "cpu") -> EagleDrafter:
    layer = EagleLayer(load_head(head, target, dtype=dtype, device=device))
    return EagleDrafter(layer, self_test(layer, parse_ref(head).folder))


class EagleDrafter:
    """One head's weights, shared by all sessions."""

    def __init__(self, layer: EagleLayer, warnings: tuple[str, ...] = ()) -> None:
        self.layer = layer
        self._warnings = warnings

    @property
    def features(self) -> FeatureSpec:
        return self.layer.spec.features

    @property
    def vocab(self) -> int:
        return self.layer.spec.vocab

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.layer.spec.warnings + self._warnings

    def open(self) -> EagleSession:
        return EagleSession(self.layer)


class EagleSession:
    """One conversation's lasting rows."""

    def __init__(self, layer: EagleLayer) -> None:
        self._layer = layer
        self._cache = self._empty(_FIRST_CAPACITY)
        self._rows = 0
        self._root = 0
        self._output: torch.Tensor | None = None  # of the last row, (1, hidden)

    @property
    def rows(self) -> int:
        return self._rows

    @torch.inference_mode()
    def extend(self, features: Floats, next_tokens: Ints) -> None:
        layer, count, width = self._layer, len(next_tokens), self._layer.spec.features.width
        if features.shape != (count, width):
            raise UsageError(f"features have shape {list(features.shape)}, expected {[count, width]}")
        if not np.isfinite(features).all():
            raise UsageError("features are not finite: the target overflowed or the transfer broke them")
        if count and not 0 <= next_tokens.min() <= next_tokens.max() < layer.spec.vocab:
            raise UsageError(
                f"token ids run from {next_tokens.min()} to {next_tokens.max()}, expected 0 to {layer.spec.vocab - 1}"
            )
        if not count:
            return
        tokens = torch.as_tensor(next_tokens, dtype=torch.int64, device=layer.device)
        positions = torch.arange(self._rows, self._rows + count, device=layer.device)
        entered = layer.enter(tokens, layer.fuse(torch.as_tensor(features)), positions)
        self._write(self._rows, entered.keys, entered.values)
        self._rows += count
        self._root = int(next_tokens[-1])
        keys, values = self._seen(self._rows - 1, self._rows)
        mixed = layer.attend(entered.queries[None, -1:], keys[None], values[None], None)
        self._output = layer.leave(mixed[0], entered.residual[-1:])

    def draft(self, shape: TreeShape) -> Draft:
        if self._output is None:
            raise UsageError("nothing to draft from, expected rows since the session was opened or truncated")
        with torch.inference_mode():
            if isinstance(shape, StaticTree):
                tokens, parents, scores = self._static(shape, self._output)
            else:
                tokens, parents, scores = self._dynamic(shape, self._output)
            scores_out = scores.cpu().numpy()
            if np.isnan(scores_out).any():
                name = str(self._layer.dtype).removeprefix("torch.")
                raise ModelError(f"the head's outputs are not numbers in {name}: load it as bf16 or fp32")
            return Draft(
                np.concatenate([[self._root], self._layer.target_ids(tokens).cpu().numpy()]),
                np.concatenate([[-1], parents.cpu().numpy()]),
                np.concatenate([np.zeros(1, np.float32), scores_out]),
            )

    def truncate(self, rows: int) -> None:
        if not 0 <= rows <= self._rows:
            raise UsageError(f"truncate to {rows} rows, expected 0 to {self._rows}")
        if rows < self._rows:
            self._rows, self._output = rows, None

    def _dynamic(self, shape: DynamicTree, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft ids, parents and scores of all nodes but the root."""
        growth = _Growth(self, shape.depth * shape.top_k)

        def run(tokens: torch.Tensor, hidden: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
            return growth.run(tokens[0], hidden[0], None if parents is None else parents[0])[None]

        tokens, rows, scores = grow(self._layer, run, output, shape)
        return tokens[0], rows[0], scores[0]

    def _static(self, shape: StaticTree, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft ids, parents and scores of all nodes but the root."""
        layer = self._layer
        paths = sorted(shape.paths, key=lambda path: (len(path), path))
        inner = {path[:-1] for path in paths}
        widest = 1 + max((path[-1] for path in paths), default=0)
        if widest > layer.spec.draft_vocab:
            raise UsageError(f"static tree takes rank {widest - 1}, the draft vocabulary has {layer.spec.draft_vocab}")
        growth = _Growth(self, len(inner) - 1 if inner else 0)
        number = {path: i for i, path in enumerate([(), *paths])}
        parents = torch.tensor([number[path[:-1]] for path in paths], device=layer.device, dtype=torch.int64)
        all_tokens, all_scores = [parents[:0]], [output.new_empty(0, dtype=torch.float32)]
        expanded: list[tuple[int, ...]] = [()]
        scores = output.new_zeros(1, dtype=torch.float32)
        for level in range(max(map(len, paths), default=0)):
            ids, steps = layer.best(output, widest)
            here = [path for path in paths if len(path) == level + 1]
            slot = torch.tensor([expanded.index(path[:-1]) for path in here], device=layer.device)
            rank = torch.tensor([path[-1] for path in here], device=layer.device)
            tokens, sums = ids[slot, rank], scores[slot] + steps[slot, rank]
            all_tokens.append(tokens)
            all_scores.append(sums)
            goes_on = [i for i, path in enumerate(here) if path in inner]
            if not goes_on:
                break
            hidden = layer.latent(output)[slot[goes_on]]
            output = growth.run(layer.target_ids(tokens[goes_on]), hidden, None if level == 0 else slot[goes_on])
            expanded, scores = [here[i] for i in goes_on], sums[goes_on]
        return torch.cat(all_tokens), parents, torch.cat(all_scores)

    def _seen(self, position: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (kv_heads, rows, head_dim) up to `end`, from the oldest row that `position` may look at."""
        window = self._layer.spec.window
        start = max(0, position - window + 1) if window else 0
        return self._cache[0, :, start:end], self._cache[1, :, start:end]

    def _write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end, capacity = start + len(keys), self._cache.shape[2]
        if end > capacity:
            old, self._cache = self._cache, self._empty(max(2 * capacity, end))
            self._cache[:, :, :capacity] = old
        self._cache[0, :, start:end] = keys.transpose(0, 1)
        self._cache[1, :, start:end] = values.transpose(0, 1)

    def _empty(self, rows: int) -> torch.Tensor:
        spec = self._layer.spec
        return torch.zeros(2, spec.kv_heads, rows, spec.head_dim, dtype=self._layer.dtype, device=self._layer.device)


class _Growth:
    """K/V and ancestry of one growing tree, behind the session's lasting rows."""

    def __init__(self, session: EagleSession, nodes: int) -> None:
        self._session = session
        self._layer = session._layer
        self._count = 0
        self._level = 0
        self._level_start = 0
        # row sees column, among the tree's own nodes
        self._sees = torch.zeros(nodes, nodes, dtype=torch.bool, device=self._layer.device)

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """Run one level: output (n, hidden) of nodes whose parents are these slots of the level before.

        Every node of a level has the same position, one more than the level before; the first follows the last row.
        """
        session, layer = self._session, self._layer
        start, end = self._count, self._count + len(tokens)
        position = session._rows + self._level
        positions = torch.full((len(tokens),), position, device=layer.device)
        entered = layer.enter(tokens, hidden, positions)
        session._write(session._rows + start, entered.keys, entered.values)
        if parents is not None:
            self._sees[start:end, :start] = self._sees[self._level_start + parents, :start]
        self._sees[start:end, start:end].fill_diagonal_(True)
        keys, values = session._seen(position, session._rows + end)
        lasting = keys.shape[1] - end
        unseen = torch.zeros(len(tokens), keys.shape[1], dtype=torch.bool, device=layer.device)
        unseen[:, lasting:] = ~self._sees[start:end, :end]
        self._count, self._level, self._level_start = end, self._level + 1, start
        mixed = layer.attend(entered.queries[None], keys[None], values[None], unseen[None])
        return layer.leave(mixed[0], entered.residual)

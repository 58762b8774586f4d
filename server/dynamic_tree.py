"""EAGLE-2's dynamic tree (arXiv 2406.16858) for any number of sessions at once, after `tests/golden/README.md`
(*Growing the tree*). All scores are sums of log-probabilities from the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from starsd.server.drafter import DynamicTree
from starsd.server.eagle_layer import EagleLayer
from starsd.server.live_session import LiveSession
from starsd.server.slots import SlotPool
from starsd.shared.errors import UsageError


class RunLevel(Protocol):
    """One pass over a level of every session's tree."""

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """Outputs (sessions, k, hidden) of nodes with these target ids (sessions, k) and hidden (sessions, k, hidden).

        `parents` (sessions, k) are slots of the level before; None for the first level, whose parent is the root.
        """
        ...


Noise = Callable[[int], torch.Tensor | None]  # of the tokens so many levels below the root, (sessions, draft_vocab)


def grow(
    layer: EagleLayer, run: RunLevel, output: torch.Tensor, shape: DynamicTree, noise: Noise = lambda level: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft ids, parents and scores, each (sessions, total - 1), of all nodes but the root, in generation order.

    `output` (sessions, hidden) is the layer's output for each session's last row.
    """
    k, sessions = shape.top_k, len(output)
    if k > layer.spec.draft_vocab:
        raise UsageError(f"top_k is {k}, expected at most the draft vocabulary's {layer.spec.draft_vocab}")
    tokens, scores = layer.best(output, k, noise(1))
    hidden = layer.latent(output)[:, None].expand(-1, k, -1)
    slots: torch.Tensor | None = None  # where each frontier node's parent was in the call before
    all_tokens, all_scores, all_parents = [tokens], [scores], [torch.full_like(tokens, -1)]
    frontier = torch.arange(k, device=layer.device).expand(sessions, k)  # its place among all candidates
    for level in range(shape.depth):
        output = run(layer.target_ids(tokens), hidden, slots)
        drawn = noise(level + 2)
        ids, steps = layer.best(output.flatten(0, 1), k, None if drawn is None else drawn.repeat_interleave(k, 0))
        found, sums = ids.view(sessions, -1), (scores[:, :, None] + steps.view(sessions, k, k)).flatten(1)
        all_tokens.append(found)
        all_scores.append(sums)
        all_parents.append(frontier.repeat_interleave(k, 1))
        if level + 1 == shape.depth:
            break
        scores, chosen = sums.topk(k)
        tokens, slots = found.gather(1, chosen), chosen // k
        hidden = layer.latent(output).gather(1, slots[:, :, None].expand(-1, -1, output.shape[-1]))
        frontier = k + level * k * k + chosen
    sums = torch.cat(all_scores, 1)
    # stable: a child that scores no less than its parent (a probability of one) never displaces it
    kept = sums.sort(descending=True, stable=True, dim=1).indices[:, : shape.total - 1].sort(1).values
    parents = torch.cat(all_parents, 1).gather(1, kept)
    rows = torch.searchsorted(kept, parents) + (parents >= 0)
    return torch.cat(all_tokens, 1).gather(1, kept), rows, sums.gather(1, kept)


class SlotGrowth:
    """One level after the other of every session's official tree, in the slots' tree entries."""

    def __init__(self, pool: SlotPool, layer: EagleLayer, sessions: Sequence[LiveSession], shape: DynamicTree) -> None:
        self._layer, self._pool = layer, pool
        self._slots = [session.slot for session in sessions]
        self._index = torch.tensor(self._slots, device=self._layer.device)[:, None]
        self._k, self._level = shape.top_k, 0
        last = np.array([session.rows.last for session in sessions])
        self._last = torch.from_numpy(last).to(self._layer.device)[:, None]
        self._places = max(session.rows.used for session in sessions)
        unseen = np.ones((len(sessions), shape.depth, self._places), np.bool_)
        for mask, session in zip(unseen, sessions, strict=True):
            levels = session.rows.last + 1 + np.arange(shape.depth)
            mask[:, : session.rows.used] = ~session.rows.seen(levels)
        self._unseen = torch.from_numpy(unseen).to(self._layer.device)
        nodes = shape.depth * shape.top_k
        self._hides = torch.ones(len(sessions), nodes, nodes, dtype=torch.bool, device=self._layer.device)

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """See `RunLevel`."""
        layer, pool, k = self._layer, self._pool, self._k
        sessions, start, end = len(tokens), self._level * k, (self._level + 1) * k
        positions = (self._last + 1 + self._level).expand(-1, k)
        entered = layer.enter(tokens.flatten(), hidden.flatten(0, 1), positions.flatten())
        entries = torch.arange(start, end, device=layer.device)
        columns = (pool.limits.entries - 1 - entries).expand(sessions, -1).flatten()
        pool.write(self._index.expand(-1, k).flatten(), columns, entered.keys, entered.values)
        hides = self._hides[:, start:end]
        if parents is not None:
            above = self._hides[:, start - k : start, :start]
            hides[:, :, :start] = above.gather(1, parents[:, :, None].expand(-1, -1, start))
        hides[:, :, start:end].diagonal(dim1=1, dim2=2).fill_(False)
        lasting = self._unseen[:, self._level, None].expand(-1, k, -1)
        unseen = torch.cat([hides[:, :, :end].flip(2), lasting], 2)
        keys, values = pool.window(self._slots, end, self._places)
        self._level += 1
        mixed = layer.attend(entered.queries.view(sessions, k, *entered.queries.shape[1:]), keys, values, unseen)
        return layer.leave(mixed.flatten(0, 1), entered.residual).view(sessions, k, -1)

"""From stored rows to what an optimiser step eats: padded chats on the device, and each depth's rows and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from starsd.export.train_data import Chats, Ints, Role
from starsd.export.train_head import Head
from starsd.export.train_store import Rows
from starsd.export.train_target import BatchTarget

_ROOM = 0.5  # of an accelerator's free memory may hold taps


@dataclass(frozen=True)
class DepthRows:
    """Rows of one depth that are trained: `places` int64 (m,) in its flattened rows, (chats · n) or (chats · c),
    `labels` int64 (m,) in the stored rows, `weights` float32 (m,), `answers` bool (m,): whether they predict an
    answer's token."""

    places: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """`embedded` (chats, n, hidden), `taps` (chats, n, width); `later` int64 (c,) the columns that depths behind 0 have
    rows of, None: all; `depths` one entry a depth."""

    embedded: torch.Tensor
    taps: torch.Tensor
    later: torch.Tensor | None
    depths: list[DepthRows]

    @property
    def tokens(self) -> int:
        """Padding included."""
        return self.taps.shape[0] * self.taps.shape[1]


def draft_ids(chats: Chats, count: int, vocab: int, user_weight: float) -> Ints:
    """The `count` ids that are predicted most often, ascending; all of them when the vocabulary is no larger.

    A user's tokens count `user_weight`; among equals the smaller id is taken.
    """
    if count >= vocab:
        return np.arange(vocab)
    weights = role_weights(user_weight)[chats.roles]
    counts = np.bincount(chats.tokens, weights, minlength=vocab)
    chosen: Ints = np.sort(np.argsort(-counts, kind="stable")[:count])
    return chosen


def role_weights(user_weight: float) -> NDArray[np.float32]:
    """What predicting a token weighs, by who it is from."""
    weights = np.zeros(len(Role), np.float32)
    weights[Role.USER], weights[Role.ANSWER] = user_weight, 1.0
    return weights


class Feeder:
    """Makes batches. Taps live in the accelerator's memory when they fit, else where the store maps them."""

    def __init__(self, rows: Rows, target: BatchTarget, draft: Ints, steps: int, user_weight: float) -> None:
        self.chats = rows.chats
        self._kept, self._steps, self._target = rows.kept, steps, target
        self._weights = role_weights(user_weight)
        self._device = target.device
        self._taps = rows.taps
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
            if rows.taps.numel() * rows.taps.element_size() < _ROOM * free:
                self._taps = rows.taps.to(self._device)
        self._top_ids, self._top_probs = rows.top_ids.to(self._device), rows.top_probs.to(self._device)
        to_draft = torch.full((target.shape.vocab,), -1, dtype=torch.int64)
        to_draft[torch.from_numpy(draft)] = torch.arange(len(draft))
        self._to_draft = to_draft.to(self._device)

    def batch(self, chosen: Sequence[int] | Ints, share: float = 1.0, rng: np.random.Generator | None = None) -> Batch:
        """These chats, padded on the right to the longest; depths behind 0 on a `share` of the columns, drawn by `rng`,
        which a share below 1 needs."""
        starts, lengths = self.chats.offsets[chosen], self.chats.lengths[chosen]
        columns = np.arange(lengths.max())
        # padding repeats a chat's last row: no row that counts sees it
        index = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        ids = torch.from_numpy(self.chats.tokens[index]).to(self._device)
        if max(chosen) < self._kept:
            flat = torch.from_numpy(index.reshape(-1))
            taps = self._taps[flat.to(self._taps.device)].to(self._device).view(*index.shape, -1)
        else:
            taps = self._target.forward(ids)[0]
        embedded = F.embedding(ids, self._target.embedding)
        dtype = self._target.dtype
        later, some = None, columns
        if share < 1:
            assert rng is not None
            some = np.sort(rng.choice(columns, max(1, round(share * len(columns))), replace=False))
            later = torch.from_numpy(some).to(self._device)
        depths = [self._depth(starts, lengths, some if d else columns, d) for d in range(self._steps)]
        return Batch(embedded, taps.to(dtype), later, depths)

    def labels(self, depth: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft ids int64 and their probabilities float32, both (m, top), of the target's next tokens at these rows.

        Probabilities are renormalised over the draft vocabulary; what is not in it has id 0 and probability 0. A row
        whose likeliest token is not in it has id -1 there: it can only be a miss.
        """
        ids = self._to_draft[self._top_ids[depth.labels].long()]
        probs = torch.where(ids >= 0, self._top_probs[depth.labels].float(), 0.0)
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-6)
        ids[:, 1:].clamp_(min=0)
        return ids, probs

    def _depth(self, starts: Ints, lengths: Ints, columns: Ints, depth: int) -> DepthRows:
        """Row i of a chat of n tokens predicts token i + 2 + depth, which the target foretold at i + 1 + depth."""
        known = columns[None] < lengths[:, None] - 2 - depth
        label = starts[:, None] + np.minimum(columns + 1 + depth, lengths[:, None] - 1)
        roles = self.chats.roles[np.minimum(label + 1, len(self.chats.roles) - 1)].reshape(-1)
        weight = self._weights[roles] * known.reshape(-1)
        places = np.flatnonzero(weight)
        parts = (places, label.reshape(-1)[places], weight[places], roles[places] == Role.ANSWER)
        return DepthRows(*(torch.from_numpy(part).to(self._device, non_blocking=True) for part in parts))


def soft_loss(logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross entropy of rows (m, draft vocab) against `Feeder.labels`; rows that can only miss weigh 0.

    `log_softmax`: four times as fast as `logsumexp` on CPUs, backward included.
    """
    likely = F.log_softmax(logits, -1, dtype=torch.float32).gather(1, ids.clamp(min=0))
    weights = weights * (ids[:, 0] >= 0)
    return -((probs * likely).sum(-1) * weights).sum() / weights.sum().clamp(min=1e-6)


def losses(head: Head, feeder: Feeder, batch: Batch) -> list[torch.Tensor]:
    """The loss of each depth."""
    found = []
    outputs = head.unroll(batch.embedded, batch.taps, len(batch.depths), batch.later)
    for depth, output in zip(batch.depths, outputs, strict=True):
        rows = output.flatten(0, 1)[depth.places]
        found.append(soft_loss(head.logits(rows), *feeder.labels(depth), depth.weights))
    return found


@torch.no_grad()
def accepted(head: Head, feeder: Feeder, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """How a chain fares from every row: `reached` and `hit` int64 (depths,).

    Along the chat's own tokens; a draft is a hit when it is the target's likeliest token, and a depth is reached when
    all drafts above it were hits. Only rows whose next tokens are an answer's, as many as there are depths, count.
    """
    assert batch.later is None, "a chain is followed through all depths of a row"
    depths = len(batch.depths)
    alive = torch.ones(batch.tokens, dtype=torch.bool, device=batch.taps.device)
    for depth in batch.depths:
        answers = torch.zeros_like(alive)
        answers[depth.places] = depth.answers
        alive &= answers
    reached, hit = alive.new_zeros(depths, dtype=torch.int64), alive.new_zeros(depths, dtype=torch.int64)
    for j, output in enumerate(head.unroll(batch.embedded, batch.taps, depths)):
        depth = batch.depths[j]
        guess = head.logits(output.flatten(0, 1)[depth.places]).argmax(-1)
        right = torch.zeros_like(alive)
        right[depth.places] = guess == feeder.labels(depth)[0][:, 0]
        reached[j] = alive.sum()
        alive = alive & right
        hit[j] = alive.sum()
    return reached, hit

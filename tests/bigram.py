"""A language model that mostly goes on with the same token behind the same token, and a drafter that knows how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tiny_session import VOCAB, ToyTarget, toy_logits

from starsd.server.drafter import DynamicTree, SlotLimits, Total, each
from starsd.server.live_session import LiveSession
from starsd.server.live_tree import LiveTree
from starsd.server.served import Head
from starsd.shared.errors import CapacityError
from starsd.shared.messages import HeadInfo

FINGERPRINT = "f" * 64
HABIT = 3.5  # logits that the usual next token has more: it then follows four times in five
FOLLOWS = np.random.default_rng(7).permutation(VOCAB)
TOP_K = 4


def bigram_logits(context: Sequence[int]) -> Any:
    logits = toy_logits(context)
    logits[FOLLOWS[context[-1]]] += HABIT
    return logits


class BigramTarget(ToyTarget):
    """Its one feature is nothing that anybody needs; what counts is that rows are complete and in place."""

    def logits(self, context: Sequence[int]) -> Any:
        return bigram_logits(context)


class BigramDrafter:
    """What `BatchDrafter` is to a head, without one: the usual next token, and some others."""

    def __init__(self, slots: int = 8, window: int = 64) -> None:
        self.limits = SlotLimits(slots, window, 64)
        self.free = list(range(slots))
        self.passes = 0

    def open(self, *, projected: bool = False) -> LiveSession:
        if not self.free:
            raise CapacityError("all slots are taken")
        tree = LiveTree(0, top_k=TOP_K, depth=7, entries=self.limits.entries)
        slot = self.free.pop()
        return LiveSession(slot, self.limits, tree, vocab=VOCAB, width=1, projected=projected, close=self.free.append)

    def advance(self, work: Sequence[tuple[LiveSession, int]], total: Total = None) -> int:
        rows, self.passes = 0, self.passes + 1
        for (session, budget), nodes in zip(work, each(total, len(work), 20), strict=True):
            session.take_moves()
            while (chunk := session.take_features(512)) is not None:
                session.landed(chunk[0])
            plan = session.plan(budget, nodes)
            if plan is not None:
                rows += len(plan.tokens)
                others = (plan.tokens[:, None] * 7 + np.arange(1, TOP_K)) % VOCAB
                usual = FOLLOWS[plan.tokens][:, None]
                others = np.where(others == usual, (others + 1) % VOCAB, others)
                tokens = np.concatenate([usual, others], axis=1)
                steps = np.broadcast_to(np.log(np.float32([0.6, 0.1, 0.05, 0.02])), tokens.shape)
                session.finish(plan, tokens, steps)
        return rows

    def trees(self, sessions: Sequence[LiveSession], shape: DynamicTree) -> Any:
        raise NotImplementedError


def bigram_head(drafter: Any = None) -> Head:
    return Head(HeadInfo(FINGERPRINT, "ab" * 32, "bigram"), drafter or BigramDrafter(), vocab=VOCAB, projects=False)

"""A session that is drafted for as a server might: parts of the truth, branches, nonsense."""

from __future__ import annotations

import math
import random

import numpy as np

from starsd.edge.drafts import layout
from starsd.edge.policy import Policy
from starsd.edge.session import Session
from starsd.edge.speculator import Proposal, Speculator
from starsd.edge.target import Target
from starsd.edge.text import Text
from starsd.shared.messages import Draft

LIKELY, UNLIKELY = -0.1, -2.0


class Scripted(Speculator):
    """Knows the conversation's end. Its trunk is often wrong somewhere; the truth then hangs on a branch."""

    def __init__(self, known: list[int], vocab: int, seed: int) -> None:
        super().__init__(Policy.NEVER_WAIT, ngrams=False)
        self.known, self.vocab, self.random = known, vocab, random.Random(seed)
        self.sent = 0

    def propose(self, room: int) -> Proposal:
        self._drafts.graft(self._draft())
        found = self._drafts.best(min(room - 1, 40), lambda node: 0.99 if node.sure else math.exp(node.step))
        rows, parents = layout([node for node, _ in found])
        return Proposal([self._tokens[-1], *(node.token for node in rows)], parents, rows)

    def _draft(self) -> Draft:
        base = len(self._tokens)
        ahead = self.known[base:][: self.random.randint(0, 5)]
        wrong_at = self.random.randrange(8)  # often beyond the end: then the trunk is right
        nodes: list[tuple[int, int, float]] = []  # parent, token, step
        for i, token in enumerate(ahead):
            nodes.append((i - 1, self._other(token) if i == wrong_at else token, LIKELY))
        above = wrong_at - 1
        for token in ahead[wrong_at:]:
            if self.random.random() < 0.5:
                nodes.append((above, self._other(token), UNLIKELY))
            nodes.append((above, token, UNLIKELY))
            above = len(nodes) - 1
        first, self.sent = self.sent, self.sent + len(nodes)
        parents, tokens, steps = zip(*nodes, strict=True) if nodes else ((), (), ())
        numbers = [parent if parent < 0 else first + parent for parent in parents]
        ids, logs = np.array(tokens, np.int64), np.array(steps, np.float32)
        return Draft(1, 1, 0, base, first, np.array(numbers, np.int64), ids, logs)

    def _other(self, token: int) -> int:
        return (token + self.random.randrange(1, self.vocab)) % self.vocab


class Drafting(Session):
    """Knows what plain decoding answered to `prompt`."""

    def __init__(self, target: Target, text: Text, prompt: list[int], truth: list[int], seed: int) -> None:
        super().__init__(target, text, Scripted([*prompt, *truth], target.shape.vocab, seed))

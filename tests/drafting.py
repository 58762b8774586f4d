"""A session that is drafted for as a server might: parts of the truth, branches, nonsense."""

from __future__ import annotations

import random

from starsd.edge.session import Session
from starsd.edge.target import Target
from starsd.edge.text import Text


class Drafting(Session):
    """Knows what plain decoding answered. Its trunk is often wrong somewhere; the truth then hangs on a branch."""

    def __init__(self, target: Target, text: Text, prompt: list[int], truth: list[int], seed: int) -> None:
        super().__init__(target, text)
        self.known = [*prompt, *truth]
        self.random = random.Random(seed)

    def _draft(self, tip: int) -> tuple[list[int], list[int]]:
        tokens, parents = super()._draft(tip)
        ahead = self.known[self.target.length + len(tokens) :][: self.random.randint(0, 5)]
        wrong_at = self.random.randrange(8)  # often beyond the end: then the trunk is right
        trunk = [self._other(token) if i == wrong_at else token for i, token in enumerate(ahead)]
        first = len(tokens)
        tokens += trunk
        parents += range(first - 1, first - 1 + len(trunk))
        at = first + wrong_at - 1
        for token in ahead[wrong_at:]:
            if self.random.random() < 0.5:
                tokens.append(self._other(token))
                parents.append(at)
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        room = self.target.context - self.target.length
        return tokens[:room], parents[:room]

    def _other(self, token: int) -> int:
        return (token + self.random.randrange(1, self.target.shape.vocab)) % self.target.shape.vocab

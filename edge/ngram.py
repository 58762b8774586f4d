"""Drafts from the conversation itself: what followed the last time the newest few tokens stood there.

Costs nothing but memory, needs no server, and is right where text repeats: code, lists, quotations, summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 5  # tokens that are looked up
SHORTEST = 2
PROPOSED = 8  # tokens of a draft


class NgramIndex:
    """Places in `tokens`, the conversation so far, which is read and never changed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.begin()

    def begin(self) -> None:
        """Index anew: the conversation is another one, or shorter than it was."""
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self) -> tuple[int, list[int]]:
        """How many of the newest tokens were found, 0 or SHORTEST … LONGEST, and what followed them."""
        self._catch_up()
        tokens = self._tokens
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                return length, list(tokens[place : place + PROPOSED])
        return 0, []

    def _catch_up(self) -> None:
        """Index all but the newest token: what follows the others is known."""
        tokens = self._tokens
        for place in range(max(self._indexed, 1), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, place) + 1):
                self._after[tuple(tokens[place - length : place])] = place
        self._indexed = max(len(tokens), 1)

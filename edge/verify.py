"""Which drafts were right: walk the tree along the tokens that plain decoding would choose (promise 1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import EngineError
from starsd.shared.sampling import Sampler, TokenLogprob
from starsd.shared.tree import ROOT


@dataclass(frozen=True)
class Verdict:
    """What one step commits, and what it expects to come next.

    `rows` of the pass stay in the cache, the root first; `tokens` are the new ids, accepted drafts and then one that
    no row stands for: the new tip. Both have the same length, at least 1. A caller that ends earlier still, at a stop
    string, keeps the first n of both. `preview` are tokens behind them that rows we do not trust have chosen: all but
    certain, so the best drafts for the next pass. `logprobs` has one for each of `tokens` where they were asked for.
    """

    rows: list[int]
    tokens: list[int]
    near_ties: int
    preview: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Drafts that were right."""
        return len(self.tokens) - 1


def verify(
    logits: NDArray[np.float32],
    tokens: Sequence[int],
    parents: Sequence[int],
    sampler: Sampler,
    path: Sequence[int],
    *,
    index: int,
    eos: Collection[int] = (),
    limit: int | None = None,
    epsilon: float = 0.0,
    trusted: int | None = None,
    top_logprobs: int | None = None,
) -> Verdict:
    """Choose the token at the root, go to the child that is this token, and so on until there is none.

    `logits`, float32 (n, V), are those of the tree `tokens` and `parents`, row 0 the tip; `path` are the ids generated
    so far and `index` is the output index of the first new token. Nothing is committed beyond an end token in `eos`
    or beyond `limit` new tokens. Choices whose gap is below `epsilon` (logits) count as near-ties. Of siblings with the
    same token the first counts. Only the first `trusted` rows commit anything (None: all of them); where the walk
    leaves them it goes on as a preview. With `top_logprobs` the verdict says how likely its tokens were, and that many
    of the likeliest. Raises EngineError when the shapes disagree or `limit` is below 1.
    """
    if not len(logits) == len(tokens) == len(parents) > 0:
        raise EngineError(f"{len(logits)} rows of logits for {len(tokens)} tokens and {len(parents)} parents")
    if limit is not None and limit < 1:
        raise EngineError(f"limit is {limit} new tokens, expected 1 or more")
    children: dict[tuple[int, int], int] = {}
    for row in range(ROOT + 1, len(tokens)):
        children.setdefault((parents[row], tokens[row]), row)

    trusted = len(tokens) if trusted is None else trusted
    rows: list[int] = []
    here = list(path)
    new: list[int] = []
    near_ties = 0
    logprobs: list[TokenLogprob] = []
    at: int | None = ROOT
    while at is not None:
        choice = sampler.choose(logits[at], here, index + len(new))
        if at < trusted:
            rows.append(at)
            near_ties += choice.gap < epsilon
            if top_logprobs is not None:
                logprobs.append(sampler.logprob(logits[at], here, choice.token, top_logprobs))
        here.append(choice.token)
        new.append(choice.token)
        ended = choice.token in eos or len(new) == limit
        at = None if ended else children.get((at, choice.token))
    return Verdict(rows, new[: len(rows)], near_ties, new[len(rows) :], logprobs)

"""Drafts for a sampled answer, ranked under the very noise that its tokens are drawn with (docs/sampling.md).

The edge chooses argmax(logits / T + noise). Who knows T and the noise can guess better than by q, the drafter's
distribution, alone. A child's score is

    log q + WEIGHT · T · noise,    and log-softmax of the scores is its log-probability given the noise

With an exact drafter at temperature 1 the noise would count fully, and so would log q, both times infinity. A real one
errs: q holds its doubt already, and noise that lifts what it errs about counts less. WEIGHT is fitted: see the page.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from starsd.server.drafter import Floats, Ints
from starsd.shared.messages import Race
from starsd.shared.noise import from_words, words

WEIGHT = 0.75
KEPT = 24  # positions whose noise is remembered: a deep tree's, since trees are refined and move on


class RaceNoise:
    """What one session's noise adds to the logits of a drafter whose target has `vocab` tokens.

    `ids` are the target ids that the drafter knows (draft_vocab,), None where they are all.
    """

    def __init__(self, race: Race, vocab: int, ids: Ints | None = None) -> None:
        self._race, self._ids = race, ids
        self._vocab = vocab if ids is None else int(ids.max()) + 1
        self._kept: OrderedDict[int, Floats] = OrderedDict()

    def at(self, position: int) -> Floats | None:
        """For tokens at this position of the text, (draft_vocab,); None before the answer."""
        if (index := position - self._race.start) < 0:
            return None
        if (known := self._kept.get(index)) is None:
            drawn = words(self._race.seed, self._race.choice, index, self._vocab)
            noise = from_words(drawn if self._ids is None else drawn[self._ids])
            known = self._kept[index] = (WEIGHT * self._race.temperature * noise).astype(np.float32)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return known

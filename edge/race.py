"""What a server may be told of how an answer is drawn, so that it drafts what the draw is likely to choose."""

from __future__ import annotations

import numpy as np

from starsd.shared.limits import MAX_TEMPERATURE
from starsd.shared.messages import Race
from starsd.shared.noise import WORD
from starsd.shared.sampling import Sampler


def race_of(sampler: Sampler, start: int) -> Race | None:
    """The race behind an answer whose first token is at position `start`; None where there is none: it is greedy.

    Truncation, penalties and bias are left out: drafts do well without.
    """
    params = sampler.params
    if params.temperature > MAX_TEMPERATURE or (temperature := float(np.float32(params.temperature))) == 0:
        return None
    return Race(temperature, params.seed % WORD, sampler.choice, start)

"""How far the rows of an engine's passes are from plain decoding: measured on the engine itself, by passes alone.

Promise 2, row independence: a kernel for one row may round differently from the kernel for many, and a node that others
separate from its ancestors lies in another column than in plain decoding. Both are seen in the logits of a small tree
behind a small prompt. An engine probes itself when it is opened, with nothing in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from starsd.edge.target import Target
from starsd.shared import tree

WIDE = 8  # rows of the tree
PROMPT = 2 * WIDE  # most rows before it
TRUNK = tuple(tree.chain(WIDE))
COMB = (-1, 0, 0, 2, 2, 4, 4, 6)  # a tree whose path to the last row skips every other one
_BUSHY = (-1, 0, 0, 1, 1, 2, 3, 3)


def count_noise(target: Target, counts: Sequence[int]) -> float:
    """The largest difference in a logit between passes of `counts` rows (at most WIDE) and of WIDE over one tree."""
    tokens = _prepare(target)
    wide = target.score(tokens, _BUSHY)
    worst = max(float(np.abs(target.score(tokens[:n], _BUSHY[:n]) - wide[:n]).max()) for n in counts)
    target.truncate(0)
    return worst


def path_noise(target: Target, parents: Sequence[int]) -> float:
    """The largest difference in a logit between the path to a tree's last row and plain decoding of the same.

    TRUNK as the tree gives the noise of the trunk, COMB that of branches.
    """
    tokens = _prepare(target)
    wide, worst = target.score(tokens, parents), 0.0
    for row in tree.path_to(parents, WIDE - 1):
        worst = max(worst, float(np.abs(target.score([tokens[row]], [-1])[0] - wide[row]).max()))
        target.commit([0])
    target.truncate(0)
    return worst


def _prepare(target: Target) -> list[int]:
    """Read a prompt; WIDE tokens for a tree behind it."""
    vocab = target.shape.vocab
    target.prefill([(7 * i + 1) % vocab for i in range(min(PROMPT, target.context - WIDE))])
    return [(11 * i + 3) % vocab for i in range(WIDE)]

"""Whether a head still does what it did when it was trained: wrong taps or a wrong target draft without an error, only
badly (FACTS 1: 0 % accepted instead of 59 %).

A head ships with `recording.npz` beside its weights: rounds as in `recording.py`, about 128 tokens that its own target
wrote, and

    chain_accepted   int64 (n,)   for each of the first n rounds, how many tokens of a chain the target agreed with

of which only the first drafted token is looked at, since all rounds then take a single pass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from starsd.server.drafter import Ints
from starsd.server.eagle_layer import EagleLayer
from starsd.server.recording import Arrays, Round, read_arrays, read_rounds
from starsd.shared.errors import UsageError

FILE_NAME = "recording.npz"
MOST_ROWS = 4096
TOLERANCE = 0.05  # six of 128 tokens: what rounding to bf16 or int8 may turn, and no wrong tap stays within
_LONGEST_CHAIN = 64


def self_test(layer: EagleLayer, folder: Path) -> tuple[str, ...]:
    """Warnings: none when the head guesses its recording as well as it did, or when it has none."""
    path = folder / FILE_NAME
    if not path.is_file():
        return ()
    try:
        rounds, accepted = read_arrays(path, lambda arrays: _read(arrays, layer))
    except UsageError as error:
        return (f"self-test was not run: {error}",)
    expected = float((accepted > 0).mean())
    measured = float(guessed(layer, rounds)[: len(accepted)].mean())
    if measured >= expected - TOLERANCE:
        return ()
    return (
        f"self-test guesses {measured:.1%} of {len(accepted)} tokens, expected {expected:.1%}: "
        "the head, its target or its taps are not those that it was trained with",
    )


@torch.inference_mode()
def guessed(layer: EagleLayer, rounds: list[Round]) -> NDArray[np.bool_]:
    """For every round but the last, whether the head's likeliest token is the one that the target went on with.

    Row i pairs feature i with token i + 1 and guesses token i + 2, from true rows alone.
    """
    features = torch.from_numpy(np.concatenate([one.features for one in rounds]))
    given = torch.from_numpy(np.concatenate([one.next_tokens for one in rounds])).to(layer.device)
    rows = torch.arange(len(given), device=layer.device)
    entered = layer.enter(given, layer.fuse(features), rows)
    unseen = rows > rows[:, None]
    if layer.spec.window:
        unseen |= rows <= rows[:, None] - layer.spec.window
    keys, values = entered.keys.transpose(0, 1)[None], entered.values.transpose(0, 1)[None]
    mixed = layer.attend(entered.queries[None], keys, values, unseen[None])
    ends = torch.from_numpy(np.cumsum([len(one.next_tokens) for one in rounds])[:-1]).to(layer.device)
    output = layer.leave(mixed[0, ends - 1], entered.residual[ends - 1])
    found: Ints = layer.target_ids(layer.best(output, 1)[0][:, 0]).cpu().numpy()
    hits: NDArray[np.bool_] = found == given[ends].cpu().numpy()
    return hits


def _read(arrays: Arrays, layer: EagleLayer) -> tuple[list[Round], Ints]:
    width, vocab = layer.spec.features.width, layer.spec.vocab
    rounds = read_rounds(arrays, width, vocab)
    accepted = arrays.ids("chain_accepted", _LONGEST_CHAIN)
    if len(accepted) >= len(rounds):
        raise UsageError(f"chain_accepted has {len(accepted)} rounds, expected at most {len(rounds) - 1}")
    if (rows := sum(len(one.next_tokens) for one in rounds)) > MOST_ROWS:
        raise UsageError(f"recording has {rows} rows, expected at most {MOST_ROWS}")
    if not all(np.isfinite(one.features).all() for one in rounds):
        raise UsageError("features are not finite")
    return rounds, accepted

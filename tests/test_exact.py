"""Promise 1 on the real model: whatever is drafted, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drafting import Drafting

from starsd.edge.answer import Outcome
from starsd.edge.session import Session
from starsd.edge.target import open_target
from starsd.edge.text import Text
from starsd.shared import tree
from starsd.shared.config import Engine, Limits, Sampling

pytestmark = pytest.mark.model

QUESTIONS = ("Why do leaves turn red in autumn?", "Write a function that finds the largest of three numbers.")
LIMITS = Limits(max_new_tokens=64)


def outcome(session: Session, prompt: list[int], sampling: Sampling) -> Outcome:
    *_, last = session.generate(prompt, sampling, LIMITS)
    assert last.outcome is not None
    return last.outcome


@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(smollm2_bundle: Callable[[str], Path], precision: str, temperature: float) -> None:
    folder = smollm2_bundle(precision)
    target, text = open_target("onnx", folder, Engine()), Text.open(folder)
    for seed, question in enumerate(QUESTIONS):
        prompt = text.encode_chat([{"role": "user", "content": question}])
        sampling = Sampling(temperature=temperature, top_p=0.95, seed=seed)
        plain = outcome(Session(target, text), prompt, sampling)
        drafted = outcome(Drafting(target, text, prompt, plain.token_ids, seed), prompt, sampling)
        assert drafted.passes < 0.75 * plain.passes, "the drafts were not used"
        if target.noise:  # on this processor rounding is left: a token may differ, where it is counted
            assert drafted.token_ids == plain.token_ids or drafted.near_ties
        else:
            assert (drafted.token_ids, drafted.text, drafted.near_ties) == (plain.token_ids, plain.text, 0)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_trunk_equals_plain_decoding_bit_for_bit(smollm2_bundle: Callable[[str], Path], precision: str) -> None:
    target = open_target("onnx", smollm2_bundle(precision), Engine())
    rng = np.random.default_rng(1)
    ids = [int(token) for token in rng.integers(5, 40_000, 600)]
    for past in (1, 63, 127, 255, 500):
        target.truncate(0)
        target.prefill(ids[:past])
        ahead = ids[past : past + 13]
        branches = [0, 1, 2, 0, 5]
        wide = target.score([*ahead, 7, 8, 9, 10, 11], [*tree.chain(len(ahead)), *branches]).copy()
        for row, token in enumerate(ahead):
            assert distance(target.score([token], [-1])[0], wide[row]) <= target.noise, f"row {row} behind {past}"
            target.commit([0])
        grown = target.score([99], [-1])[0].copy()
        target.truncate(0)
        target.prefill(ids[: past + len(ahead)])
        assert distance(target.score([99], [-1])[0], grown) <= target.noise, f"read at once, {past}"


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())

"""Promise 1 on the real model: whatever is drafted, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drafting import Drafting

from starsd.edge.answer import Outcome
from starsd.edge.session import Session
from starsd.edge.target import open_target
from starsd.edge.text import Text
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
        assert target.noise == 0, "a trunk row differs from plain decoding on this processor"
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text

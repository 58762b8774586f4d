"""The measure of agreement: against figures computed by hand, and at the edges of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import ENGINE, VOCAB, export, write_folder
from torch_helpers import tokens

from starsd.edge.target_onnx import open_bundle
from starsd.export import check
from starsd.export.check import Answer, Runner, compare, write_answers
from starsd.shared.manifest import read


class Scripted:
    """Answers with the logits that a function of the text gives."""

    capacity = 1000

    def __init__(self, function: Any) -> None:
        self._function, self._text = function, []
        self.passes: list[tuple[int, int]] = []

    def run(self, ids: Sequence[int], start: int, mask: None = None) -> dict[str, np.ndarray]:
        self.passes.append((start, len(ids)))
        self._text = [*self._text[:start], *ids]
        rows = [self._function(self._text[: start + i + 1]) for i in range(len(ids))]
        return {"logits": np.array(rows, np.float32)}


def counting(text: Sequence[int]) -> list[float]:
    """The next token is the last one plus 1, of 8."""
    return [5.0 * (i == (text[-1] + 1) % 8) for i in range(8)]


def test_answers_are_greedy_and_end() -> None:
    runner: Any = Scripted(counting)
    seen: list[tuple[str, int, int]] = []
    answers = write_answers(runner, [[0, 1], [6]], [5], lambda *event: seen.append(event))
    assert [answer.tokens for answer in answers] == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3, 4, 5]]
    assert [answer.start for answer in answers] == [2, 1]
    for answer in answers:
        assert answer.tokens[answer.start :] == answer.log_probs.argmax(-1).tolist()
        assert np.exp(answer.log_probs.astype(float)).sum(-1) == pytest.approx(1, abs=1e-2)
    assert runner.passes[:3] == [(0, 2), (2, 1), (3, 1)]
    done = [count for _, count, total in seen if total == 2 * check.ANSWER_TOKENS]
    assert done == sorted(done)
    assert len(done) == len(seen)
    assert done[-1] == 2 * check.ANSWER_TOKENS


def test_answers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = Scripted(counting)
    assert len(write_answers(runner, [[0, 1]], [])[0].tokens) == 2 + check.ANSWER_TOKENS
    runner.capacity = 7
    assert write_answers(runner, [[0, 1]], [])[0].tokens == [0, 1, 2, 3, 4, 5, 6]


def test_divergence_and_agreement_by_hand() -> None:
    """Only the answers' tokens count: three, where the second model is sure of another token once."""
    chosen_by = np.log(np.array([[0.5, 0.25, 0.25]])).astype(np.float16)
    answers = [Answer([0, 1, 0, 0], 2, chosen_by.repeat(2, 0)), Answer([2, 2, 0], 2, chosen_by)]
    other: Any = Scripted(lambda text: np.log([0.25, 0.5, 0.25] if len(text) == 3 else [0.5, 0.25, 0.25]) + 7)
    quality = compare(answers, other)
    divergence = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert quality.tokens == 3
    assert quality.top1 == pytest.approx(2 / 3, abs=1e-4)
    assert quality.kl == pytest.approx(divergence / 3, abs=1e-3)


def test_logits_further_apart_than_float16_reaches() -> None:
    """As of a model with weights of 1e30: what it rules out adds nothing to the divergence."""
    sure: Any = Scripted(lambda text: [0.0, 1e30, -1e30])
    answers = write_answers(sure, [[0, 1]], [])
    quality = compare(answers, Scripted(lambda text: [0.0, 9.0, -1e30]))  # type: ignore[arg-type]
    assert quality.top1 == 1
    assert quality.kl == pytest.approx(np.log1p(np.exp(-9)), abs=1e-6)


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    bundle = export(write_folder(tmp_path / "m"), tmp_path / "b", "int8")
    runner = Runner(bundle, read(bundle).shape, 64)
    answers = write_answers(runner, [tokens(20, VOCAB)], [])
    assert len(answers[0].tokens) == 64
    quality = compare(answers, runner)
    assert (quality.top1, quality.tokens) == (1, 44)
    assert quality.kl == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_runner_says_what_the_engine_says(precision: str, tmp_path: Path) -> None:
    bundle = export(write_folder(tmp_path / "m"), tmp_path / "b", precision, last_hidden=True)
    target, ids = open_bundle(bundle, ENGINE), tokens(30, VOCAB)
    runner = Runner(bundle, target.shape, 32)
    features = target.prefill(ids[:-1])
    got = runner.run(ids[:-1], 0)
    assert runner.results == ["features", "logits"]
    tolerance = 1e-5 if precision == "fp32" else 0.05
    np.testing.assert_allclose(got["features"], features, atol=tolerance)
    np.testing.assert_allclose(runner.run(ids[-1:], 29)["logits"], target.score(ids[-1:], [-1]), atol=tolerance)

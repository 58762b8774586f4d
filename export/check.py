"""How far a bundle's answers are from fp32's: mean KL divergence and share of equal argmaxes, on fp32's own answers.

Agreement is measured where it matters, along the text that the fp32 model itself writes (greedily, to prompts of ours):
there, one differing argmax is one place where the quantised model would have said something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ModelError
from starsd.shared.graph_contract import DUMMIES, Pass, contract_of, require_runtime
from starsd.shared.manifest import GRAPH_FILE, ModelShape, Quality

PROMPTS = (
    "Explain to a ten-year-old why the moon seems to change its shape.",
    "Write a short story about a ferry captain who is afraid of water.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain each step.",
    "Write a Python function that counts how often each word occurs in a text.",
    "Give me a simple recipe for vegetable soup, with amounts.",
    "What are the advantages and disadvantages of working from home?",
    "Write a polite e-mail that asks a landlord to repair a heater.",
    "List five exercises that need no equipment and say what each is good for.",
)
ANSWER_TOKENS = 64
_LEAST = -6e4  # a logarithm that float16 holds and whose probability is 0: below, 0 · -∞ would be no number
_ANSWERING = "fp32 answers to compare with"

Floats = NDArray[np.float32]


class Runner:
    """Runs a graph on plain sequences: the least that a measurement needs. Serving is the edge's business.

    `mapped` leaves fp32 weights where they are mapped from disk instead of packing a copy: half the memory, and no
    slower for the single rows that answers are written with.
    """

    def __init__(
        self, folder: Path, shape: ModelShape, capacity: int, *, flavour: str = "ort", mapped: bool = False
    ) -> None:
        require_runtime(flavour, ort.__version__)
        self._contract = contract_of(flavour)
        options = ort.SessionOptions()
        for name, value in self._contract.options.items():
            options.add_session_config_entry(name, value)
        options.add_session_config_entry("session.disable_prepacking", str(int(mapped)))
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self.capacity, self._buffer, self._window = capacity, capacity + DUMMIES, shape.window
        self._inputs = {tensor.name for tensor in self._session.get_inputs()}
        half = any(tensor.type == "tensor(float16)" for tensor in self._session.get_inputs())
        size = (2 * shape.layers, 1, shape.kv_heads, self._buffer, shape.head_dim)
        self._cache = np.zeros(size, np.float16 if half else np.float32)
        self._values = [ort.OrtValue.ortvalue_from_numpy(part) for part in self._cache]
        for i, value in enumerate(self._values):
            self._binding.bind_ortvalue_input(f"past_{'kv'[i % 2]}_{i // 2}", value)
            if self._contract.in_place:
                self._binding.bind_ortvalue_output(f"present_{'kv'[i % 2]}_{i // 2}", value)

    @property
    def results(self) -> list[str]:
        """Names of the outputs besides the cache."""
        return [o.name for o in self._session.get_outputs() if not o.name.startswith(("present_", "new_"))]

    def run(self, ids: Sequence[int], start: int) -> dict[str, Floats]:
        """A pass of `ids` behind `start` earlier rows: every output, logits of all rows."""
        count = len(ids)
        feeds = self._contract.feeds(Pass(ids, None, start, count, count, self._buffer, count), self._window)
        for name in feeds.keys() & self._inputs:
            self._binding.bind_cpu_input(name, feeds[name])
        names = [o.name for o in self._session.get_outputs() if not o.name.startswith("present_")]
        for name in names:
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        made = dict(zip(names, self._binding.get_outputs()[-len(names) :], strict=True))
        for i, part in enumerate(self._cache if not self._contract.in_place else ()):
            part[:, :, start : start + count] = made[f"new_{'kv'[i % 2]}_{i // 2}"].numpy()
        return {name: made[name].numpy() for name in self.results}


@dataclass(frozen=True)
class Answer:
    """A prompt with a greedy answer behind it, `start` tokens in.

    `log_probs` (answer, vocab) are those that chose each of its tokens; in float16 they are exact enough to measure by,
    and half the memory.
    """

    tokens: list[int]
    start: int
    log_probs: NDArray[np.float16]


def write_answers(
    runner: Runner, prompts: Sequence[Sequence[int]], eos: Sequence[int], progress: Progress = no_progress
) -> list[Answer]:
    """The runner's greedy answers."""
    answers, most = [], len(prompts) * ANSWER_TOKENS
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        chosen_by: list[NDArray[np.float16]] = []
        room = min(ANSWER_TOKENS, runner.capacity - len(prompt))
        unread = tokens[:]
        while len(chosen_by) < room and not (chosen_by and tokens[-1] in eos):
            logits = runner.run(unread, len(tokens) - len(unread))["logits"][-1]
            if not np.isfinite(logits).all():
                raise ModelError("the model computes logits that are not finite in fp32, expected numbers")
            chosen_by.append(np.maximum(_log_softmax(logits), _LEAST).astype(np.float16))
            unread = [int(logits.argmax())]
            tokens += unread
            if (done := number * ANSWER_TOKENS + len(chosen_by)) < most:  # the end is said below
                progress(_ANSWERING, done, most)
        answers.append(Answer(tokens, len(prompt), np.stack(chosen_by)))
    progress(_ANSWERING, most, most)
    return answers


def compare(answers: Sequence[Answer], runner: Runner) -> Quality:
    """`runner` against what chose the answers, at each of their tokens."""
    divergence = equal = count = 0.0
    for answer in answers:
        logits = runner.run(answer.tokens[:-1], 0)["logits"][answer.start - 1 :]
        if not np.isfinite(logits).all():
            raise ModelError("the exported graph computes logits that are not finite, expected numbers")
        for token, theirs, row in zip(answer.tokens[answer.start :], answer.log_probs, logits, strict=True):
            expected = theirs.astype(np.float64)
            divergence += float((np.exp(expected) * (expected - _log_softmax(row))).sum())
            equal += int(row.argmax() == token)
            count += 1
    return Quality(kl=round(divergence / count, 6), top1=round(equal / count, 4), tokens=int(count))


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Of one row."""
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result

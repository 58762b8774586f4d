"""How far a bundle's answers are from fp32's: mean KL divergence and share of equal argmaxes, on fp32's own answers.

Agreement is measured where it matters, along the text that the fp32 model itself writes (greedily, to prompts of ours):
there, one differing argmax is one place where the quantised model would have said something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from starsd.export.graph import MODEL_FILE
from starsd.shared.console import Progress, no_progress
from starsd.shared.manifest import ModelShape, Quality

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
ANSWER_TOKENS = 96

Floats = NDArray[np.float32]


class Runner:
    """Runs a graph on plain sequences: the least that a measurement needs. Serving is the edge's business."""

    def __init__(self, folder: Path, shape: ModelShape, capacity: int) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(folder / MODEL_FILE), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self.capacity = capacity
        half = any(tensor.type == "tensor(float16)" for tensor in self._session.get_inputs())
        size = (2 * shape.layers, 1, shape.kv_heads, capacity, shape.head_dim)
        self._cache = np.zeros(size, np.float16 if half else np.float32)
        self._values = [ort.OrtValue.ortvalue_from_numpy(part) for part in self._cache]
        for i, value in enumerate(self._values):
            self._binding.bind_ortvalue_input(f"past_{'kv'[i % 2]}_{i // 2}", value)
            self._binding.bind_ortvalue_output(f"present_{'kv'[i % 2]}_{i // 2}", value)

    @property
    def results(self) -> list[str]:
        """Names of the outputs besides the cache."""
        return [o.name for o in self._session.get_outputs() if not o.name.startswith("present_")]

    def run(self, ids: Sequence[int], start: int, mask: Floats | None = None) -> dict[str, Floats]:
        """A pass of `ids` behind `start` earlier rows: every output, logits of all rows."""
        count = len(ids)
        rows, total = np.arange(count), start + count
        feeds: dict[str, Any] = {
            "input_ids": np.array(ids, np.int64),
            "attention_rows": rows[None],
            "own_rows": rows,
            "position_ids": rows[None] + start,
            "mask": np.zeros((1, 1, count, total), np.float32) if mask is None else mask,
            "last_row": np.array([total - 1], np.int32),
            "total": np.array(total, np.int32),
            "logit_rows": rows,
        }
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)
        for name in self.results:
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        outputs = self._binding.get_outputs()[-len(self.results) :]
        return {name: output.numpy() for name, output in zip(self.results, outputs, strict=True)}


def write_answers(
    runner: Runner, prompts: Sequence[Sequence[int]], eos: Sequence[int], progress: Progress = no_progress
) -> list[list[int]]:
    """Each prompt with the runner's greedy answer behind it."""
    texts = []
    for number, prompt in enumerate(prompts):
        text = list(prompt)
        logits = runner.run(text, 0)["logits"]
        while len(text) < min(len(prompt) + ANSWER_TOKENS, runner.capacity):
            text.append(int(logits[-1].argmax()))
            if text[-1] in eos:
                break
            logits = runner.run(text[-1:], len(text) - 1)["logits"]
        texts.append(text)
        progress("fp32 answers", number + 1, len(prompts))
    return texts


def compare(reference: Runner, runner: Runner, prompts: Sequence[Sequence[int]], texts: Sequence[list[int]]) -> Quality:
    """`runner` against `reference` at every token of the answers."""
    divergence = equal = count = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        answer = slice(len(prompt) - 1, len(text) - 1)
        expected = _log_softmax(reference.run(text[:-1], 0)["logits"][answer])
        got = _log_softmax(runner.run(text[:-1], 0)["logits"][answer])
        divergence += float((np.exp(expected) * (expected - got)).sum())
        equal += int((expected.argmax(-1) == got.argmax(-1)).sum())
        count += len(expected)
    return Quality(kl=round(divergence / count, 6), top1=round(equal / count, 4), tokens=int(count))


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result

"""For tests of a runtime around the toy target: how to ask it, and what it should have said."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tiny_session import EOS, ToyTarget, outcome_of

from starsd.edge import Limits, Outcome, Piece, Runtime, Sampling
from starsd.edge.session import Session
from starsd.edge.text import Text

LIMITS = Limits(max_new_tokens=24)
ENDLESS = Sampling(logit_bias={EOS: -100})
GREEDY, WARM = Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=7, logit_bias={EOS: -100})
PROMPT = [40, 41, 42, 43, 44]


def run(runtime: Runtime, prompt: Any, sampling: Sampling = WARM, limits: Limits = LIMITS, **options: Any) -> Outcome:
    *_, last = runtime.generate(prompt, sampling=sampling, limits=limits, **options)
    assert last.outcome is not None
    return last.outcome


def alone(
    text: Text, prompt: Sequence[int], sampling: Sampling = WARM, limits: Limits = LIMITS, **options: Any
) -> list[int]:
    """What plain decoding says in a session that nobody else uses."""
    return outcome_of(Session(ToyTarget(), text), prompt, sampling, limits, **options).token_ids


async def all_of(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


class SlowTarget(ToyTarget):
    """A pass takes a while, and everybody's are noted: who, whether it read, and how many tokens."""

    seconds = 0.002

    def __init__(self, context: int = 4096, log: list[tuple[int, str, int]] | None = None) -> None:
        super().__init__(context)
        self.log: list[tuple[int, str, int]] = [] if log is None else log
        self.gate: threading.Event | None = None
        self.at_work = threading.Lock()

    def sibling(self) -> SlowTarget:
        other = type(self)(self.context, self.log)
        other.at_work = self.at_work
        return other

    def prefill(self, tokens: Sequence[int], *progress: Any) -> Any:
        self._work("read", len(tokens))
        return super().prefill(tokens, *progress)

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        self._work("score", len(tokens))
        return super().score(tokens, parents)

    def _work(self, what: str, count: int) -> None:
        assert self.at_work.acquire(blocking=False), "two passes at a time"
        try:
            self.log.append((id(self), what, count))
            time.sleep(self.seconds)
        finally:
            self.at_work.release()

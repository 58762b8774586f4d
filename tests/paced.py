"""Conversations on the machine's own clock: one that is drafted for beside one that decodes alone, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bigram import FOLLOWS
from star import GREEDY, MODEL, PROMPT, MarkedTarget

from starsd.edge.link import Link
from starsd.edge.paced_target import PacedTarget
from starsd.edge.policy import Policy
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.text import Text
from starsd.shared.config import Limits, Sampling
from starsd.shared.profiles import Profile
from starsd.shared.sampling import Sampler

PASS_SECONDS = 0.06
DEVICE = Profile(
    name="paced", hidden=1, pass_ms=((1, 1e3 * PASS_SECONDS), (64, 100.0)), interpolation="linear", prefill_tok_s=2000.0
)
RUNS = 5
SLOWEST = 0.1  # of all steps


class SureTarget(MarkedTarget):
    """Nearly always goes on as usual, so that speed depends on drafts alone."""

    def logits(self, context: Sequence[int]) -> Any:
        return sure_logits(context)


def sure_logits(context: Sequence[int]) -> Any:
    logits = np.random.default_rng([len(context), context[-1]]).standard_normal(len(FOLLOWS), np.float32)
    logits[FOLLOWS[context[-1]]] += 6
    return logits


def truth(prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    sampler, ids = Sampler(sampling, prompt=prompt), list[int]()
    for index in range(count):
        ids.append(sampler.choose(sure_logits([*prompt, *ids]), ids, index).token)
    return ids


class Talk:
    """One endless answer in a thread of its own: its `ids`, and the `steps` that brought them."""

    def __init__(self, text: Text, link: Link | None, prompt: list[int], *, ngrams: bool = False) -> None:
        self.prompt, self.ids = prompt, list[int]()
        self.steps: list[tuple[float, float, int]] = []  # when it was done, seconds that it took, its tokens
        remote = None if link is None else link.channel.session(MODEL)
        policy = Policy.PLAIN if link is None else Policy.NEVER_WAIT
        self.remote = remote
        self.session = Session(PacedTarget(SureTarget(), DEVICE), text, Speculator(policy, remote, ngrams=ngrams))
        self.error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            before = time.perf_counter()
            for piece in self.session.generate(self.prompt, GREEDY, Limits(max_new_tokens=4000)):
                now = time.perf_counter()
                self.ids += piece.tokens
                self.steps.append((now, now - before, len(piece.tokens)))
                before = now
                if self._over:
                    return
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Raises what went wrong; every token is that of plain decoding."""
        self._over = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the conversation hangs"
        if self.error is not None:
            raise self.error
        assert self.ids == truth(self.prompt, len(self.ids))

    def rate(self, begin: float, end: float, without: float = SLOWEST) -> float:
        """Tokens a second of the steps between two moments, without the slowest of them: those are the machine's."""
        steps = sorted((seconds, tokens) for at, seconds, tokens in self.steps if begin <= at - seconds and at <= end)
        kept = steps[: len(steps) - int(without * len(steps))]
        return sum(tokens for _, tokens in kept) / sum(seconds for seconds, _ in kept)


class Race:
    """Use as a context manager: two talks at a time, one of them through a link."""

    def __init__(self, text: Text, url: str, **link: Any) -> None:
        self._text, self._url, self._options = text, url, {"client": "race", "codec_name": "fp16", "window": 512} | link

    def __enter__(self) -> Race:
        self.link = Link(self._url, **self._options)
        self.drafted, self.alone = Talk(self._text, self.link, PROMPT), Talk(self._text, None, PROMPT)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.drafted.end()
                self.alone.end()
        finally:
            self.link.close()

    def for_(self, seconds: float) -> float:
        """Let it go on for so long; how many times as fast as alone it was. `whole`: the slowest steps included."""
        begin = time.perf_counter()
        time.sleep(seconds)
        end = time.perf_counter()
        self.whole = self.drafted.rate(begin, end, 0.0) / self.alone.rate(begin, end, 0.0)
        return self.drafted.rate(begin, end) / self.alone.rate(begin, end)


def median_of(runs: Callable[[], float], least: float) -> float:
    """Of up to RUNS runs; the first is enough where it reaches `least`."""
    found = [runs()]
    while found[0] < least and len(found) < RUNS:
        found.append(runs())
    return sorted(found)[len(found) // 2]

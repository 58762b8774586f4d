"""One conversation on one target engine: the loop that turns a prompt into tokens.

    read the prompt · propose a tree · score it in one pass · verify · commit what was right · show it · propose …

The cache keeps what it read: of a conversation's next prompt only what is new goes through the target.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from starsd.edge.answer import Answer, Piece
from starsd.edge.speculator import Speculator
from starsd.edge.target import Floats, Target
from starsd.edge.text import Text, shared_length
from starsd.shared import tree
from starsd.shared.config import OVERFLOWS, Limits, Sampling
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.sampling import Sampler

READ_AT_ONCE = 256  # tokens of a prompt, after which their features can leave
TOLERATED_NOISE = 1e-3  # logits; near-ties of less are one choice in thousands, and counted


class Session:
    """Owns `target` and its cache; `text` is the same model's. Runs one generation at a time.

    Without a speculator of its own it decodes plainly.
    """

    def __init__(self, target: Target, text: Text, speculator: Speculator | None = None) -> None:
        self.target = target
        self.text = text
        self.speculator = speculator or Speculator()
        self._now = self.speculator.clock.now
        self._cached: list[int] = []  # never claims more than the cache holds: forgets before it, learns after it
        self._running: Answer | None = None
        self.forget()

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        *,
        choice: int = 0,
        keep: int = 0,
        progress: Progress = no_progress,
    ) -> Generator[Piece, None, None]:
        """Answer `prompt`, a piece a step; the last piece has the outcome.

        `choice` numbers the answers to one prompt, each with noise of its own. Where `limits.overflow` is truncate the
        first `keep` tokens always stay. An iterator that is closed early, or that an exception ends, leaves the session
        ready for the next. Raises UsageError for parameters out of range and ContextOverflowError for a prompt that
        does not fit, both before the first piece is asked for; the iterator raises EngineError when a newer one of the
        same session has begun.
        """
        ids = fit(prompt, limits, self.target.context, keep)
        room = self.target.context - len(ids) + 1  # the last token needs no row
        sampler = Sampler(sampling, choice=choice, prompt=ids)
        limit = min(limits.max_new_tokens, room)
        answer = Answer(sampler, self.text.stream(limits.stop), self.text.eos, limit, self._now)
        return self._run(ids, answer, progress)

    def forget(self) -> None:
        """Start over: nothing of what was read is used again."""
        self._cached.clear()
        self.target.truncate(0)

    def close(self) -> None:
        """The conversation is over; its server need not keep it. Only plain steps are taken afterwards."""
        self.speculator.close()

    def _run(self, prompt: list[int], answer: Answer, progress: Progress) -> Generator[Piece, None, None]:
        self._running = answer
        answer.start()
        self._read(prompt, progress)
        while not answer.finish_reason:
            self._must_be_running(answer)
            proposal = self.speculator.propose(self.target.context - self.target.length)
            began = self._now()
            logits = self.target.score(proposal.tokens, proposal.parents)
            trusted, epsilon = self._trust(proposal.parents)
            verdict = answer.verify(logits, proposal.tokens, proposal.parents, trusted=trusted, epsilon=epsilon)
            piece, rows = answer.take(verdict)
            features = self._commit(proposal.tokens, rows)
            self.speculator.learn(proposal, verdict, len(rows), features, self._now() - began)
            yield piece
        yield answer.finish(self.speculator.counts)

    def _read(self, prompt: list[int], progress: Progress) -> None:
        """Make the cache hold `prompt` but its last token; only what is not there yet goes through the target."""
        shared = shared_length(self._cached, prompt[:-1])
        del self._cached[shared:]
        self.target.truncate(shared)
        self.speculator.begin(prompt, shared)
        for start in range(shared, len(prompt) - 1, READ_AT_ONCE):
            unread = prompt[start : min(start + READ_AT_ONCE, len(prompt) - 1)]
            self.speculator.read(start, self.target.prefill(unread))
            self._cached += unread
            progress("reading the prompt", len(self._cached) - shared, len(prompt) - 1 - shared)

    def _trust(self, parents: Sequence[int]) -> tuple[int, float]:
        """How many leading rows of a pass decide, and how far their logits may be from plain decoding's.

        All of them where branches are computed as in plain decoding, but for a little noise. Where branches are noisy
        the trunk alone decides, which is exact; what a branch found out comes first in the next pass, in the trunk.
        """
        if self.target.branch_noise <= TOLERATED_NOISE:
            return len(parents), self.target.branch_noise
        return tree.trunk(parents), self.target.noise

    def _commit(self, tokens: Sequence[int], rows: Sequence[int]) -> Floats:
        features = self.target.commit(rows)
        self._cached += [tokens[row] for row in rows]
        return features

    def _must_be_running(self, answer: Answer) -> None:
        if self._running is not answer:
            raise EngineError("generation was overtaken by a newer one, expected one at a time on a session")


def fit(prompt: Sequence[int], limits: Limits, context: int, keep: int = 0) -> list[int]:
    """The prompt as it goes into a context of so many tokens.

    With overflow `error` it is the whole prompt, and ContextOverflowError when that is longer than the context. With
    `truncate` it leaves room for the new tokens, a quarter of the context at most, by losing its oldest tokens after
    the first `keep`. They go in quarters of the context, so that a growing conversation seldom moves and its cache
    stays good. Raises ContextOverflowError when the first `keep` alone leave no room.
    """
    if not prompt:
        raise UsageError("prompt is empty, expected at least one token")
    if limits.max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {limits.max_new_tokens}, expected 1 or more")
    if limits.overflow not in OVERFLOWS:
        raise UsageError(f"overflow is {limits.overflow!r}, expected one of {', '.join(OVERFLOWS)}")
    if limits.overflow == "error":
        if len(prompt) > context:
            raise ContextOverflowError(
                f"prompt has {len(prompt)} tokens, expected at most {context}: shorten it, or set overflow to truncate"
            )
        return list(prompt)
    quarter = max(1, context // 4)
    most = context + 1 - min(limits.max_new_tokens, quarter)
    if len(prompt) <= most:
        return list(prompt)
    if keep >= most:
        raise ContextOverflowError(f"system message has {keep} tokens, expected at most {most - 1}")
    quarters = -(-(len(prompt) - most) // quarter)
    lost = min(quarters * quarter, len(prompt) - keep - 1)
    return [*prompt[:keep], *prompt[keep + lost :]]

"""One conversation on one target engine: the loop that turns a prompt into tokens.

    read the prompt · propose a tree · score it in one pass · verify · commit what was right · show it · propose …

The cache keeps what it read: of a conversation's next prompt only what is new goes through the target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from starsd.edge.answer import Answer, Piece
from starsd.edge.race import race_of
from starsd.edge.speculator import Speculator
from starsd.edge.target import Floats, Target
from starsd.edge.text import Text, shared_length
from starsd.edge.turns import Turns
from starsd.shared import tree
from starsd.shared.config import OVERFLOWS, Limits, Sampling
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.sampling import Sampler

if TYPE_CHECKING:
    from starsd.edge.grammar import Grammar

READ_AT_ONCE = 256  # tokens of a prompt, after which their features can leave
WORTH_COPYING = 16  # tokens that another session has read and this one has not
TOLERATED_NOISE = 1e-3  # logits; near-ties of less are one choice in thousands, and counted

Like = Callable[[Sequence[int]], "Session | None"]  # finds the session that has read most of a prompt


class Session:
    """Owns `target` and its cache; `text` is the same model's. Runs one generation at a time.

    Without a speculator of its own it decodes plainly. Sessions that share an engine share its `turns`.
    """

    def __init__(
        self, target: Target, text: Text, speculator: Speculator | None = None, turns: Turns | None = None
    ) -> None:
        self.target = target
        self.text = text
        self._turns = turns or Turns()
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
        grammar: Grammar | None = None,
        top_logprobs: int | None = None,
        like: Like | None = None,
        progress: Progress = no_progress,
    ) -> Generator[Piece, None, None]:
        """Answer `prompt`, a piece a step; the last piece has the outcome.

        `choice` numbers the answers to one prompt, each with noise of its own. Where `limits.overflow` is truncate the
        first `keep` tokens always stay. The answer is one that `grammar` describes, or its beginning. With
        `top_logprobs` pieces say how likely their tokens were, and that many of the likeliest. Where `like`
        finds a session on the same engine and turns that has read more of the prompt, that is copied instead of read.

        An iterator that is closed early, or that an exception ends, leaves the session ready for the next. Raises
        UsageError for parameters out of range and ContextOverflowError for a prompt that does not fit, both before the
        first piece is asked for; the iterator raises EngineError when a newer one of the same session has begun.
        """
        ids = fit(prompt, limits, self.target.context, keep)
        if top_logprobs is not None and top_logprobs < 0:
            raise UsageError(f"top_logprobs is {top_logprobs}, expected 0 or more")
        if grammar is not None and grammar.text is not self.text:
            raise UsageError("grammar is for another text, expected one made with this session's")
        matcher = grammar.matcher() if grammar is not None else None
        room = self.target.context - len(ids) + 1  # the last token needs no row
        sampler = Sampler(sampling, choice=choice, prompt=ids, masks=matcher)
        limit = min(limits.max_new_tokens, room)
        stream = self.text.stream(limits.stop)
        answer = Answer(sampler, stream, self.text.eos, limit, self._now, matcher, top_logprobs)
        return self._run(ids, answer, like, progress)

    @property
    def cached(self) -> Sequence[int]:
        """Tokens that need not be read again where a prompt begins with them, as of now."""
        return list(self._cached)  # another thread may be changing it

    def forget(self) -> None:
        """Start over: nothing of what was read is used again."""
        self._cached.clear()
        self.target.truncate(0)

    def renew(self, speculator: Speculator, keep: bool) -> None:
        """Another conversation begins, with drafts of its own; what was read is of use to it where `keep` says so."""
        self.speculator.close()
        self.speculator = speculator
        if not keep:
            self._cached = []  # its rows go when it is our turn: another session may be copying them

    def close(self) -> None:
        """The conversation is over; its server need not keep it. Only plain steps are taken afterwards."""
        self.speculator.close()

    def _run(
        self, prompt: list[int], answer: Answer, like: Like | None, progress: Progress
    ) -> Generator[Piece, None, None]:
        self._running = answer
        answer.start()
        for piece in self._read(prompt, answer, like, progress):
            yield piece
            self._must_be_running(answer)
        while not answer.finish_reason:
            self._must_be_running(answer)
            proposal = self.speculator.propose(self.target.context - self.target.length)
            with self._turns:
                began = self._now()
                logits = self.target.score(proposal.tokens, proposal.parents)
            trusted, epsilon = self._trust(proposal.parents)
            verdict = answer.verify(logits, proposal.tokens, proposal.parents, trusted=trusted, epsilon=epsilon)
            piece, rows = answer.take(verdict, proposal.sources(verdict.rows))
            features = self._commit(proposal.tokens, rows)
            self.speculator.learn(proposal, verdict, len(rows), features, self._now() - began)
            yield piece
        yield answer.finish(self.speculator.counts)

    def _read(self, prompt: list[int], answer: Answer, like: Like | None, progress: Progress) -> Iterator[Piece]:
        """Make the cache hold `prompt` but its last token; only what is not there yet goes through the target.

        A piece between the parts of a long one: there whoever takes them may end it.
        """
        with self._turns:
            shared = shared_length(self._cached, prompt[:-1])
            del self._cached[shared:]
            self.target.truncate(shared)
        self.speculator.begin(prompt, shared, answer.matcher, race_of(answer.sampler, len(prompt)))
        while (start := len(self._cached)) < len(prompt) - 1:
            if start > shared:
                yield Piece("", [])
            with self._turns:
                if like is None or not self._copied(prompt, like(prompt)):
                    unread = prompt[start : min(start + READ_AT_ONCE, len(prompt) - 1)]
                    self.speculator.read(start, self.target.prefill(unread))
                    self._cached += unread
            progress("reading the prompt", len(self._cached) - shared, len(prompt) - 1 - shared)

    def _copied(self, prompt: list[int], other: Session | None) -> bool:
        """Whether the other had read enough of the prompt that copying is worth it; it may be at work itself.

        It is our turn, so it neither reads, scores nor forgets now, and the rows it says it has stay what they are.
        """
        start = len(self._cached)
        stop = shared_length(other._cached, prompt[:-1]) if other is not None else 0
        if other is None or other is self or stop - start < WORTH_COPYING:
            return False
        self._cached.clear()
        self.target.adopt(other.target, stop)
        self.speculator.read_by(other.speculator, start, stop)
        self._cached += prompt[:stop]
        return True

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

"""An answer in the making: which of the verified tokens belong to it, their text, and why it ended.

What is reported:

    token_ids   end where the answer ends: without the end token; the token that completed a stop string is the last
    text        ends before the stop string, without special tokens; the pieces joined are the text

Near-ties are counted for the verdicts that were taken.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from starsd.edge.detokenize import TextStream
from starsd.edge.drafts import Source
from starsd.edge.speculator import Counts
from starsd.edge.target import Floats
from starsd.edge.verify import Verdict, verify
from starsd.shared.sampling import Sampler, TokenLogprob

if TYPE_CHECKING:
    from starsd.edge.grammar import Matcher


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation came to, in the order of the command contract.

    Seconds are wall time, pauses of whoever takes the pieces included; those of the prefill end with the first token.
    `passes` counts what came after it: (new_tokens - 1) / passes is tau.
    """

    token_ids: list[int]
    text: str
    finish_reason: str  # stop: an end token, a stop string, a grammar's end; length: no tokens or no context left
    new_tokens: int
    passes: int
    accepted_remote: int = 0
    accepted_ngram: int = 0
    near_ties: int
    seconds: float
    prefill_seconds: float
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def tokens_per_second(self) -> float:
        """After the first token; 0 when there was no second."""
        decoding = self.seconds - self.prefill_seconds
        return (self.new_tokens - 1) / decoding if self.new_tokens > 1 and decoding > 0 else 0.0


@dataclass(frozen=True)
class Piece:
    """What a step adds: its tokens, and the text that became certain, often none. The last piece has the outcome.

    `sources` say for each token who had proposed it: `remote`, `ngram`, `phrase`, `grammar` (nothing else was legal),
    or `target`: nobody. `logprobs` has one for each token, where they were asked for. While a long prompt is read,
    pieces are empty.
    """

    text: str
    tokens: list[int]
    outcome: Outcome | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass
class Answer:
    """Ends at a token in `eos`, at a stop string of `stream`, where the grammar of `matcher` is complete, or after
    `limit` tokens. `sampler` masks by the same matcher."""

    sampler: Sampler
    stream: TextStream
    eos: Collection[int]
    limit: int
    now: Callable[[], float] = time.perf_counter
    matcher: Matcher | None = None
    top_logprobs: int | None = None
    finish_reason: str = ""
    _ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _passes: int = -1  # the first belongs to the prefill
    _near_ties: int = 0
    _started: float = 0.0
    _prefilled: float = 0.0

    def start(self) -> None:
        """Set the clock: what comes next is the prefill."""
        self._started = self.now()

    def verify(
        self, logits: Floats, tokens: Sequence[int], parents: Sequence[int], *, trusted: int, epsilon: float
    ) -> Verdict:
        """What plain decoding says of a tree that grows from this answer's last token."""
        return verify(
            logits,
            tokens,
            parents,
            self.sampler,
            self._ids,
            index=len(self._ids),
            eos=self.eos,
            limit=self.limit - len(self._ids),
            epsilon=epsilon,
            trusted=trusted,
            top_logprobs=self.top_logprobs,
        )

    def take(self, verdict: Verdict, sources: Sequence[str]) -> tuple[Piece, list[int]]:
        """Add the verdict up to where the answer ends; the piece that makes, and the rows to commit for it.

        `sources` are those of its tokens.
        """
        self._passes += 1
        self._near_ties += verdict.near_ties
        began = len(self._ids)
        shown: list[str] = []
        rows: list[int] = []
        for row, token in zip(verdict.rows, verdict.tokens, strict=True):
            rows.append(row)
            shown.append(self._add(token))
            if self.finish_reason:
                break
        count = len(self._ids) - began
        logprobs, known = verdict.logprobs[:count], [*sources[:count]]
        if self.matcher is not None and not self.finish_reason:
            shown += self._complete(self.matcher)
            forced = self._ids[began + count :]
            known += [Source.GRAMMAR.name.lower()] * len(forced)
            if self.top_logprobs is not None:
                logprobs += [TokenLogprob(token, 0.0, ((token, 0.0),)[: self.top_logprobs]) for token in forced]
        if not self.finish_reason and len(self._ids) >= self.limit:
            self.finish_reason = "length"
        self._prefilled = self._prefilled or self.now()
        piece = self._piece(shown, self._ids[began:])
        return replace(piece, logprobs=tuple(logprobs), sources=tuple(known)), rows

    def _add(self, token: int) -> str:
        """A token more, unless it is an end token; the text that became certain."""
        if token in self.eos:
            self.finish_reason = "stop"
            return ""
        self._ids.append(token)
        text, stopped = self.stream.push(token)
        if stopped:
            self.finish_reason = "stop"
        return text

    def _complete(self, matcher: Matcher) -> list[str]:
        """Where only one way leads to the grammar's end, go it: nothing follows, so nobody needs these tokens' rows."""
        forced = matcher.forced(self._ids, self.limit - len(self._ids))
        if not matcher.finished([*self._ids, *forced]):
            return []
        shown: list[str] = []
        for token in forced:
            shown.append(self._add(token))
            if self.finish_reason:
                return shown
        self.finish_reason = "stop"
        return shown

    def finish(self, counts: Counts) -> Piece:
        """The text still held back, which may yet complete a stop string, and the outcome."""
        rest, stopped = self.stream.finish()
        if stopped:
            self.finish_reason = "stop"
        piece = self._piece([rest], [])
        outcome = Outcome(
            token_ids=list(self._ids),
            text="".join(self._text),
            finish_reason=self.finish_reason,
            new_tokens=len(self._ids),
            passes=self._passes,
            accepted_remote=counts.remote,
            accepted_ngram=counts.ngram,
            bytes_up=counts.bytes_up,
            bytes_down=counts.bytes_down,
            near_ties=self._near_ties,
            seconds=self.now() - self._started,
            prefill_seconds=self._prefilled - self._started,
        )
        return Piece(piece.text, piece.tokens, outcome)

    def _piece(self, shown: list[str], tokens: list[int]) -> Piece:
        self._text += shown
        return Piece("".join(shown), tokens)


def drafted(outcome: Outcome) -> str:
    """What drafts were worth, for people: `, 1.6 a pass (30 from the server, 12 n-grams)`; empty where none was."""
    if not outcome.accepted_remote + outcome.accepted_ngram:
        return ""
    tau = (outcome.new_tokens - 1) / max(1, outcome.passes)
    return f", {tau:.1f} a pass ({outcome.accepted_remote} from the server, {outcome.accepted_ngram} from n-grams)"


def printable(text: str) -> str:
    """`text` without control characters, newline and tab apart: a model must not steer the terminal it is shown on."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")

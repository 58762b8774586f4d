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
from dataclasses import dataclass, field

import msgspec

from starsd.edge.detokenize import TextStream
from starsd.edge.speculator import Counts
from starsd.edge.target import Floats
from starsd.edge.verify import Verdict, verify
from starsd.shared.sampling import Sampler


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation came to, in the order of the command contract.

    Seconds are wall time, pauses of whoever takes the pieces included; those of the prefill end with the first token.
    `passes` counts what came after it: (new_tokens - 1) / passes is tau.
    """

    token_ids: list[int]
    text: str
    finish_reason: str  # stop: an end token or a stop string; length: no tokens or no context left
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
    """What a step adds: its tokens, and the text that became certain, often none. The last piece has the outcome."""

    text: str
    tokens: list[int]
    outcome: Outcome | None = None


@dataclass
class Answer:
    """Ends at a token in `eos`, at a stop string of `stream`, or after `limit` tokens."""

    sampler: Sampler
    stream: TextStream
    eos: Collection[int]
    limit: int
    now: Callable[[], float] = time.perf_counter
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
        )

    def take(self, verdict: Verdict) -> tuple[Piece, list[int]]:
        """Add the verdict up to where the answer ends; the piece that makes, and the rows to commit for it."""
        self._passes += 1
        self._near_ties += verdict.near_ties
        shown: list[str] = []
        fresh: list[int] = []
        rows: list[int] = []
        for row, token in zip(verdict.rows, verdict.tokens, strict=True):
            rows.append(row)
            if token in self.eos:
                self.finish_reason = "stop"
                break
            fresh.append(token)
            text, stopped = self.stream.push(token)
            shown.append(text)
            if stopped:
                self.finish_reason = "stop"
                break
        self._ids += fresh
        if not self.finish_reason and len(self._ids) >= self.limit:
            self.finish_reason = "length"
        self._prefilled = self._prefilled or self.now()
        return self._piece(shown, fresh), rows

    def finish(self, counts: Counts) -> Piece:
        """The text still held back, which may yet complete a stop string, and the outcome."""
        rest, stopped = self.stream.finish()
        if stopped:
            self.finish_reason = "stop"
        piece = self._piece([rest], [])
        outcome = Outcome(
            token_ids=self._ids,
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

"""Runs a request's answers on the engine, and tells what happens as events.

The answers of one request come one after another: they share one engine, so that all together are no slower, and each
finds its prompt already read. An answer that may call tools goes in turns: free text up to `<tool_call>`, then a call
under the grammar, then free again. Each turn has noise of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from starsd.edge.answer import Outcome, Piece
from starsd.edge.api_orders import Order
from starsd.edge.api_tokens import Tints
from starsd.edge.api_tools import CLOSE, OPEN, Call, read_call
from starsd.edge.grammar import Grammar
from starsd.shared.config import Limits

if TYPE_CHECKING:
    from starsd.edge.runtime import Runtime

TURN = 1 << 32  # choices of different turns lie so far apart


@dataclass(frozen=True)
class Event:
    """Of answer `index`: more text (with its piece), a call, or, last, why it ended."""

    index: int
    text: str = ""
    piece: Piece | None = None
    tints: list[dict[str, str]] | None = None
    call: Call | None = None
    finish: str | None = None


@dataclass
class Tally:
    """What all answers of a request took together."""

    new_tokens: int = 0
    verified: int = 0  # tokens that passes behind the prefill committed
    passes: int = 0
    accepted_remote: int = 0
    accepted_ngram: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    decoding: float = 0.0  # seconds behind the prefills
    joules: float | None = 0.0  # that the device used meanwhile, for whatever; None where its power is unknown

    def add(self, outcome: Outcome, joules: float | None) -> None:
        self.joules = None if joules is None or self.joules is None else self.joules + joules
        self.new_tokens += outcome.new_tokens
        self.verified += max(0, outcome.new_tokens - 1)
        self.passes += outcome.passes
        self.accepted_remote += outcome.accepted_remote
        self.accepted_ngram += outcome.accepted_ngram
        self.bytes_up += outcome.bytes_up
        self.bytes_down += outcome.bytes_down
        self.decoding += outcome.seconds - outcome.prefill_seconds

    def add_cut(self, passes: int, sources: Counter[str]) -> None:
        """A generation that ended before its outcome came: passes that brought tokens, and who proposed those."""
        tokens = sources.total()
        self.new_tokens += tokens
        self.verified += max(0, tokens - 1)
        self.passes += max(0, passes - 1)  # the first belongs to the prefill
        self.accepted_remote += sources["remote"]
        self.accepted_ngram += sources["ngram"] + sources["phrase"]

    def shape(self, prompt_tokens: int) -> dict[str, Any]:
        """As `usage` has it; tau is None without a pass behind the prefill."""
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": prompt_tokens + self.new_tokens,
            "starsd": {
                "passes": self.passes,
                "accepted_remote": self.accepted_remote,
                "accepted_ngram": self.accepted_ngram,
                "tau": round(self.verified / self.passes, 3) if self.passes else None,
                "tokens_per_second": round(self.verified / self.decoding, 2) if self.decoding > 0 else None,
                "bytes_up": self.bytes_up,
                "bytes_down": self.bytes_down,
                "joules": round(self.joules, 3) if self.joules else None,
                "tokens_per_joule": round(self.new_tokens / self.joules, 3) if self.joules else None,
            },
        }


@dataclass
class Answers:
    """One request's. `tally` grows while `events` runs; `came` is told of tokens as they come, shown or not. `grammar`
    is that of the order's form, if it has one."""

    runtime: Runtime
    order: Order
    came: Callable[[int], None]
    grammar: Grammar | None = None
    tally: Tally = field(default_factory=Tally)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every answer's events, the first answer's first. Closing the iterator ends the generation under way."""
        index = 0
        for prompt in self.order.prompts:
            for _ in range(self.order.n):
                told = self._free(index, prompt) if self.order.offer is None else self._with_calls(index, prompt)
                async with aclosing(told) as events:
                    async for event in events:
                        yield event
                index += 1

    async def _free(self, index: int, prompt: list[int]) -> AsyncGenerator[Event, None]:
        tints = Tints(self.runtime.text) if self.order.show_drafts else None
        async with aclosing(self._turn(prompt, index, self.grammar)) as pieces:
            async for piece in pieces:
                yield Event(index, piece.text, piece, None if tints is None else tints.shape(piece))
                if piece.outcome is not None:
                    yield Event(index, finish=piece.outcome.finish_reason)

    async def _with_calls(self, index: int, prompt: list[int]) -> AsyncGenerator[Event, None]:
        order, text = self.order, self.runtime.text
        offer, ids, left = order.offer, list(prompt), order.limits.max_new_tokens
        assert offer is not None
        if offer.must:
            ids += text.encode(f"{OPEN}\n", add_special_tokens=False)
        calling, calls, finish = offer.must, 0, "length"
        for turn in count():
            if left < 1 or len(ids) > order.context:
                break
            stop = () if calling else (*order.limits.stop, OPEN)
            limits = msgspec.structs.replace(order.limits, max_new_tokens=left, stop=stop)
            tints = Tints(text) if order.show_drafts else None
            unsaid: list[str] = []  # a call, which is told when it is whole; or what follows one, mostly space
            outcome: Outcome | None = None
            grammar = self.grammar if calling else None
            async with aclosing(self._turn(ids, index + turn * TURN, grammar, limits)) as pieces:
                async for piece in pieces:
                    outcome = piece.outcome
                    if calling or calls:
                        unsaid.append(piece.text)
                    else:
                        yield Event(index, piece.text, piece, None if tints is None else tints.shape(piece))
            assert outcome is not None
            left -= outcome.new_tokens
            ids += outcome.token_ids
            finish = outcome.finish_reason
            if calling and finish == "stop":
                yield Event(index, call=read_call("".join(unsaid)))
                calls += 1
                ids += text.encode(f"\n{CLOSE}", add_special_tokens=False)
            elif not calling and (rest := "".join(unsaid).strip()):
                yield Event(index, rest)
            if not (finish == "stop" and (offer.several if calling else self._opened(outcome))):
                break
            if not calling:
                ids += text.encode("\n", add_special_tokens=False)
            calling = not calling
        if finish == "stop" and calls and not offer.named:
            finish = "tool_calls"
        yield Event(index, finish=finish)

    def _opened(self, outcome: Outcome) -> bool:
        """Whether free text ended because a call begins, and not by an end token or a stop string of the client's."""
        said = self.runtime.text.decode(outcome.token_ids)
        return said[len(outcome.text) :].startswith(OPEN)

    async def _turn(
        self, prompt: list[int], choice: int, grammar: Grammar | None, limits: Limits | None = None
    ) -> AsyncGenerator[Piece, None]:
        order, telemetry = self.order, self.runtime.telemetry
        before = telemetry.mark()
        pieces = self.runtime.agenerate(
            prompt,
            sampling=order.sampling,
            limits=limits or order.limits,
            choice=choice,
            grammar=grammar,
            top_logprobs=order.top_logprobs,
            private=order.private,
        )
        passes, sources, whole = 0, Counter[str](), False
        try:
            async with aclosing(pieces) as running:
                async for piece in running:
                    self.came(len(piece.tokens))
                    passes += bool(piece.tokens)
                    sources.update(piece.sources)
                    if piece.outcome is not None:
                        self.tally.add(piece.outcome, telemetry.spent(before))
                        whole = True
                    yield piece
        finally:
            if not whole:
                self.tally.add_cut(passes, sources)

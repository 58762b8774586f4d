"""`starsd-edge generate`: prompts in, answers out; what came before a prompt cannot change its answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from starsd.edge.answer import Outcome, drafted, printable
from starsd.edge.session import Session
from starsd.shared.config import Limits, Sampling
from starsd.shared.console import Progress, emit
from starsd.shared.errors import ContextOverflowError
from starsd.shared.prompts import Prompt

LONG_PROMPT = 256  # tokens; reading fewer is no news


def answer_all(
    session: Session,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    limits: Limits,
    *,
    progress: Progress,
    as_json: bool,
) -> None:
    """Answer every prompt's first turn on stdout: a JSON object each, or the text as it comes."""
    keep = session.text.leading_tokens() if limits.overflow == "truncate" else 0
    for prompt in prompts:
        session.forget()
        ids = session.text.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        try:
            pieces = session.generate(ids, sampling, limits, keep=keep, progress=_long_only(progress))
        except ContextOverflowError as error:
            raise ContextOverflowError(f"prompt {prompt.id}: {error}") from error
        if not as_json and len(prompts) > 1:
            print(f"── {prompt.id}")
        for piece in pieces:
            if not as_json:
                sys.stdout.write(printable(piece.text) if sys.stdout.isatty() else piece.text)
                sys.stdout.flush()
            if piece.outcome and as_json:
                emit({"id": prompt.id, **msgspec.structs.asdict(piece.outcome)})
            elif piece.outcome:
                print(flush=True)
                print(_summary(prompt, piece.outcome), file=sys.stderr)


def _summary(prompt: Prompt, outcome: Outcome) -> str:
    speed = f", {outcome.tokens_per_second:.1f} tokens/s" if outcome.tokens_per_second else ""
    return f"{prompt.id}: {outcome.new_tokens} tokens{speed}{drafted(outcome)}, ended by {outcome.finish_reason}"


def _long_only(progress: Progress) -> Progress:
    def report(what: str, done: int, total: int) -> None:
        if total >= LONG_PROMPT:
            progress(what, done, total)

    return report

"""What is told of single tokens: their text and log-probabilities, and who drafted them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from starsd.edge.answer import Piece
from starsd.edge.detokenize import Detokenizer, TokenBytes
from starsd.edge.text import Text
from starsd.shared.sampling import TokenLogprob

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON does not have; OpenAI's figure


class ChatLogprobs:
    """As /v1/chat/completions has them: an entry a token."""

    def __init__(self, text: Text) -> None:
        self._bytes = TokenBytes(text.tokenizer)

    def shape(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*other) for other in one.top]}
            for one in tokens
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """As /v1/completions has them: lists side by side. Keeps count of where in the text each token begins."""

    def __init__(self, text: Text) -> None:
        self._bytes = TokenBytes(text.tokenizer)
        self._texts = Detokenizer(text.tokenizer)
        self._offset = 0

    def shape(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for one in tokens:
            offsets.append(self._offset)
            self._offset += len(self._texts.push(one.token))
        return {
            "tokens": [self._name(one.token) for one in tokens],
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [{self._name(token): _finite(logprob) for token, logprob in one.top} for one in tokens],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Tints:
    """Which part of the text comes from whom. What it gives for a piece joins to the piece's text, to the letter: what
    is held back for a stop string is held back here too."""

    def __init__(self, text: Text) -> None:
        self._texts = Detokenizer(text.tokenizer)
        self._held: deque[tuple[str, str]] = deque()
        self._last = "target"

    def shape(self, piece: Piece) -> list[dict[str, str]]:
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self._held.append((self._texts.push(token), source))
            self._last = source
        if piece.outcome is not None:
            self._held.append((self._texts.finish(), self._last))
        shown: list[dict[str, str]] = []
        wanted = len(piece.text)
        while wanted and self._held:
            text, source = self._held.popleft()
            if len(text) > wanted:
                self._held.appendleft((text[wanted:], source))
                text = text[:wanted]
            wanted -= len(text)
            if text:
                shown.append({"text": text, "source": source})
        return shown


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB

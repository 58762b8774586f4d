"""Text as tokens arrive: never half a character, never a piece of a stop string, nothing decoded twice."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer

from starsd.shared.errors import UnsupportedModelError, UsageError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOCAL = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}  # a piece needs only what is before it


class _Pieces(Protocol):
    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Detokenizer:
    """Turns one generation's tokens into text; the pieces joined equal decoding all ids at once, without specials.

    Constant time per token. Byte-level tokenizers hold back the bytes of an unfinished character. With byte-fallback
    tokenizers (`<0xE4>`) a run of byte tokens is held until it ends: one wrong byte turns the *whole* run into
    replacement characters, so that no part of it is certain before. Raises UnsupportedModelError, naming the decoder,
    where text depends on tokens still to come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._skipped = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        kinds = _decoder_kinds(tokenizer)
        self._pieces: _Pieces
        if set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
            self._pieces = _ByteLevel(tokenizer)
        elif kinds and set(kinds) <= _LOCAL:
            self._pieces = _Local(tokenizer, self._skipped, "ByteFallback" in kinds)
        else:
            found = " + ".join(kinds) or "none"
            raise UnsupportedModelError(
                f"tokenizer decoder is {found}, expected ByteLevel or a sequence of {', '.join(sorted(_LOCAL))}"
            )

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty."""
        return "" if token in self._skipped else self._pieces.push(token)

    def finish(self) -> str:
        """What is still held, with replacement characters for what never became one."""
        return self._pieces.finish()


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may turn out to begin one.

    Of several stop strings the one that is complete first ends the text, of those the longest, however the text is cut
    into pieces. The text before it is shown, it itself is not.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise UsageError("stop string is empty, expected at least one character")
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string is complete; nothing is shown after one."""
        if self.hit or not self._stops:
            return ("" if self.hit else piece), self.hit
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]], True
        longest = min(len(text), max(map(len, self._stops)) - 1)
        holds = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        cut = len(text) - next(holds, 0)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text still held: no stop string came of it."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """A Detokenizer followed by StopStrings.

    The token whose push returns True completed the stop string: it is the last id to report, later ones are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token: int) -> tuple[str, bool]:
        """Text to show, and whether a stop string ended it."""
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> tuple[str, bool]:
        """The rest of the text, and whether a stop string ended it."""
        text, hit = self._stops.push(self._detokenizer.finish())
        return text + self._stops.finish(), hit


class TokenBytes:
    """What single tokens stand for, in the middle of a text: a part of a character too; special tokens their name.

    Raises UnsupportedModelError where a tokenizer has no plain token to put others behind.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._special = {
            id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._anchor, self._anchor_text = (0, "") if self._byte_level else _find_anchor(tokenizer, set(self._special))

    def __call__(self, token: int) -> bytes:
        """Nothing for ids of no token."""
        if token in self._special:
            return self._special[token].encode()
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if self._byte_level:
            return _byte_level(spelled)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(spelled[3:5], 16)])
        return str(self._tokenizer.decode([self._anchor, token]))[len(self._anchor_text) :].encode()


class _ByteLevel:
    """Tokens spell bytes in GPT-2's alphabet; the bytes of all tokens are one UTF-8 text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        spelled = self._tokenizer.id_to_token(token)
        return "" if spelled is None else self._decoder.decode(_byte_level(spelled))

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _Local:
    """Every token's text depends at most on whether text came before, except within a run of byte tokens.

    A token is decoded once, behind an anchor (a token with plain text), and remembered. Until the first text, where
    decoders strip a leading space, tokens are decoded from the start.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: set[int], byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = byte_fallback
        self._anchor, self._anchor_text = _find_anchor(tokenizer, skipped)
        self._started = False
        self._held: list[int] = []
        self._texts: dict[int, str] = {}

    def push(self, token: int) -> str:
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return ""
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(spelled):
            self._held.append(token)
            return ""
        if not self._started:
            self._held.append(token)
            text = self._decode(self._held)
            if text:
                self._started, self._held = True, []
            return text
        if token not in self._texts:
            self._texts[token] = self._behind_anchor([token])
        return self.finish() + self._texts[token]

    def finish(self) -> str:
        held, self._held = self._held, []
        if not held:
            return ""
        return self._behind_anchor(held) if self._started else self._decode(held)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _behind_anchor(self, tokens: list[int]) -> str:
        return self._decode([self._anchor, *tokens])[len(self._anchor_text) :]


def _find_anchor(tokenizer: Tokenizer, skipped: set[int]) -> tuple[int, str]:
    for token in range(tokenizer.get_vocab_size()):
        if token not in skipped and (text := tokenizer.decode([token])) and text.isascii() and text.isalnum():
            return token, text
    raise UnsupportedModelError("tokenizer has no token that is plain ASCII text, expected at least one")


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Types of the decoders in `tokenizer`, in order; a Strip that also cuts the end is named so."""
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())  # the whole tokenizer's JSON takes 50 ms
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return ["Strip at the end" if step.get("stop") else str(step["type"]) for step in steps]


def _byte_level(spelled: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in spelled)
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return spelled.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()

"""What values a message may have in any state; `docs/protocol.md` lists them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ProtocolError
from starsd.shared.features import CODECS
from starsd.shared.messages import (
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Race,
    Verdict,
    Welcome,
)

MAX_SESSION = 2**16 - 1
MAX_EPOCH = 2**32 - 1
MAX_POSITION = 2**31 - 1  # of a token, a node, a verdict in its epoch
MAX_VOCAB = 2**24
MAX_PREFIX_TOKENS = 131_072
MAX_VERDICT_TOKENS = 4_096
MAX_DRAFT_NODES = 1_024
MAX_FEATURE_BYTES = 65_536  # rows of one Features, hence also one row with its padding
MAX_WIDTH = 65_536
MAX_BYTES = 2**63 - 1  # that an Ack counts
MAX_KEY = 2**64 - 1  # of noise
MAX_TEMPERATURE = 1_000.0

# A frame that a server must be able to take: the longest Prefix of the largest vocabulary, with room for its header.
MAX_MESSAGE = MAX_PREFIX_TOKENS * 3 + 64

_SESSION = ("session", 1, MAX_SESSION)
_EPOCH = ("epoch", 1, MAX_EPOCH)
_START = ("start", 0, MAX_POSITION)

RANGES: dict[type[Any], tuple[tuple[str, int, int], ...]] = {
    Hello: (("lowest", 1, 65_535), ("highest", 1, 65_535)),
    Welcome: (("version", 1, 65_535), ("max_sessions", 1, MAX_SESSION), ("max_message", 1_024, 2**31 - 1)),
    Open: (_SESSION, ("vocab", 2, MAX_VOCAB), ("padding", 0, MAX_FEATURE_BYTES)),
    Opened: (
        _SESSION,
        ("width", 1, MAX_WIDTH),
        ("window", 1, MAX_POSITION),
        ("max_nodes", 1, MAX_POSITION),
    ),
    Close: (_SESSION,),
    Error: (("session", 0, MAX_SESSION),),
    Prefix: (_SESSION, _EPOCH, _START),
    Verdict: (
        _SESSION,
        _EPOCH,
        ("seq", 1, MAX_POSITION),
        _START,
        ("received", 0, MAX_POSITION),
        ("lag", 0, MAX_POSITION),
    ),
    Features: (_SESSION, _EPOCH, _START),
    Draft: (
        _SESSION,
        _EPOCH,
        ("seq", 0, MAX_POSITION),
        ("base", 1, MAX_POSITION),
        ("first", 0, MAX_POSITION),
    ),
    Ack: (("received", 0, MAX_BYTES),),
}

# Of the race in a Prefix, beside its temperature.
_RACE = (("seed", 0, MAX_KEY), ("choice", 0, MAX_KEY), ("start", 0, MAX_POSITION))

# A Prefix without tokens would leave the drafter without a newest one; a Verdict without any only reports `received`;
# a Draft without nodes only says that the tree rests.
COUNTS: dict[type[Any], tuple[str, int, int]] = {
    Prefix: ("tokens", 1, MAX_PREFIX_TOKENS),
    Verdict: ("tokens", 0, MAX_VERDICT_TOKENS),
    Draft: ("nodes", 0, MAX_DRAFT_NODES),
}


@dataclass(frozen=True)
class Layout:
    """What the bytes of a session's messages depend on: its vocabulary, and bytes of a feature row with its padding."""

    vocab: int
    row_bytes: int

    @classmethod
    def of(cls, request: Open, answer: Opened) -> Layout:
        """The layout of a session. Raises ProtocolError when a row would be larger than a message may be."""
        row_bytes = CODECS[request.codec].row_bytes(answer.width) + request.padding
        if row_bytes > MAX_FEATURE_BYTES:
            raise ProtocolError(
                f"a feature row takes {row_bytes} bytes, expected at most {MAX_FEATURE_BYTES}", request.session
            )
        return cls(request.vocab, row_bytes)


def name_of(kind: type[Any]) -> str:
    """What errors call a message."""
    return str(kind.__name__).lower()


def check(message: Message) -> None:
    """Raises ProtocolError when a field is out of its range, or fields contradict each other."""
    kind = type(message)
    _check_ranges(name_of(kind), message, RANGES.get(kind, ()))
    match message:
        case Hello() if message.lowest > message.highest:
            raise ProtocolError(f"hello has lowest {message.lowest}, expected at most highest {message.highest}")
        case Welcome() if any(head.projector_bytes < 0 for head in message.heads):
            raise ProtocolError("welcome has a projector of negative size, expected 0 or more bytes")
        case Open() if message.codec not in CODECS:
            raise ProtocolError(f"open has codec {message.codec[:32]!r}, expected one of {', '.join(CODECS)}")
        case Error() if math.isnan(message.retry_after):
            raise ProtocolError("error has retry_after nan, expected seconds")
        case Prefix() | Verdict():
            _check_end(kind, "start", message.start, len(message.tokens))
            if isinstance(message, Prefix) and message.race is not None:
                _check_race(message.race)
        case Draft():
            _check_end(kind, "first", message.first, len(message.tokens))
            if not (len(message.tokens) or message.rest):
                raise ProtocolError("draft has 0 nodes, expected 1 or more unless the tree rests")


def check_count(kind: type[Any], count: int) -> None:
    """Raises ProtocolError for more or fewer tokens or nodes than such a message has."""
    what, low, high = COUNTS[kind]
    if not low <= count <= high:
        raise ProtocolError(f"{name_of(kind)} has {count} {what}, expected {low} to {high}")


def check_tokens(kind: type[Any], tokens: NDArray[np.int64], vocab: int) -> None:
    """Raises ProtocolError for an id outside the vocabulary."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
        raise ProtocolError(f"{name_of(kind)} has token {wrong}, expected 0 to {vocab - 1}")


def check_parents(first: int, parents: NDArray[np.int64]) -> None:
    """Raises ProtocolError unless every parent is -1 or an earlier node."""
    own = first + np.arange(len(parents))
    wrong = np.flatnonzero((parents < -1) | (parents >= own))
    if len(wrong):
        at = wrong[0]
        raise ProtocolError(f"draft has parent {parents[at]} of node {own[at]}, expected -1 to {own[at] - 1}")


def check_rows(size: int, row_bytes: int) -> None:
    """Raises ProtocolError unless so many bytes are a whole number of feature rows that one message may carry."""
    if not 0 < size <= MAX_FEATURE_BYTES:
        raise ProtocolError(f"features have {size} bytes of rows, expected 1 to {MAX_FEATURE_BYTES}")
    if size % row_bytes:
        raise ProtocolError(f"features have {size} bytes of rows, expected a multiple of {row_bytes}")


def _check_ranges(name: str, values: object, ranges: tuple[tuple[str, int, int], ...]) -> None:
    for field, low, high in ranges:
        if not low <= (value := getattr(values, field)) <= high:
            raise ProtocolError(f"{name} has {field} {value}, expected {low} to {high}")


def _check_race(race: Race) -> None:
    _check_ranges("race", race, _RACE)
    if not 0 < race.temperature <= MAX_TEMPERATURE:
        raise ProtocolError(f"race has temperature {race.temperature}, expected more than 0, at most {MAX_TEMPERATURE}")


def _check_end(kind: type[Any], field: str, start: int, count: int) -> None:
    if start + count > MAX_POSITION:
        raise ProtocolError(f"{name_of(kind)} ends at {field} {start} + {count}, expected at most {MAX_POSITION}")

"""The bytes of the messages that are sent all the time: a little-endian header and a bit string (`bits.py`).

Sizes are checked against the header before anything is allocated. A message has one form, and others are refused.
Errors here are ProtocolErrors without a session; `codec.py` knows whose they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from starsd.shared.bits import Ints, pack, packed_bytes, unpack, width_of
from starsd.shared.errors import ProtocolError
from starsd.shared.limits import Layout, check_count, check_parents, check_rows, check_tokens, name_of
from starsd.shared.messages import Ack, Draft, Features, Floats, Hot, Prefix, Race, Verdict

# Hot messages: the header, tag included. Session and epoch stand in the same place in all that have them.
HEADERS: dict[type[Any], struct.Struct] = {
    Prefix: struct.Struct("<BHIIIB"),  # tag, session, epoch, start, count, whether a race follows
    Verdict: struct.Struct("<BHIIIIIH"),  # tag, session, epoch, seq, start, received, lag, count
    Features: struct.Struct("<BHII"),  # tag, session, epoch, start
    Draft: struct.Struct("<BHIIIIHB"),  # tag, session, epoch, seq, base, first, count, shape
    Ack: struct.Struct("<BQ"),  # tag, received
}
RACE = struct.Struct("<fQQI")  # temperature, seed, choice, start
REST = 0x80  # in the shape of a Draft, beside the bits that a distance takes
MAX_DISTANCE_BITS = 31

STEP_BITS = 4
_LAST_LEVEL = 2**STEP_BITS - 1
_LOWEST_STEP = -8.0
LEVELS: Floats = (_LOWEST_STEP * (np.arange(_LAST_LEVEL + 1) / _LAST_LEVEL) ** 2 + 0.0).astype(np.float32)


def quantise(steps: Floats) -> Ints:
    """Levels 0 to 15 of log-probabilities: step = -8 · (level / 15)², the nearest by its root; -8 and below are 15.

    Raises ProtocolError for what is not a number.
    """
    if np.isnan(steps).any():
        raise ProtocolError("draft has step nan, expected log-probabilities")
    roots = np.sqrt(np.clip(np.asarray(steps, np.float64), _LOWEST_STEP, 0.0) / _LOWEST_STEP)
    levels: Ints = np.rint(_LAST_LEVEL * roots).astype(np.int64)
    return levels


def encode_hot(tag: int, message: Hot, layout: Layout | None) -> bytes:
    """The frame of a message whose numbers are in their ranges. Only an Ack needs no layout."""
    kind = type(message)
    if isinstance(message, Ack):
        return HEADERS[kind].pack(tag, message.received)
    head = (tag, message.session, message.epoch)
    layout = _open(kind, message.session, layout)
    if isinstance(message, Features):
        check_rows(len(message.rows), layout.row_bytes)
        return HEADERS[kind].pack(*head, message.start) + bytes(message.rows)
    tokens = _whole("tokens", message.tokens)
    check_count(kind, len(tokens))
    check_tokens(kind, tokens, layout.vocab)
    bits = width_of(layout.vocab - 1)
    match message:
        case Prefix():
            race = b"" if message.race is None else _encode_race(message.race)
            return HEADERS[kind].pack(*head, message.start, len(tokens), bool(race)) + race + pack([(tokens, bits)])
        case Verdict():
            rest = message.seq, message.start, message.received, message.lag, len(tokens)
            return HEADERS[kind].pack(*head, *rest) + pack([(tokens, bits)])
    parents, steps = _whole("parents", message.parents), quantise(message.steps)
    if not len(parents) == len(tokens) == len(steps):
        raise ProtocolError(f"draft has {len(tokens)} tokens, {len(parents)} parents and {len(steps)} steps")
    check_parents(message.first, parents)
    distances = np.where(parents < 0, 0, message.first + np.arange(len(parents)) - parents)
    reach = width_of(int(distances.max(initial=0)))
    shape = reach | (REST if message.rest else 0)
    rest = message.seq, message.base, message.first, len(tokens), shape
    return HEADERS[kind].pack(*head, *rest) + pack([(tokens, bits), (distances, reach), (steps, STEP_BITS)])


def decode_hot(kind: type[Any], data: bytes | memoryview, layout: Layout | None) -> Hot:
    """The message of a frame; the rows of Features are a view of it."""
    view = memoryview(data)
    header = HEADERS[kind]
    if len(view) < header.size:
        raise ProtocolError(f"{name_of(kind)} takes {len(view)} bytes, expected at least {header.size}")
    _, *fields = header.unpack_from(view)
    body = view[header.size :]
    if kind is Ack:
        _check_body(kind, body, 0)
        return Ack(*fields)
    return _DECODE[kind](fields, body, _open(kind, fields[0], layout))


def _decode_prefix(fields: list[int], body: memoryview, layout: Layout) -> Prefix:
    session, epoch, start, count, races = fields
    if races > 1:
        raise ProtocolError(f"prefix has race {races}, expected 0 or 1")
    size = RACE.size if races else 0
    tokens = _decode_tokens(Prefix, body, count, layout.vocab, before=size)
    return Prefix(session, epoch, start, tokens, Race(*RACE.unpack_from(body)) if races else None)


def _decode_verdict(fields: list[int], body: memoryview, layout: Layout) -> Verdict:
    session, epoch, seq, start, received, lag, count = fields
    tokens = _decode_tokens(Verdict, body, count, layout.vocab)
    return Verdict(session, epoch, seq, start, received, lag, tokens)


def _decode_features(fields: list[int], body: memoryview, layout: Layout) -> Features:
    check_rows(len(body), layout.row_bytes)
    session, epoch, start = fields
    return Features(session, epoch, start, body)


def _decode_draft(fields: list[int], body: memoryview, layout: Layout) -> Draft:
    session, epoch, seq, base, first, count, shape = fields
    reach, rest = shape & ~REST, bool(shape & REST)
    if reach > MAX_DISTANCE_BITS:
        raise ProtocolError(f"draft has distances of {reach} bits, expected at most {MAX_DISTANCE_BITS}")
    widths = width_of(layout.vocab - 1), reach, STEP_BITS
    tokens, distances, levels = _decode_records(Draft, body, count, widths)
    check_tokens(Draft, tokens, layout.vocab)
    if (least := width_of(int(distances.max(initial=0)))) != reach:
        raise ProtocolError(f"draft has distances of {reach} bits, expected {least}")
    own = first + np.arange(count)
    if (beyond := np.flatnonzero(distances > own)).size:
        at = beyond[0]
        raise ProtocolError(f"draft has distance {distances[at]} at node {own[at]}, expected 0 to {own[at]}")
    parents = np.where(distances == 0, -1, own - distances)
    return Draft(session, epoch, seq, base, first, parents, tokens, LEVELS[levels], rest)


_DECODE: dict[type[Any], Callable[[list[int], memoryview, Layout], Hot]] = {
    Prefix: _decode_prefix,
    Verdict: _decode_verdict,
    Features: _decode_features,
    Draft: _decode_draft,
}


def _encode_race(race: Race) -> bytes:
    """Raises ProtocolError where float32 would make another temperature of it."""
    data = RACE.pack(race.temperature, race.seed, race.choice, race.start)
    if (rounded := RACE.unpack(data)[0]) != race.temperature:
        raise ProtocolError(f"race has temperature {race.temperature}, expected a float32 such as {rounded}")
    return data


def _decode_tokens(kind: type[Any], body: memoryview, count: int, vocab: int, *, before: int = 0) -> Ints:
    """Tokens behind so many bytes."""
    (tokens,) = _decode_records(kind, body, count, (width_of(vocab - 1),), before=before)
    check_tokens(kind, tokens, vocab)
    return tokens


def _decode_records(
    kind: type[Any], body: memoryview, count: int, widths: tuple[int, ...], *, before: int = 0
) -> list[Ints]:
    """The columns behind a header; no count makes us allocate before there are as many bytes."""
    check_count(kind, count)
    _check_body(kind, body, before + packed_bytes(count, sum(widths)))
    return unpack(body[before:], count, widths)


def _check_body(kind: type[Any], body: memoryview, expected: int) -> None:
    if len(body) != expected:
        head = HEADERS[kind].size
        raise ProtocolError(f"{name_of(kind)} takes {head + len(body)} bytes, expected {head + expected}")


def _open(kind: type[Any], session: int, layout: Layout | None) -> Layout:
    if layout is None:
        raise ProtocolError(f"{name_of(kind)} is of session {session}, which is not open")
    return layout


def _whole(what: str, values: Any) -> Ints:
    numbers = np.asarray(values)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers)):
        raise ProtocolError(f"{what} are {numbers.dtype} {list(numbers.shape)}, expected whole numbers [n]")
    return numbers.astype(np.int64)

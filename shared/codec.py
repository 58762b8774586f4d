"""The bytes of every message; `docs/protocol.md` has them one by one, with test vectors.

The first byte of a frame is its tag. Control messages go on with MessagePack of their fields, hot messages with a
little-endian header and bit strings (`hot_codec.py`). Sizes are checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from starsd.shared.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from starsd.shared.hot_codec import HEADERS, decode_hot, encode_hot
from starsd.shared.limits import MAX_SESSION, Layout, check, name_of
from starsd.shared.messages import (
    CONNECTION,
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Hot,
    Message,
    Open,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)

__all__ = ["KINDS", "TAGS", "Bytes", "Layout", "LayoutOf", "blame", "decode", "encode", "peek", "session_of"]

Bytes = bytes | memoryview
LayoutOf = Callable[[int], Layout | None]

TAGS: dict[type[Any], int] = {
    Hello: 0x01,
    Welcome: 0x02,
    Open: 0x03,
    Opened: 0x04,
    Close: 0x05,
    Error: 0x06,
    Stats: 0x07,
    Prefix: 0x10,
    Verdict: 0x11,
    Features: 0x12,
    Draft: 0x13,
    Ack: 0x14,
}
KINDS: dict[int, type[Any]] = {tag: kind for kind, tag in TAGS.items()}

# Control messages: the largest frame, and its decoder.
CONTROL_BYTES: dict[type[Any], int] = {
    Hello: 4_096,
    Welcome: 65_536,
    Open: 4_096,
    Opened: 4_096,
    Close: 64,
    Error: 4_096,
    Stats: 16_384,
}
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, strict=True) for kind in CONTROL_BYTES
}
_OF_SESSION = (Open, Opened, Close, Error)  # control messages that name a session


class _Numbered(msgspec.Struct):
    """The one field of a control message that says whose it is."""

    session: int = CONNECTION


_NUMBERED = msgspec.msgpack.Decoder(_Numbered)


def encode(message: Message, layout: Layout | None = None) -> bytes:
    """The frame of a message; what tokens or rows need is the session's `layout`.

    Raises LocalProtocolError for values that the protocol does not allow.
    """
    with blame(LocalProtocolError, session_of(message)):
        check(message)
        kind = type(message)
        if isinstance(message, Hot):
            return encode_hot(TAGS[kind], message, layout)
        data = bytes([TAGS[kind]]) + msgspec.msgpack.encode(message)
        _check_limit(kind, data)
        return data


def decode(data: Bytes, layout_of: LayoutOf) -> Message:
    """The message of a frame; `layout_of` gives a session's layout, None for sessions that have none.

    The rows of Features are a view of `data`. Raises RemoteProtocolError, which names the session if the frame does.
    """
    tag, session = peek(data)
    kind = KINDS[tag]
    with blame(RemoteProtocolError, session):
        if kind in CONTROL_BYTES:
            _check_limit(kind, data)
            message: Message = _msgpack(kind, _DECODERS[kind], data)
        else:
            message = decode_hot(kind, data, layout_of(session))
        check(message)
    return message


def peek(data: Bytes) -> tuple[int, int]:
    """Tag and session of a frame, 0 where it belongs to none, without decoding it.

    Raises RemoteProtocolError for an unknown tag, or when no session can be read where there should be one.
    """
    if not len(data):
        raise RemoteProtocolError("frame is empty, expected a tag")
    tag = data[0]
    kind = KINDS.get(tag)
    if kind is None:
        raise RemoteProtocolError(f"frame has tag 0x{tag:02x}, expected one of {', '.join(map(hex, KINDS))}")
    if kind in _OF_SESSION:
        with blame(RemoteProtocolError):
            _check_limit(kind, data)
            session = _msgpack(kind, _NUMBERED, data).session
            if not (least := 0 if kind is Error else 1) <= session <= MAX_SESSION:
                raise ProtocolError(f"{name_of(kind)} has session {session}, expected {least} to {MAX_SESSION}")
        return tag, session
    if kind is Ack or kind in CONTROL_BYTES:
        return tag, CONNECTION
    if len(data) < HEADERS[Features].size:  # of the shortest
        raise RemoteProtocolError(f"{name_of(kind)} takes {len(data)} bytes, expected at least {HEADERS[kind].size}")
    session = int.from_bytes(data[1:3], "little")
    if session == CONNECTION:
        raise RemoteProtocolError(f"{name_of(kind)} has session 0, expected 1 to {MAX_SESSION}")
    return tag, session


def session_of(message: Message) -> int:
    """The session a message belongs to; 0 for those of the connection."""
    return CONNECTION if isinstance(message, Hello | Welcome | Stats | Ack) else message.session


@contextmanager
def blame(kind: type[ProtocolError], session: int = CONNECTION) -> Iterator[None]:
    """Say of a ProtocolError whose fault it is, and which session's."""
    try:
        yield
    except ProtocolError as error:
        raise kind(str(error), session or error.session) from None


def _msgpack(kind: type[Any], decoder: msgspec.msgpack.Decoder[Any], data: Bytes) -> Any:
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)
        raise ProtocolError(f"{name_of(kind)} is malformed: {reason[:1].lower()}{reason[1:200]}") from None


def _check_limit(kind: type[Any], data: Bytes) -> None:
    if len(data) > CONTROL_BYTES[kind]:
        raise ProtocolError(f"{name_of(kind)} takes {len(data)} bytes, expected at most {CONTROL_BYTES[kind]}")

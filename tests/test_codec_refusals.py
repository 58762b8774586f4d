"""What the codec does not send, and frames that it refuses."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from starsd.shared.codec import TAGS, Layout, decode, encode, session_of
from starsd.shared.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from starsd.shared.hot_codec import HEADERS
from starsd.shared.messages import (
    Ack,
    Close,
    Draft,
    Error,
    Features,
    HeadInfo,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Race,
    Verdict,
    Welcome,
)

LAYOUT = Layout(vocab=49_152, row_bytes=66)

TOKENS = np.array([1, 2])
STEPS = np.zeros(2, np.float32)


def racing(**changed: Any) -> Prefix:
    return Prefix(1, 1, 0, TOKENS, Race(**{"temperature": 0.5, "seed": 1, "choice": 0, "start": 2, **changed}))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Hello(3, 2, ""), "hello has lowest 3, expected at most highest 2"),
        (Hello(0, 2, ""), "hello has lowest 0, expected 1 to 65535"),
        (Hello(1, 2, "x" * 5000), "hello takes 5040 bytes, expected at most 4096"),
        (Welcome(1, "", (HeadInfo("", "", "", -1),), 1, 2048), "welcome has a projector of negative size"),
        (Open(1, "f", 1, "int4"), "open has vocab 1, expected 2 to 16777216"),
        (Open(70_000, "f", 9, "int4"), "open has session 70000, expected 1 to 65535"),
        (Open(1, "f", 9, "int3"), "open has codec 'int3', expected one of fp16, int8, int4"),
        (Error(1, "", float("nan")), "error has retry_after nan, expected seconds"),
        (Prefix(1, 0, 0, TOKENS), "prefix has epoch 0, expected 1 to 4294967295"),
        (Prefix(1, 1, 0, TOKENS[:0]), "prefix has 0 tokens, expected 1 to 131072"),
        (Prefix(1, 1, 2**31 - 2, TOKENS), "prefix ends at start 2147483646 + 2, expected at most 2147483647"),
        (Prefix(1, 1, 0, np.array([5, 49_152])), "prefix has token 49152, expected 0 to 49151"),
        (Prefix(1, 1, 0, np.array([-1])), "prefix has token -1, expected 0 to 49151"),
        (Prefix(1, 1, 0, np.array([[1]])), "tokens are int64 [1, 1], expected whole numbers [n]"),
        (racing(temperature=0.0), "race has temperature 0.0, expected more than 0, at most 1000.0"),
        (racing(temperature=math.inf), "race has temperature inf, expected more than 0, at most 1000.0"),
        (racing(temperature=0.8), "race has temperature 0.8, expected a float32 such as 0.800000011920929"),
        (racing(seed=-1), "race has seed -1, expected 0 to 18446744073709551615"),
        (racing(choice=2**64), "race has choice 18446744073709551616, expected 0 to 18446744073709551615"),
        (racing(start=2**31), "race has start 2147483648, expected 0 to 2147483647"),
        (Prefix(1, 1, 0, np.array([1.0])), "tokens are float64 [1], expected whole numbers [n]"),
        (Verdict(1, 1, 0, 0, 0, 0, TOKENS), "verdict has seq 0, expected 1 to 2147483647"),
        (Verdict(1, 1, 1, 0, 0, 0, np.zeros(4097, int)), "verdict has 4097 tokens, expected 0 to 4096"),
        (Features(1, 1, 0, b""), "features have 0 bytes of rows, expected 1 to 65536"),
        (Features(1, 1, 0, bytes(65_538)), "features have 65538 bytes of rows, expected 1 to 65536"),
        (Features(1, 1, 0, bytes(67)), "features have 67 bytes of rows, expected a multiple of 66"),
        (Draft(1, 1, 0, 0, 0, TOKENS - 2, TOKENS, STEPS), "draft has base 0, expected 1 to 2147483647"),
        (Draft(1, 1, 0, 1, 4, np.array([3, 5]), TOKENS, STEPS), "draft has parent 5 of node 5, expected -1 to 4"),
        (Draft(1, 1, 0, 1, 4, np.array([-2, 4]), TOKENS, STEPS), "draft has parent -2 of node 4, expected -1 to 3"),
        (Draft(1, 1, 0, 1, 0, TOKENS - 2, TOKENS, STEPS[:1]), "draft has 2 tokens, 2 parents and 1 steps"),
        (Draft(1, 1, 0, 1, 0, TOKENS - 2, TOKENS, STEPS * np.nan), "draft has step nan, expected log-probabilities"),
        (
            Draft(1, 1, 0, 1, 0, TOKENS[:0], TOKENS[:0], STEPS[:0]),
            "draft has 0 nodes, expected 1 or more unless the tree rests",
        ),
        (Ack(-1), "ack has received -1, expected 0 to 9223372036854775807"),
    ],
)
def test_what_is_not_sent(message: Message, text: str) -> None:
    with pytest.raises(LocalProtocolError) as error:
        encode(message, LAYOUT)
    assert text in str(error.value)
    assert error.value.session == session_of(message)


def test_hot_messages_need_an_open_session() -> None:
    with pytest.raises(LocalProtocolError, match=r"^prefix is of session 7, which is not open$"):
        encode(Prefix(7, 1, 0, TOKENS))
    frame = encode(Prefix(7, 1, 0, TOKENS), LAYOUT)
    with pytest.raises(RemoteProtocolError, match=r"^prefix is of session 7, which is not open$") as error:
        decode(frame, lambda session: None)
    assert error.value.session == 7


def hot(kind: type[Any], *fields: int, body: str = "") -> bytes:
    return HEADERS[kind].pack(TAGS[kind], *fields) + bytes.fromhex(body)


def control(kind: type[Any], **fields: Any) -> bytes:
    return bytes([TAGS[kind]]) + msgspec.msgpack.encode({"type": kind.__name__.lower(), **fields})


@pytest.mark.parametrize(
    ("frame", "text", "session"),
    [
        (b"", "frame is empty, expected a tag", 0),
        (b"\x00", "frame has tag 0x00, expected one of 0x1, 0x2", 0),
        (b"\x11\x01", "verdict takes 2 bytes, expected at least 25", 0),
        (hot(Verdict, 0, 1, 1, 0, 0, 0, 0), "verdict has session 0, expected 1 to 65535", 0),
        (hot(Verdict, 3, 1, 1, 0, 0, 0, 0)[:-1], "verdict takes 24 bytes, expected at least 25", 3),
        (hot(Verdict, 3, 1, 1, 0, 0, 0, 1), "verdict takes 25 bytes, expected 27", 3),
        (hot(Verdict, 3, 1, 1, 0, 0, 0, 4097), "verdict has 4097 tokens, expected 0 to 4096", 3),
        (hot(Verdict, 3, 0, 1, 0, 0, 0, 0), "verdict has epoch 0, expected 1", 3),
        (hot(Verdict, 3, 1, 1, 0, 0, 0, 1, body="00c0"), "verdict has token 49152, expected 0 to 49151", 3),
        (hot(Prefix, 3, 1, 2**31, 1, 0, body="0000"), "prefix has start 2147483648, expected 0 to 2147483647", 3),
        (hot(Prefix, 3, 1, 0, 1, 2, body="0000"), "prefix has race 2, expected 0 or 1", 3),
        (hot(Prefix, 3, 1, 0, 1, 1, body="0000"), "prefix takes 18 bytes, expected 42", 3),
        (
            hot(Prefix, 3, 1, 0, 1, 1, body="00" * 26),
            "race has temperature 0.0, expected more than 0, at most 1000.0",
            3,
        ),
        (hot(Prefix, 3, 1, 0, 1, 1, body="0000c07f" + "00" * 22), "race has temperature nan, expected more than 0", 3),
        (hot(Prefix, 3, 1, 0, 2**32 - 1, 0), "prefix has 4294967295 tokens, expected 1 to 131072", 3),
        (hot(Features, 3, 1, 0), "features have 0 bytes of rows, expected 1 to 65536", 3),
        (hot(Draft, 3, 1, 0, 1, 0, 1, 32), "draft has distances of 32 bits, expected at most 31", 3),
        (hot(Draft, 3, 1, 0, 1, 0, 1, 0, body="000010"), "bits after the last value are set, expected zeros", 3),
        (hot(Draft, 3, 1, 0, 1, 0, 1, 1, body="000000"), "draft has distances of 1 bits, expected 0", 3),
        (hot(Draft, 3, 1, 0, 1, 0, 1, 1, body="000001"), "draft has distance 1 at node 0, expected 0 to 0", 3),
        (hot(Draft, 3, 1, 0, 1, 0, 0, 0), "draft has 0 nodes, expected 1 or more unless the tree rests", 3),
        (hot(Ack, 2**64 - 1), "ack has received 18446744073709551615", 0),
        (control(Close), "close has session 0, expected 1 to 65535", 0),
        (control(Close, session=-4), "close has session -4, expected 1 to 65535", 0),
        (control(Close, session="4"), "close is malformed: expected `int`, got `str` - at `$.session`", 0),
        (control(Close, session=4, why="x"), "close is malformed: object contains unknown field `why`", 4),
        (control(Error, session=4), "error is malformed: object missing required field `message`", 4),
        (control(Hello, type="close", lowest=1, highest=1, client=""), "hello is malformed: invalid value 'close'", 0),
        (control(Open, session=4, fingerprint="", vocab=0, codec="int4"), "open has vocab 0, expected 2 to", 4),
        (control(Close, session=4, why="x" * 99), "close takes 127 bytes, expected at most 64", 0),
        (control(Hello, lowest=1, highest=1, client="", other=[]), "unknown field `other`", 0),
        (control(Hello, lowest=1, highest=1, client="x" * 5000), "hello takes 5040 bytes, expected at most 4096", 0),
    ],
)
def test_frames_that_are_refused(frame: bytes, text: str, session: int) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        decode(frame, lambda number: LAYOUT)
    assert text in str(error.value)
    assert error.value.session == session


def test_a_row_must_fit_a_message() -> None:
    request, answer = Open(3, "f", 9, "fp16", padding=10), Opened(3, "h", 32_768, 9, 9)
    with pytest.raises(ProtocolError, match=r"^a feature row takes 65546 bytes, expected at most 65536$"):
        Layout.of(request, answer)
    assert Layout.of(request, Opened(3, "h", 100, 9, 9)) == Layout(9, 210)

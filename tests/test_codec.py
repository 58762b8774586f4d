"""The bytes of messages: round trips and sizes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import fuzz_protocol
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd.scripts.bench_wire import grown
from starsd.server.live_tree import LiveTree
from starsd.shared import limits, messages
from starsd.shared.codec import CONTROL_BYTES, KINDS, TAGS, Layout, decode, encode, peek, session_of
from starsd.shared.errors import RemoteProtocolError
from starsd.shared.hot_codec import HEADERS, LEVELS, quantise
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
    Stats,
    Verdict,
    Welcome,
)

LAYOUT = Layout(vocab=49_152, row_bytes=66)
LARGE = Layout(vocab=151_936, row_bytes=2_112)
HOT = (Prefix, Verdict, Features, Draft, Ack)

SESSIONS, EPOCHS = st.integers(1, 65_535), st.integers(1, 2**32 - 1)
POSITIONS = st.integers(0, 2**31 - 1 - 4_096)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
VOCABS = st.integers(2, 2**24)


def ids(vocab: int, least: int, most: int) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, vocab - 1), min_size=least, max_size=most).map(
        lambda found: np.array(found, np.int64)
    )


@st.composite
def controls(draw: st.DrawFn) -> Message:
    number, text = draw(SESSIONS), draw(TEXT)
    small = st.integers(1, 65_535)
    lowest = draw(small)
    heads = draw(st.lists(st.builds(HeadInfo, TEXT, TEXT, TEXT, st.integers(0, 2**40)), max_size=3))
    found: list[Message] = [
        Hello(lowest, draw(st.integers(lowest, 65_535)), text),
        Welcome(draw(small), text, tuple(heads), draw(small), draw(st.integers(1_024, 2**31 - 1))),
        Open(number, text, draw(VOCABS), draw(st.sampled_from(["fp16", "int8", "int4"])), draw(st.booleans()), lowest),
        Opened(number, text, draw(small), draw(small), draw(small)),
        Close(number),
        Error(draw(st.sampled_from([0, number])), text, draw(st.floats(-1, 1e6))),
        Stats(draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=4))),
    ]
    return draw(st.sampled_from(found))


@st.composite
def hots(draw: st.DrawFn) -> tuple[Message, Layout]:
    layout = Layout(draw(VOCABS), draw(st.integers(1, 300)))
    number, epoch, start = draw(SESSIONS), draw(EPOCHS), draw(POSITIONS)
    match draw(st.sampled_from(HOT)).__name__:
        case "Prefix":
            keys, temperatures = st.integers(0, 2**64 - 1), st.floats(0, 1000, width=32, exclude_min=True)
            races = st.none() | st.builds(Race, temperatures, keys, keys, POSITIONS)
            return Prefix(number, epoch, start, draw(ids(layout.vocab, 1, 40)), draw(races)), layout
        case "Verdict":
            tokens = draw(ids(layout.vocab, 0, 12))
            seq, received, lag = draw(st.integers(1, 2**31 - 1)), draw(POSITIONS), draw(POSITIONS)
            return Verdict(number, epoch, seq, start, received, lag, tokens), layout
        case "Features":
            rows = draw(st.binary(min_size=layout.row_bytes, max_size=layout.row_bytes)) * draw(st.integers(1, 4))
            return Features(number, epoch, start, rows), layout
        case "Draft":
            tokens = draw(ids(layout.vocab, 0, 30))
            parents = [draw(st.integers(-1, start + i - 1)) for i in range(len(tokens))]
            steps = LEVELS[draw(st.lists(st.integers(0, 15), min_size=len(tokens), max_size=len(tokens)))]
            rest = not len(tokens) or draw(st.booleans())
            base, seq = draw(st.integers(1, 2**31 - 1)), draw(POSITIONS)
            return Draft(number, epoch, seq, base, start, np.array(parents, np.int64), tokens, steps, rest), layout
    return Ack(draw(st.integers(0, 2**63 - 1))), layout


def same(one: Message, other: Message) -> bool:
    """Whether type and all fields are equal."""
    if type(one) is not type(other):
        return False
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


@given(controls())
def test_control_messages_come_back(message: Message) -> None:
    frame = encode(message)
    assert same(decode(frame, lambda session: None), message)
    assert peek(frame) == (TAGS[type(message)], session_of(message))


@given(hots())
def test_hot_messages_come_back(pair: tuple[Message, Layout]) -> None:
    message, layout = pair
    frame = encode(message, layout)
    back = decode(frame, lambda session: layout if session == session_of(message) else None)
    assert same(back, message)
    assert encode(back, layout) == frame
    assert peek(frame) == (TAGS[type(message)], session_of(message))


@given(hots(), st.data())
def test_a_changed_bit_is_refused_or_another_message(pair: tuple[Message, Layout], data: st.DataObject) -> None:
    """There is one form of each message, so what decodes is what encodes to the same bytes."""
    message, layout = pair
    frame = bytearray(encode(message, layout))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    try:
        back = decode(bytes(frame), lambda session: layout)
    except RemoteProtocolError:
        return
    if isinstance(back, HOT):
        assert encode(back, layout) == frame


@pytest.mark.parametrize("message", fuzz_protocol.samples(np.random.default_rng(1)), ids=lambda m: type(m).__name__)
def test_frames_of_another_length_are_refused(message: Message) -> None:
    frame = encode(message, LAYOUT)
    for wrong in (*(frame[:end] for end in range(len(frame))), frame + b"\0"):
        with pytest.raises(RemoteProtocolError, match=r"takes \d+ bytes|malformed|is empty|bytes of rows|has token"):
            decode(wrong, lambda session: LAYOUT)


def test_every_message_has_a_tag() -> None:
    assert set(TAGS) == set(messages.Message.__args__)
    assert len(KINDS) == len(TAGS)
    assert set(CONTROL_BYTES) | set(HEADERS) == set(TAGS)


# Sizes


def test_sixty_nodes_take_260_bytes_at_most() -> None:
    """Trees of any shape, and deltas whose parents lie up to 511 nodes back."""
    draw = np.random.default_rng(3)
    for trial in range(300):
        first = int(draw.integers(0, 452)) if trial % 2 else 0
        own = first + np.arange(60)
        parents = draw.integers(-1, own)
        steps = -draw.exponential(2, 60).astype(np.float32)
        draft = Draft(1, 1, 9, 700, first, parents, draw.integers(0, LARGE.vocab, 60), steps)
        assert len(encode(draft, LARGE)) <= 260


def test_dynamic_trees_take_232_bytes_at_most() -> None:
    assert max(len(encode(grown(60, LARGE.vocab, base=500, seed=seed), LARGE)) for seed in range(20)) == 232


def test_deltas_of_a_live_tree_take_260_bytes_at_most() -> None:
    """A tree that is re-rooted over and over sends what is new, at most 60 nodes at a time."""
    draw, counts = np.random.default_rng(4), []
    live, base = LiveTree(0, top_k=10, depth=7, entries=128), 500
    for _ in range(120):
        while len(due := live.frontier(10, 100)):
            live.claim(due)
            steps = np.sort(np.log(draw.dirichlet(np.full(10, 0.5), len(due)) + 1e-6), axis=1)[:, ::-1]
            tokens = np.stack([draw.choice(LARGE.vocab, 10, replace=False) for _ in due])
            live.expand(due, tokens, steps.astype(np.float32))
        while len(delta := live.delta(100, most=60)):
            counts.append(len(delta))
            frame = encode(Draft(1, 1, 1, base, delta.first, delta.parents, delta.tokens, delta.steps), LARGE)
            assert len(frame) <= 260
        best = live.best(100)
        live.reroot([int(best.tokens[1]) if draw.random() < 0.7 else int(draw.integers(0, LARGE.vocab))])
        base += 1
    assert max(counts) == 60
    assert len(set(counts)) > 10


def test_the_longest_prefix_fits_what_a_server_takes() -> None:
    tokens = np.full(limits.MAX_PREFIX_TOKENS, limits.MAX_VOCAB - 1)
    layout = Layout(limits.MAX_VOCAB, 2)
    frame = encode(Prefix(1, 1, 0, tokens), layout)
    assert len(frame) <= limits.MAX_MESSAGE
    tracemalloc.start()
    try:
        decode(frame, lambda session: layout)
        assert tracemalloc.get_traced_memory()[1] < fuzz_protocol.PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [Prefix, Verdict, Draft])
def test_a_count_allocates_nothing(kind: type[Any]) -> None:
    """Headers that promise as much as is allowed, with nothing behind them."""
    _, _, most = limits.COUNTS[kind]
    fields = {Prefix: (1, 1, 0, most, 1), Verdict: (1, 1, 1, 0, 0, 0, most), Draft: (1, 1, 0, 1, 0, most, 31)}[kind]
    frame = HEADERS[kind].pack(TAGS[kind], *fields)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=rf"takes {len(frame)} bytes, expected \d{{4,}}$"):
            decode(frame, lambda session: LARGE)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


# Log-probabilities


def test_levels_are_square_and_come_back() -> None:
    assert LEVELS.dtype == np.float32
    assert LEVELS[[1, 2, 3, 15]] == pytest.approx([-0.0356, -0.1422, -0.32, -8.0], abs=1e-4)
    assert np.array_equal(quantise(LEVELS), np.arange(16))


def test_steps_go_to_the_nearest_level() -> None:
    steps = np.linspace(-8, 0, 1_000, dtype=np.float32)
    roots = np.sqrt(-LEVELS)[None] - np.sqrt(-steps)[:, None]
    assert np.array_equal(quantise(steps), np.abs(roots).argmin(axis=1))
    assert quantise(np.array([1e-7, -9.0, -np.inf], np.float32)).tolist() == [0, 15, 15]

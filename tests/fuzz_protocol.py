"""Frames that no honest peer sends, to the decoder and to connections in any state.

    python -m tests.fuzz_protocol --seconds 60

Whatever comes, there is a message, nothing (late), or RemoteProtocolError; soon, and without allocating more than the
largest message takes. A finding is printed with its frame in hexadecimal and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from starsd.shared.codec import KINDS, TAGS, Layout, decode, encode
from starsd.shared.errors import RemoteProtocolError
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
from starsd.shared.protocol import Connection, Role

SLOW_SECONDS = 1.0  # for one frame; the largest takes some ten milliseconds
PEAK_BYTES = 8 * 2**20  # for one frame; the largest Prefix takes 4.5 MB
LAYOUT = Layout(vocab=49_152, row_bytes=66)
OPEN = Open(1, "f", LAYOUT.vocab, "int8")
OPENED = Opened(1, "h", 64, 128, 64)  # 64 values as int8 take LAYOUT.row_bytes
_SIZES = (0, 1, 2, 3, 7, 11, 22, 64, 300, 4_096, 70_000, 400_000)


def samples(draw: np.random.Generator) -> list[Message]:
    """An honest message of each type; those of a session would be the first of their kind in session 1."""
    count = int(draw.integers(1, 30))
    ids = draw.integers(0, LAYOUT.vocab, count)
    parents = np.array([int(draw.integers(-1, i)) if i else -1 for i in range(count)])
    steps = -draw.exponential(2.0, count).astype(np.float32)
    none = slice(0, 0 if draw.random() < 0.1 else count)  # now and then only the news that the tree rests
    return [
        Hello(2, 2, "edge 1.0"),
        Welcome(2, "server 1.0", (HeadInfo("f", "h", "a model"),), 4, 400_000),
        OPEN,
        OPENED,
        Close(1),
        Error(1, "no room", 2.0),
        Stats({"tau": 3.5}),
        Prefix(1, 1, 0, ids, Race(0.5, 2**64 - 1, 3, count) if draw.random() < 0.5 else None),
        Verdict(1, 1, 1, count, 0, 0, ids[:3]),
        Features(1, 1, 0, draw.bytes(LAYOUT.row_bytes)),
        Draft(1, 1, 0, count, 0, parents[none], ids[none], steps[none], True),
        Ack(5),
    ]


def connection(draw: np.random.Generator) -> Connection:
    """One side of a conversation that honest peers broke off after some messages."""
    hello, welcome, request, answer, close, _, _, prefix, verdict, features, draft, _ = samples(draw)
    script = [
        (Role.EDGE, hello),
        (Role.SERVER, welcome),
        (Role.EDGE, request),
        (Role.SERVER, answer),
        (Role.EDGE, prefix),
        (Role.SERVER, draft),
        (Role.EDGE, features),
        (Role.EDGE, verdict),
        (Role.EDGE, close),
        (Role.EDGE, request),
        (Role.SERVER, close),
    ]
    sides = {role: Connection(role) for role in Role}
    for role, message in script[: int(draw.integers(0, len(script) + 1))]:
        if isinstance(message, Features) and len(prefix.tokens) < 2:
            continue
        sides[role.peer].receive(sides[role].send(message))
    return sides[Role.EDGE if draw.random() < 0.5 else Role.SERVER]


def dishonest(draw: np.random.Generator) -> bytes:
    """Noise, noise behind a tag, or an honest frame that was changed, cut, lengthened or given huge numbers."""
    kind = int(draw.integers(0, 7))
    if kind == 0:
        return draw.bytes(int(draw.choice(_SIZES)))
    if kind == 1:
        return bytes([int(draw.choice(list(KINDS)))]) + draw.bytes(int(draw.choice(_SIZES)))
    messages = samples(draw)
    frame = bytearray(encode(messages[int(draw.integers(0, len(messages)))], LAYOUT))
    if kind == 2:
        return bytes(frame[: int(draw.integers(0, len(frame)))])
    if kind == 3:
        return bytes(frame) + draw.bytes(int(draw.integers(1, 100)))
    if kind == 4:
        at, size = int(draw.integers(1, len(frame))), int(draw.choice([1, 2, 4, 8]))
        frame[at : at + size] = bytes([int(draw.choice([0, 127, 128, 255]))]) * len(frame[at : at + size])
    if kind == 5 and frame[0] in (TAGS[Prefix], TAGS[Verdict], TAGS[Draft]):
        frame[-8:] = b"\xff" * len(frame[-8:])
    if kind == 6:  # the one MessagePack has for lengths: arrays, maps, strings, binaries of 4 GiB
        at = int(draw.integers(1, len(frame)))
        frame[at : at + 5] = bytes([int(draw.choice([0xDD, 0xDF, 0xDB, 0xC6]))]) + b"\xff" * 4
    for _ in range(int(draw.integers(0, 4))):
        frame[int(draw.integers(0, len(frame)))] = int(draw.integers(0, 256))
    return bytes(frame)


def run(seconds: float, seed: int = 0) -> Counter[str]:
    """Fuzz for so long; how often each outcome came. Raises AssertionError, with the frame, for any other."""
    draw, outcomes = np.random.default_rng(seed), Counter[str]()
    end = time.monotonic() + seconds
    tracemalloc.start()
    try:
        while time.monotonic() < end:
            frame = dishonest(draw)
            outcomes[_outcome(partial(decode, frame, lambda session: LAYOUT), frame)] += 1
            side = connection(draw)
            outcomes[_outcome(partial(side.receive, frame), frame, side)] += 1
    finally:
        tracemalloc.stop()
    return outcomes


def _outcome(call: Callable[[], Message | None], frame: bytes, side: Connection | None = None) -> str:
    """What became of a frame; a connection must be able to tell its peer of an error."""
    where = f"frame {frame[:512].hex()} of {len(frame)} bytes" + (f" at a {side.role.value}" if side else "")
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    start = time.perf_counter()
    refused: RemoteProtocolError | None = None
    try:
        outcome = "late" if call() is None else "message"
    except RemoteProtocolError as error:
        outcome, refused = "refused", error
    except Exception as error:
        raise AssertionError(f"{where} raises {error!r}") from error
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1] - before
    assert seconds < SLOW_SECONDS, f"{where} took {seconds:.1f} s"
    assert peak < PEAK_BYTES, f"{where} took {peak} bytes"
    assert refused is None or str(refused), f"{where} is refused without a reason"
    assert refused is None or side is None or side.fail(refused), f"{where} is refused, and its sender cannot be told"
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the protocol's decoder and its state machine.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        outcomes = run(arguments.seconds, arguments.seed)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{outcomes.total()} frames: {', '.join(f'{count} {what}' for what, count in sorted(outcomes.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

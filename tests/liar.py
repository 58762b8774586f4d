"""A server that is up to no good, as a protocol object without sockets: what it answers to each frame of an edge."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from bigram import FINGERPRINT, FOLLOWS
from tiny_session import VOCAB

from starsd.shared import codec
from starsd.shared.errors import ProtocolError
from starsd.shared.limits import MAX_DRAFT_NODES, Layout
from starsd.shared.messages import (
    Ack,
    Draft,
    Error,
    Features,
    HeadInfo,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)

DRAFT_COUNT = 19  # where a Draft's header has its count, see `docs/protocol.md`
LIES = (
    "mute",  # not even a Welcome
    "silent",  # opens sessions and says nothing of them
    "refuses",  # every session, at once
    "ends",  # the connection, when a session is asked for
    "wrong tokens",
    "one token",  # a thousand times
    "deep",  # a path of a thousand nodes
    "wrong base",  # of a tree, as far as the protocol lets it
    "impossible base",
    "cyclic parents",
    "ten thousand nodes",
    "flood",  # without end, and without being asked
    "rests",  # at once, and never with a node
    "rests on the old",  # the same, but for nodes that came too late
    "late",  # right, but always an epoch or some verdicts ago
    "repeats",  # every frame twice
    "bytes",  # of no meaning, with the right tags
    "noise",  # of no meaning at all
    "wide features",
    "no window",
    "no room",  # for messages of a useful size
    "one session",
    "acknowledges nothing",
    "acknowledges too much",
    "other heads",
)


class Liar:
    """One connection's; `seed` makes it the same every time."""

    def __init__(self, how: str, seed: int = 0) -> None:
        self.how, self.random = how, random.Random(f"{how} {seed}")
        self.over = False  # it closes the connection
        self._layouts: dict[int, Layout] = {}
        self._received = 0
        self._texts: dict[int, list[int]] = {}
        self._nodes: dict[int, int] = {}

    def take(self, data: bytes) -> list[bytes]:
        """Frames that it sends for one that came."""
        self._received += len(data)
        frames = self._answers(codec.decode(data, self._layouts.get))
        if self.how == "repeats":
            frames = [frame for each in frames for frame in (each, each)]
        if self.how not in ("acknowledges nothing", "mute"):
            frames.append(codec.encode(Ack(2**40 if self.how == "acknowledges too much" else self._received)))
        return frames

    def _answers(self, message: Message | None) -> list[bytes]:
        match message:
            case Hello() if self.how != "mute":
                fingerprint = "0" * 64 if self.how == "other heads" else FINGERPRINT
                head = HeadInfo(fingerprint, "ab" * 32, "liar")
                room = 1024 if self.how == "no room" else 1 << 18
                return [codec.encode(Welcome(2, "liar", (head,), 1 if self.how == "one session" else 64, room))]
            case Open():
                return self._opens(message)
            case Prefix(session=session):
                before = self._texts.get(session, [0] * message.start)[: message.start]
                self._texts[session] = [*before, *message.tokens.tolist()]
                self._nodes[session] = 0
                return self._drafts(message, 0)
            case Verdict(session=session):
                self._texts[session] += message.tokens.tolist()
                return self._drafts(message, message.seq)
            case Features(session=session) if self.how == "flood":
                return self._drafts(message, 0)
        return []

    def _opens(self, message: Open) -> list[bytes]:
        session = message.session
        if self.how == "refuses":
            return [codec.encode(Error(session, "no", 0.0))]
        if self.how == "ends":
            self.over = True
            return [codec.encode(Error(0, "no"))]
        width, window = 5 if self.how == "wide features" else 1, 1 if self.how == "no window" else 64
        opened = Opened(session, "ab" * 32, width, window, 2**31 - 1)
        self._layouts[session] = Layout.of(message, opened)
        self._texts.pop(session, None)
        return [codec.encode(opened)]

    def _drafts(self, message: Any, seq: int) -> list[bytes]:
        """What it sends when it hears of tokens."""
        session, draw, text = message.session, self.random, self._texts[message.session]
        if self.how == "noise":
            return [draw.randbytes(draw.randint(0, 300))]
        if self.how == "bytes":
            tag = codec.TAGS[draw.choice([Draft, Opened, Error, Ack, Stats, Welcome])]
            return [bytes([tag]) + session.to_bytes(2, "little") + draw.randbytes(draw.randint(0, 60))]
        if self.how not in _TREES:
            return []
        base, tokens, options = _TREES[self.how](draw, text)
        if self.how == "late":
            seq = max(0, seq - draw.randint(0, 3))
        times = 3 if self.how == "flood" else 1
        frames = [frame for _ in range(times) for frame in self._draft(message, seq, base, tokens, **options)]
        return [self._spoilt(frame) for frame in frames]

    def _spoilt(self, frame: bytes) -> bytes:
        if self.how == "cyclic parents":
            shape = codec.HEADERS[Draft].size
            return frame[:shape] + self.random.randbytes(len(frame) - shape)
        if self.how == "ten thousand nodes":
            return frame[:DRAFT_COUNT] + (10_000).to_bytes(2, "little") + frame[DRAFT_COUNT + 2 :] + bytes(40_000)
        return frame

    def _draft(
        self, message: Any, seq: int, base: int, tokens: list[int], *, chain: bool = True, rest: bool = False
    ) -> list[bytes]:
        session, first = message.session, self._nodes.get(message.session, 0)
        parents = np.arange(first - 1, first - 1 + len(tokens)) if chain else np.full(len(tokens), -1)
        if chain and len(tokens):
            parents[0] = -1
        draft = Draft(
            session,
            message.epoch,
            seq,
            base,
            first,
            parents,
            np.array(tokens, np.int64),
            np.full(len(tokens), -0.1),
            rest,
        )
        try:
            frame = codec.encode(draft, self._layouts[session])
        except ProtocolError:
            return []
        self._nodes[session] = first + len(tokens)
        return [frame]


Tree = tuple[int, list[int], dict[str, bool]]  # base, tokens, and what else `_draft` is told
USUAL = ("repeats", "no window", "one session", "acknowledges nothing", "acknowledges too much")

_TREES: dict[str, Callable[[random.Random, list[int]], Tree]] = {
    "wrong tokens": lambda draw, text: (len(text), draw.choices(range(VOCAB), k=20), {"chain": False}),
    "one token": lambda draw, text: (len(text), [7] * MAX_DRAFT_NODES, {"chain": False}),
    "deep": lambda draw, text: (len(text), [7] * MAX_DRAFT_NODES, {}),
    "wrong base": lambda draw, text: (draw.randint(1, len(text)), [int(FOLLOWS[text[-1]])] * 3, {}),
    "impossible base": lambda draw, text: (len(text) + draw.randint(1, 2**20), [3, 4], {}),
    "cyclic parents": lambda draw, text: (len(text), [3, 4, 5, 6], {}),
    "ten thousand nodes": lambda draw, text: (len(text), [3, 4, 5, 6], {}),
    "flood": lambda draw, text: (len(text), draw.choices(range(VOCAB), k=MAX_DRAFT_NODES), {"chain": False}),
    "rests": lambda draw, text: (len(text), [], {"rest": True}),
    "rests on the old": lambda draw, text: (max(1, len(text) - 1), [draw.randrange(VOCAB)], {"rest": True}),
    "late": lambda draw, text: (base := max(1, len(text) - draw.randint(0, 9)), text[base : base + 4] or [3], {}),
    **{how: lambda draw, text: (len(text), [int(FOLLOWS[text[-1]])], {"rest": True}) for how in USUAL},
}


def tampering(seed: int, share: float = 0.2) -> Callable[[bytes], list[bytes]]:
    """Drops, repeats, delays, cuts, lengthens and changes a share of the frames."""
    ways: list[Callable[[random.Random, bytes, int], list[bytes]]] = [
        lambda draw, frame, at: [],
        lambda draw, frame, at: [frame, frame],
        lambda draw, frame, at: [frame[:at]],
        lambda draw, frame, at: [frame + draw.randbytes(draw.randint(1, 9))],
        lambda draw, frame, at: [frame[:at] + bytes([frame[at] ^ (1 << draw.randrange(8))]) + frame[at + 1 :]],
        lambda draw, frame, at: [draw.randbytes(draw.randint(0, 200))],
        lambda draw, frame, at: held.append(frame) or ([held.pop(draw.randrange(len(held)))] if len(held) > 3 else []),
    ]
    draw, held = random.Random(f"tampering {seed}"), list[bytes]()

    def tamper(frame: bytes) -> list[bytes]:
        if draw.random() > share:
            return [frame]
        return draw.choice(ways)(draw, frame, draw.randrange(len(frame)))

    return tamper

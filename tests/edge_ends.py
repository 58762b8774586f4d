"""The edge's half of a session or a connection against the protocol's own idea of a server, without time or sockets."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from starsd.edge.channel import Channel, Model
from starsd.edge.remote import RemoteSession
from starsd.shared.clock import RealMailbox
from starsd.shared.features import codec
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.messages import Draft, Features, HeadInfo, Hello, Message, Open, Opened, Welcome
from starsd.shared.protocol import Connection, Role

WIDTH, WINDOW, VOCAB = 4, 16, 100
FINGERPRINT, HEAD = "f" * 64, "ab" * 8
MODEL = Model(
    FINGERPRINT,
    ModelShape(layers=1, hidden=WIDTH, heads=1, kv_heads=1, head_dim=WIDTH, vocab=VOCAB, context=4096),
    FeatureSpec((), True, WIDTH),
)
M = TypeVar("M")


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def mailbox(self) -> RealMailbox[Any]:
        return RealMailbox()


def rows(start: int, count: int) -> Any:
    """Features that say which row they are."""
    return np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None], WIDTH, axis=1)


def draft(
    session: RemoteSession, base: int, tokens: list[int], *, first: int = 0, seq: int = 0, rest: bool = False
) -> Draft:
    count = len(tokens)
    return Draft(
        session.number,
        session.epoch,
        seq,
        base,
        first,
        np.arange(count) - 1,
        np.array(tokens, np.int64),
        np.full(count, -0.1, np.float32),
        rest,
    )


class OneSession:
    """A session that a test pumps; what it says has to be allowed, or `send` raises."""

    def __init__(self, *, window: int = WINDOW, padding: int = 0, idle_seconds: float = math.inf) -> None:
        self.clock = Hands()
        self.woken = 0
        self.session = RemoteSession(
            fingerprint=FINGERPRINT,
            vocab=VOCAB,
            width=WIDTH,
            codec=codec("fp16"),
            clock=self.clock,
            wake=self._wake,
            window=window,
            padding=padding,
            idle_seconds=idle_seconds,
        )
        self.connect()

    def connect(self) -> None:
        self.edge, self.server = Connection(Role.EDGE), Connection(Role.SERVER)
        self.server.receive(self.edge.send(Hello(2, 2, "edge")))
        self.edge.receive(self.server.send(Welcome(2, "server", (), 9, 1 << 20)))

    def _wake(self) -> None:
        self.woken += 1

    def say(self, most: int = 1000, chunk: int = 4096) -> list[Any]:
        """What it has to say, up to `most` messages; the server finds all of it right."""
        said: list[Any] = []
        while len(said) < most:
            if self.session.unnumbered and self.session.urgency() == 0:
                self.session.number += 1
            if (message := self.session.next_message(chunk)) is None:
                break
            frame = self.edge.send(message)
            self.session.sent(message, len(frame))
            assert self.server.receive(frame) is not None
            said.append(message)
        return said

    def hear(self, message: Message) -> None:
        frame = self.server.send(message)
        found = self.edge.receive(frame)
        if isinstance(found, Opened):
            self.session.opened(found)
        elif isinstance(found, Draft):
            self.session.arrived(found, len(frame))

    def open(self, *, window: int = WINDOW, width: int = WIDTH, projector: Any = None) -> Open:
        """Until the server has it."""
        self.session.offer(projector)
        (message,) = self.say()
        assert isinstance(message, Open)
        self.hear(Opened(self.session.number, HEAD, width, window, 200))
        return message


def shown(said: list[Any]) -> list[list[int]]:
    """Rows of the features in it, as their values tell."""
    return [
        codec("fp16").decode(message.rows, WIDTH)[:, 0].astype(int).tolist()
        for message in said
        if isinstance(message, Features)
    ]


class OneChannel:
    """A channel on a connection that a test pumps."""

    def __init__(self, **options: Any) -> None:
        self.clock = Hands()
        self.asked: list[HeadInfo] = []
        self.projectors: dict[str, Any] = {}
        self.channel = Channel(
            client="edge 1.0",
            clock=self.clock,
            codec_name="fp16",
            window=WINDOW,
            projectors=self._projector,
            **options,
        )

    def _projector(self, head: HeadInfo) -> Any:
        self.asked.append(head)
        return self.projectors.get(head.head)

    def connect(self, *, welcome: bool = True, sessions: int = 9, projector_bytes: int = 0) -> None:
        self.server = Connection(Role.SERVER)
        self.channel.connected()
        assert self.say() == [Hello(2, 2, "edge 1.0")]
        if welcome:
            head = HeadInfo(FINGERPRINT, HEAD, "tiny", projector_bytes)
            self.hear(Welcome(2, "server", (head,), sessions, 1 << 20))

    def say(self, most: int = 1000) -> list[Any]:
        said: list[Any] = []
        while len(said) < most and (frame := self.channel.next_frame()) is not None:
            said.append(self.server.receive(frame))
        return said

    def hear(self, message: Message) -> bytes | None:
        return self.channel.received(self.server.send(message))

    def open(self, *sessions: RemoteSession, width: int = WIDTH) -> None:
        """Sessions that are about to open, or all."""
        for message in self.say():
            if isinstance(message, Open):
                self.hear(Opened(message.session, HEAD, width, WINDOW, 200))


def of(said: list[Any], kind: type[M]) -> list[M]:
    return [message for message in said if isinstance(message, kind)]

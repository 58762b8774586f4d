"""A link to a server that drafts nothing and remembers all that it is told."""

from __future__ import annotations

import threading
from typing import Any

from edge_ends import FINGERPRINT, HEAD

from starsd.edge.channel import Channel
from starsd.shared.features import codec
from starsd.shared.messages import Ack, Close, Features, HeadInfo, Message, Open, Opened, Prefix, Verdict, Welcome
from starsd.shared.protocol import Connection, Role


class RecordingLink:
    """In place of a `Link`. `texts` are those that sessions hold, `told` all that they ever held; `rows` are features
    by session, position and value."""

    reconnects = 0

    def __init__(self, width: int = 1, window: int = 2048) -> None:
        self.width, self.window = width, window
        self.channel = Channel(client="edge", codec_name="fp16", wake=self._pump)
        self.opened = self.ended = 0
        self.open: set[int] = set()
        self.texts: dict[int, list[int]] = {}
        self.told: list[list[int]] = []
        self.rows: list[tuple[list[int], int, float]] = []  # the text then, position, value
        self._server = Connection(Role.SERVER)
        self._received = 0
        self._pumping = threading.Lock()
        self.connect()

    @property
    def connected(self) -> bool:
        return self.channel.welcome is not None

    def connect(self) -> None:
        self.channel.connected()
        self._pump()

    def close(self) -> None:
        self._pump()
        self.channel.disconnected()

    def _pump(self) -> None:
        """Any thread may; the one that is at it goes on until there is nothing more to say."""
        if not hasattr(self, "_pumping") or not self._pumping.acquire(blocking=False):
            return
        try:
            while (frame := self.channel.next_frame()) is not None:
                self._received += len(frame)
                self._take(self._server.receive(frame))
                self._say(Ack(self._received))
        finally:
            self._pumping.release()

    def _say(self, message: Message) -> None:
        self.channel.received(self._server.send(message))

    def _take(self, message: Any) -> None:
        match message:
            case Open():
                self.opened += 1
                self.open.add(message.session)
                self._say(Opened(message.session, HEAD, self.width, self.window, 200))
            case Close():
                self.ended += 1
                self.open.discard(message.session)
            case Prefix() | Verdict():
                old = self.texts.get(message.session, [])[: message.start]
                self.texts[message.session] = [*old, *message.tokens.tolist()]
                assert message.start == len(old)
                self.told.append(self.texts[message.session])
            case Features():
                values = codec("fp16").decode(message.rows, self.width)[:, 0]
                for row, value in enumerate(values.tolist(), start=message.start):
                    self.rows.append((self.texts[message.session], row, value))
            case _:  # Hello
                head = HeadInfo(FINGERPRINT, HEAD, "toy", 0)
                self._say(Welcome(2, "server", (head,), 9, 1 << 20))

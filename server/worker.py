"""A drafter's process: the service loop, its messages coming from and going to a gateway over ZeroMQ.

    python -m starsd.server.worker        a `WorkerConfig` as the first line of stdin; ends when stdin does

so that it never outlives the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from starsd.server.heads import Loaded, load_heads
from starsd.server.link import (
    NOBODY,
    RELOAD,
    ROLLBACK,
    STOP,
    Failed,
    Figures,
    Keys,
    Notice,
    Ready,
    WorkerConfig,
    decode_order,
    encode,
)
from starsd.server.schedules import schedule
from starsd.server.service import Service
from starsd.server.sessions import GONE, Item, Sessions
from starsd.shared import codec
from starsd.shared.errors import RemoteProtocolError, StarsdError
from starsd.shared.limits import Layout
from starsd.shared.messages import Ack, Message

STDIN = 0
LINGER_MS = 500  # for what was said last to get out

LayoutOf = Callable[[bytes, int], Layout | None]


class GatewayLink:
    """The inbox of a service, and its way out. One frame each way is a message of one peer (`link.py`)."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.layout_of: LayoutOf = lambda peer, session: None
        self.orders: list[str] = []
        self._socket = socket
        self._taken: dict[bytes, int] = {}  # bytes of each peer

    def put(self, item: tuple[bytes, Item]) -> None:
        raise NotImplementedError("a gateway fills this inbox")

    def take(self, timeout: float) -> list[tuple[bytes, Item]]:
        """All that came, oldest first; the gateway hears how much of each peer's was taken."""
        items: list[tuple[bytes, Item]] = []
        if not self._socket.poll(round(1000 * timeout)):
            return items
        peers: set[bytes] = set()
        for peer, data in self._frames():
            if peer == NOBODY:
                self.orders.append(decode_order(data).what)
                continue
            items.append((peer, self._decode(peer, data)))
            if data:
                self._taken[peer] = self._taken.get(peer, 0) + len(data)
                peers.add(peer)
            else:
                self._taken.pop(peer, None)
                peers.discard(peer)
        for peer in peers:
            self.send(peer, Ack(self._taken[peer]))
        return items

    def send(self, peer: bytes, message: Message) -> None:
        session = codec.session_of(message)
        self._socket.send_multipart([peer, codec.encode(message, self.layout_of(peer, session) if session else None)])

    def notify(self, notice: Notice) -> None:
        self._socket.send_multipart([NOBODY, encode(notice)])

    def _frames(self) -> Iterator[list[bytes]]:
        while True:
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _decode(self, peer: bytes, data: bytes) -> Item:
        if not data:
            return GONE
        try:
            return codec.decode(data, lambda session: self.layout_of(peer, session))
        except RemoteProtocolError as error:
            return error


class Worker:
    """Loads heads, drafts with them until told to stop, and changes them while it drafts."""

    def __init__(self, config: WorkerConfig, link: GatewayLink) -> None:
        """Raises StarsdError when the heads cannot be loaded."""
        self._config, self._link = config, link
        self._loaded = self._load(None)
        self._before: Loaded | None = None  # what a rollback goes back to
        self._loading: threading.Thread | None = None
        self._result: Loaded | StarsdError | None = None
        self.sessions = Sessions(self._loaded.heads, link.send, config.limits)
        link.layout_of = self.sessions.layout_of
        self._service = Service(self.sessions, schedule(config.schedule, config.limits), link)
        self._service.metrics.listener = lambda values: link.notify(Figures(values))

    def run(self) -> None:
        self._announce(self._loaded)
        self._service.run(until=self._tend)

    def _tend(self) -> bool:
        """Between turns: do what was ordered; whether to stop."""
        orders, self._link.orders = self._link.orders, []
        if RELOAD in orders and self._loading is None:
            # beside the drafting, which goes on
            self._loading = threading.Thread(target=self._load_again, daemon=True)
            self._loading.start()
        if ROLLBACK in orders:
            self._roll_back()
        if self._loading is not None and self._result is not None:
            result, self._loading, self._result = self._result, None, None
            self._link.notify(Failed(str(result))) if isinstance(result, StarsdError) else self._change(result)
        return STOP in orders

    def _roll_back(self) -> None:
        if self._before is None:
            self._link.notify(Failed("no heads were there before these, expected a reload first"))
        else:
            self._change(self._before)

    def _change(self, loaded: Loaded) -> None:
        self._before, self._loaded = self._loaded, loaded
        self.sessions.replace(loaded.heads, "the head was replaced: open the session again")
        self._announce(loaded)

    def _announce(self, loaded: Loaded) -> None:
        self._link.notify(Ready(tuple(head.info for head in loaded.heads), loaded.projectors, loaded.warnings))

    def _load(self, before: Loaded | None) -> Loaded:
        config = self._config
        return load_heads(
            config.models,
            Path(config.folder),
            config.limits,
            dtype=config.dtype,
            device=config.device,
            before=before,
        )

    def _load_again(self) -> None:
        try:
            self._result = self._load(self._loaded)
        except StarsdError as error:
            self._result = error
        except Exception as error:  # a head that is written just now can break in any way
            self._result = StarsdError(f"{type(error).__name__}: {error}")


def serve(config: WorkerConfig, context: zmq.Context[Any]) -> None:
    """Connect to the gateway and draft until told to stop."""
    with connected(config.endpoint, config.name, context, config.keys) as socket:
        link = GatewayLink(socket)
        try:
            worker = Worker(config, link)
        except StarsdError as error:
            link.notify(Failed(str(error)))
            return
        worker.run()


@contextmanager
def connected(
    endpoint: str, name: str, context: zmq.Context[Any], keys: Keys | None = None
) -> Iterator[zmq.Socket[bytes]]:
    """A worker's socket to its gateway. What flows is bounded by the gateway, so that nothing is dropped here."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            socket.curve_serverkey = keys.public.encode()
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close()


def main() -> int:
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
    ):  # a terminal's are for the gateway, which then stops us
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with zmq.Context() as context:
        serve(config, context)
    return 0


def _end_with_parent() -> None:
    while os.read(STDIN, 4096):  # not through sys.stdin, whose lock would be missing at a regular end
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

"""One edge's connection at the gateway: the protocol's state, and what is under way in either direction. No sockets."""

from __future__ import annotations

from collections import deque
from importlib.metadata import version

from starsd.server.limits import ServerLimits
from starsd.server.metrics import edge_figures
from starsd.shared import codec
from starsd.shared.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from starsd.shared.messages import Ack, Close, Error, HeadInfo, Hello, Open, Stats, Welcome
from starsd.shared.protocol import Connection, Role

SERVER = f"starsd {version('starsd')}"
CLOSE, ACK = codec.TAGS[Close], codec.TAGS[Ack]


class Peer:
    """What came is `take`n and goes to a worker; what a worker sends is given `back` and waits in `waiting`."""

    def __init__(self, name: bytes, device: str, limits: ServerLimits) -> None:
        self.name, self.device = name, device
        self.connection = Connection(Role.SERVER)
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.figures: dict[str, float] = {}  # how its device fares, as it last said
        self.unread = 0  # bytes that went to the worker and that it has not taken yet
        self._limits = limits
        self._acked = 0
        self._forwarded = 0  # bytes, since the worker began
        # of sessions, for each Close that the worker has not answered: whether the edge waits for the answer
        self._closing: dict[int, deque[bool]] = {}
        self.over = False  # nothing more is to be sent once what waits has gone out

    @property
    def overflows(self) -> bool:
        """Whether it reads so slowly that too much waits for it."""
        return self.waiting_bytes > self._limits.unsent

    @property
    def held(self) -> bool:
        """Whether its socket is not to be read until the worker has caught up."""
        return self.unread > self._limits.unread

    def take(self, data: bytes, heads: tuple[HeadInfo, ...], *, room: bool) -> list[bytes]:
        """What a frame of the edge means for the worker, as frames; without `room` it takes no new sessions."""
        try:
            message = self.connection.receive(data)
        except RemoteProtocolError as error:
            return self._refuse(error)
        match message:
            case None:
                pass
            case Hello():
                limits = self._limits
                welcome = Welcome(self.connection.version, SERVER, heads, limits.sessions, limits.max_message)
                self._push(self.connection.send(welcome))
            case Error(session=0):
                self.over = True
            case Stats(values=values):
                self.figures = edge_figures(values)
            case Open(session=session) if not room:
                starting = ProtocolError("the drafter is starting: open the session again", session)
                self.fail(starting, self._limits.retry_seconds)
            case Close(session=session) | Error(session=session):
                return [self._end(session, asked=True)]
            case _ if codec.session_of(message):
                return [self._forward(data)]
        return []

    def back(self, data: bytes) -> list[bytes]:
        """A frame of the worker: goes out if it is still of interest. What the worker is to hear of it, as `take`."""
        tag, session = codec.peek(data)
        if tag == ACK:
            self.unread = self._forwarded - _received(data)
            return []
        # whatever comes before the answer to a Close is of the session that had this number before
        if (closing := self._closing.get(session)) is not None:
            if tag != CLOSE:
                return []
            asked = closing.popleft()
            if not closing:
                del self._closing[session]
            if not asked:
                return []
        try:
            if self.connection.forward(data):
                self._push(data)
        except LocalProtocolError as error:  # a fault of ours, which must not end other sessions
            return self._refuse(error, 0.0)
        return []

    def ack(self) -> None:
        """Tell the edge how many of its bytes were read, if that is news."""
        if self.connection.received_bytes > self._acked and self.connection.version and not self.over:
            self._acked = self.connection.received_bytes
            self._push(self.connection.send(Ack(self._acked)))

    def fail(self, error: ProtocolError, retry_after: float = -1.0) -> None:
        """End a session, or with session 0 the connection."""
        self._push(self.connection.fail(error, retry_after))
        self.over = self.over or error.session == 0

    def lose(self) -> None:
        """The worker ended: so do its sessions, which may be opened again at once."""
        self.unread = self._forwarded = 0
        self._closing.clear()
        while closing := self.connection.closing:
            self._push(self.connection.send(Close(closing[0])))
        for session in self.connection.sessions:
            self.fail(ProtocolError("the drafter was restarted: open the session again", session), 0.0)

    def pop(self) -> bytes:
        """The next frame to send."""
        data = self.waiting.popleft()
        self.waiting_bytes -= len(data)
        return data

    def _refuse(self, error: ProtocolError, retry_after: float = -1.0) -> list[bytes]:
        known = error.session in self.connection.sessions
        self.fail(error, retry_after)
        return [self._end(error.session, asked=False)] if known else []

    def _end(self, session: int, *, asked: bool) -> bytes:
        self._closing.setdefault(session, deque()).append(asked)
        return self._forward(codec.encode(Close(session)))

    def _forward(self, data: bytes) -> bytes:
        self._forwarded += len(data)
        self.unread += len(data)
        return data

    def _push(self, data: bytes) -> None:
        if data:
            self.waiting.append(data)
            self.waiting_bytes += len(data)


def _received(data: bytes) -> int:
    message = codec.decode(data, lambda session: None)
    assert isinstance(message, Ack)
    return message.received

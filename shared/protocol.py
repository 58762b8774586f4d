"""One side of a connection, without I/O and without a clock: messages in, bytes to send out, and the other way round.

    connection = Connection(Role.EDGE)
    wire.send(connection.send(Hello(2, 2, "edge 1.0")))
    message = connection.receive(wire.recv())      # None: late, to be ignored

Where the peer breaks the protocol `receive` raises RemoteProtocolError and nothing has changed; `fail` gives the frame
that tells the peer and ends the session, or, when it is session 0, the connection. Other sessions go on. One thread
at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from starsd.shared.codec import KINDS, Bytes, blame, decode, encode, peek, session_of
from starsd.shared.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from starsd.shared.limits import MAX_MESSAGE, Layout, name_of
from starsd.shared.messages import (
    CONNECTION,
    VERSION,
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Message,
    Open,
    Opened,
    Prefix,
    Verdict,
    Welcome,
)
from starsd.shared.session_rules import SessionRules
from starsd.shared.transitions import (
    CONNECTION_TABLE,
    SENT_BY,
    SESSION_TABLE,
    ConnectionState,
    Role,
    SessionState,
    refusal,
)
from starsd.shared.versions import Versions

__all__ = ["Connection", "ConnectionState", "Role", "SessionState"]

CLOSED_LATELY = 256  # session numbers that are remembered, so that what was under way to them is ignored
LONGEST_REASON = 1_000  # characters of an Error that we make


class Connection:
    """`lowest` and `highest` are the versions that this side speaks.

    `sent_bytes` counts every frame that went out and `received_bytes` every frame that came in, whatever became of it;
    `acked_bytes` are those of the edge that the server has acknowledged.
    """

    def __init__(self, role: Role, *, lowest: int = VERSION, highest: int = VERSION) -> None:
        self.role = role
        self.state = ConnectionState.START
        self.version = 0  # agreed on: the server knows it after Hello, the edge after Welcome
        self.max_sessions = 0  # after Welcome
        self.sent_bytes = self.received_bytes = self.acked_bytes = 0
        self._versions = Versions(lowest, highest)
        self._max_message = MAX_MESSAGE  # bytes of a frame to the server; Welcome says how many
        self._sessions: dict[int, SessionRules] = {}
        self._closing: dict[int, int] = {}  # sessions that the edge ended and the server has not, by number
        self._lately: OrderedDict[int, None] = OrderedDict()

    def send(self, message: Message) -> bytes:
        """The frame to send. Raises LocalProtocolError, and changes nothing, when the state does not allow it."""
        session, kind = session_of(message), type(message)
        with blame(LocalProtocolError, self._owner(session)):
            after = self._next(self.role, kind, session)
            self._check(self.role, message, session)
            data = encode(message, self.layout_of(session))
            self._check_size(self.role, kind, data)
        self._apply(self.role, message, session, after)
        self.sent_bytes += len(data)
        return data

    def forward(self, data: Bytes) -> bool:
        """Like `send` for a frame that another process of ours has encoded: whether it is to go out.

        False when it is late. Raises LocalProtocolError, and changes nothing, when the state does not allow it.
        """
        with blame(LocalProtocolError):
            message = self._take(self.role, data)
        self.sent_bytes += 0 if message is None else len(data)
        return message is not None

    def receive(self, data: Bytes) -> Message | None:
        """The message of a frame that came; None when it is late, which is nobody's fault.

        Late is what belongs to an older epoch, to a session that closed lately, or to a connection that is closed.
        Raises RemoteProtocolError for everything else that the protocol does not allow, and changes nothing then.
        """
        self.received_bytes += len(data)
        with blame(RemoteProtocolError):
            return self._take(self.role.peer, data)

    def fail(self, error: ProtocolError, retry_after: float = -1.0) -> bytes:
        """The frame that tells the peer of an error, and the end of the session or connection it belongs to.

        Empty when the connection is closed already.
        """
        if self.state is ConnectionState.CLOSED:
            return b""
        session = self._owner(error.session)
        data = encode(Error(session, str(error)[:LONGEST_REASON], retry_after))
        if session == CONNECTION:
            self._close()
        else:
            self._end(self.role, session)
        self.sent_bytes += len(data)
        return data

    def layout_of(self, session: int) -> Layout | None:
        """What the bytes of a session's messages depend on; None before it is open."""
        rules = self._sessions.get(session)
        return None if rules is None else rules.layout

    def state_of(self, session: int) -> SessionState:
        """CLOSED for numbers that were never used."""
        if (rules := self._sessions.get(session)) is not None:
            return rules.state
        return SessionState.CLOSING if session in self._closing else SessionState.CLOSED

    @property
    def sessions(self) -> tuple[int, ...]:
        """Numbers of the sessions that neither side has ended."""
        return tuple(self._sessions)

    @property
    def closing(self) -> tuple[int, ...]:
        """Numbers of the sessions that the edge has ended and the server has not answered."""
        return tuple(self._closing)

    def _take(self, sender: Role, data: Bytes) -> Message | None:
        """Check a frame of `sender` and take note of it; None when it is late."""
        if self.state is ConnectionState.CLOSED:
            return None
        tag, session = peek(data)
        kind = KINDS[tag]
        if self._is_late(sender, kind, session):
            return None
        with blame(ProtocolError, self._owner(session)):
            older = sender is Role.SERVER and session in self._closing
            after = self._next(sender, kind, session)
            self._check_size(sender, kind, data)
            message = decode(data, self.layout_of)
            if session in self._sessions and self._sessions[session].late(message):
                return None
            self._check(sender, message, session)
        self._apply(sender, message, session, after)
        return None if older and self.role is Role.EDGE else message

    def _owner(self, session: int) -> int:
        """Whose an error is: nothing but the connection's before there can be sessions."""
        return session if self.state is ConnectionState.OPEN else CONNECTION

    def _is_late(self, sender: Role, kind: type[Any], session: int) -> bool:
        """Whether it was sent before its sender knew that the session was over. An Error never calls for another."""
        if session == CONNECTION or self.state is not ConnectionState.OPEN or kind not in SENT_BY[sender]:
            return False
        if sender is Role.SERVER and session in self._closing:
            return kind not in (Close, Error)
        if sender is Role.SERVER and kind is Close:
            return True
        if session in self._sessions or kind is Open:
            return False
        return session in self._lately or kind is Error

    def _next(self, sender: Role, kind: type[Any], session: int) -> ConnectionState | SessionState:
        """The state after such a message, of its session or of the connection."""
        if session == CONNECTION or self.state is not ConnectionState.OPEN:
            connection = CONNECTION_TABLE.get((self.state, sender, kind)) if session == CONNECTION else None
            if connection is None:
                raise ProtocolError(refusal(self.state, sender, kind))
            return connection
        older = sender is Role.SERVER and session in self._closing
        state = SessionState.CLOSING if older else self.state_of(session)
        after = SESSION_TABLE.get((state, sender, kind))
        if after is None:
            raise ProtocolError(refusal(state, sender, kind, session))
        return after

    def _check(self, sender: Role, message: Message, session: int) -> None:
        """Raises ProtocolError when a message that the state allows contradicts what was said before."""
        match message:
            case Hello() | Welcome() if sender is self.role:
                self._versions.check_own(message, self.version)
            case Hello():
                self._versions.agree(message)
            case Welcome():
                self._versions.check_welcome(message.version)
            case Ack():
                low, high = self.acked_bytes, self.sent_bytes if self.role is Role.EDGE else self.received_bytes
                if not low <= message.received <= high:
                    raise ProtocolError(f"ack has received {message.received}, expected {low} to {high}")
            case Open():
                if (count := len(self._sessions)) >= self.max_sessions:
                    raise ProtocolError(f"{count} sessions are open, expected at most {self.max_sessions}: close one")
                if len(self._closing) >= CLOSED_LATELY or self._closing.get(session, 0) >= CLOSED_LATELY:
                    raise ProtocolError("too many sessions are closing, expected the server to answer first")
            case Opened() | Prefix() | Verdict() | Features() | Draft():
                self._sessions[session].check(message)

    def _check_size(self, sender: Role, kind: type[Any], data: Bytes) -> None:
        limit = self._max_message if sender is Role.EDGE else MAX_MESSAGE
        if len(data) > limit:
            raise ProtocolError(f"{name_of(kind)} takes {len(data)} bytes, expected at most {limit}")

    def _apply(self, sender: Role, message: Message, session: int, after: ConnectionState | SessionState) -> None:
        if isinstance(after, ConnectionState):
            self._apply_to_connection(message, after)
        elif isinstance(message, Close | Error):
            self._end(sender, session)
        elif isinstance(message, Open):
            self._lately.pop(session, None)
            self._sessions[session] = SessionRules(message)
        else:
            self._sessions[session].apply(message, after)

    def _apply_to_connection(self, message: Message, after: ConnectionState) -> None:
        self.state = after
        match message:
            case Hello():
                self.version = self._versions.agree(message) if self.role is Role.SERVER else 0
            case Welcome():
                self.version, self.max_sessions = message.version, message.max_sessions
                self._max_message = message.max_message
            case Ack():
                self.acked_bytes = message.received
            case Error():
                self._close()

    def _end(self, sender: Role, session: int) -> None:
        """One side has ended a session: the server the oldest of this number that it has not, the edge the newest."""
        if sender is Role.SERVER and session in self._closing:
            self._closing[session] -= 1
            if not self._closing[session]:
                del self._closing[session]
            return
        if self._sessions.pop(session, None) is not None and sender is Role.EDGE:
            self._closing[session] = self._closing.get(session, 0) + 1
            return
        self._lately[session] = None
        self._lately.move_to_end(session)
        if len(self._lately) > CLOSED_LATELY:
            self._lately.popitem(last=False)

    def _close(self) -> None:
        self.state = ConnectionState.CLOSED
        self._sessions.clear()
        self._closing.clear()
        self._lately.clear()

"""One connection to a server, without I/O: which message goes next, and who gets what arrived.

    urgency        what                              sent when
    control        Hello, Open, Close                at once
    tokens         Prefix, Verdict                   at once: a few bytes, on which all drafts wait
    newest         features of the newest rows       while the uplink has room
    backfill       features of older rows            while the uplink has room, after all else
    figures        Stats                             seldom, while there is a session and nothing else to say

Sessions of the same urgency take turns, so none blocks another. A shell (`link.py`) pumps: it sends `next_frame` until
there is none, waits until `wake` is called, and hands in what it reads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from starsd.edge.projector import Projector
from starsd.edge.remote import CHUNK, RemoteSession, Urgency
from starsd.edge.uplink import Uplink
from starsd.shared.clock import REAL, Clock
from starsd.shared.config import DEFAULT_CODEC
from starsd.shared.errors import RemoteProtocolError
from starsd.shared.features import codec
from starsd.shared.limits import MAX_FEATURE_BYTES
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.messages import (
    CONNECTION,
    VERSION,
    Ack,
    Draft,
    Error,
    HeadInfo,
    Hello,
    Message,
    Opened,
    Stats,
    Welcome,
)
from starsd.shared.protocol import CLOSED_LATELY, Connection, Role

MOST_SESSIONS = 65535
MISBEHAVED_SECONDS = 5.0  # until a session in which the server broke the rules is opened again
LEAST_MESSAGE = MAX_FEATURE_BYTES + 64  # bytes that a server has to take at once
STATS_SECONDS = 30.0  # at least, between two of ours
Projectors = Callable[[HeadInfo], Projector | None]


@dataclass(frozen=True)
class Model:
    """What a server must know of a target to draft for it."""

    fingerprint: str
    shape: ModelShape
    features: FeatureSpec


class Channel:
    """Sessions outlive connections: they are opened again on the next one. `projectors` finds a head's projector."""

    def __init__(
        self,
        *,
        client: str,
        clock: Clock = REAL,
        codec_name: str = DEFAULT_CODEC,
        padding: int = 0,
        window: int = 2048,
        wake: Callable[[], None] = lambda: None,
        projectors: Projectors = lambda head: None,
        figures: Callable[[], dict[str, float]] = dict,
        idle_seconds: float = math.inf,
    ) -> None:
        """`figures` of the device are asked for when they may be sent; none are sent where there are none.
        A session that is idle for `idle_seconds` is closed until it is used again."""
        self.uplink = Uplink()
        self.welcome: Welcome | None = None
        self._heads: dict[str, HeadInfo] = {}  # that the server drafts with, by the target's fingerprint
        self.notice = ""  # why the server does not help, for people
        self.server_stats: dict[str, float] = {}
        self.bytes_up = self.bytes_down = 0
        self._client, self._clock, self._codec = client, clock, codec(codec_name)
        self._padding, self._window, self._wake, self._projectors = padding, window, wake, projectors
        self._figures, self._told_at = figures, -math.inf
        self._idle_seconds = idle_seconds
        self._sessions: list[RemoteSession] = []
        self._numbered: dict[int, RemoteSession] = {}  # those that the server has been told of
        self._number = 0
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._greeted = False
        self._last: RemoteSession | None = None  # whose turn was last

    def session(self, model: Model) -> RemoteSession:
        """A new session for this model; it works, and proposes nothing, while there is no connection."""
        session = RemoteSession(
            fingerprint=model.fingerprint,
            vocab=model.shape.vocab,
            width=model.features.width,
            codec=self._codec,
            clock=self._clock,
            wake=self._wake,
            window=self._window,
            padding=self._padding,
            idle_seconds=self._idle_seconds,
        )
        with self._lock:
            self._sessions.append(session)
        self.offer_heads()
        self._wake()
        return session

    def connected(self) -> None:
        """There is a connection, on which nothing was said yet."""
        self._connection, self._greeted, self.uplink = Connection(Role.EDGE), False, Uplink()

    def disconnected(self) -> None:
        """The connection is gone, and all that the server knew with it."""
        self._connection = self.welcome = None
        self._heads = {}
        self._numbered.clear()
        for session in self._all():
            session.lost()

    def next_frame(self) -> bytes | None:
        """What to send next; None: nothing, until `wake` or an arrival."""
        if self._connection is None:
            return None
        if not self._greeted:
            self._greeted = True
            return self._frame(Hello(VERSION, VERSION, self._client), None)
        if self.welcome is None:
            return None
        for session in self._in_turn():
            if session.unnumbered:
                if not self._may_open():
                    continue
                self._numbered.pop(session.number, None)
                session.number = self._next_number()
                self._numbered[session.number] = session
            message = session.next_message(min(CHUNK, int(self.uplink.window / 2)))
            if session.closed or session.unnumbered:
                self._numbered.pop(session.number, None)
            if message is not None:
                self._last = session
                return self._frame(message, session)
        return self._stats()

    def received(self, data: bytes) -> bytes | None:
        """Take in a frame; what to answer when it broke the rules. Raises RemoteProtocolError when the connection is
        of no further use."""
        assert self._connection is not None
        self.bytes_down += len(data)
        try:
            message = self._connection.receive(data)
            if isinstance(message, Opened):
                self._opened(message)
        except RemoteProtocolError as error:
            if error.session == CONNECTION:
                raise
            answer = self._connection.fail(error)
            self.uplink.on_sent(len(answer), self._clock.now())
            self._refused(error.session, str(error), MISBEHAVED_SECONDS)
            return answer or None
        match message:
            case Draft():
                if (session := self._numbered.get(message.session)) is not None:
                    session.arrived(message, len(data))
            case Ack():
                self.uplink.on_ack(message.received, self._clock.now())
            case Welcome():
                self._welcomed(message)
            case Error():
                if message.session == CONNECTION:
                    raise RemoteProtocolError(f"server says: {message.message}", CONNECTION)
                self._refused(message.session, f"server says: {message.message}", message.retry_after)
            case Stats():
                self.server_stats = message.values
        return None

    def _stats(self) -> bytes | None:
        """How the device fares, where it is time to say so. Who has no session here tells the server nothing."""
        now = self._clock.now()
        if not self._numbered or not self.uplink.room or now - self._told_at < STATS_SECONDS:
            return None
        self._told_at = now
        values = self._figures()
        return self._frame(Stats(values), None) if values else None

    def _in_turn(self) -> list[RemoteSession]:
        """Sessions with something to say that may be said now, the most urgent first, those of an urgency in turn."""
        sessions = self._all()
        if self._last in sessions:
            after = sessions.index(self._last) + 1
            sessions = sessions[after:] + sessions[:after]
        most = Urgency.BACKFILL if self.uplink.room else Urgency.TOKENS
        urgent = [(session.urgency(), session) for session in sessions]
        return [session for _, session in sorted((u for u in urgent if u[0] <= most), key=lambda item: item[0])]

    def _all(self) -> list[RemoteSession]:
        """Open sessions; those that were closed are let go."""
        with self._lock:
            self._sessions = [session for session in self._sessions if not session.closed]
            return list(self._sessions)

    def _next_number(self) -> int:
        """The number used least lately: what is still under way to an old one must not meet a new one."""
        while True:
            self._number = self._number % MOST_SESSIONS + 1
            if self._number not in self._numbered:
                return self._number

    def _frame(self, message: Message, session: RemoteSession | None) -> bytes:
        assert self._connection is not None
        frame = self._connection.send(message)
        self.bytes_up += len(frame)
        self.uplink.on_sent(len(frame), self._clock.now())
        if session is not None:
            session.sent(message, len(frame))
        return frame

    def _may_open(self) -> bool:
        """Whether the server lets us have another session."""
        assert self._connection is not None
        assert self.welcome is not None
        if len(self._connection.sessions) >= self.welcome.max_sessions:
            self.notice = f"server lets us have {self.welcome.max_sessions} sessions, which are all in use"
            return False
        return len(self._connection.closing) < CLOSED_LATELY

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.max_message < LEAST_MESSAGE:
            raise RemoteProtocolError(
                f"server takes messages of {welcome.max_message} bytes, expected {LEAST_MESSAGE} or more", CONNECTION
            )
        self._heads = {head.fingerprint: head for head in welcome.heads}
        self.welcome, self.notice = welcome, ""
        self.offer_heads()

    def offer_heads(self) -> None:
        """Let sessions open for which the server has a head, with the head's projector where we have it by now."""
        if (welcome := self.welcome) is None:
            return
        for session in self._all():
            if (head := self._heads.get(session.fingerprint)) is not None:
                session.offer(self._projectors(head) if head.projector_bytes else None)
            else:
                offered = ", ".join(head.model for head in welcome.heads) or "none"
                self.notice = f"server has no drafter for this model, only for {offered}"
        self._wake()

    def _opened(self, message: Opened) -> None:
        """Raises RemoteProtocolError when the server's features are not like ours."""
        if (session := self._numbered.get(message.session)) is None:
            return
        if not session.opened(message):
            raise RemoteProtocolError(
                f"server expects features {message.width} wide, ours are {session.sent_width}", message.session
            )
        head = self._heads.get(session.fingerprint)
        if head is not None and head.head != message.head:  # it was replaced after the Welcome, its projector with it
            self._heads[head.fingerprint] = msgspec.structs.replace(head, head=message.head)
            self.offer_heads()
        self._wake()

    def _refused(self, number: int, reason: str, retry_after: float) -> None:
        self.notice = reason
        if (session := self._numbered.get(number)) is not None:
            session.refused(retry_after)

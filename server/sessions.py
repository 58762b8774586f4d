"""All sessions of a drafter, by peer and number: a message reaches no session but its own connection's.

A peer is whatever tells connections apart; only who owns the connection can name it. What a message gets wrong ends its
own session, with an Error, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from starsd.server.limits import LIMITS, ServerLimits
from starsd.server.served import Head, Served
from starsd.shared import codec
from starsd.shared.errors import CapacityError, ProtocolError, StarsdError, UsageError
from starsd.shared.limits import Layout, name_of
from starsd.shared.messages import Close, Error, Features, Message, Open, Prefix, Stats, Verdict
from starsd.shared.protocol import CLOSED_LATELY

Send = Callable[[bytes, Message], None]


class Gone:
    """Instead of a message: the peer's connection is no more."""


GONE = Gone()
Item = Message | ProtocolError | Gone


@dataclass
class _Peer:
    sessions: dict[int, Served] = field(default_factory=dict)
    closed: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Sessions:
    """Opens, changes and closes sessions as messages say; answers go through `send(peer, message)`."""

    def __init__(self, heads: Iterable[Head], send: Send, limits: ServerLimits = LIMITS) -> None:
        self.heads = {head.info.fingerprint: head for head in heads}
        self.limits = limits
        self._changed: dict[Served, None] = {}  # sessions that messages touched since `take_changed`
        self.send = send
        self._peers: dict[bytes, _Peer] = {}

    def __len__(self) -> int:
        return sum(len(peer.sessions) for peer in self._peers.values())

    def __iter__(self) -> Iterator[Served]:
        return (session for peer in self._peers.values() for session in peer.sessions.values())

    def count(self, head: Head) -> int:
        """Sessions that a head drafts for."""
        return sum(1 for session in self if session.head is head)

    def take_changed(self) -> list[Served]:
        """Sessions that messages have changed since this was last asked."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    @property
    def peers(self) -> tuple[bytes, ...]:
        return tuple(self._peers)

    def layout_of(self, peer: bytes, number: int) -> Layout | None:
        """What the bytes of a session's messages depend on, None where there is none."""
        session = self._find(peer, number)
        return None if session is None else session.layout

    def apply(self, peer: bytes, item: Item) -> None:
        """Do what a message says. Instead of one: what was wrong with its bytes, or that the peer is gone."""
        if isinstance(item, Gone):
            self._leave(peer)
        elif not isinstance(item, Stats):
            try:
                self._apply(peer, item)
            except StarsdError as error:
                self._refuse(peer, item.session if isinstance(item, ProtocolError) else codec.session_of(item), error)

    def fail(self, session: Served, error: Exception, retry_after: float = -1.0) -> None:
        """End a session and say why."""
        self._close(session.peer, session.number)
        self.send(session.peer, Error(session.number, str(error), retry_after))

    def replace(self, heads: Iterable[Head], reason: str) -> None:
        """New sessions get these heads; those of heads that are no longer there end, to be opened again at once."""
        self.heads = {head.info.fingerprint: head for head in heads}
        for session in list(self):
            if self.heads.get(session.head.info.fingerprint) is not session.head:
                self.fail(session, UsageError(reason), retry_after=0.0)

    def _apply(self, peer: bytes, item: Message | ProtocolError) -> None:
        match item:
            case ProtocolError():
                raise item
            case Open():
                self._open(peer, item)
            case Close():
                self._close(peer, item.session)
                self.send(peer, item)
            case Prefix() | Verdict() | Features():
                self._change(peer, item)
            case _:
                raise UsageError(f"got {name_of(type(item))}, expected what an edge sends")

    def _open(self, peer: bytes, message: Open) -> None:
        if message.session in (own := self._peers.setdefault(peer, _Peer())).sessions:
            raise UsageError(f"session {message.session} is open already")
        if len(own.sessions) >= self.limits.sessions:
            raise CapacityError(f"{len(own.sessions)} sessions are open, expected at most {self.limits.sessions}")
        if (head := self.heads.get(message.fingerprint)) is None:
            models = ", ".join(sorted(head.info.model for head in self.heads.values()))
            raise UsageError(f"no head is for the target {message.fingerprint[:12]!r}: there are heads for {models}")
        session = Served(peer, message, head, self.limits)
        own.sessions[message.session] = session
        own.closed.pop(message.session, None)
        self.send(peer, session.opened)

    def _change(self, peer: bytes, message: Prefix | Verdict | Features) -> None:
        session = self._find(peer, message.session)
        if session is None:
            if message.session in self._peers.get(peer, _Peer()).closed:
                return
            raise UsageError(f"session {message.session} is not open")
        match message:
            case Prefix():
                session.prefix(message)
            case Verdict():
                session.verdict(message)
            case Features():
                session.features(message)
        self._changed[session] = None

    def _refuse(self, peer: bytes, number: int, error: StarsdError) -> None:
        self._close(peer, number)
        retry_after = self.limits.retry_seconds if isinstance(error, CapacityError) else -1.0
        self.send(peer, Error(number, str(error), retry_after))

    def _find(self, peer: bytes, number: int) -> Served | None:
        own = self._peers.get(peer)
        return None if own is None else own.sessions.get(number)

    def _close(self, peer: bytes, number: int) -> None:
        """Give its slot back; closing what is not open is fine."""
        if (session := self._find(peer, number)) is None:
            return
        session.live.close()
        self._changed.pop(session, None)
        own = self._peers[peer]
        del own.sessions[number]
        own.closed[number] = None
        if len(own.closed) > CLOSED_LATELY:
            own.closed.popitem(last=False)

    def _leave(self, peer: bytes) -> None:
        for number in list(self._peers.get(peer, _Peer()).sessions):
            self._close(peer, number)
        self._peers.pop(peer, None)

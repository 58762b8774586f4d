"""A star on a virtual clock: the loops of edges and server as they are, between them links that are a model of time.

Only sockets and processes are left out. Frames are the real ones, so bytes and their times are a real star's; passes
take what a profile says on the edge, and on the server what they were measured to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starsd.edge.channel import Channel
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_link import VirtualLink, VirtualWay
from starsd.scripts.virtual_queue import Queue
from starsd.server.drafter import Total
from starsd.server.limits import LIMITS, ServerLimits
from starsd.server.peer import Peer
from starsd.server.schedules import schedule
from starsd.server.served import Drafting, Head
from starsd.server.service import Service
from starsd.server.sessions import GONE, Sessions
from starsd.shared import codec
from starsd.shared.errors import ProtocolError, RemoteProtocolError
from starsd.shared.messages import Features, Message, Stats, Verdict

FULL_SECONDS = 0.005  # until a link whose queue was full is looked at again
GATEWAY_SECONDS = 0.0005  # from a frame's arrival to the drafter, and back again
AGAIN_SECONDS = 1.0  # until a connection that the server ended is opened again
TICK_SECONDS = 0.25  # after which a session that was refused may have become welcome again

Arrive = Callable[[bytes], None]


class ChargedDrafter:
    """A drafter whose passes take simulated time: `seconds` of the rows that ran, and of the sessions in the pass."""

    def __init__(self, drafter: Drafting, clock: VirtualClock, seconds: Callable[[int, int], float]) -> None:
        self._drafter, self._clock, self._seconds = drafter, clock, seconds
        self.busy_seconds = 0.0

    def open(self, *, projected: bool = False) -> Any:
        return self._drafter.open(projected=projected)

    def advance(self, work: Sequence[tuple[Any, int]], total: Total = None) -> int:
        rows = self._drafter.advance(work, total)
        self._charge(rows, len(work))
        return rows

    def trees(self, sessions: Sequence[Any], shape: Any) -> Any:
        drafts = self._drafter.trees(sessions, shape)
        for _ in range(shape.depth + 1):
            self._charge(shape.top_k * len(sessions), len(sessions))
        return drafts

    def _charge(self, rows: int, sessions: int) -> None:
        seconds = self._seconds(rows, sessions)
        self.busy_seconds += seconds
        self._clock.sleep(seconds)


@dataclass(eq=False)
class _Line:
    """A connection as the gateway has it."""

    peer: Peer
    way: VirtualWay
    arrive: Arrive
    hang_up: Callable[[], None]
    waits: bool = False  # for room


class VirtualServer:
    """A gateway and one worker, as a participant of the clock."""

    def __init__(
        self, clock: VirtualClock, heads: Sequence[Head], limits: ServerLimits = LIMITS, order: str = "batched"
    ) -> None:
        self.clock, self.limits = clock, limits
        self._heads = tuple(head.info for head in heads)
        self._inbox: Any = clock.mailbox()
        self._lines: dict[bytes, _Line] = {}
        self._orders: list[Callable[[], None]] = []
        self.sessions = Sessions(heads, self._answer, limits)
        self.queue = Queue(schedule(order, limits), clock)
        self.service = Service(self.sessions, self.queue, self._inbox, clock)
        clock.spawn(lambda: self.service.run(until=self._tend), "server", daemon=True)

    def connect(self, name: bytes, way: VirtualWay, arrive: Arrive, hang_up: Callable[[], None]) -> None:
        """Frames to this peer go over `way` and then `arrive`; `hang_up` is called when the server ends it."""
        self._lines[name] = _Line(Peer(name, "", self.limits), way, arrive, hang_up)

    def disconnect(self, name: bytes) -> None:
        if self._lines.pop(name, None) is not None:
            self._soon(lambda: self._inbox.put((name, GONE)))

    def take(self, name: bytes, data: bytes) -> None:
        """A frame has arrived."""
        if (line := self._lines.get(name)) is None:
            return
        self._pass_on(name, line.peer.take(data, self._heads, room=True))
        line.peer.ack()
        self._flush(name)

    def restart(self) -> None:
        """The worker ends, and all sessions with it; another begins."""
        self._order(self._begin_again)

    def replace(self, heads: Sequence[Head]) -> None:
        """As a worker does that was told to load its heads again."""
        self._heads = tuple(head.info for head in heads)
        self._order(lambda: self.sessions.replace(heads, "the head was replaced: open the session again"))

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        self._inbox.put((b"", Stats({})))  # so that it looks

    def _tend(self) -> bool:
        """Between turns of the service: do what was ordered."""
        while self._orders:
            self._orders.pop(0)()
        return False

    def _begin_again(self) -> None:
        for name in self.sessions.peers:
            self.sessions.apply(name, GONE)
        for name in list(self._lines):
            self._lines[name].peer.lose()
            self._flush(name)

    def _soon(self, act: Callable[[], None]) -> None:
        self.clock.call_at(self.clock.now() + GATEWAY_SECONDS, act)

    def _pass_on(self, name: bytes, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._soon(lambda frame=frame: self._forward(name, frame))  # type: ignore[misc]

    def _forward(self, name: bytes, frame: bytes) -> None:
        try:
            message: Any = codec.decode(frame, lambda session: self.sessions.layout_of(name, session))
        except ProtocolError as error:
            message = error
        if isinstance(message, Verdict | Features):
            self.queue.arrived(name, message.session)
        self._inbox.put((name, message))

    def _answer(self, name: bytes, message: Message) -> None:
        if (line := self._lines.get(name)) is None or isinstance(message, Stats):
            return
        session = codec.session_of(message)
        self._pass_on(name, line.peer.back(codec.encode(message, self.sessions.layout_of(name, session))))
        self._flush(name)

    def _flush(self, name: bytes) -> None:
        """Send what waits, as far as there is room for it; who reads too slowly is cut."""
        if (line := self._lines.get(name)) is None:
            return
        while line.peer.waiting and line.way.room:
            frame = line.peer.pop()
            line.way.send(len(frame), lambda frame=frame: line.arrive(frame))  # type: ignore[misc]
        if line.peer.overflows or (line.peer.over and not line.peer.waiting):
            self.disconnect(name)
            line.hang_up()
        elif line.peer.waiting and not line.waits:
            line.waits = True
            self.clock.call_at(self.clock.now() + FULL_SECONDS, lambda: self._flush_again(name, line))

    def _flush_again(self, name: bytes, line: _Line) -> None:
        line.waits = False
        self._flush(name)


class VirtualLine:
    """An edge's channel and its link to a server; the edge's own thread and the link's arrivals both pump."""

    def __init__(
        self, server: VirtualServer, name: str, settings: LinkSettings, number: int = 0, **channel: Any
    ) -> None:
        self.link = VirtualLink(server.clock, settings, number)
        self.channel = Channel(client=name, clock=server.clock, wake=self._pump, **channel)
        self.connected = False
        self._server, self._name = server, name.encode()
        self._life = 0  # connections so far: what is under way of an older one arrives nowhere
        self._pumping = self._waits = False

    def connect(self) -> None:
        """Unless it is."""
        if self.connected:
            return
        self._life += 1
        life, self.connected = self._life, True
        self._server.connect(
            self._peer, self.link.down, lambda frame: self._arrive(life, frame), lambda: self._lost(life)
        )
        self.channel.connected()
        self._tick(life)

    def disconnect(self, unnoticed: float = 0.0) -> None:
        """Both ends know of it, the server after so many seconds."""
        if not self.connected:
            return
        self.connected, peer, server = False, self._peer, self._server
        if unnoticed:
            server.clock.call_at(server.clock.now() + unnoticed, lambda: server.disconnect(peer))
        else:
            server.disconnect(peer)
        self.channel.disconnected()

    @property
    def _peer(self) -> bytes:
        return self._name + b" %d" % self._life

    def _lost(self, life: int) -> None:
        """The connection is of no further use: open it anew, after a while."""
        if life == self._life and self.connected:
            self.disconnect()
            self._server.clock.call_at(self._server.clock.now() + AGAIN_SECONDS, self.connect)

    def _tick(self, life: int) -> None:
        if life == self._life and self.connected:
            self._pump()
            self._server.clock.call_at(self._server.clock.now() + TICK_SECONDS, lambda: self._tick(life))

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        while self.link.up.room and (frame := self.channel.next_frame()) is not None:
            self._send(frame)
        self._pumping = False
        if not (self.link.up.room or self._waits):
            self._waits, clock = True, self._server.clock
            clock.call_at(clock.now() + FULL_SECONDS, self._pump_again)

    def _pump_again(self) -> None:
        self._waits = False
        self._pump()

    def _send(self, frame: bytes) -> None:
        peer = self._peer
        if self.link.up.room:  # an answer to nonsense may be lost: it only tells the other side what it has done
            self.link.up.send(len(frame), lambda: self._server.take(peer, frame))

    def _arrive(self, life: int, frame: bytes) -> None:
        if life != self._life or not self.connected:
            return
        try:
            answer = self.channel.received(frame)
        except RemoteProtocolError as error:
            self.channel.notice = str(error)
            self._lost(life)
            return
        if answer is not None:
            self._send(answer)
        self._pump()

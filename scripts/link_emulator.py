"""A TCP proxy that is a long, thin or broken link: `link_model` between real sockets, changeable while it runs.

    async with LinkEmulator("127.0.0.1", 7600, LinkSettings(rtt_ms=80)) as link:    # or EmulatorThread, without await
        connect to link.port … link.set(rtt_ms=500) … link.cut("hole") … link.cut("none")

Every connection is a link of its own. Buffers are bounded: the proxy reads nothing that does not fit into the queue of
that direction, so a sender is held back as by a real path. What it cannot do, TCP hides: a lost packet is a stall, and
connecting itself takes no round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from starsd.scripts.link_model import Direction, Link, LinkSettings
from starsd.scripts.link_trace import Cut, TraceEvent
from starsd.shared.errors import UsageError

SOCKET_BUFFER = 64 * 1024  # bytes the kernel may hold before and behind the queue, instead of megabytes
END = b""  # travels like data; the sender will send no more


class LinkEmulator:
    """Listens on `port` of `host` (0: a free one, then in `self.port`) and connects to `to_host`, `to_port`."""

    def __init__(
        self,
        to_host: str,
        to_port: int,
        settings: LinkSettings | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.settings = settings or LinkSettings()
        self.host, self.port = host, port
        self._to = to_host, to_port
        self._cut: Cut = "none"
        self._stalled_until = 0.0
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._accepted = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LinkEmulator:
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bound_buffers(self._listener)  # those it accepts inherit them
        try:
            self._listener.bind((self.host, self.port))
        except OSError as error:
            self._listener.close()
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"port {self.port} of {self.host} cannot be listened on: {reason}") from error
        self._listener.listen()
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *self._connections.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def set(self, **changes: float | None) -> None:
        self.settings = self.settings.changed(**changes)
        for connection in self._connections:
            connection.link.change(self._loop.time(), self.settings)
            connection.wake()

    def stall(self, seconds: float) -> None:
        now = self._loop.time()
        self._stalled_until = max(self._stalled_until, now + seconds)
        self._each(lambda way: way.stall(now, seconds))

    def cut(self, how: Cut) -> None:
        now, self._cut = self._loop.time(), how
        if how == "none":
            self._stalled_until = now
            self._each(lambda way: way.resume(now))
        elif how == "hole":
            self.stall(float("inf"))
        else:
            for task in self._connections.values():
                task.cancel()

    def play(self, events: Sequence[TraceEvent]) -> None:
        """Let these happen, counted from now."""
        self._start(self._play(events))

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    async def _play(self, events: Sequence[TraceEvent]) -> None:
        started = self._loop.time()
        for event in events:
            await asyncio.sleep(started + event.at - self._loop.time())
            event.apply(self)

    async def _accept(self) -> None:
        while True:
            try:
                near, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # out of descriptors, or the client is gone already
                await asyncio.sleep(0.1)
                continue
            if self._cut == "close":
                _abort(near)
                continue
            self._accepted += 1
            connection = _Connection(near, Link(self.settings, self._accepted))
            now = self._loop.time()
            for way in (connection.link.up, connection.link.down):
                if self._stalled_until > now:
                    way.stall(now, self._stalled_until - now)
            task = self._loop.create_task(connection.run(self._to))
            self._connections[connection] = task
            task.add_done_callback(lambda _, gone=connection: self._connections.pop(gone))  # type: ignore[misc]

    def _each(self, act: Callable[[Direction[bytes]], None]) -> None:
        for connection in self._connections:
            act(connection.link.up)
            act(connection.link.down)
            connection.wake()

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Connection:
    """Two sockets and the link between them."""

    def __init__(self, near: socket.socket, link: Link[bytes]) -> None:
        self._near, self.link = near, link
        self._up, self._down = _Pump(link.up), _Pump(link.down)

    def wake(self) -> None:
        """The link was changed: look again when something is due."""
        self._up.wake()
        self._down.wake()

    async def run(self, to: tuple[str, int]) -> None:
        """Until both ways have ended. Where one fails or is cut, both ends see a reset."""
        sockets = [self._near]
        pumps: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._near.setblocking(False)
        self._near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # what a client sends at once already travels while the other side is being connected to
            pumps.append(loop.create_task(self._up.read(self._near)))
            far = await _connect(to)
            sockets.append(far)
            for work in (self._up.write(far), self._down.read(far), self._down.write(self._near)):
                pumps.append(loop.create_task(work))
            await asyncio.gather(*pumps)
            for each in sockets:
                each.close()
        except OSError:
            pass  # either end is gone; the other is told below
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)  # a socket is closed once nobody waits for it
            for each in sockets:
                _abort(each)


class _Pump:
    """Moves bytes from one socket through one direction to another."""

    def __init__(self, way: Direction[bytes]) -> None:
        self._way = way
        self._due, self._room = asyncio.Event(), asyncio.Event()

    def wake(self) -> None:
        self._due.set()
        self._room.set()

    async def read(self, source: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        data = None
        while data != END:
            while (room := self._way.room(loop.time())) == 0:
                self._room.clear()
                await self._room.wait()
            try:
                data = await loop.sock_recv(source, min(room, self._way.segment()))
            except OSError:
                data = END  # a reset takes its time over the link, too
            self._way.push(loop.time(), len(data), data)
            self._due.set()

    async def write(self, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while (data := self._way.pop(loop.time())) != END:
            self._room.set()
            if data is not None:
                await loop.sock_sendall(sink, data)
                continue
            self._due.clear()
            when = self._way.next()
            timer = loop.call_at(when, self._due.set) if when < float("inf") else None
            await self._due.wait()
            if timer is not None:
                timer.cancel()
        with contextlib.suppress(OSError):  # it may have gone meanwhile
            sink.shutdown(socket.SHUT_WR)


class EmulatorThread:
    """A LinkEmulator in a thread of its own, for callers without a loop: a context manager with the same controls."""

    def __init__(self, to_host: str, to_port: int, settings: LinkSettings | None = None, *, port: int = 0) -> None:
        self._emulator = LinkEmulator(to_host, to_port, settings, port=port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-emulator", daemon=True)

    def __enter__(self) -> EmulatorThread:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._emulator.__aenter__(), self._loop).result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._emulator.__aexit__(), self._loop).result()
        self._stop()

    @property
    def port(self) -> int:
        return self._emulator.port

    @property
    def connections(self) -> int:
        return self._emulator.connections

    def set(self, **changes: float | None) -> None:
        self._call(lambda: self._emulator.set(**changes))

    def stall(self, seconds: float) -> None:
        self._call(lambda: self._emulator.stall(seconds))

    def cut(self, how: Cut) -> None:
        self._call(lambda: self._emulator.cut(how))

    def play(self, events: Sequence[TraceEvent]) -> None:
        self._call(lambda: self._emulator.play(events))

    def _call(self, act: Callable[[], None]) -> None:
        async def inside() -> None:
            act()

        asyncio.run_coroutine_threadsafe(inside(), self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _connect(to: tuple[str, int]) -> socket.socket:
    """A connected socket. Raises OSError when nobody listens there."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(*to, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    far = socket.socket(family, kind, protocol)
    far.setblocking(False)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _bound_buffers(far)
    try:
        await loop.sock_connect(far, address)
    except BaseException:
        far.close()
        raise
    return far


def _bound_buffers(each: socket.socket) -> None:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)


def _abort(each: socket.socket) -> None:
    """Close with a reset, unless it is closed."""
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    each.close()

"""Where edges connect: WebSocket in front, workers behind. Bytes are passed on as they came.

GET /              the WebSocket (`docs/protocol.md`); Authorization: Bearer TOKEN, unless there are no tokens
GET /projector/H   the file that projects features for head H on the edge
GET /health        JSON for people and probes; without a token only whether there is a drafter
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import itertools
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from starsd.server.auth import device_of
from starsd.server.limits import ServerLimits
from starsd.server.metrics import fleet
from starsd.server.peer import SERVER, Peer
from starsd.server.pool import Pool, Worker
from starsd.shared.errors import ProtocolError, UsageError
from starsd.shared.messages import HeadInfo
from starsd.shared.protocol import ConnectionState

GOING_AWAY, POLICY = 1001, 1008  # RFC 6455, 7.4.1
SEND_BUFFER = 131_072  # bytes that the system holds for a peer; Linux doubles it
_PROJECTOR = "/projector/"


class _Line:
    """A peer with its socket and its worker."""

    def __init__(self, peer: Peer, websocket: ServerConnection, worker: Worker) -> None:
        self.peer, self.websocket, self.worker = peer, websocket, worker
        self.filled = asyncio.Event()  # something waits to be sent
        self.caught_up = asyncio.Event()  # the worker took something
        self.acking = False


class Gateway:
    """Call `listen`; `address` is where, from then on. `drain` ends it."""

    def __init__(
        self,
        limits: ServerLimits,
        *,
        host: str,
        port: int,
        tokens: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tokens` None lets everybody in."""
        self.limits, self.tokens = limits, tokens
        self.pool: Pool | None = None
        self._host, self._port, self._tls = host, port, tls
        self._lines: dict[bytes, _Line] = {}
        self._numbers = itertools.count(1)
        self._server: Server | None = None
        self._draining = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def listen(self, pool: Pool) -> None:
        """Take connections from now on; their sessions go to this pool, which is ready.

        Raises UsageError when the address cannot be had.
        """
        self.pool = pool
        limits = self.limits
        try:
            self._server = await serve(
                self._handle,
                self._host,
                self._port,
                ssl=self._tls,
                compression=None,
                max_size=limits.max_message,
                ping_interval=limits.keepalive,
                ping_timeout=limits.keepalive,
                close_timeout=limits.drain_seconds,
                process_request=self._request,
                server_header=None,
            )
        except OSError as error:
            raise UsageError(f"cannot listen on {self._host} port {self._port}: {error.strerror or error}") from error
        for listener in self._server.sockets:  # and so of all connections: what waits for a peer waits with us
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    async def drain(self) -> None:
        """Take no more connections, tell those there are, and close."""
        self._draining = True
        if self._server is None:
            return
        self._server.close(close_connections=False)
        for line in list(self._lines.values()):
            line.peer.fail(ProtocolError("server is going away"), self.limits.retry_seconds)
            line.filled.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), self.limits.drain_seconds)

    def admit(self, tokens: Mapping[str, str] | None) -> None:
        """Let in whoever has one of these tokens from now on; devices that have none any more are cut."""
        self.tokens = tokens
        for line in self._lines.values():
            if tokens is not None and line.peer.device not in tokens:
                line.peer.fail(ProtocolError("the device's token is no longer known"))
                line.filled.set()
                self._leave(line)

    def log(self, text: str) -> None:
        """For the operator. Never anything that an edge's user wrote, nor what a model answered."""
        print(f"starsd-server: {text}", file=sys.stderr, flush=True)

    # what the pool's workers say

    def deliver(self, worker: Worker, peer: bytes, data: bytes) -> None:
        line = self._lines.get(peer)
        if line is None or line.worker is not worker:
            return  # of a connection that has just ended
        self._pass_on(line, line.peer.back(data))
        line.caught_up.set()
        if line.peer.overflows:
            self.log(f"connection {peer.decode()} was cut: it does not read what it is sent")
            line.websocket.transport.abort()

    def lost(self, worker: Worker) -> None:
        for line in self._lines.values():
            if line.worker is worker:
                line.peer.lose()
                line.caught_up.set()
                line.filled.set()

    # what edges say

    def _request(self, websocket: ServerConnection, request: Request) -> Response | None:
        """Answer what is no WebSocket, and let in only whose token is known."""
        device = "" if self.tokens is None else device_of(request.headers.get("Authorization"), self.tokens)
        if request.path == "/health":
            return self._health(known=device is not None)
        if device is None:
            refusal = _response(http.HTTPStatus.UNAUTHORIZED, b"unknown token, expected Authorization: Bearer TOKEN\n")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if request.path.startswith(_PROJECTOR):
            return self._projector(request.path.removeprefix(_PROJECTOR))
        if self._draining or len(self._lines) >= self.limits.connections:
            refusal = _response(http.HTTPStatus.SERVICE_UNAVAILABLE, b"no room for another connection\n")
            refusal.headers["Retry-After"] = str(max(1, round(self.limits.retry_seconds)))
            return refusal
        websocket.username = device
        return None

    def _projector(self, head: str) -> Response:
        for worker in self._workers():
            if worker.ready is not None and (file := worker.ready.projectors.get(head)) is not None:
                return _response(http.HTTPStatus.OK, Path(file).read_bytes(), "application/octet-stream")
        return _response(http.HTTPStatus.NOT_FOUND, b"no such head\n")

    def _health(self, *, known: bool) -> Response:
        """For a probe, whether there is a drafter; how many draw on it, and how they fare, for who is `known`."""
        workers = self._workers()
        ready = any(worker.ready is not None for worker in workers) and not self._draining
        state: dict[str, Any] = {"status": "ok" if ready else "unavailable"}
        if known:
            lines = self._lines.values()
            state |= {
                "server": SERVER,
                "connections": len(lines),
                "sessions": sum(len(line.peer.connection.sessions) for line in lines),
                "heads": [head.model for head in self.heads()],
                "edges": fleet(line.peer.figures for line in lines),
                "workers": [{"ready": worker.ready is not None, **worker.figures} for worker in workers],
            }
        status = http.HTTPStatus.OK if ready else http.HTTPStatus.SERVICE_UNAVAILABLE
        return _response(status, msgspec.json.encode(state) + b"\n", "application/json")

    async def _handle(self, websocket: ServerConnection) -> None:
        """One connection, from its first message to its end."""
        peer = Peer(f"{next(self._numbers)}".encode(), websocket.username or "", self.limits)
        line = _Line(peer, websocket, self._least_busy())
        self._lines[peer.name] = line
        if peer.device:
            self.log(f"{peer.device} connected from {websocket.remote_address[0]} as {peer.name.decode()}")
        writer = asyncio.create_task(self._write(line))
        try:
            await self._read(line)
        except ConnectionClosed:
            pass
        finally:
            self._leave(line)
            del self._lines[peer.name]
            if peer.device:
                self.log(f"{peer.device} left as {peer.name.decode()}")
            line.filled.set()
            await _finished(writer)

    async def _read(self, line: _Line) -> None:
        peer, websocket = line.peer, line.websocket
        with contextlib.suppress(asyncio.TimeoutError):
            self._take(line, await asyncio.wait_for(websocket.recv(), self.limits.hello_seconds))
        if peer.connection.state is ConnectionState.START:
            peer.fail(ProtocolError(f"nothing came in {self.limits.hello_seconds:g} seconds, expected hello"))
            line.filled.set()
        async for data in websocket:
            if peer.over:
                continue  # until it has heard of the end, and says so
            self._take(line, data)
            while peer.held:
                line.caught_up.clear()
                await line.caught_up.wait()

    def _take(self, line: _Line, data: str | bytes) -> None:
        if isinstance(data, str):
            line.peer.fail(ProtocolError("frame is text, expected binary"))
            line.filled.set()
        else:
            if line.worker.ready is None:  # its sessions ended with it
                line.worker = self._least_busy()
            room = line.worker.ready is not None
            self._pass_on(line, line.peer.take(data, self.heads(), room=room))
        if line.peer.over:
            self._leave(line)
        if not line.acking:
            line.acking = True
            asyncio.get_running_loop().call_soon(self._ack, line)

    def _pass_on(self, line: _Line, frames: list[bytes]) -> None:
        """Send to the worker what a frame of either side meant for it, and to the edge what waits."""
        assert self.pool is not None
        for frame in frames:
            self.pool.send(line.worker, line.peer.name, frame)
        line.filled.set()

    def _leave(self, line: _Line) -> None:
        """Have the worker end all its sessions; saying so twice is fine."""
        assert self.pool is not None
        self.pool.send(line.worker, line.peer.name, b"")

    def _ack(self, line: _Line) -> None:
        line.acking = False
        line.peer.ack()
        line.filled.set()

    async def _write(self, line: _Line) -> None:
        """Send what waits, until the connection is over."""
        peer, websocket = line.peer, line.websocket
        try:
            while True:
                await line.filled.wait()
                line.filled.clear()
                while peer.waiting:
                    await websocket.send(peer.pop())
                if peer.over:
                    await websocket.close(GOING_AWAY if self._draining else POLICY)
                    return
                if line.peer.name not in self._lines:
                    return
        except ConnectionClosed:
            return

    def _workers(self) -> list[Worker]:
        return [] if self.pool is None else self.pool.workers

    def heads(self) -> tuple[HeadInfo, ...]:
        return next((worker.ready.heads for worker in self._workers() if worker.ready is not None), ())

    def _least_busy(self) -> Worker:
        """The worker with the fewest sessions, those that cannot draft last."""
        load = {worker.number: [0, 0] for worker in self._workers()}
        for line in self._lines.values():
            load[line.worker.number][0] += len(line.peer.connection.sessions)
            load[line.worker.number][1] += 1
        return min(self._workers(), key=lambda worker: (worker.ready is None, *load[worker.number]))


async def _finished(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task], timeout=1.0)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _response(status: http.HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"})
    return Response(status.value, status.phrase, headers, body)

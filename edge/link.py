"""The thin shell around a channel: one WebSocket to a server, kept open by a thread of its own.

It pumps frames both ways and does nothing else. When the connection fails it is opened again, soon but not at the same
moment as everybody else's; meanwhile the device decodes alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException

from starsd.edge.channel import Channel
from starsd.edge.projectors import ProjectorStore
from starsd.shared.errors import ProtocolError, RemoteProtocolError, UsageError

FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # seconds before a connection is tried again
STEADY_SECONDS = 5.0  # after which one that worked is tried again soon
OPEN_SECONDS = 5.0
HELLO_SECONDS = 5.0  # that a server may take to answer the first message
KEEPALIVE = 5.0  # seconds between pings, and for their answer
TICK = 0.25  # seconds after which a session that was refused may have become welcome again
MAX_FRAME = 1 << 17


class Link:
    """Starts to connect at once. `token` is the device's, `trust` a file of certificates beside the system's."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        trust: Path | None = None,
        make: Callable[..., Channel] = Channel,
        **channel: object,
    ) -> None:
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0
        except ValueError:  # brackets that do not match, a port that is none
            known = False
        if not known:
            raise UsageError(f"server is {url!r}, expected ws://host:port or wss://host:port")
        if not re.fullmatch(r"[!-~]{0,1024}", token):
            raise UsageError("token has spaces, line ends or other characters that no token has, expected one word")
        if token and parts.scheme == "ws" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise UsageError(f"server is {url!r}, expected wss:// where a token is sent")
        self.url = url
        self.reconnects = -1
        self._token, self._tls = token, _tls(trust) if parts.scheme == "wss" else None
        self._projectors = ProjectorStore(url, token, self._tls, lambda: self._soon(self.channel.offer_heads))
        self.channel = make(wake=self._wake, projectors=self._projectors, **channel)
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._socket: ClientConnection | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self.channel.welcome is not None

    def close(self, timeout: float = 1.0) -> None:
        """Say what is left to say, then close; after `timeout` seconds just close."""
        if self._thread.is_alive():
            self._soon(self._stop)
            self._thread.join(timeout)

    def _stop(self) -> None:
        self._stopped = True
        self._woken.set()

    def _wake(self) -> None:
        self._soon(self._woken.set)

    def _soon(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep_connected())
        finally:
            self._loop.close()

    async def _keep_connected(self) -> None:
        wait = FIRST_WAIT
        while not self._stopped:
            began = self._loop.time()
            try:
                async with connect(
                    self.url,
                    ssl=self._tls,
                    additional_headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
                    compression=None,
                    proxy=None,
                    max_size=MAX_FRAME,
                    open_timeout=OPEN_SECONDS,
                    close_timeout=1.0,
                    ping_interval=KEEPALIVE,
                    ping_timeout=KEEPALIVE,
                    write_limit=1 << 14,
                ) as socket:
                    self.reconnects += 1
                    await self._talk(socket)
            except ProtocolError as error:
                self.channel.notice = str(error)
                wait = LONGEST_WAIT
            except InvalidHandshake as error:
                self.channel.notice = f"server at {self.url} refuses us: {error}{_hint(str(error))}"
                wait = LONGEST_WAIT
            except (OSError, WebSocketException, InvalidURI, asyncio.TimeoutError) as error:
                reason = str(error) or type(error).__name__
                self.channel.notice = f"no server at {self.url}: {reason}{_hint(reason)}"
            finally:
                self.channel.disconnected()
            if self._loop.time() - began > STEADY_SECONDS:
                wait = FIRST_WAIT
            if not self._stopped:
                await self._pause(random.uniform(0.5, 1.0) * wait)
                wait = min(LONGEST_WAIT, 2 * wait)

    async def _pause(self, seconds: float) -> None:
        end = self._loop.time() + seconds
        while not self._stopped and (left := end - self._loop.time()) > 0:
            self._woken.clear()
            await self._nap(left)

    async def _talk(self, socket: ClientConnection) -> None:
        """Pump until either side ends the connection."""
        self.channel.connected()
        pumps = [asyncio.ensure_future(pump(socket)) for pump in (self._send, self._receive, self._expect_welcome)]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _send(self, socket: ClientConnection) -> None:
        while True:
            self._woken.clear()
            while (frame := self.channel.next_frame()) is not None:
                await socket.send(frame)
            if self._stopped:
                return
            await self._nap(TICK)

    async def _expect_welcome(self, socket: ClientConnection) -> None:
        """Give up on a server that answers pings and nothing else. Never returns otherwise."""
        await asyncio.sleep(HELLO_SECONDS)
        if self.channel.welcome is None:
            raise RemoteProtocolError(f"server did not answer hello in {HELLO_SECONDS:g} seconds")
        await socket.wait_closed()

    async def _nap(self, seconds: float) -> None:
        """Until something wakes us. `wait_for` would do, but before Python 3.12 it may swallow a cancellation."""
        timer = self._loop.call_later(seconds, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    async def _receive(self, socket: ClientConnection) -> None:
        async for data in socket:
            if isinstance(data, str):
                raise RemoteProtocolError("server sent text, expected binary frames")
            answer = self.channel.received(data)
            if answer is not None:
                await socket.send(answer)
            self._woken.set()  # an acknowledgement makes room, a welcome opens sessions


_HINTS = {
    "HTTP 401": "the server wants a token that it knows, see --token-file",
    "CERTIFICATE_VERIFY_FAILED": "see --trust",
    "valid HTTP response": "does it speak wss://?",
    "WRONG_VERSION_NUMBER": "does it speak ws://?",
    "EOFError": "does it speak ws://?",
}


def _hint(reason: str) -> str:
    """What to try, where a reason suggests something."""
    return next((f" ({what})" for sign, what in _HINTS.items() if sign in reason), "")


def _tls(trust: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if trust is not None:
        try:
            context.load_verify_locations(trust)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"certificates in {trust} cannot be read: {error}") from error
    return context

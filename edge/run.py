"""`starsd-edge run`: the API's server, from start to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import msgspec
import uvicorn

from starsd.edge.api import create_app
from starsd.edge.api_guard import is_loopback
from starsd.edge.api_settings import KEY_VARIABLE, Settings, recommended
from starsd.edge.bundle import ensure_bundle
from starsd.edge.link_news import LinkNews
from starsd.edge.runtime import Drafting, Runtime
from starsd.edge.telemetry import Telemetry
from starsd.shared import console, manifest
from starsd.shared.config import Engine
from starsd.shared.errors import UsageError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CONNECTIONS = 512  # more at a time are turned away
LOOK = 0.5  # seconds between looks at the link
LAST_WORDS = 5.0  # seconds for what is still to be said when the time of grace is over


def check(settings: Settings) -> None:
    """Raise UsageError for limits that make no sense, and for a door that is open to others without a key."""
    if not is_loopback(settings.host) and not settings.keys:
        raise UsageError(
            f"--host {settings.host} lets other machines in, expected an API key: "
            f"give --api-key-file FILE or set {KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    for name, least in (("conversations", 1), ("queue", 0), ("grace", 0)):
        if not least <= (value := getattr(settings, name)) < math.inf:
            raise UsageError(f"{name} is {value}, expected {least} or more")
    for origin in settings.origins:
        if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.rstrip("/") != origin):
            raise UsageError(f"allowed origin is {origin!r}, expected the like of https://app.example, or *")


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address; it listens once the server serves. Raises UsageError when it cannot be had."""
    if not 0 <= port < 2**16:
        raise UsageError(f"port is {port}, expected 0 to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        busy = error.errno == errno.EADDRINUSE
        remedy = ": something listens there already, give another --port" if busy else ""
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}{remedy}") from error
    return made


def run(
    model: str,
    precision: str | None,
    *,
    engine: Engine,
    drafting: Drafting,
    settings: Settings,
    telemetry: Callable[[], Telemetry] = Telemetry,
    as_json: bool = False,
) -> None:
    """Serve a model, which is pulled and exported first where it is missing. Raises UsageError before that for options
    that cannot be, and for an address that is taken."""
    check(settings)
    with bind(settings.host, settings.port) as listener:
        bundle = ensure_bundle(model, precision)
        name, sampling = manifest.read(bundle).name, recommended(bundle, settings.sampling)
        settings = msgspec.structs.replace(settings, name=name, sampling=sampling)
        with Runtime.open(
            str(bundle),
            engine=engine,
            drafting=drafting,
            conversations=settings.conversations,
            telemetry=telemetry,
        ) as runtime:
            serve(runtime, settings, listener, as_json=as_json)


def serve(runtime: Runtime, settings: Settings, listener: socket.socket, *, as_json: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. Answers under way then get `settings.grace` seconds; a second signal ends them."""
    asyncio.run(_serve(runtime, settings, listener, as_json))


async def _serve(runtime: Runtime, settings: Settings, listener: socket.socket, as_json: bool) -> None:
    app = create_app(runtime, settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = listener.getsockname()[1]

    def ready() -> None:
        url = f"http://{host}:{port}"
        if as_json:
            console.emit({"event": "ready", "host": settings.host, "port": port, "url": url, "model": settings.name})
        _say(f"ready at {url}")

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        lifespan="off",
        http="h11",  # which bounds the head of a request, as others do not
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(settings.grace + LAST_WORDS),
    )
    watching = asyncio.create_task(_watch(runtime))
    try:
        await _Server(config, settings.grace, app.state.ending, ready).serve(sockets=[listener])
    finally:
        watching.cancel()


async def _watch(runtime: Runtime) -> None:
    """Tell what becomes of the link."""
    if runtime.link is not None:
        news = LinkNews(runtime.link, _say)
        while True:
            news.look()
            await asyncio.sleep(LOOK)


def _say(line: str) -> None:
    print(f"starsd-edge: {line}", file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """Says when it is ready, and ends as our other commands do: with exit status 0, whichever signal asked for it."""

    def __init__(self, config: uvicorn.Config, grace: float, ending: asyncio.Event, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._grace, self._ending, self._ready = grace, ending, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._end, loop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.should_exit:
            self._ending.set()
        self.should_exit = True
        loop.call_later(self._grace, self._ending.set)

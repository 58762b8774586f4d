"""`starsd-server run`: a gateway and its workers, from start to a graceful end."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import ssl
import sys

from starsd.server.auth import read_tokens
from starsd.server.config import ServerConfig
from starsd.server.gateway import Gateway
from starsd.server.link import RELOAD, ROLLBACK, ModelHead, WorkerConfig
from starsd.server.pool import Pool
from starsd.shared import console
from starsd.shared.entry import heard
from starsd.shared.errors import UsageError


def models(names: list[str], head: str | None) -> tuple[ModelHead, ...]:
    """What `--model NAME[=HEAD]` and `--head DIR` say. Raises UsageError when they contradict each other."""
    found = tuple(ModelHead(*name.split("=", 1)) for name in names)
    if head is None:
        return found
    if len(found) != 1 or found[0].head:
        raise UsageError("got --head beside several models or a head, expected it with a single --model NAME")
    return (ModelHead(found[0].model, head),)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None with `--dev`, which is for this machine alone. Raises UsageError for a server that others could reach
    without encryption or without tokens."""
    if config.dev:
        if given := [name for name in ("tls_cert", "tls_key", "tokens") if getattr(config, name) is not None]:
            raise UsageError(f"got --dev and --{given[0].replace('_', '-')}, expected one of them")
        if not _is_loopback(config.host):
            raise UsageError(f"--dev listens on this machine only, got --host {config.host}: use 127.0.0.1")
        return None
    for name in ("tls_cert", "tls_key", "tokens"):
        if getattr(config, name) is None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is missing: a server needs it unless it runs with --dev on 127.0.0.1")
    assert config.tls_cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"TLS files {config.tls_cert} and {config.tls_key} cannot be used: {error}") from error
    return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allow_descriptors() -> None:
    """As many open sockets as the system lets us have: idle strangers must not keep edges out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(config: ServerConfig, *, as_json: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP loads heads and tokens again, SIGUSR1 goes back to the heads before."""
    tls = tls_context(config)
    allow_descriptors()
    gateway = Gateway(
        config.limits,
        host=config.host,
        port=config.port,
        tls=tls,
        tokens=None if config.tokens is None else read_tokens(config.tokens),
    )
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    pool = Pool(_worker_config(config), config.workers, gateway)
    loop.add_signal_handler(signal.SIGHUP, _reload, config, gateway, pool)
    loop.add_signal_handler(signal.SIGUSR1, pool.order, ROLLBACK)
    heard((signal.SIGHUP, signal.SIGUSR1))
    try:
        await _unless(ending, pool.start())
        if not ending.is_set():
            await gateway.listen(pool)
            _ready(gateway, config, as_json)
            await ending.wait()
            await gateway.drain()
    finally:
        await pool.close()


async def _unless(ending: asyncio.Event, starting: object) -> None:
    """Wait for the start, or for the wish to end."""
    start = asyncio.ensure_future(starting)  # type: ignore[call-overload]
    end = asyncio.ensure_future(ending.wait())
    await asyncio.wait([start, end], return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if start.done():
        start.result()
    start.cancel()


def _worker_config(config: ServerConfig) -> WorkerConfig:
    return WorkerConfig(
        endpoint="",
        name="",
        folder="",
        models=config.models,
        schedule=config.schedule,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        limits=config.limits,
    )


def _reload(config: ServerConfig, gateway: Gateway, pool: Pool) -> None:
    pool.order(RELOAD)
    try:
        gateway.admit(None if config.tokens is None else read_tokens(config.tokens))
    except UsageError as error:  # those that were good before stay so
        gateway.log(str(error))


def _ready(gateway: Gateway, config: ServerConfig, as_json: bool) -> None:
    host, port = gateway.address
    scheme = "ws" if config.dev else "wss"
    if as_json:
        heads = [{"model": head.model, "head": head.head, "fingerprint": head.fingerprint} for head in gateway.heads()]
        console.emit({"event": "ready", "host": host, "port": port, "url": f"{scheme}://{host}:{port}", "heads": heads})
    print(f"starsd-server: ready at {scheme}://{host}:{port}", file=sys.stderr, flush=True)

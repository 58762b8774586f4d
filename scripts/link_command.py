"""`starsd link-emulator`: a port that leads to another over a link as bad as you like."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from starsd.scripts.link_emulator import LinkEmulator
from starsd.scripts.link_model import LinkSettings, parse_kbit
from starsd.scripts.link_trace import TraceEvent, read_trace
from starsd.shared.console import emit
from starsd.shared.errors import UsageError

DEFAULTS = LinkSettings()
_RATE = "A number and bit, kbit, mbit or gbit; as fast as can be without."


def link_emulator(
    *,
    listen: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")],
    to: Annotated[str, typer.Option(help="HOST:PORT that it leads to.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    rtt: Annotated[float, typer.Option(help="Milliseconds of a round trip, half each way.")] = DEFAULTS.rtt_ms,
    jitter: Annotated[float, typer.Option(help="Milliseconds, up to so many more each way.")] = DEFAULTS.jitter_ms,
    up: Annotated[str, typer.Option(help=_RATE)] = "",
    down: Annotated[str, typer.Option(help=_RATE)] = "",
    queue: Annotated[int, typer.Option(help="Bytes that wait for a line; 0: a second's, at most 256 KB.")] = (
        DEFAULTS.queue_bytes
    ),
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = DEFAULTS.seed,
    trace: Annotated[Path | None, typer.Option(help="JSON list of changes, each with its time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it listens as one JSON object.")] = False,
) -> None:
    """Put a link between two TCP ports: delay, rate, jitter, stalls and cuts. Ends with Ctrl-C."""
    settings = LinkSettings(
        rtt_ms=rtt,
        jitter_ms=jitter,
        up_kbit=parse_kbit(up) if up else DEFAULTS.up_kbit,
        down_kbit=parse_kbit(down) if down else DEFAULTS.down_kbit,
        queue_bytes=queue,
        seed=seed,
    )
    events = read_trace(trace) if trace is not None else ()
    asyncio.run(_run(LinkEmulator(*_address(to), settings, host=host, port=listen), to, events, as_json=as_json))


async def _run(emulator: LinkEmulator, to: str, events: tuple[TraceEvent, ...], *, as_json: bool) -> None:
    async with emulator:
        if as_json:
            emit({"host": emulator.host, "port": emulator.port, "to": to})
        else:
            print(f"{emulator.host}:{emulator.port} leads to {to}", file=sys.stderr, flush=True)
        emulator.play(events)
        await asyncio.Event().wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"address is {text!r}, expected HOST:PORT")
    return host.strip("[]"), int(port)

"""The link between real sockets: how long bytes take, how many pass, what stalls and cuts do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from starsd.scripts.cli import main
from starsd.scripts.link_emulator import EmulatorThread, LinkEmulator
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.link_trace import TraceEvent
from starsd.shared.errors import UsageError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ATTEMPTS = 3  # of a measurement: other programs may hold the processor


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def linked(handler: Handler, **settings: Any) -> AsyncIterator[LinkEmulator]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with LinkEmulator("127.0.0.1", port, LinkSettings(**settings)) as link:
        yield link
    server.close()


async def client(link: LinkEmulator) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Milliseconds of a round trip of a few bytes."""
    started = time.perf_counter()
    writer.write(b"x" * 20)
    await reader.readexactly(20)
    return 1e3 * (time.perf_counter() - started)


def within(wanted: float, tolerance: float, measure: Callable[[], Coroutine[Any, Any, float]]) -> None:
    found = []
    for _ in range(ATTEMPTS):
        found.append(asyncio.run(measure()))
        print(f"\n{wanted}: {found[-1]:.3f}")  # pytest -s shows it, docs/rigs.md quotes it
        if abs(found[-1] - wanted) <= tolerance:
            return
    pytest.fail(f"got {found}, expected {wanted} ± {tolerance}")


@pytest.mark.parametrize("rtt", [0, 20, 80])
def test_delay_within_2_ms(rtt: float) -> None:
    async def median() -> float:
        async with linked(echo, rtt_ms=rtt) as link:
            ends = await client(link)
            return statistics.median([await ping(*ends) for _ in range(15)])

    within(rtt, 2.0, median)


@pytest.mark.parametrize("mbit", [0.064, 0.5, 4.0, 40.0])
@pytest.mark.parametrize("way", ["up", "down"])
def test_rate_within_5_percent(way: str, mbit: float) -> None:
    count = int(mbit * 1e6 / 8 * 0.6)  # bytes of 0.6 s

    async def measure(reader: asyncio.StreamReader) -> float:
        """Mbit/s from the first bytes to the last, the first not counted: they begin the time."""
        first, rest = len(await reader.read(1 << 20)), 0
        started = time.perf_counter()
        while first + rest < count:
            rest += len(await reader.read(1 << 20))
        return rest * 8e-6 / (time.perf_counter() - started)

    async def rate() -> float:
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if way == "up":
                result.set_result(await measure(reader))
            else:
                writer.write(bytes(count))
            await result
            writer.close()

        async with linked(serve, rtt_ms=10, **{f"{way}_kbit": mbit * 1e3}) as link:
            reader, writer = await client(link)
            if way == "up":
                writer.write(bytes(count))
            else:
                result.set_result(await measure(reader))
            return await result

    within(mbit, 0.05 * mbit, rate)


def test_bytes_arrive_whole_and_in_order_with_jitter() -> None:
    sent = bytes(range(256)) * 800

    async def go() -> bytes:
        async with linked(echo, rtt_ms=4, jitter_ms=3, up_kbit=20_000) as link:
            reader, writer = await client(link)
            writer.write(sent)
            writer.write_eof()  # and that its end comes through
            return await reader.read(-1)

    assert asyncio.run(go()) == sent


def test_jitter_spreads_the_delay() -> None:
    async def times() -> list[float]:
        async with linked(echo, jitter_ms=20, seed=3) as link:
            ends = await client(link)
            return [await ping(*ends) for _ in range(30)]

    found = asyncio.run(times())
    assert max(found) - min(found) > 10
    assert 15 < statistics.median(found) < 30  # two ways of 0 to 20


def test_changes_apply_to_what_runs() -> None:
    async def times() -> tuple[float, float, float]:
        async with linked(echo, rtt_ms=5) as link:
            ends = await client(link)
            before = await ping(*ends)
            link.set(rtt_ms=60)
            during = await ping(*ends)
            link.set(rtt_ms=5)
            return before, during, await ping(*ends)

    before, during, after = asyncio.run(times())
    assert max(before, after) < 40
    assert during >= 60


def test_a_queue_that_waits_gains_from_a_faster_line() -> None:
    async def seconds() -> float:
        async with linked(echo, up_kbit=8, queue_bytes=20_000) as link:
            reader, writer = await client(link)
            writer.write(bytes(10_000))  # ten seconds
            await asyncio.sleep(0.2)
            link.set(up_kbit=8_000)
            started = time.perf_counter()
            await reader.readexactly(10_000)
            return time.perf_counter() - started

    assert asyncio.run(seconds()) < 1


def test_a_stall_holds_everything_and_loses_nothing() -> None:
    async def times() -> list[float]:
        async with linked(echo, rtt_ms=10) as link:
            ends = await client(link)
            link.stall(0.3)
            return [await ping(*ends), await ping(*ends)]

    stalled, after = asyncio.run(times())
    assert 300 <= stalled < 400
    assert after < 100


def test_a_hole_is_silent_until_it_ends() -> None:
    async def go() -> bytes:
        async with linked(echo, rtt_ms=2) as link:
            reader, writer = await client(link)
            await ping(reader, writer)
            link.cut("hole")
            writer.write(b"before")
            late, late_writer = await client(link)  # a new one is no better
            late_writer.write(b"new")
            for silent in (reader, late):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(silent.read(1), 0.1)
            link.cut("none")
            return await reader.readexactly(6) + await late.readexactly(3)

    assert asyncio.run(go()) == b"beforenew"


def test_a_cut_that_closes_resets_and_refuses_until_it_ends() -> None:
    async def go() -> None:
        async with linked(echo) as link:
            reader, writer = await client(link)
            await ping(reader, writer)
            link.cut("close")
            assert await asyncio.wait_for(_closed(reader), 2)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ping(*await client(link))
            assert link.connections == 0
            link.cut("none")
            await ping(*await client(link))
            assert link.connections == 1

    asyncio.run(go())


@pytest.mark.parametrize("abort", [False, True])
def test_the_end_of_a_client_reaches_the_server_when_the_link_lets_it(abort: bool) -> None:
    async def go() -> bytes:
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.set_result(await reader.read(-1))
            writer.close()

        async with linked(serve, rtt_ms=4) as link:
            _, writer = await client(link)
            writer.write(b"bye")
            await asyncio.sleep(0.05)
            link.cut("hole")
            if abort:  # a reset instead of an end
                near = writer.get_extra_info("socket")
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
            await asyncio.sleep(0.1)
            assert not got.done()
            link.cut("none")
            return await asyncio.wait_for(got, 2)

    assert asyncio.run(go()) == b"bye"


def test_nobody_behind_it_is_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def go() -> None:
        async with LinkEmulator("127.0.0.1", port) as link:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ping(*await client(link))

    asyncio.run(go())


def test_a_sender_is_held_back() -> None:
    """Of what a client sends, the proxy takes in what its queue holds; kernels hold the rest, and then the client."""

    async def go() -> int:
        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(3600)

        async with linked(deaf, up_kbit=400, queue_bytes=16_384) as link:
            with socket.create_connection(("127.0.0.1", link.port)) as near:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                near.setblocking(False)
                sent = 0
                for _ in range(60):
                    with contextlib.suppress(BlockingIOError):
                        sent += near.send(bytes(65536))
                    await asyncio.sleep(0.01)
                return sent

    assert 16_384 <= asyncio.run(go()) < 500_000


def test_a_trace_plays() -> None:
    events = [TraceEvent(at=0, rtt_ms=30), TraceEvent(at=0.3, rtt_ms=1, up_kbit=500), TraceEvent(at=0.5, cut="close")]

    async def go() -> tuple[float, float]:
        async with linked(echo) as link:
            ends = await client(link)
            link.play(events)
            await asyncio.sleep(0.05)
            slow = await ping(*ends)
            await asyncio.sleep(0.3)
            quick = await ping(*ends)
            assert link.settings == LinkSettings(rtt_ms=1, up_kbit=500)
            assert await asyncio.wait_for(_closed(ends[0]), 2)
            return slow, quick

    slow, quick = asyncio.run(go())
    assert slow >= 30 > quick


async def _closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def echo_port() -> Iterator[int]:
    """An echo server without asyncio."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = server.accept()
                    with near:
                        while data := near.recv(4096):
                            near.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def round_trip(near: socket.socket) -> float:
    started = time.perf_counter()
    near.sendall(b"x")
    assert near.recv(1) == b"x"
    return 1e3 * (time.perf_counter() - started)


def test_a_thread_for_callers_without_a_loop(echo_port: int) -> None:
    with EmulatorThread("127.0.0.1", echo_port, LinkSettings(rtt_ms=30)) as link:
        with socket.create_connection(("127.0.0.1", link.port)) as near:
            assert 30 <= round_trip(near) < 60
            link.set(rtt_ms=0)
            assert round_trip(near) < 30
            link.stall(0.2)
            assert round_trip(near) > 190
            with pytest.raises(UsageError, match=r"^a link has no rtt, expected one of rtt_ms, jitter_ms,"):
                link.set(rtt=3)
            link.cut("close")
            near.settimeout(2)
            with pytest.raises(ConnectionError):
                near.recv(1)
        deadline = time.perf_counter() + 2
        while link.connections and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert link.connections == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "link-emulator"]


def test_a_port_that_is_taken(echo_port: int) -> None:
    with (
        pytest.raises(
            UsageError, match=f"^port {echo_port} of 127.0.0.1 cannot be listened on: address already in use$"
        ),
        EmulatorThread("127.0.0.1", 1, port=echo_port),
    ):
        pass


def test_the_command(echo_port: int, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps([{"at": 0, "rtt_ms": 40}]))
    argv = ["link-emulator", "--listen", "0", "--to", f"localhost:{echo_port}", "--up", "5mbit"]
    command = [sys.executable, "-m", "starsd.scripts.cli", *argv, "--trace", str(tmp_path / "trace.json"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = json.loads(child.stdout.readline())
        with socket.create_connection((said["host"], said["port"])) as near:
            assert round_trip(near) >= 40
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=10)
    assert said["to"] == f"localhost:{echo_port}"
    assert child.returncode == 130
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--to", "8765", "address is '8765', expected HOST:PORT"),
        ("--to", "host:99999", "address is 'host:99999', expected HOST:PORT"),
        ("--up", "5", "rate '5' cannot be read, expected a number and a unit, such as 64kbit or 5mbit"),
        ("--rtt", "-1", "rtt_ms is -1.0, expected 0 to 60,000"),
        ("--down", "0kbit", "down_kbit is 0.0, expected 1 to 1,000,000"),
    ],
)
def test_what_the_command_refuses(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["link-emulator", "--listen", "0", "--to", "localhost:1", option, value]) == 1
    assert capsys.readouterr() == ("", f"starsd: {message}\n")

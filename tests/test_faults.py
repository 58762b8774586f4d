"""What goes wrong between real sockets, while an answer is being given: it is the one of plain decoding, and at any
moment as fast as that; soon after recovery as fast as before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bigram_server import child, serving
from liar import LIES, Liar
from paced import Race, Talk, median_of
from star import PROMPT
from tiny_session import write_text_files
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from starsd.edge.link import Link
from starsd.edge.text import Text
from starsd.scripts.link_emulator import EmulatorThread
from starsd.scripts.link_model import LinkSettings

PACE = 0.98  # of plain decoding, at the least
ROUGHLY = 0.93  # the same where steps count that the machine had no time for
HELPED = 1.5  # times plain decoding: drafts are of use
SETTLE = 1.5  # seconds
BACK, FULL = 2.0, 0.85  # seconds until speed is back, but for noise


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


@contextmanager
def emulated(url: str, **settings: float) -> Iterator[tuple[EmulatorThread, str]]:
    """A link in front of a server, and the address that leads through it."""
    with EmulatorThread("127.0.0.1", int(url.rpartition(":")[2]), LinkSettings(**settings)) as link:  # type: ignore[arg-type]
        yield link, f"ws://127.0.0.1:{link.port}"


def through_a_fault(race: Race, begin: Callable[[], object], seconds: float, end: Callable[[], object]) -> float:
    """At least 1: in the meantime it was as fast as alone, and afterwards as fast as before."""
    race.for_(SETTLE)
    before = race.for_(1.5)
    begin()
    during, whole = race.for_(seconds), race.whole
    end()
    time.sleep(BACK)
    after = race.for_(1.5)
    print(f"before {before:.2f}, during {during:.3f}, all of it {whole:.3f}, after {after:.2f}")
    assert before > HELPED
    return min(during / PACE, whole / ROUGHLY, after / (FULL * before))


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(text: Text) -> None:
    def run() -> float:
        with child() as server, Race(text, server.url) as race:
            return through_a_fault(race, server.end, 2.0, server.start)

    assert median_of(run, 1.0) >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 12.0])
def test_a_server_that_stops_answering_but_keeps_the_socket(text: Text, seconds: float) -> None:
    """For longer than either side waits for an answer to its pings, too."""

    def run() -> float:
        with child() as server, Race(text, server.url) as race:
            stop, go_on = (lambda number=number: server.process.send_signal(number) for number in STOP_AND_GO)
            try:
                return through_a_fault(race, stop, seconds, go_on)
            finally:
                go_on()

    assert median_of(run, 1.0) >= 1.0


STOP_AND_GO = signal.SIGSTOP, signal.SIGCONT


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seconds"), [("hole", 10.0), ("close", 3.0)])
def test_a_link_that_is_cut(text: Text, how: str, seconds: float) -> None:
    def run() -> float:
        with (
            child() as server,
            emulated(server.url, rtt_ms=10, up_kbit=5000, down_kbit=5000) as (link, there),
            Race(text, there) as race,
        ):
            return through_a_fault(race, lambda: link.cut(how), seconds, lambda: link.cut("none"))  # type: ignore[arg-type]

    assert median_of(run, 1.0) >= 1.0


@pytest.mark.slow
def test_a_round_trip_that_becomes_long(text: Text) -> None:
    def run() -> float:
        with child() as server, emulated(server.url, rtt_ms=20) as (link, there), Race(text, there) as race:
            return through_a_fault(race, lambda: link.set(rtt_ms=500), 4.0, lambda: link.set(rtt_ms=20))

    assert median_of(run, 1.0) >= 1.0


@pytest.mark.slow
def test_a_thin_uplink(text: Text) -> None:
    """Features of 2 KB a token are five times what it carries; tokens get through all the same."""

    def run() -> float:
        with (
            child() as server,
            emulated(server.url, rtt_ms=10, up_kbit=64) as (_, there),
            Race(text, there, padding=2000) as race,
        ):
            race.for_(SETTLE)
            speed = race.for_(4.0)
            assert race.drafted.remote is not None
            print(f"{speed:.2f}, response in {race.drafted.remote.response.mean:.2f} s")
            assert race.drafted.remote.live
            return speed / PACE

    assert median_of(run, 1.0) >= 1.0


class Pretender:
    """A server that lies, on a real socket."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._server = serve(self._talk, "127.0.0.1", 0, compression=None, max_size=None)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def _talk(self, connection: ServerConnection) -> None:
        liar = Liar(self._how)
        with contextlib.suppress(ConnectionClosed):
            for data in connection:
                if self._how == "text":
                    connection.send("text")
                elif self._how == "hangs up":
                    return
                elif isinstance(data, bytes):
                    for frame in liar.take(data):
                        connection.send(frame)
                if liar.over:
                    return

    def close(self) -> None:
        self._server.shutdown()


class Stranger(Pretender):
    """Something else that listens there: `how` is what it answers, over and over."""

    def __init__(self, how: bytes) -> None:
        self._answer = how
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        held = []
        while True:
            try:
                found, _ = self._socket.accept()
            except OSError:
                return
            if self._answer:
                found.recv(4096)
                found.sendall(self._answer)
                found.close()
            held.append(found)

    def close(self) -> None:
        self._socket.close()


STRANGERS = [
    b"",
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n<html>",
    bytes(range(256)) * 400,
]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_servers_that_are_up_to_no_good(text: Text, part: int) -> None:
    """Several kinds of them at once, each with an edge of its own, beside one that decodes alone.

    They take this process's time, too; `test_liars.py` measures without.
    """
    kinds: list[str | bytes] = ["text", "hangs up", *LIES, *STRANGERS]

    def run() -> float:
        others = [Pretender(how) if isinstance(how, str) else Stranger(how) for how in kinds[part::4]]
        links = [Link(other.url, client="victim", codec_name="fp16", window=64) for other in others]
        talks = [Talk(text, link, [*PROMPT, number]) for number, link in enumerate(links)]
        alone = Talk(text, None, PROMPT)
        begin = time.perf_counter()
        time.sleep(3.5)
        end = time.perf_counter()
        for talk in (*talks, alone):
            talk.end()
        plain = alone.rate(begin + 1, end)
        speeds = [talk.rate(begin + 1, end) / plain for talk in talks]
        for how, link, speed in zip(kinds[part::4], links, speeds, strict=True):
            print(f"{how[:20]!r} {speed:.3f} {link.reconnects} {link.channel.notice[:90]!r}")
            link.close()
        for other in others:
            other.close()
        assert max(link.reconnects for link in links) < 10
        return sorted(speeds)[len(speeds) // 2]

    assert median_of(run, ROUGHLY) >= ROUGHLY


def test_two_devices_with_equal_session_numbers(text: Text) -> None:
    with serving() as (_, url, drafter):
        links = [Link(url, client=f"device {number}", codec_name="fp16", window=512) for number in range(2)]
        talks = [Talk(text, link, [*PROMPT, number, *range(50 * number)]) for number, link in enumerate(links)]
        time.sleep(3.0)
        for talk in talks:
            talk.end()
            assert talk.remote is not None
            assert talk.remote.number == 1
            assert talk.session.speculator.counts.remote > 0.5 * len(talk.ids)
        for link in links:
            link.close()
        assert not drafter.wrong


CLIENT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from paced import Link, Talk
from starsd.edge.text import Text
link = Link({url!r}, client="victim", codec_name="fp16", window=512, padding=20000)
talk = Talk(Text.open(Path({text!r})), link, list(range(2, 200)) * 20)
print("going", flush=True)
sys.stdin.read()
"""


def test_an_edge_that_is_killed_in_the_middle_of_its_prefix_frees_its_slot(tmp_path: Path) -> None:
    """10 MB of features are to come when it dies."""
    write_text_files(tmp_path)
    with serving() as (_, url, drafter), emulated(url, up_kbit=8000) as (_, there):
        code = CLIENT.format(tests=os.path.dirname(__file__), url=there, text=str(tmp_path))
        argv = [sys.executable, "-c", code]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as edge:
            assert edge.stdout is not None
            assert edge.stdout.readline() == "going\n"
            slots = len(drafter.free)
            wait_for(lambda: drafter.landed > 20)
            assert (len(drafter.free), health(url)["sessions"]) == (slots - 1, 1) or slots == 7
            landed = drafter.landed
            edge.kill()
            killed = time.monotonic()
            wait_for(lambda: len(drafter.free) == drafter.limits.slots and health(url)["sessions"] == 0)
            assert time.monotonic() - killed < 1.0
            assert landed < 450


def health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url.replace("ws://", "http://") + "/health") as answer:
        found: dict[str, int] = json.load(answer)
    return found


def wait_for(check: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)

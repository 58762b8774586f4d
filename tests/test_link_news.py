"""What `starsd-edge run` says of its server: one line when it is lost, one when it is back."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bigram_server import child
from tiny_model import export, write_folder

from starsd.edge.link_news import AWAY_SECONDS, LinkNews

URL = "ws://drafter.example:1"


class Watched:
    """A link as a test wants it, looked at ten times a second."""

    def __init__(self) -> None:
        self.time = 0.0
        self.said: list[str] = []
        self.link: Any = SimpleNamespace(url=URL, connected=False, channel=SimpleNamespace(notice=""))
        self.news = LinkNews(self.link, self.said.append, lambda: self.time)

    def after(self, seconds: float, *, connected: bool, notice: str = "") -> list[str]:
        """What is said meanwhile."""
        self.said.clear()
        self.link.connected, self.link.channel.notice = connected, notice
        for _ in range(round(10 * seconds)):
            self.time += 0.1
            self.news.look()
        return list(self.said)


def test_a_server_that_is_there_is_no_news() -> None:
    link = Watched()
    assert link.after(1.0, connected=False, notice="no server yet") == []
    assert link.after(60.0, connected=True) == []


def test_one_line_when_it_is_lost_and_one_when_it_is_back() -> None:
    link = Watched()
    assert link.after(30.0, connected=False, notice="no server at x: refused") == [
        "no server at x: refused; answers go on without it"
    ]
    assert link.after(30.0, connected=False, notice="no server at x: timed out") == []
    assert link.after(1.0, connected=True) == [f"server at {URL} is back"]
    assert link.after(60.0, connected=True) == []
    assert link.after(AWAY_SECONDS + 1, connected=False) == [f"server at {URL} is away; answers go on without it"]
    assert link.after(1.0, connected=True) == [f"server at {URL} is back"]


def test_a_connection_that_is_soon_there_again_is_no_news() -> None:
    link = Watched()
    for _ in range(5):
        assert link.after(1.0, connected=True) == []
        assert link.after(AWAY_SECONDS / 2, connected=False, notice="reset") == []


def test_why_a_server_that_is_there_does_not_help_is_said_once() -> None:
    link = Watched()
    assert link.after(5.0, connected=True, notice="server has no drafter") == ["server has no drafter"]
    assert link.after(5.0, connected=True) == []
    assert link.after(5.0, connected=True, notice="server has no drafter") == []
    assert link.after(5.0, connected=True, notice="server says: full") == ["server says: full"]


def test_the_command_says_so(tmp_path: Path) -> None:
    bundle = export(write_folder(tmp_path / "model"), tmp_path / "bundle")
    with child() as server:
        server.end()
        argv = ["run", "--model", str(bundle), "--port", "0", "--threads", "1", "--server", server.url]
        command = [sys.executable, "-m", "starsd.edge.cli", *argv]
        environment = {**os.environ, "STARSD_API_KEY": "", "STARSD_TOKEN": ""}
        edge = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        lines: queue.Queue[str] = queue.Queue()
        assert edge.stderr is not None
        threading.Thread(target=lambda said: [lines.put(line.strip()) for line in said], args=(edge.stderr,)).start()
        try:
            assert lines.get(timeout=90).startswith("starsd-edge: ready at http://127.0.0.1:")
            said = lines.get(timeout=40)
            assert said.startswith(f"starsd-edge: no server at {server.url}: ")
            assert said.endswith("; answers go on without it")
            server.start()
            assert lines.get(timeout=40) == f"starsd-edge: server at {server.url} is back"
            server.end()
            assert lines.get(timeout=40).endswith("; answers go on without it")
            edge.terminate()
            assert edge.wait(20) == 0
            assert lines.empty()
        finally:
            edge.kill()
            edge.wait()

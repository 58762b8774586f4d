"""`starsd demo`: what it shows, what it refuses, and one run from end to end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from test_target_replay import HEADER, recorded
from tiny_session import write_text_files

from starsd.edge.policy import Policy
from starsd.edge.recordings import Recording, Recordings
from starsd.edge.regime import Lately, regime
from starsd.edge.target_replay import ReplayTarget
from starsd.edge.text import Text
from starsd.scripts import demo_star, local_server
from starsd.scripts.cli import main
from starsd.scripts.demo_edges import Edge
from starsd.scripts.demo_star import PROMPTS
from starsd.scripts.demo_table import EdgeRow, Snapshot, draw, lines, render
from starsd.scripts.local_server import LocalServer
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.shared.errors import StarsdError
from starsd.shared.profiles import Profile

BUSY = EdgeRow(1, True, 20.0, "streams", 80, 2.0, 32, 40, 8, 12_345_678, 67_890, 81.6, "The fox \x1b[2J\n found it.")
STATS = {"sessions": 2.0, "drafter_idle": 0.25, "passes_per_s": 70.4, "pass_ms": 9.96}
SNAPSHOT = Snapshot("orin", "never-wait", 80.0, 12.3, (BUSY, EdgeRow(2, False, 20.0)), STATS)
FAST = Profile(name="fast", hidden=8, pass_ms=((1, 1.0),), interpolation="linear", prefill_tok_s=None)


@pytest.mark.parametrize(
    ("policy", "was_connected", "lately", "expected"),
    [
        (Policy.PLAIN, True, Lately(True, True, 0.5, 9), "device only"),
        (Policy.NEVER_WAIT, False, Lately(), "connecting"),
        (Policy.NEVER_WAIT, True, Lately(False, True, 0.0, 9), "device only"),  # the link was cut
        (Policy.NEVER_WAIT, True, Lately(True, False, 0.0, 0), "connecting"),  # no session yet
        (Policy.NEVER_WAIT, True, Lately(True, True, 0.05, 9), "streams"),
        (Policy.NEVER_WAIT, True, Lately(True, True, 0.05, 0), "device only"),  # nothing of the server's was right
        (Policy.NEVER_WAIT, True, Lately(True, True, 0.2, 9), "waits"),
        (Policy.STOP_AND_WAIT, True, Lately(True, True, 0.6, 0), "waits"),
    ],
)
def test_regimes(policy: Policy, was_connected: bool, lately: Lately, expected: str) -> None:
    assert regime(policy, was_connected, lately) == expected


def test_lines_without_a_terminal() -> None:
    assert lines(SNAPSHOT) == [
        "  12 s  edge 1  computed  40.0 tok/s  2.00 x plain  2.50 tau  40 remote  8 n-gram  12346 kB up  68 kB down"
        "  82 ms RTT  streams",
        "  12 s  edge 2  replayed  - tok/s  - x plain  - tau  0 remote  0 n-gram  0 kB up  0 kB down  - ms RTT"
        "  connecting",
        "  12 s  server  2 sessions · drafter idle 25 % · 70 passes/s of 10.0 ms",
    ]


def shown(snapshot: Snapshot, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(snapshot, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_fits_a_terminal_of_eighty_columns() -> None:
    found = shown(SNAPSHOT, 80)
    assert found[0] == "2 edges: orin, 20.0 tok/s plain · never-wait · 80 ms away · 12 s"
    assert max(map(len, found)) <= 80
    heads, cells = next((a.split(), c) for a, c in zip(found, found[2:], strict=False) if a.startswith("#"))
    assert heads == ["#", "target", "tok/s", "gain", "tau", "remote", "n-gram", "kB", "up", "down", "RTT", "regime"]
    assert cells.split() == ["1", "computed", "40.0", "2.00", "2.50", "40", "8", "12346", "68", "82", "streams"]
    assert "1  The fox [2J found it." in found  # what a model says does not steer the terminal


def test_of_a_long_answer_the_end_is_shown() -> None:
    row = replace(BUSY, text="word " * 50 + "end")
    line = shown(replace(SNAPSHOT, edges=(row,)), 60)[-1]
    assert line.startswith("1  …")
    assert line.endswith("word end")
    assert len(line) <= 60


def test_before_the_server_says_something() -> None:
    assert "server  no figures yet" in shown(replace(SNAPSHOT, server={}), 80)


def test_the_picture_looks_nothing_up(tmp_path: Path) -> None:
    draw(SNAPSHOT, file := tmp_path / "demo.svg")
    svg = file.read_text()
    assert re.findall(r"https?://[^\s\"']+", svg) == ["http://www.w3.org/2000/svg"]
    assert "@import" not in svg
    assert "font-face" not in svg
    assert set(re.findall(r"url\((.)", svg)) == {"#"}
    assert "streams" in svg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--edges", "0"], "edges is 0, expected 1 to 32"),
        (["--seconds", "0.5"], "seconds is 0.5, expected 1 to 3600"),
        (["--max-new-tokens", "1"], "max_new_tokens is 1, expected 2 or more"),
        (["--policy", "hope"], "policy is 'hope', expected plain, stop-and-wait, never-wait"),
        (["--rtt", "-1"], "rtt_ms is -1.0, expected 0 to 60,000"),
        (["--head", "."], "head . has no config.json, expected the folder of an EAGLE head"),
        (
            ["--server", "ws://a:1", "--head", "."],
            "got both --server and --head, expected one of them: a running server",
        ),
        (
            ["--server", "wss://a:1"],
            "server is 'wss://a:1', expected ws://host:port of one that was started with --dev",
        ),
        (["--server", "ws://a"], "server is 'ws://a', expected ws://host:port of one that was started with --dev"),
        (["--server", "ws://a:x"], "server is 'ws://a:x', expected ws://host:port of one that was started with --dev"),
        (
            ["--server", "ws://a:1", "--profile", "toaster"],
            "profile 'toaster' is unknown, expected one of agx-orin-64gb-8b",
        ),
    ],
)
def test_refusals_come_before_any_work(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_star, "record", lambda demo: pytest.fail("recorded"))
    assert main(["demo", *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"starsd: {message}")
    assert err.count("\n") == 1


def test_without_a_packaged_head_it_says_which_option_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("starsd.server.packaged.HEADS", tmp_path)
    monkeypatch.setattr(demo_star, "record", lambda demo: pytest.fail("recorded"))
    assert main(["demo"]) == 1
    expected = "starsd: no head is packaged for smollm2-135m: give the folder of one as --head DIR\n"
    assert capsys.readouterr() == ("", expected)


def test_the_demos_prompts_are_ours() -> None:
    ours = [msgspec.json.decode(line)["id"] for line in OWN_PROMPTS.read_bytes().splitlines()]
    assert len(set(PROMPTS)) == len(PROMPTS)
    assert set(PROMPTS) <= set(ours)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text.open(write_text_files(tmp_path / "text"))


def ran(runs: Sequence[Recording], text: Text, until: int, profile: Profile = FAST) -> Edge:
    """An edge that was stopped after so many answers; it replays what was recorded, whatever `runs` say."""
    target = ReplayTarget(Recordings(HEADER, tuple(recorded())))
    row = EdgeRow(3, False, profile.plain_tok_s)
    edge = Edge(row, target, text, runs, profile, Policy.NEVER_WAIT, HEADER, "")
    edge.start()
    deadline = time.monotonic() + 20
    while edge.answers < until and edge.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    edge.close()
    return edge


def test_an_edge_answers_again_and_again_until_it_is_stopped(text: Text) -> None:
    edge = ran(recorded(), text, until=5)
    assert (edge.error, edge.differs, edge.identical) == (None, [], True)
    row = edge.row
    assert (row.number, row.regime, row.remote, row.bytes_up) == (3, "connecting", 0, 0)
    assert edge.answers >= 5
    assert 0 < row.tokens <= edge.new_tokens - edge.answers  # the first of an answer is the prefill's
    assert 0 < row.passes <= row.tokens + edge.answers
    assert row.tok_s > 0


def test_an_edge_that_says_something_else_than_was_recorded_is_told(text: Text) -> None:
    run, *others = recorded()
    other = run.tokens.copy()
    other[run.prompt + 2] += 1
    edge = ran([replace(run, tokens=other), *others], text, until=2)
    assert not edge.identical
    assert edge.differs[0] == "edge 3 answers p0 otherwise than plain decoding from token 2 on"


def test_an_edge_that_ends_too_early_is_told(text: Text) -> None:
    run = recorded()[2]
    assert run.ended
    said = len(run.tokens) - run.prompt - 1
    longer = np.append(run.tokens[:-1], [9, 9]).astype(np.int32)
    edge = ran([replace(run, tokens=longer, ended=False)], text, until=1)
    assert edge.differs[0] == f"edge 3 answers p2 otherwise than plain decoding from token {said} on"


def test_an_edge_that_fails_says_why(text: Text) -> None:
    run = recorded()[0]
    edge = ran([replace(run, prompt=2)], text, until=1)
    assert not edge.identical
    assert str(edge.error).startswith("none of 3 recordings begins with these 2 tokens")


@pytest.mark.parametrize(("pass_ms", "prefill", "late"), [(50.0, 1e9, "prefills"), (1e-3, 1.0, "passes")])
def test_late_prefills_are_not_late_passes(pass_ms: float, prefill: float, late: str, text: Text) -> None:
    """A profile that no prefill can keep, or no pass."""
    profile = Profile(name="x", hidden=8, pass_ms=((1, pass_ms),), interpolation="linear", prefill_tok_s=prefill * 100)
    edge = ran([recorded()[2]], text, until=1, profile=profile)
    assert (edge.late_prefills > 0, edge.late_passes > 0) == (late == "prefills", late == "passes")


class Child:
    """A command that stands for the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        real = subprocess.Popen

        def start(argv: Any, **options: Any) -> Any:
            assert argv[:5] == [sys.executable, "-m", "starsd.server.cli", "run", "--model"]
            self.process = real([sys.executable, "-c", code], **options)
            return self.process

        monkeypatch.setattr(subprocess, "Popen", start)


READY = """import sys, time, signal
print('{"event": "ready", "url": "ws://127.0.0.1:5"}', flush=True)
"""


def test_a_server_is_ended_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, READY + "time.sleep(60)")
    with LocalServer("m", Path("h")) as server:
        assert server.wait() == "ws://127.0.0.1:5"
        server.check()
    assert child.process.returncode == -signal.SIGTERM


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "STOP_SECONDS", 0.2)
    child = Child(
        monkeypatch, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)"
    )
    with LocalServer("m", Path("h")) as server:
        server.wait()
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('x\\nstarsd-server: no such head')", "server did not start: no such head"),
        ("import sys; sys.exit(3)", "server did not start: exit status 3"),
    ],
)
def test_a_server_that_does_not_start_says_why(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Child(monkeypatch, code)
    with LocalServer("m", Path("h")) as server, pytest.raises(StarsdError) as caught:
        server.wait()
    assert str(caught.value) == message


def test_a_server_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, READY + "sys.exit('starsd-server: out of memory')")
    with LocalServer("m", Path("h")) as server:
        server.wait()
        child.process.wait()
        with pytest.raises(StarsdError, match=r"^server ended: out of memory$"):
            server.check()


def children(of: int) -> list[int]:
    """Processes that live below `of`, however deep."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name_and_rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(name_and_rest[2].split()[1]) == of:
            found += [int(stat.parent.name), *children(int(stat.parent.name))]
    return found


def start_demo(*options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "starsd.scripts.cli", "demo", "--max-new-tokens", "24", *options]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.model
def test_two_edges_from_end_to_end(tmp_path: Path, smollm2_folder: Path) -> None:
    file = tmp_path / "demo.svg"
    with start_demo("--edges", "2", "--seconds", "5", "--rtt", "20", "--json", "--picture", str(file)) as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    *rows, summary = [json.loads(line) for line in out.splitlines()]
    assert [(row["edge"], row["target"], row["identical"]) for row in rows] == [
        (1, "computed", True),
        (2, "replayed", True),
    ]
    assert (summary["edges"], summary["identical"], summary["policy"]) == (2, True, "never-wait")
    assert summary["new_tokens"] == sum(row["new_tokens"] for row in rows) > 20
    assert all(row["bytes_up"] > 0 and row["bytes_down"] > 0 and row["rtt_ms"] >= 20 for row in rows)
    assert 0 <= summary["drafter_idle"] <= 1
    assert "edge 2  replayed" in err
    assert "replayed" in file.read_text()


@pytest.mark.model
def test_without_a_server_the_devices_go_on_alone(smollm2_folder: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        server = f"ws://127.0.0.1:{nobody.getsockname()[1]}"
        with start_demo("--edges", "2", "--seconds", "2", "--server", server) as process:
            out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["identical"], summary["accepted_remote"], summary["drafter_idle"]) == (True, 0, None)
    assert "connecting" in err
    assert re.search(r"^starsd: (no )?server at ws://127.0.0.1:", err, re.MULTILINE)  # as the link has it


@pytest.mark.model
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted_it_leaves_nothing_behind(number: signal.Signals, status: int, smollm2_folder: Path) -> None:
    with start_demo("--seconds", "600") as process:
        assert process.stderr is not None
        for line in process.stderr:  # the server is there and the edges run
            if "server  4 sessions" in line:
                break
        below = children(process.pid)
        assert len(below) >= 2  # a gateway and its worker
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == status
    assert out == ""
    deadline = time.monotonic() + 5
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.model
def test_a_terminal_gets_its_cursor_back(smollm2_folder: Path) -> None:
    """Ctrl-C on a terminal, which goes to the whole foreground group."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
        command = "starsd.scripts.cli demo --seconds 600 --policy plain"
        os.execve(sys.executable, [sys.executable, "-m", *command.split()], environment)
    seen = b""
    while b"\x1b[?25l" not in seen or b"computed" not in seen:  # hidden, and the table there
        seen += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # its other end is closed
        while more := os.read(terminal, 65536):
            seen += more
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")

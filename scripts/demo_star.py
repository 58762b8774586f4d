"""A star on this machine: one server, some edges, emulated links between them, for as long as it was asked for.

    recordings (made on first use) → server, a child process → an emulated link to it → edges, a thread each

Every connection through the emulator is a link of its own.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from starsd.edge.policy import Policy
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_MODEL, Engine
from starsd.shared.console import StderrProgress
from starsd.shared.errors import UsageError
from starsd.shared.profiles import Profile, read_profile

if TYPE_CHECKING:
    from starsd.edge.recordings import Recordings
    from starsd.scripts.demo_edges import Edge
    from starsd.scripts.demo_table import Snapshot
    from starsd.scripts.local_server import LocalServer

MOST_EDGES = 32
FRAME_SECONDS = 0.25  # between two tables
THREADS = 1  # of the engine: the other core is the server's
# of our own prompts: short ones with long answers, so that a first run records them in seconds
PROMPTS = ("own-04", "own-23", "own-45", "own-31", "own-47", "own-06", "own-50", "own-43")


class Demo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is shown. Raises UsageError for what cannot be."""

    edges: int = 4
    rtt_ms: float = 80.0
    policy: Policy = Policy.NEVER_WAIT
    profile: str = "orin-nx-16gb-8b"
    seconds: float = 30.0
    max_new_tokens: int = 96
    prompts: Path | None = None  # None: some of our own
    server: str = ""  # ws:// address of one that runs; "": one of our own
    head: Path | None = None  # of our own server; None: the packaged one
    schedule: str = "batched"  # of our own server

    def __post_init__(self) -> None:
        if not 1 <= self.edges <= MOST_EDGES:
            raise UsageError(f"edges is {self.edges}, expected 1 to {MOST_EDGES}")
        if not 1 <= self.seconds <= 3600:
            raise UsageError(f"seconds is {self.seconds:g}, expected 1 to 3600")
        if self.max_new_tokens < 2:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}, expected 2 or more")
        if self.server and self.head is not None:
            raise UsageError("got both --server and --head, expected one of them: a running server has its own head")
        if self.server:
            address(self.server)
        self.link  # noqa: B018  # refuses what no link is
        if self.head is not None and not (self.head / "config.json").is_file():
            raise UsageError(f"head {self.head} has no config.json, expected the folder of an EAGLE head")

    @property
    def link(self) -> LinkSettings:
        return LinkSettings(rtt_ms=self.rtt_ms)

    @property
    def needs_server(self) -> bool:
        return self.policy is not Policy.PLAIN


def address(server: str) -> tuple[str, int]:
    """Host and port of a server without TLS. Raises UsageError for any other."""
    parts = urlsplit(server)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "ws" or not parts.hostname or not port:
        raise UsageError(f"server is {server!r}, expected ws://host:port of one that was started with --dev")
    return parts.hostname, port


def head_of(demo: Demo) -> Path:
    """The head for a server of our own. Raises UsageError where none is packaged."""
    if demo.head is not None:
        return demo.head
    try:
        return packaged_head(DEFAULT_MODEL)
    except UsageError as error:
        raise UsageError(f"no head is packaged for {DEFAULT_MODEL}: give the folder of one as --head DIR") from error


def run(demo: Demo, *, picture: Path | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Show it; a row for each edge, and the summary. Raises StarsdError when the server or an edge fails."""
    from threadpoolctl import threadpool_limits

    from starsd.edge.recordings import read_recordings
    from starsd.scripts.demo_table import Screen, draw

    profile = read_profile(demo.profile)
    head = head_of(demo) if demo.needs_server and not demo.server else None
    recordings = read_recordings(file := record(demo))
    with ExitStack() as stack:
        # numpy's products are small here: its threads would wait for each other while the engine has the cores
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        edges, server = _open(stack, demo, profile, recordings, head)
        screen = stack.enter_context(Screen())
        figures: list[dict[str, float]] = []
        started = time.monotonic()
        for edge in edges:
            edge.start()
        while (passed := time.monotonic() - started) < demo.seconds:
            screen.show(now := _snapshot(demo, profile, edges, passed))
            if now.server and now.server not in figures[-1:]:
                figures.append(now.server)
            time.sleep(min(FRAME_SECONDS, demo.seconds - passed))
            if server is not None:
                server.check()
            _check(edges)
        for edge in edges:
            edge.stop()
        for edge in edges:
            edge.join()
        _check(edges)
        screen.show(last := _snapshot(demo, profile, edges, demo.seconds), last=True)
        complaints = [*{edge.notice: 0 for edge in edges if edge.notice}, *(text for e in edges for text in e.differs)]
    if any(edge.differs for edge in edges):
        complaints.append(f"plain decoding was recorded in {file}: remove it if the engine has changed since")
    for text in complaints:
        print(f"starsd: {text}", file=sys.stderr)
    if picture is not None:
        draw(last, picture)
    return [_edge_row(edge) for edge in edges], _summary(last, edges, figures)


def _check(edges: Sequence[Edge]) -> None:
    """Raises what ended an edge."""
    for edge in edges:
        if edge.error is not None:
            raise edge.error


def record(demo: Demo) -> Path:
    """The file of what the real engine answers to the demo's prompts, plainly and greedily; made on first use."""
    from starsd.scripts.bench_record import ensure_recording

    with tempfile.TemporaryDirectory() as place:
        prompts = demo.prompts
        if prompts is None:
            prompts = Path(place) / "prompts.jsonl"
            asked = {msgspec.json.decode(line)["id"]: line for line in OWN_PROMPTS.read_bytes().splitlines()}
            prompts.write_bytes(b"\n".join(asked[id] for id in PROMPTS))
        return ensure_recording(DEFAULT_MODEL, None, prompts, demo.max_new_tokens, StderrProgress(), THREADS)


def _open(
    stack: ExitStack, demo: Demo, profile: Profile, recordings: Recordings, head: Path | None
) -> tuple[list[Edge], LocalServer | None]:
    """The edges, and the server where it is our own; `stack` closes all of it, the edges first."""
    from starsd.edge.bundle import ensure_bundle
    from starsd.edge.target import open_target
    from starsd.edge.target_replay import ReplayTarget
    from starsd.edge.text import Text
    from starsd.scripts.demo_edges import Edge
    from starsd.scripts.demo_table import EdgeRow
    from starsd.scripts.link_emulator import EmulatorThread
    from starsd.scripts.local_server import LocalServer

    server = stack.enter_context(LocalServer(DEFAULT_MODEL, head, demo.schedule)) if head is not None else None
    print("opening the engine" + " and starting the server" * (server is not None), file=sys.stderr, flush=True)
    bundle = ensure_bundle(DEFAULT_MODEL)
    engine, text = open_target("onnx", bundle, Engine(threads=THREADS)), Text.open(bundle)
    url = server.wait() if server is not None else demo.server * demo.needs_server
    if url:
        link = stack.enter_context(EmulatorThread(*address(url), demo.link))
        url = f"ws://127.0.0.1:{link.port}"
    edges: list[Edge] = []
    for number in range(demo.edges):
        target = engine if number == 0 else ReplayTarget(recordings)
        edge = Edge(
            EdgeRow(number + 1, number == 0, profile.plain_tok_s),
            target,
            text,
            recordings.turned(number / demo.edges),
            profile,
            demo.policy,
            recordings.header,
            url,
        )
        stack.callback(edge.close)
        edges.append(edge)
    return edges, server


def _snapshot(demo: Demo, profile: Profile, edges: Sequence[Edge], seconds: float) -> Snapshot:
    from starsd.scripts.demo_table import Snapshot

    figures = next((edge.server_stats for edge in edges if edge.server_stats), {})
    return Snapshot(
        profile=profile.name,
        policy=demo.policy.value,
        rtt_ms=demo.rtt_ms,
        seconds=seconds,
        edges=tuple(edge.row for edge in edges),
        server=figures,
    )


def _edge_row(edge: Edge) -> dict[str, Any]:
    row = edge.row
    return {
        "edge": row.number,
        "target": "computed" if row.computes else "replayed",
        "identical": edge.identical,
        "regime": row.regime,
        "tok_s": round(row.tok_s, 2),
        "gain": round(row.gain, 3),
        "tau": round(row.tau, 3),
        "new_tokens": edge.new_tokens,
        "accepted_remote": row.remote,
        "accepted_ngram": row.ngram,
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "rtt_ms": round(row.rtt_ms, 1) if math.isfinite(row.rtt_ms) else None,
        "late_passes": edge.late_passes,
    }


def _summary(last: Snapshot, edges: Sequence[Edge], figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The demo in one object. Rates are an edge's, the mean of all."""
    rows = last.edges
    seconds, passes = sum(row.seconds for row in rows), sum(row.passes for row in rows)
    rate = sum(row.tokens for row in rows) / seconds if seconds else 0.0
    idle = [each["drafter_idle"] for each in figures if "drafter_idle" in each]
    return {
        "edges": len(edges),
        "identical": all(edge.identical for edge in edges),
        "policy": last.policy,
        "profile": last.profile,
        "rtt_ms": last.rtt_ms,
        "seconds": last.seconds,
        "plain_tok_s": round(rows[0].plain_tok_s, 2),
        "tok_s": round(rate, 2),
        "gain": round(rate / rows[0].plain_tok_s, 3),
        "tau": round(sum(row.tokens for row in rows) / passes, 3) if passes else None,
        "answers": sum(edge.answers for edge in edges),
        "new_tokens": sum(edge.new_tokens for edge in edges),
        "accepted_remote": sum(row.remote for row in rows),
        "accepted_ngram": sum(row.ngram for row in rows),
        "bytes_up": sum(row.bytes_up for row in rows),
        "bytes_down": sum(row.bytes_down for row in rows),
        "drafter_idle": round(sum(idle) / len(idle), 3) if idle else None,
        "late_passes": sum(edge.late_passes for edge in edges),
        "late_prefills": sum(edge.late_prefills for edge in edges),
    }

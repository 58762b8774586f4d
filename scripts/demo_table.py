"""What a star looks like while it runs: a snapshot of its edges and its server, as a table or as lines.

Nothing here asks or changes the star; `demo_edges` fills the rows.
"""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from starsd.edge.answer import printable
from starsd.edge.regime import CONNECTING, DEVICE_ONLY, STREAMING, WAITING

WIDTH = 84  # columns of a picture
LINES_SECONDS = 5.0  # between snapshots where there is no terminal

_STYLES = {CONNECTING: "yellow", DEVICE_ONLY: "yellow", WAITING: "magenta", STREAMING: "green"}


@dataclass(frozen=True)
class EdgeRow:
    """One edge so far. Tokens, seconds and passes are those after the first pass of each answer."""

    number: int
    computes: bool  # else it replays
    plain_tok_s: float  # of its profile
    regime: str = CONNECTING
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    remote: int = 0  # drafts accepted, by who proposed them
    ngram: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    rtt_ms: float = math.inf  # the shortest measured lately, infinite before any
    text: str = ""  # what it said last

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def gain(self) -> float:
        return self.tok_s / self.plain_tok_s

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Snapshot:
    """All edges at one moment; `server` has the newest figures that it sent, none before the first."""

    profile: str
    policy: str
    rtt_ms: float
    seconds: float
    edges: tuple[EdgeRow, ...]
    server: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        edges = f"{len(self.edges)} edge{'s' * (len(self.edges) != 1)}"
        plain = f"{self.edges[0].plain_tok_s:.1f} tok/s plain"
        return f"{edges}: {self.profile}, {plain} · {self.policy} · {self.rtt_ms:g} ms away · {self.seconds:.0f} s"


def render(snapshot: Snapshot, width: int = WIDTH) -> Group:
    """The table, the server's line under it, and the end of what each edge says, `width` columns wide."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = f"{snapshot.title}\n", "left", "bold"
    for name in ("#", "target"):
        table.add_column(name, no_wrap=True)
    for name in ("tok/s", "gain", "tau", "remote", "n-gram", "kB up", "down", "RTT"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("regime", no_wrap=True)
    for row in snapshot.edges:
        where = Text(row.regime, _STYLES.get(row.regime, ""))
        table.add_row(str(row.number), *_cells(row), where, style="bold" if row.computes else None)
    said = (Text(f"{row.number}  {_tail(row.text, width - 4)}", "dim", no_wrap=True) for row in snapshot.edges)
    return Group(table, Text(), Text(server_line(snapshot.server)), Text(), *said)


def lines(snapshot: Snapshot) -> list[str]:
    """The same without a terminal: a line for each edge and one for the server."""
    names = ("", "tok/s", "x plain", "tau", "remote", "n-gram", "kB up", "kB down", "ms RTT")
    found = []
    for row in snapshot.edges:
        cells = (f"{cell} {name}".strip() for cell, name in zip(_cells(row), names, strict=True))
        found.append(f"{snapshot.seconds:4.0f} s  edge {row.number}  {'  '.join(cells)}  {row.regime}")
    return [*found, f"{snapshot.seconds:4.0f} s  {server_line(snapshot.server)}"]


def server_line(figures: dict[str, float]) -> str:
    if not figures:
        return "server  no figures yet"
    sessions, passes = figures.get("sessions", 0.0), figures.get("passes_per_s", 0.0)
    idle, took = 100 * figures.get("drafter_idle", 0.0), figures.get("pass_ms", 0.0)
    return f"server  {sessions:.0f} sessions · drafter idle {idle:.0f} % · {passes:.0f} passes/s of {took:.1f} ms"


def draw(snapshot: Snapshot, file: Path) -> None:
    """Write the table as an SVG that looks nothing up on any host. Raises OSError."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(snapshot))
    file.write_text(_without_hosts(console.export_svg(title="starsd demo", unique_id="starsd")))


def _without_hosts(svg: str) -> str:
    """Without the web fonts and the maker's address; the name space, which nobody fetches, stays."""
    return re.sub(r"<!--.*?-->|@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)


def _cells(row: EdgeRow) -> tuple[str, ...]:
    target = "computed" if row.computes else "replayed"
    rtt = f"{row.rtt_ms:.0f}" if math.isfinite(row.rtt_ms) else "-"
    rates = (f"{row.tok_s:.1f}", f"{row.gain:.2f}", f"{row.tau:.2f}") if row.passes else ("-", "-", "-")
    sizes = (f"{row.bytes_up / 1e3:.0f}", f"{row.bytes_down / 1e3:.0f}")
    return (target, *rates, str(row.remote), str(row.ngram), *sizes, rtt)


def _tail(text: str, width: int) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else f"…{line[1 - width :]}"


class Screen:
    """Shows snapshots on stderr: in place on a terminal, else as lines every few seconds."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._due = 0.0
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()  # which shows the cursor again

    def show(self, snapshot: Snapshot, *, last: bool = False) -> None:
        if self._live is not None:
            self._live.update(render(snapshot, self._live.console.width), refresh=True)
        elif last or snapshot.seconds >= self._due:
            self._due = snapshot.seconds + LINES_SECONDS
            print(*lines(snapshot), sep="\n", file=sys.stderr, flush=True)

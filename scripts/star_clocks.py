"""How `starsd bench star` measures a number of targets: on a virtual clock, or with sockets and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import msgspec
import numpy as np

from starsd.edge.policy import Policy
from starsd.edge.recordings import Recording, Recordings
from starsd.scripts import demo_star
from starsd.scripts.demo_star import Demo
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_edge import SETTLE_SECONDS, Star, VirtualEdge
from starsd.scripts.virtual_head import VirtualHead
from starsd.scripts.virtual_star import ChargedDrafter, VirtualServer
from starsd.shared.errors import UsageError

APART_SECONDS = 0.0137  # between the starts of two edges, so that they are not in step

Measure = Callable[[int, str, Policy], dict[str, Any]]  # so many targets, by this schedule


def on_virtual_clock(star: Star, head: VirtualHead, recordings: Recordings, seconds: float) -> Measure:
    def measure(count: int, schedule: str, policy: Policy) -> dict[str, Any]:
        return simulate(msgspec.structs.replace(star, schedule=schedule), head, recordings, count, seconds, policy)

    return measure


def on_real_clock(demo: Demo) -> Measure:
    """With the demo's sockets and processes, its table on stderr meanwhile."""

    def measure(count: int, schedule: str, policy: Policy) -> dict[str, Any]:
        _, told = demo_star.run(msgspec.structs.replace(demo, edges=count, schedule=schedule, policy=policy))
        if not told["identical"]:
            raise AssertionError("an edge's text is not that of plain decoding")
        return {
            "system_tok_s": round(count * told["tok_s"], 2),
            "per_target_tok_s": told["tok_s"],
            "tau": told["tau"],
            "drafter_idle": told["drafter_idle"],
            "queue_ms_p99": None,  # a server does not tell
            "late_passes": told["late_passes"],
        }

    return measure


@dataclass
class _Tally:
    """Of one edge: what came after the first token of each answer."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0


def simulate(
    star: Star,
    head: VirtualHead,
    recordings: Recordings,
    count: int,
    seconds: float,
    policy: Policy,
    *,
    connected: bool = True,
) -> dict[str, Any]:
    """The star for `seconds` on a virtual clock; not `connected`: every edge is alone with its own drafts.

    Raises UsageError when an edge reads its prompt for all that time.
    """
    tallies = [_Tally() for _ in range(count)]
    with VirtualClock() as clock:
        drafter = head.on(clock, star.limits, star.cost)
        server = VirtualServer(clock, [drafter], star.limits, star.schedule)
        for number, tally in enumerate(tallies):
            edge = VirtualEdge(star, server, head, recordings, policy, number)
            if connected:
                edge.line.connect()
            runs = recordings.turned(number / count)
            work = partial(_work, clock, edge, tally, runs, number * APART_SECONDS)
            clock.spawn(work, f"edge {number}", daemon=True)
        clock.run(until=SETTLE_SECONDS)
        charged = drafter.drafter
        assert isinstance(charged, ChargedDrafter)
        before = charged.busy_seconds
        clock.run(until=SETTLE_SECONDS + seconds)
        busy, waits = charged.busy_seconds - before, server.queue.waits
    if not all(tally.passes for tally in tallies):
        raise UsageError(f"{seconds:g} seconds are too short for an answer's second token, expected more --seconds")
    speeds = [tally.tokens / tally.seconds for tally in tallies]
    return {
        "system_tok_s": round(sum(speeds), 2),
        "per_target_tok_s": round(sum(speeds) / count, 2),
        "tau": round(sum(tally.tokens for tally in tallies) / sum(tally.passes for tally in tallies), 3),
        "drafter_idle": round(max(0.0, 1 - busy / seconds), 4),
        "queue_ms_p99": round(1e3 * float(np.percentile(waits, 99)), 2) if waits else None,
    }


def _work(clock: VirtualClock, edge: VirtualEdge, tally: _Tally, runs: Sequence[Recording], late: float) -> None:
    """Answer one prompt after the other until the clock stops."""
    edge.begin()
    clock.sleep(late)
    for run in cycle(runs):
        last: float | None = None
        for piece in edge.answer(run):
            if not piece.tokens:
                continue
            if last is not None:
                tally.tokens += len(piece.tokens)
                tally.passes += 1
                tally.seconds += clock.now() - last
            last = clock.now()

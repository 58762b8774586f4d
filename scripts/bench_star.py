"""`starsd bench star`: one drafter and more and more targets, by this server's schedule and by the paper's.

All edges answer at once, without a pause between answers, as many prompts as they find time for. What a target says is
replayed, what the drafter proposes is computed, and each edge's text is held against plain decoding. On the virtual
clock a row is the same on every machine: passes of the drafter take `--pass-ms` and `--row-ms`, so that a figure says
what a drafter of that speed does. On the real one there are sockets, processes and this machine's own speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.recordings import read_recordings
from starsd.scripts.bench_options import counts, policy_named
from starsd.scripts.bench_record import ensure_recording
from starsd.scripts.demo_star import Demo
from starsd.scripts.link_model import LinkSettings, parse_kbit
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.scripts.star_clocks import Measure, on_real_clock, on_virtual_clock
from starsd.scripts.virtual_edge import Star
from starsd.scripts.virtual_head import DraftCost, VirtualHead
from starsd.server.limits import LIMITS, SCHEDULES
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_CODEC, DEFAULT_MODEL
from starsd.shared.console import StderrProgress, emit
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.profiles import read_profile

CLOCKS = ("virtual", "real")
# what either schedule is made for: the paper's targets wait for a whole tree
OWN_POLICY = {"batched": Policy.NEVER_WAIT, "fifo": Policy.STOP_AND_WAIT}


class StarBench(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured. Raises UsageError for what cannot be."""

    counts: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[str, ...] = SCHEDULES
    policy: Policy | None = None  # None: what each schedule is made for
    seconds: float = 20.0  # of each row

    def __post_init__(self) -> None:
        for name in self.schedules:
            if name not in SCHEDULES:
                raise UsageError(f"schedule is {name!r}, expected one of {', '.join(SCHEDULES)}")
        if not 1 <= self.seconds <= 3600:
            raise UsageError(f"seconds is {self.seconds:g}, expected 1 to 3600")


def run(bench: StarBench, plain_tok_s: float, clock: str, measure: Measure) -> Iterator[dict[str, Any]]:
    """A row for each schedule and number of targets.

    `n_full_predicted` is the number at which the drafter would never be idle, by how busy the first row's kept it.
    """
    for schedule in bench.schedules:
        policy, full = bench.policy or OWN_POLICY[schedule], None
        for count in bench.counts:
            row = measure(count, schedule, policy)
            if full is None and row["drafter_idle"] is not None and row["drafter_idle"] < 1:
                full = round(count / (1 - row["drafter_idle"]), 1)
            yield {
                "n": count,
                "schedule": schedule,
                "policy": policy.value,
                "clock": clock,
                **row,
                "plain_tok_s": round(plain_tok_s, 2),
                "vs_plain": round(row["per_target_tok_s"] / plain_tok_s, 3),
                "n_full_predicted": full,
            }


def command(
    *,
    profile: Annotated[str, typer.Option(help="A device: a profile's name or file.")] = "orin-nx-16gb-8b",
    n: Annotated[str, typer.Option(help="Numbers of targets, by commas.")] = "1,2,4,8",
    schedule: Annotated[str, typer.Option(help=f"Schedules, by commas: {', '.join(SCHEDULES)}.")] = ",".join(SCHEDULES),
    clock: Annotated[str, typer.Option(help="virtual, or real: sockets and processes on this machine.")] = "virtual",
    rtt: Annotated[float, typer.Option(help="Milliseconds to the server and back.")] = 10.0,
    policy: Annotated[
        str | None,
        typer.Option(help="For both schedules; batched has never-wait and fifo stop-and-wait, if not given."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each row.")] = StarBench().seconds,
    model: Annotated[str, typer.Option(help="Whose answers are replayed.")] = DEFAULT_MODEL,
    head: Annotated[Path | None, typer.Option(help="Folder of a head; the packaged one if not given.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to answer; our own if not given.")] = None,
    recording: Annotated[Path | None, typer.Option(help="Answers recorded by starsd bench record.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    pass_ms: Annotated[float, typer.Option(help="Of the drafter, virtual clock.")] = DraftCost().base,
    row_ms: Annotated[float, typer.Option(help="More for each row of a pass, virtual clock.")] = DraftCost().row,
    ngrams: Annotated[bool, typer.Option(help="Drafts from the conversation itself, too; virtual clock.")] = True,
    phrases: Annotated[bool, typer.Option(help="Drafts from the model's phrasebook, too; virtual clock.")] = True,
    codec: Annotated[str, typer.Option(help="Of features on the wire, virtual clock.")] = DEFAULT_CODEC,
    up: Annotated[str, typer.Option(help="Rate of each edge towards the server, virtual clock.")] = "1gbit",
    down: Annotated[str, typer.Option(help="Rate towards each edge, virtual clock.")] = "1gbit",
    server: Annotated[str, typer.Option(help="One that runs with --dev, ws://host:port; real clock.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """One drafter and more and more targets: our schedule beside the paper's."""
    bench = StarBench(
        counts=counts("n", n),
        schedules=tuple(schedule.split(",")),
        policy=policy_named(policy) if policy is not None else None,
        seconds=seconds,
    )
    device = read_profile(profile)
    if clock not in CLOCKS:
        raise UsageError(f"clock is {clock!r}, expected one of {', '.join(CLOCKS)}")
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "server")
    if clock == "real":
        if model != DEFAULT_MODEL or recording is not None:
            raise UsageError(f"got --model or --recording with --clock real, expected neither: it runs {DEFAULT_MODEL}")
        if server and len(bench.schedules) > 1:
            raise UsageError(f"schedule is {schedule}, expected the one that {server} was started with")
        demo = Demo(
            rtt_ms=rtt,
            profile=profile,
            seconds=seconds,
            prompts=prompts,
            server=server,
            head=head,
            max_new_tokens=max_new_tokens,
        )
        measure = on_real_clock(demo)
    elif server:
        raise UsageError(f"got --server {server} with --clock virtual, expected --clock real")
    elif max(bench.counts) > LIMITS.slots:
        raise UsageError(f"n is {n}, expected at most the {LIMITS.slots} sessions of a drafter")
    else:
        file = recording or ensure_recording(model, None, prompts or OWN_PROMPTS, max_new_tokens, StderrProgress())
        recordings = read_recordings(file)
        about = recordings.header
        star = Star(
            profile=device,
            link=LinkSettings(rtt_ms=rtt, up_kbit=parse_kbit(up), down_kbit=parse_kbit(down)),
            codec=codec,
            cost=DraftCost(base=pass_ms, row=row_ms),
            ngrams=ngrams,
            phrases=find_phrases(about.model, about.shape.vocab) if phrases else None,
        )
        drafter = VirtualHead(str(head or packaged_head(model)), model, about.fingerprint)
        measure = on_virtual_clock(star, drafter, recordings, seconds)
    for row in run(bench, device.plain_tok_s, clock, measure):
        if as_json:
            emit(row)
        else:
            idle = "" if row["drafter_idle"] is None else f"  drafter idle {row['drafter_idle']:.0%}"
            speed = f"{row['system_tok_s']:8.2f} tok/s together  {row['vs_plain']:.2f} x plain each"
            print(f"{row['n']:3} targets  {row['schedule']:8} {row['policy']:14}{speed}  tau {row['tau']:.2f}{idle}")

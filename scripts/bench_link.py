"""`starsd bench link`: what distance does to each policy, on a device's clock.

A replay target answers the prompts from a recorded greedy run of the real engine and takes the profile's time; the
server computes real drafts; frames have the device's size. All of it on a virtual clock, so a row is the same on every
machine and takes less than it says. `down` is a link that was never there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from starsd.edge.answer import Outcome
from starsd.edge.drafts import Source
from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.recordings import Recordings, read_recordings
from starsd.scripts.bench_options import policy_named
from starsd.scripts.bench_record import ensure_recording
from starsd.scripts.link_model import LinkSettings, parse_kbit
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_edge import Star, VirtualEdge
from starsd.scripts.virtual_head import VirtualHead
from starsd.scripts.virtual_star import VirtualServer
from starsd.server.limits import LIMITS
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_CODEC, DEFAULT_MODEL
from starsd.shared.console import StderrProgress, emit
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.profiles import read_profile

DOWN = "down"
REMOTE = Source.REMOTE.name.lower()


def run(
    star: Star, head: VirtualHead, recordings: Recordings, rtts: Sequence[str], policies: Sequence[Policy]
) -> Iterator[dict[str, Any]]:
    """A row for each round trip and policy."""
    plain = _measure(star, head, recordings, DOWN, Policy.PLAIN)
    for rtt in rtts:
        for policy in policies:
            row = plain if policy is Policy.PLAIN else _measure(star, head, recordings, rtt, policy)
            rest = {name: value for name, value in row.items() if name not in ("rtt_ms", "policy", "tok_s", "tau")}
            yield {
                "rtt_ms": rtt if rtt == DOWN else float(rtt),
                "policy": policy.value,
                "tok_s": row["tok_s"],
                "vs_plain": round(row["tok_s"] / plain["tok_s"], 3),
                "tau": row["tau"],
                **rest,
            }


def _measure(star: Star, head: VirtualHead, recordings: Recordings, rtt: str, policy: Policy) -> dict[str, Any]:
    """All recorded prompts, one after the other, in one session."""
    if rtt != DOWN:
        star = msgspec.structs.replace(star, link=star.link.changed(rtt_ms=float(rtt)))
    outcomes: list[Outcome] = []
    drafted: list[float] = []  # seconds from the request to the first token that the server had proposed
    with VirtualClock() as clock:
        server = VirtualServer(clock, [head.on(clock, star.limits, star.cost)], star.limits, star.schedule)
        edge = VirtualEdge(star, server, head, recordings, policy)
        if rtt != DOWN:
            edge.line.connect()

        def work() -> None:
            edge.begin()
            for run in recordings.runs:
                asked, first = clock.now(), math.nan
                for piece in edge.answer(run):
                    if math.isnan(first) and REMOTE in piece.sources:
                        first = clock.now() - asked
                    if piece.outcome is not None:
                        outcomes.append(piece.outcome)
                drafted.append(first)

        clock.spawn(work, "edge")
        clock.run()
    target = edge.target
    tokens = sum(outcome.new_tokens - 1 for outcome in outcomes)
    seconds = sum(outcome.seconds - outcome.prefill_seconds for outcome in outcomes)
    read = sum(star.profile.prefill_seconds(run.prompt - 1) for run in recordings.runs)
    passes = sum(outcome.passes for outcome in outcomes)
    scored = passes + len(outcomes)  # the first token's pass of each answer counts as prefill
    idle = sum(outcome.seconds for outcome in outcomes) - target.busy_seconds - read
    helped = [seconds for seconds in drafted if not math.isnan(seconds)]
    return {
        "tok_s": round(tokens / seconds, 2),
        "tau": round(tokens / passes, 3),
        "remote": sum(outcome.accepted_remote for outcome in outcomes),
        "ngram": sum(outcome.accepted_ngram for outcome in outcomes),
        "tokens": tokens,
        "rows": round(target.rows / scored, 2),
        "idle_ms": round(1e3 * idle / scored, 2),
        "prefill_s": round(median(outcome.prefill_seconds for outcome in outcomes), 3),
        "first_draft_s": round(median(helped), 3) if helped else None,
        "never_drafted": len(drafted) - len(helped),
        "up_bytes_per_token": round(sum(outcome.bytes_up for outcome in outcomes) / tokens, 1),
        "down_bytes_per_token": round(sum(outcome.bytes_down for outcome in outcomes) / tokens, 1),
    }


def command(
    *,
    profile: Annotated[str, typer.Option(help="A device: a profile's name or file.")] = "orin-nx-16gb-8b",
    rtt: Annotated[str, typer.Option(help="Round trips in ms, by commas; down: no link.")] = "0,10,50,100,200,400,down",
    policy: Annotated[str, typer.Option(help="Policies, by commas.")] = "never-wait,stop-and-wait,plain",
    model: Annotated[str, typer.Option(help="Whose answers are replayed.")] = DEFAULT_MODEL,
    precision: Annotated[str | None, typer.Option(help="Of the engine that is recorded.")] = None,
    head: Annotated[str | None, typer.Option(help="Folder of a head; the packaged one if not given.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to answer; our own if not given.")] = None,
    recording: Annotated[Path | None, typer.Option(help="Answers recorded by starsd bench record.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    codec_name: Annotated[str, typer.Option("--codec", help="Of features on the wire.")] = DEFAULT_CODEC,
    up: Annotated[str, typer.Option(help="Rate towards the server, such as 256kbit.")] = "1gbit",
    down: Annotated[str, typer.Option(help="Rate towards the edge.")] = "1gbit",
    schedule: Annotated[str, typer.Option(help="batched or fifo.")] = "batched",
    ngrams: Annotated[bool, typer.Option(help="Drafts from the conversation itself, too.")] = True,
    phrases: Annotated[bool, typer.Option(help="Drafts from the model's phrasebook, too.")] = True,
    nodes: Annotated[int, typer.Option(help="Of a near edge's tree.")] = LIMITS.nodes,
    window: Annotated[int, typer.Option(help="Tokens that the drafter looks back.")] = LIMITS.window,
    farthest: Annotated[int, typer.Option(help="Times as many for a far one, at most.")] = LIMITS.farthest,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """Tokens per second over distance: never-wait, stop-and-wait and plain decoding, on a device's clock."""
    policies = [policy_named(name) for name in policy.split(",")]
    rtts = rtt.split(",")
    for each in rtts:
        if each != DOWN and not each.replace(".", "", 1).isdigit():
            raise UsageError(f"rtt is {each!r}, expected milliseconds by commas, or {DOWN}")
    star = Star(
        profile=read_profile(profile),
        link=LinkSettings(up_kbit=parse_kbit(up), down_kbit=parse_kbit(down)),
        codec=codec_name,
        schedule=schedule,
        ngrams=ngrams,
        limits=msgspec.structs.replace(LIMITS, nodes=nodes, farthest=farthest, window=window),
    )
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "server")
    drafter = head or str(packaged_head(model))
    file = recording or ensure_recording(model, precision, prompts or OWN_PROMPTS, max_new_tokens, StderrProgress())
    recordings = read_recordings(file)
    about = recordings.header
    if phrases:
        star = msgspec.structs.replace(star, phrases=find_phrases(about.model, about.shape.vocab))
    real = VirtualHead(drafter, model, about.fingerprint)
    for row in run(star, real, recordings, rtts, policies):
        if as_json:
            emit(row)
        else:
            where = f"rtt {row['rtt_ms']:g} ms" if row["rtt_ms"] != DOWN else "no link"
            speed = f"{row['tok_s']:7.2f} tok/s {row['vs_plain']:.2f} x"
            print(f"{where:12} {row['policy']:14} {speed}  tau {row['tau']:.2f}")

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
from starsd.edge.channel import Model
from starsd.edge.drafts import Source
from starsd.edge.paced_target import PacedTarget
from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.recordings import Recordings, read_recordings
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.target_replay import ReplayTarget
from starsd.scripts.bench_record import ensure_recording
from starsd.scripts.link_model import LinkSettings, parse_kbit
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_head import DraftCost, VirtualHead
from starsd.scripts.virtual_star import VirtualLine, VirtualServer
from starsd.server.limits import LIMITS, ServerLimits
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_CODEC, DEFAULT_MODEL, Limits, Sampling
from starsd.shared.console import StderrProgress, emit
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.phrases import Phrasebook
from starsd.shared.profiles import Profile, read_profile

DOWN = "down"
REMOTE = Source.REMOTE.name.lower()
SETTLE_SECONDS = 3.0  # for a connection to be made, before the first prompt


class LinkBench(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured."""

    profile: Profile
    codec: str = DEFAULT_CODEC
    up_kbit: float = LinkSettings().up_kbit
    down_kbit: float = LinkSettings().down_kbit
    jitter_ms: float = 0.0
    cost: DraftCost = DraftCost()
    limits: ServerLimits = LIMITS
    schedule: str = "batched"
    ngrams: bool = True
    phrases: Phrasebook | None = None


def run(
    bench: LinkBench, head: VirtualHead, recordings: Recordings, rtts: Sequence[str], policies: Sequence[Policy]
) -> Iterator[dict[str, Any]]:
    """A row for each round trip and policy."""
    plain = _measure(bench, head, recordings, DOWN, Policy.PLAIN)
    for rtt in rtts:
        for policy in policies:
            row = plain if policy is Policy.PLAIN else _measure(bench, head, recordings, rtt, policy)
            rest = {name: value for name, value in row.items() if name not in ("rtt_ms", "policy", "tok_s", "tau")}
            yield {
                "rtt_ms": rtt if rtt == DOWN else float(rtt),
                "policy": policy.value,
                "tok_s": row["tok_s"],
                "vs_plain": round(row["tok_s"] / plain["tok_s"], 3),
                "tau": row["tau"],
                **rest,
            }


def _measure(bench: LinkBench, head: VirtualHead, recordings: Recordings, rtt: str, policy: Policy) -> dict[str, Any]:
    """All recorded prompts, one after the other, in one session."""
    about = recordings.header
    outcomes: list[Outcome] = []
    drafted: list[float] = []  # seconds from the request to the first token that the server had proposed
    with VirtualClock() as clock:
        settings = LinkSettings(
            rtt_ms=0.0 if rtt == DOWN else float(rtt),
            up_kbit=bench.up_kbit,
            down_kbit=bench.down_kbit,
            jitter_ms=bench.jitter_ms,
        )
        server = VirtualServer(clock, [head.on(clock, bench.limits, bench.cost)], bench.limits, bench.schedule)
        line = VirtualLine(
            server,
            "edge",
            settings,
            codec_name=bench.codec,
            padding=bench.profile.padding(bench.codec, about.shape.hidden),
            projectors=lambda info: head.projector,
        )
        if rtt != DOWN:
            line.connect()

        target = PacedTarget(ReplayTarget(recordings), bench.profile, clock)

        def edge() -> None:
            remote = line.channel.session(Model(about.fingerprint, about.shape, about.features))
            speculator = Speculator(policy, remote, clock=clock, ngrams=bench.ngrams, phrases=bench.phrases)
            text: Any = _Text(about.eos)
            session = Session(target, text, speculator)
            clock.sleep(SETTLE_SECONDS)
            for run in recordings.runs:
                session.forget()
                limits = Limits(max_new_tokens=len(run.tokens) - run.prompt)
                asked, first = clock.now(), math.nan
                for piece in session.generate(run.tokens[: run.prompt].tolist(), Sampling(), limits):
                    if math.isnan(first) and REMOTE in piece.sources:
                        first = clock.now() - asked
                assert piece.outcome is not None
                outcomes.append(piece.outcome)
                drafted.append(first)
                expected = run.tokens[run.prompt :].tolist()
                if piece.outcome.token_ids != (expected[:-1] if run.ended else expected):
                    raise AssertionError(f"answer to {run.id} is not the recorded one")

        clock.spawn(edge, "edge")
        clock.run()
    tokens = sum(outcome.new_tokens - 1 for outcome in outcomes)
    seconds = sum(outcome.seconds - outcome.prefill_seconds for outcome in outcomes)
    read = sum(bench.profile.prefill_seconds(run.prompt - 1) for run in recordings.runs)
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


class _Text:
    """As much of `Text` as a session needs that shows nobody what it says."""

    def __init__(self, eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)

    def stream(self, stop: Sequence[str]) -> _Silence:
        return _Silence()


class _Silence:
    def push(self, token: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> tuple[str, bool]:
        return "", False


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
    policies = [_policy(name) for name in policy.split(",")]
    rtts = rtt.split(",")
    for each in rtts:
        if each != DOWN and not each.replace(".", "", 1).isdigit():
            raise UsageError(f"rtt is {each!r}, expected milliseconds by commas, or {DOWN}")
    bench = LinkBench(
        profile=read_profile(profile),
        codec=codec_name,
        up_kbit=parse_kbit(up),
        down_kbit=parse_kbit(down),
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
        bench = msgspec.structs.replace(bench, phrases=find_phrases(about.model, about.shape.vocab))
    real = VirtualHead(drafter, model, about.fingerprint)
    for row in run(bench, real, recordings, rtts, policies):
        if as_json:
            emit(row)
        else:
            where = f"rtt {row['rtt_ms']:g} ms" if row["rtt_ms"] != DOWN else "no link"
            speed = f"{row['tok_s']:7.2f} tok/s {row['vs_plain']:.2f} x"
            print(f"{where:12} {row['policy']:14} {speed}  tau {row['tau']:.2f}")


def _policy(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        raise UsageError(f"policy is {name!r}, expected {', '.join(policy.value for policy in Policy)}") from None

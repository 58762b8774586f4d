"""`starsd plan`: what one drafter does for so many devices, from what it does for one.

Two runs of one device on the virtual clock, at the distance and without a link, say how fast it is with all the drafts
it can get and with its own alone, and how busy it keeps the drafter. Up to 1 / busy devices (*N_full*) each has all
that. Beyond, a drafter that is never idle goes round: each gets N_full / N of what one takes, and is as much faster
than alone as that is of the whole. Sharing passes makes rows cheaper and first levels matter most, so that a measured
star (`starsd bench star`) may do better, and nobody does worse than alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.recordings import read_recordings
from starsd.scripts.bench_options import counts
from starsd.scripts.bench_record import ensure_recording
from starsd.scripts.link_model import LinkSettings, parse_kbit
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.scripts.star_clocks import simulate
from starsd.scripts.virtual_edge import Star
from starsd.scripts.virtual_head import DraftCost, VirtualHead
from starsd.server.packaged import packaged_head
from starsd.shared.config import DEFAULT_MODEL
from starsd.shared.console import StderrProgress, emit
from starsd.shared.errors import MissingExtraError
from starsd.shared.profiles import read_profile

SECONDS = 30.0  # of simulated time a run


def predict(
    helped: Mapping[str, Any], alone: Mapping[str, Any], plain_tok_s: float, targets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Rows as `starsd bench star` has them, from one that is `helped` and one that is `alone`."""
    busy = 1 - helped["drafter_idle"]
    for n in targets:
        share = min(1.0, 1 / (n * busy)) if busy else 1.0
        each = alone["per_target_tok_s"] + share * (helped["per_target_tok_s"] - alone["per_target_tok_s"])
        yield {
            "n": n,
            "schedule": "batched",
            "policy": Policy.NEVER_WAIT.value,
            "clock": "predicted",
            "system_tok_s": round(n * each, 2),
            "per_target_tok_s": round(each, 2),
            "tau": round(alone["tau"] + share * (helped["tau"] - alone["tau"]), 3),
            "drafter_idle": round(max(0.0, 1 - n * busy), 4),
            "queue_ms_p99": helped["queue_ms_p99"] if n == 1 else None,  # how verdicts meet is not in the model
            "plain_tok_s": round(plain_tok_s, 2),
            "vs_plain": round(each / plain_tok_s, 3),
            "n_full_predicted": round(1 / busy, 1) if busy else None,
        }


def command(
    *,
    profile: Annotated[str, typer.Option(help="A device: a profile's name or file.")] = "orin-nx-16gb-8b",
    rtt: Annotated[float, typer.Option(help="Milliseconds to the server and back.")] = 50.0,
    n: Annotated[str, typer.Option(help="Numbers of devices, by commas.")] = "1,4,16,64",
    up: Annotated[str, typer.Option(help="Rate of each device towards the server.")] = "20mbit",
    down: Annotated[str, typer.Option(help="Rate towards each device.")] = "20mbit",
    pass_ms: Annotated[float, typer.Option(help="Of the drafter; starsd bench drafter measures one.")] = (
        DraftCost().base
    ),
    row_ms: Annotated[float, typer.Option(help="More for each row of a pass.")] = DraftCost().row,
    model: Annotated[str, typer.Option(help="Whose answers are replayed.")] = DEFAULT_MODEL,
    head: Annotated[Path | None, typer.Option(help="Folder of a head; the packaged one if not given.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to answer; our own if not given.")] = None,
    recording: Annotated[Path | None, typer.Option(help="Answers recorded by starsd bench record.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """Predict what one drafter does for so many devices at this distance."""
    targets, device = counts("n", n), read_profile(profile)
    link = LinkSettings(rtt_ms=rtt, up_kbit=parse_kbit(up), down_kbit=parse_kbit(down))
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "server")
    recordings = read_recordings(
        recording or ensure_recording(model, None, prompts or OWN_PROMPTS, 128, StderrProgress())
    )
    about = recordings.header
    phrases = find_phrases(about.model, about.shape.vocab)
    star = Star(profile=device, link=link, cost=DraftCost(base=pass_ms, row=row_ms), phrases=phrases)
    drafter = VirtualHead(str(head or packaged_head(model)), model, about.fingerprint)
    helped, alone = (
        simulate(star, drafter, recordings, 1, SECONDS, Policy.NEVER_WAIT, connected=connected)
        for connected in (True, False)
    )
    for row in predict(helped, alone, device.plain_tok_s, targets):
        if as_json:
            emit(row)
        else:
            speed = f"{row['system_tok_s']:10.1f} tok/s together  {row['vs_plain']:.2f} x plain each"
            print(f"{row['n']:5} at a time{speed}  drafter idle {row['drafter_idle']:.0%}")
    if not as_json and helped["drafter_idle"] < 1:
        print(f"the drafter is never idle from {math.ceil(1 / (1 - helped['drafter_idle']))} on")

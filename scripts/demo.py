"""`starsd demo`: a star on this machine, and a table of how its edges fare.

The last line on stdout is a JSON object; `identical` says that every token of every edge was plain decoding's.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from starsd.edge.policy import Policy
from starsd.scripts.demo_star import Demo
from starsd.shared.console import emit
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.profiles import shipped
from starsd.shared.signals import ended_by_signals

DEMO = Demo()
POLICIES = tuple(policy.value for policy in Policy)


def demo(
    *,
    edges: Annotated[int, typer.Option(help="Devices; the first computes its target, the others replay theirs.")] = (
        DEMO.edges
    ),
    rtt: Annotated[float, typer.Option(help="Milliseconds to the server and back.")] = DEMO.rtt_ms,
    policy: Annotated[str, typer.Option(help=f"{', '.join(POLICIES)}.")] = DEMO.policy.value,
    profile: Annotated[str, typer.Option(help=f"Device: {', '.join(shipped())}, or a file.")] = DEMO.profile,
    seconds: Annotated[float, typer.Option(help="To run for, set-up not counted.")] = DEMO.seconds,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = DEMO.max_new_tokens,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to answer, JSON lines; some of our own if not given.")
    ] = (DEMO.prompts),
    server: Annotated[str, typer.Option(help="A server that runs already with --dev, ws://host:port.")] = DEMO.server,
    head: Annotated[Path | None, typer.Option(help="Folder of a head; the packaged one if not given.")] = DEMO.head,
    picture: Annotated[Path | None, typer.Option(help="Write the last table to this file, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Before the last line one for each edge.")] = False,
) -> None:
    """One server, four devices, a long way between them: a table of who wins what, and whether every token is right."""
    from starsd.scripts.demo_star import run

    if policy not in POLICIES:
        raise UsageError(f"policy is {policy!r}, expected {', '.join(POLICIES)}")
    asked = Demo(
        edges=edges,
        rtt_ms=rtt,
        policy=Policy(policy),
        profile=profile,
        seconds=seconds,
        max_new_tokens=max_new_tokens,
        prompts=prompts,
        server=server,
        head=head,
    )
    if asked.needs_server and not asked.server:
        for module in ("torch", "zmq", "websockets"):  # before anything is recorded for nothing
            if find_spec(module) is None:
                raise MissingExtraError(module, "server")
    with ended_by_signals():
        try:
            rows, summary = run(asked, picture=picture)
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "rich", "dev") from error
    for row in rows if as_json else ():
        emit(row)
    emit(summary)
    if late := summary["late_passes"]:
        print(f"starsd: {late} passes took longer than the device's, on this machine", file=sys.stderr)
    if not summary["identical"]:
        raise SystemExit(1)

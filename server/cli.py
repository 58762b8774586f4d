"""`starsd-server`: what operators type."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from starsd.server.auth import add_token
from starsd.server.config import SERVER
from starsd.server.drafter import Draft, DynamicTree, open_drafter
from starsd.server.limits import LIMITS, SCHEDULES
from starsd.server.recording import read_recording
from starsd.shared import console
from starsd.shared.errors import MissingExtraError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
DEFAULT = DynamicTree()


@app.callback()
def _server() -> None:
    """The drafter in the cloud."""


@app.command()
def run(
    *,
    model: Annotated[list[str], typer.Option(help="NAME or NAME=HEAD; once for each model that is served.")],
    head: Annotated[str | None, typer.Option(help="Folder or hf:org/name; default: the packaged one.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = SERVER.host,
    port: Annotated[int, typer.Option(help="0: any that is free.")] = SERVER.port,
    schedule: Annotated[str, typer.Option(help=", ".join(SCHEDULES))] = SERVER.schedule,
    dev: Annotated[bool, typer.Option("--dev", help="This machine only, without TLS and tokens.")] = SERVER.dev,
    workers: Annotated[int, typer.Option(help="Drafter processes.")] = SERVER.workers,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Devices that may connect; see starsd-server token.")] = None,
    slots: Annotated[int, typer.Option(help="Sessions of a head and worker.")] = LIMITS.slots,
    window: Annotated[int, typer.Option(help="Rows of a session that the drafter looks back on.")] = LIMITS.window,
    nodes: Annotated[int, typer.Option(help="Nodes of a tree, root included.")] = LIMITS.nodes,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or int8 products (cpu).")] = SERVER.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = SERVER.device,
    threads: Annotated[int, typer.Option(help="Threads of a drafter process.")] = SERVER.threads,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, when ready.")] = False,
) -> None:
    """Draft for edges that connect, until SIGTERM. SIGHUP loads heads and tokens again."""
    from starsd.server.run import models
    from starsd.server.run import run as serve

    config = msgspec.structs.replace(
        SERVER,
        models=models(model, head),
        host=host,
        port=port,
        schedule=schedule,
        dev=dev,
        workers=workers,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tokens=tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        limits=msgspec.structs.replace(LIMITS, slots=slots, window=window, nodes=nodes),
    )
    asyncio.run(serve(config, as_json=as_json))


@app.command()
def token(
    device: Annotated[str, typer.Argument(help="Name of the device.")],
    *,
    tokens: Annotated[Path, typer.Option(help="File of all devices; made when it is not there.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Make a device's token, in place of its old one, and print it: it is shown only now."""
    made = add_token(device, tokens)
    if as_json:
        console.emit({"device": device, "token": made})
    else:
        print(made)


@app.command()
def draft(
    *,
    head: Annotated[str, typer.Option(help="Folder or hf:org/name of an EAGLE head.")],
    target: Annotated[str, typer.Option(help="Folder or reference of the model it drafts for.")],
    recording: Annotated[Path, typer.Option(help="Recorded rounds, .npz.")],
    total: Annotated[int, typer.Option(help="Nodes of a tree, root included.")] = DEFAULT.total,
    depth: Annotated[int, typer.Option(help="Levels that are expanded.")] = DEFAULT.depth,
    top_k: Annotated[int, typer.Option(help="Nodes expanded a level, and children of each.")] = DEFAULT.top_k,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or int8 products (cpu).")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print the tree that a head proposes in each round of a recording."""
    shape = DynamicTree(total=total, depth=depth, top_k=top_k)
    drafter = open_drafter("eagle", head, target, dtype=dtype, device=device)
    for warning in drafter.warnings:
        print(f"starsd-server: {warning}", file=sys.stderr)
    session = drafter.open()
    for number, step in enumerate(read_recording(recording, drafter.features.width, drafter.vocab)):
        session.extend(step.features, step.next_tokens)
        _show(number, session.draft(shape), as_json)


@app.command()
def projector(
    *,
    head: Annotated[str, typer.Option(help="Folder or hf:org/name of an EAGLE-3 head.")],
    target: Annotated[str, typer.Option(help="Folder or reference of the model it drafts for.")],
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    dtype: Annotated[str, typer.Option(help="fp16 or fp32.")] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Write the part of an EAGLE-3 head that runs on the edge: fc, and the norms before it."""
    try:
        from starsd.server.eagle_heads import load_head
        from starsd.server.projector import save_projector
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "server") from error
    size = save_projector(load_head(head, target), out, dtype)
    if as_json:
        console.emit({"file": str(out), "bytes": size, "dtype": dtype})
    else:
        print(f"{out}: {size:,} bytes, {dtype}")


def _show(number: int, tree: Draft, as_json: bool) -> None:
    if as_json:
        lists = {"tokens": tree.tokens.tolist(), "parents": tree.parents.tolist(), "scores": tree.scores.tolist()}
        console.emit({"round": number, **lists})
        return
    print(f"round {number}")
    for node, (token, parent, score) in enumerate(zip(tree.tokens, tree.parents, tree.scores, strict=True)):
        print(f"{node:5} token {token:7} parent {parent:4} score {score:9.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    return console.run(app, argv, "starsd-server", "server")


if __name__ == "__main__":
    sys.exit(main())

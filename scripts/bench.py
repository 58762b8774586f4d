"""`starsd bench …`: measurements, one JSON object a line with `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from starsd.scripts import (
    bench_acceptance,
    bench_drafter,
    bench_engine,
    bench_link,
    bench_record,
    bench_star,
    bench_wire,
)
from starsd.scripts.bench_options import counts
from starsd.shared.config import DEFAULT_MODEL, PRECISIONS
from starsd.shared.console import emit
from starsd.shared.errors import MissingExtraError, UsageError

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")]
_DRAFTER = bench_drafter.DrafterBench()
bench_app.command("acceptance")(bench_acceptance.command)
bench_app.command("link")(bench_link.command)
bench_app.command("record")(bench_record.command)
bench_app.command("star")(bench_star.command)
bench_app.command("wire")(bench_wire.command)


@bench_app.callback()
def _bench() -> None:
    """Measure this machine."""


@bench_app.command()
def engine(
    *,
    model: Annotated[str, typer.Option(help="A model reference or a bundle folder.")] = DEFAULT_MODEL,
    precision: Annotated[str | None, typer.Option(help=", ".join(PRECISIONS))] = None,
    rows: Annotated[str, typer.Option(help="Row counts of the passes, by commas.")] = "1,4,8,16,32",
    threads: Annotated[int, typer.Option(help="0: one per physical core.")] = 0,
    peers: Annotated[bool, typer.Option(help="Measure transformers and llama.cpp too, where installed.")] = True,
    as_json: Json = False,
) -> None:
    """Target passes by row count, and plain decoding beside other engines on the same weights."""
    for row in bench_engine.run(model, precision, counts("rows", rows), threads, peers=peers):
        if as_json:
            emit(row)
        else:
            print("   ".join(f"{name} {value}" for name, value in row.items() if value is not None))


@bench_app.command()
def drafter(
    *,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions, by commas.")] = ",".join(
        map(str, _DRAFTER.sessions)
    ),
    head: Annotated[
        str | None, typer.Option(help="Folder or hf:org/name of a head, or random; the packaged one.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Folder or reference of the head's target.")] = None,
    total: Annotated[int, typer.Option(help="Nodes of a tree, root included.")] = _DRAFTER.total,
    depth: Annotated[int, typer.Option(help="Levels that are expanded.")] = _DRAFTER.depth,
    top_k: Annotated[int, typer.Option(help="Nodes expanded a level, and children of each.")] = _DRAFTER.top_k,
    context: Annotated[int, typer.Option(help="Rows that every session starts with.")] = _DRAFTER.context,
    seconds: Annotated[float, typer.Option(help="To measure each number of sessions for.")] = _DRAFTER.seconds,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or int8 products (cpu).")] = _DRAFTER.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = _DRAFTER.device,
    threads: Annotated[int, typer.Option(help="CPU threads, 0 for one or all, as is faster.")] = _DRAFTER.threads,
    as_json: Json = False,
) -> None:
    """Trees a second of one drafter: the paper's one task at a time (fifo) against batched passes."""
    if head != bench_drafter.RANDOM and (head is None) != (target is None):
        raise UsageError("head and target go together, got only one of them")
    bench = bench_drafter.DrafterBench(
        sessions=counts("sessions", sessions),
        total=total,
        depth=depth,
        top_k=top_k,
        context=context,
        seconds=seconds,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    try:
        layer = bench_drafter.open_layer(bench, head, target)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "server") from error
    for row in bench_drafter.run(bench, layer):
        if as_json:
            emit(row)
        else:
            name, rate, middle = row["schedule"], row["trees_per_s"], row["tree_ms_p50"]
            print(f"{row['sessions']:3} sessions {name:8} {rate:8.1f} trees/s {middle:8.2f} ms a tree, {row['dtype']}")

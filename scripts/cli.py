"""The `starsd` command: models here; benchmarks, planning and the doctor join as sub-commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from starsd.scripts.bench import bench_app
from starsd.scripts.demo import demo
from starsd.scripts.doctor import doctor
from starsd.scripts.link_command import link_emulator
from starsd.scripts.plan import command as plan
from starsd.shared.config import DEFAULT_MODEL
from starsd.shared.console import StderrProgress, emit, run

app = typer.Typer(
    help="One drafter in the cloud, many models on devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="What is stored on this machine.", no_args_is_help=True)
app.add_typer(models, name="models")
app.add_typer(bench_app, name="bench")
app.command()(demo)
app.command()(doctor)
app.command("link-emulator")(link_emulator)
app.command("plan")(plan)

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")]


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="smollm2-135m, hf:org/name, a folder or a GGUF file.")] = DEFAULT_MODEL,
    as_json: Json = False,
) -> None:
    """Bring a model to this machine and print its folder."""
    from starsd.export.pull import pull as bring

    folder = bring(model, StderrProgress())
    if as_json:
        emit({"model": model, "folder": str(folder)})
    else:
        typer.echo(folder)


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """List models and what was exported from them, with sizes."""
    from starsd.export import store
    from starsd.export.staging import size_text

    rows = store.stored()
    for row in rows:
        if as_json:
            emit(row)
            continue
        typer.echo(f"{row.name:32} {size_text(row.bytes):>10}")
        parts = [("model", row.model_bytes), ("partial download", row.partial_bytes)]
        for name, size in [*parts, *((bundle.name, bundle.bytes) for bundle in row.bundles)]:
            if size:
                typer.echo(f"  {name:30} {size_text(size):>10}")
    if not as_json:
        limit = store.quota()
        allowed = f" of {size_text(limit)}" if limit is not None else ""
        typer.echo(f"{'total':32} {size_text(sum(row.bytes for row in rows)):>10}{allowed}")


@models.command("rm")
def remove_models(
    names: Annotated[list[str], typer.Argument(help="Names as starsd models list shows them, or MODEL/BUNDLE.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models with their bundles, or single bundles."""
    from starsd.export import store
    from starsd.export.staging import size_text

    for name in names:
        size = store.find(name)
        if yes or typer.confirm(f"remove {name} ({size_text(size)})?", err=True):
            typer.echo(f"removed {name}, {size_text(store.remove(name))} freed")


def main(argv: Sequence[str] | None = None) -> int:
    return run(app, argv, "starsd", "export")


if __name__ == "__main__":
    raise SystemExit(main())

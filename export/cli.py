"""The `starsd-export` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from starsd.export.train_recipe import DTYPES, RECIPE, SOURCES, Recipe, Sources
from starsd.shared.config import DEFAULT_MODEL, DEFAULT_PRECISION, FLAVOURS, PRECISIONS, Engine
from starsd.shared.console import StderrProgress, emit, run
from starsd.shared.errors import MissingExtraError, UsageError

app = typer.Typer(
    help="Turn published weights into target bundles, and train drafters for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def onnx(
    model: Annotated[str, typer.Argument(help="smollm2-135m, hf:org/name, a folder or a GGUF.")] = DEFAULT_MODEL,
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = DEFAULT_PRECISION,
    flavour: Annotated[str, typer.Option(help=", ".join(FLAVOURS))] = FLAVOURS[0],
    taps: Annotated[str | None, typer.Option(help="Layers whose inputs are features; default: EAGLE-3's.")] = None,
    last_hidden: Annotated[bool, typer.Option(help="Hand out the last normed state too (EAGLE-1).")] = False,
    context: Annotated[int, typer.Option(help="Most tokens the bundle can hold; 0: the model's own.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where the bundle goes; default: the store.")] = None,
    check: Annotated[bool, typer.Option(help="Measure agreement with fp32.")] = True,
    calibration: Annotated[Path | None, typer.Option(help="Chats (.npz) to round int8 and int4 weights by.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Export a target bundle for ONNX Runtime."""
    from starsd.export.bundle import Options, export_onnx

    options = Options(
        precision=precision,
        flavour=flavour,
        taps=_layers(taps),
        last_hidden=last_hidden,
        context=context,
        check=check,
        calibration=calibration,
    )
    report = export_onnx(model, options, out, StderrProgress())
    if as_json:
        emit(report)
        return
    typer.echo(report.bundle)
    print(
        f"{report.bytes / 1e6:.0f} MB in {report.seconds:.1f} s, peak memory {report.peak_memory_mb:.0f} MB",
        file=sys.stderr,
    )
    if report.quality:
        print(
            f"against fp32 over {report.quality.tokens} tokens: {100 * report.quality.top1:.1f} % of argmaxes equal, "
            f"KL {report.quality.kl:.4f}",
            file=sys.stderr,
        )


@app.command()
def tensorrt(
    bundle: Annotated[str, typer.Argument(help="A bundle's folder, or its name: model/flavour-precision.")],
    context: Annotated[int, typer.Option(help="Most tokens of a conversation; 0: the model's own, or 4096.")] = 0,
    chunk: Annotated[int, typer.Option(help="Most tokens of a pass over a prompt.")] = Engine().prefill_chunk,
    rebuild: Annotated[bool, typer.Option(help="Build though the engine that is there fits.")] = False,
    force: Annotated[bool, typer.Option(help="Build though memory seems not to suffice.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Build a bundle's TensorRT engine on the device that will run it."""
    from starsd.export.tensorrt_engine import Options, export_tensorrt

    options = Options(context=context, chunk=chunk, rebuild=rebuild, force=force)
    report = export_tensorrt(bundle, options, StderrProgress(), lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        emit(report)
        return
    typer.echo(report.engine)
    print(
        f"{report.bytes / 1e6:.0f} MB for {report.gpu} and TensorRT {report.tensorrt}, "
        + (f"built in {report.seconds:.1f} s" if report.built else "fits as it is"),
        file=sys.stderr,
    )


@app.command("train-drafter")
def train_drafter(
    *,
    target: Annotated[str, typer.Option(help="smollm2-135m, hf:org/name, a folder or a GGUF.")] = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="Where the head goes; a run that was stopped goes on from there.")],
    data: Annotated[
        Path | None, typer.Option(help="Chats: an .npz or a folder of them; default: it writes some.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of chats; 0: all of --data, or a million to write.")] = SOURCES.tokens,
    prompts: Annotated[
        Path | None, typer.Option(help="User turns to answer, JSON lines; default: it asks too.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A head of this target to go on from.")] = SOURCES.start,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = SOURCES.device,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = RECIPE.dtype,
    minutes: Annotated[float, typer.Option(help="For everything; the schedule is fitted to it.")] = RECIPE.minutes,
    epochs: Annotated[int, typer.Option(help="0: as many as --minutes allow, or 6.")] = RECIPE.epochs,
    steps_ahead: Annotated[int, typer.Option(help="Depth of the training-time test.")] = RECIPE.steps_ahead,
    later_share: Annotated[float, typer.Option(help="Of the rows behind depth 0 to train.")] = RECIPE.later_share,
    draft_vocab: Annotated[int, typer.Option(help="Most frequent tokens that can be drafted.")] = RECIPE.draft_vocab,
    user_weight: Annotated[float, typer.Option(help="Of predicting users' words; answers: 1.")] = RECIPE.user_weight,
    learning_rate: Annotated[float, typer.Option(help="The largest of the schedule.")] = RECIPE.learning_rate,
    batch_tokens: Annotated[int, typer.Option(help="Of an optimiser step; 0: by device.")] = RECIPE.batch_tokens,
    held_out: Annotated[int, typer.Option(help="Chats kept from training.")] = RECIPE.held_out,
    seed: Annotated[int, typer.Option(help="Of the order of chats and what is written.")] = RECIPE.seed,
    cache_gb: Annotated[float, typer.Option(help="Most disk for what the target said.")] = SOURCES.cache_gb,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """Train an EAGLE-3 head for a target on chats that the target writes itself."""
    recipe = Recipe(
        draft_vocab=draft_vocab,
        steps_ahead=steps_ahead,
        later_share=later_share,
        user_weight=user_weight,
        epochs=epochs,
        minutes=minutes,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        held_out=held_out,
        seed=seed,
        dtype=dtype,
    )
    sources = Sources(data=data, prompts=prompts, start=start, tokens=tokens, device=device, cache_gb=cache_gb)
    if data is not None and prompts is not None:
        raise UsageError("got --data and --prompts, expected one of them")
    try:
        from starsd.export.train_drafter import train_drafter as train
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "server") from error

    result = train(target, out, recipe, sources, emit if as_json else _tell, StderrProgress())
    if as_json:
        emit(result)
        return
    typer.echo(result.head)
    print(f"{result.bytes / 1e6:.1f} MB, {result.tau:.2f} tokens a step (chain, held out)", file=sys.stderr)


@app.command()
def phrases(
    *,
    target: Annotated[str, typer.Option(help="smollm2-135m, hf:org/name, a folder or a GGUF.")] = DEFAULT_MODEL,
    data: Annotated[Path, typer.Option(help="Chats that it wrote: an .npz or a folder of them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("phrases.npz"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Count what often follows what in a target's own chats: drafts that a device has at hand without any server."""
    from starsd.export.checkpoint import Checkpoint
    from starsd.export.phrases import count_phrases, write_phrases
    from starsd.export.pull import pull
    from starsd.export.train_data import read_chats

    vocab = Checkpoint(pull(target, StderrProgress())).shape.vocab
    chats = read_chats(data, vocab)
    arrays = count_phrases(chats, vocab)
    contexts = len(arrays["singles_keys"]) + len(arrays["pairs_keys"])
    size = write_phrases(out, arrays)
    if as_json:
        emit({"file": str(out), "bytes": size, "contexts": contexts, "tokens": len(chats.tokens)})
        return
    typer.echo(str(out))
    print(f"{contexts:,} contexts of {len(chats.tokens):,} tokens, {size / 1e6:.1f} MB", file=sys.stderr)


def _tell(row: dict[str, Any]) -> None:
    """A row of training as a line on stderr."""
    values = (f"{name} {value}" for name, value in row.items() if name != "event")
    print(f"{row['event']}: {', '.join(values)}", file=sys.stderr)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"taps are {text!r}, expected layer numbers like 2,15,27") from None


def main(argv: Sequence[str] | None = None) -> int:
    return run(app, argv, "starsd-export", "export")


if __name__ == "__main__":
    sys.exit(main())

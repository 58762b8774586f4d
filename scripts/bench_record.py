"""`starsd bench record`: greedy answers of the real engine, kept for replay targets.

Recordings that benches make for themselves lie in `$STARSD_HOME/recordings`, named after what they depend on.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from starsd.edge.bundle import ensure_bundle
from starsd.edge.recordings import Header, Recording, record_run, write_recordings
from starsd.edge.session import fit
from starsd.edge.target import open_target
from starsd.export.staging import storage_errors
from starsd.scripts.long_prompts import Conversations
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_MODEL, PRECISIONS, Engine, Limits
from starsd.shared.console import Progress, StderrProgress, emit
from starsd.shared.errors import ContextOverflowError, UsageError
from starsd.shared.home import home
from starsd.shared.prompts import read_prompts

FOLDER = "recordings"
LIMITS = Limits()


def ensure_recording(
    model: str, precision: str | None, prompts: Path, max_new_tokens: int, progress: Progress, threads: int = 0
) -> Path:
    """The recording of these prompts by this bundle, made when it is not there yet.

    Its name holds a hash of the bundle's manifest and of the file of prompts: another engine or another prompt is
    another recording.
    """
    bundle = ensure_bundle(model, precision)
    found = manifest.read(bundle)
    read_prompts(prompts)  # its errors say more than those of a file that cannot be read
    digest = hashlib.sha256()
    for path in (bundle / manifest.FILE_NAME, prompts):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    file = home() / FOLDER / f"{found.name}-{found.precision}-{max_new_tokens}-{digest.hexdigest()[:12]}.npz"
    if not file.is_file():
        record(bundle, prompts, max_new_tokens, file, progress, threads)
    return file


def record(
    bundle: Path,
    prompts: Path,
    max_new_tokens: int,
    out: Path,
    progress: Progress,
    threads: int = 0,
    chats: Path | None = None,
    context: int = 0,
) -> list[Recording]:
    """Answer the first turn of every prompt, plainly and greedily, into `out`, which appears whole or not at all.

    With `chats` a prompt is the last turn of a conversation of nearly `context` tokens. Raises UsageError for prompts
    that cannot be read, ContextOverflowError for those that do not fit, and StorageError.
    """
    from starsd.edge.text import Text

    asked = read_prompts(prompts)
    found, text = manifest.read(bundle), Text.open(bundle)
    limits = Limits(max_new_tokens=max_new_tokens)
    target = open_target("onnx", bundle, Engine(threads=threads))
    earlier = None if chats is None else Conversations(text, chats, found.shape.vocab)
    runs = []
    for done, prompt in enumerate(asked):
        progress("recording", done, len(asked))
        said = prompt.turns[0]
        try:
            if earlier is None:
                ids = text.encode_chat([{"role": "user", "content": said}])
            else:
                ids = earlier.ending_with(said, context, seed=done)
            ids = fit(ids, limits, target.context)
        except ContextOverflowError as error:
            raise ContextOverflowError(f"prompt {prompt.id}: {error}") from error
        room = target.context - len(ids) + 1  # as `Session.generate` has it
        runs.append(record_run(target, prompt.id, ids, sorted(text.eos), min(max_new_tokens, room)))
    progress("recording", len(asked), len(asked))
    header = Header(
        model=found.name,
        fingerprint=found.fingerprint,
        precision=found.precision,
        shape=found.shape,
        features=found.features,
        eos=tuple(sorted(text.eos)),
        runs=(),
    )
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            write_recordings(partial, header, runs)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    return runs


def command(
    *,
    model: Annotated[str, typer.Option(help="A model reference or a bundle folder.")] = DEFAULT_MODEL,
    precision: Annotated[str | None, typer.Option(help=", ".join(PRECISIONS))] = None,
    prompts: Annotated[Path, typer.Option(help='Lines {"id", "turns"} (the first counts) or {"id", "prompt"}.')],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = LIMITS.max_new_tokens,
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    threads: Annotated[int, typer.Option(help="0: one for each physical core.")] = 0,
    chats: Annotated[Path | None, typer.Option(help="An .npz of chats to be the turns before each prompt.")] = None,
    context: Annotated[int, typer.Option(help="Tokens that a prompt shall have with --chats.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """Record greedy answers of the real engine for replay targets."""
    started = time.perf_counter()
    if (chats is None) != (context == 0) or context < 0:
        raise UsageError(f"chats are {chats} and context is {context}, expected both or neither")
    bundle = ensure_bundle(model, precision)
    runs = record(bundle, prompts, max_new_tokens, out, StderrProgress(), threads, chats, context)
    row = {
        "file": str(out),
        "prompts": len(runs),
        "new_tokens": sum(len(run.tokens) - run.prompt for run in runs),
        "ended": sum(run.ended for run in runs),
        "bytes": out.stat().st_size,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if as_json:
        emit(row)
    else:
        print("   ".join(f"{name} {value}" for name, value in row.items()))

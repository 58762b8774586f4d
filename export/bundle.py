"""From a model reference to a published bundle: graph, weights, tokenizer, manifest; whole or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from starsd.export import check
from starsd.export.calibrate import calibrate
from starsd.export.chat import ask, end_tokens
from starsd.export.checkpoint import Checkpoint
from starsd.export.graph import GraphWriter
from starsd.export.graph_decoder import build
from starsd.export.hf_folder import chat_template
from starsd.export.pull import pull
from starsd.export.recipe import check_offered, make
from starsd.export.staging import staged
from starsd.export.store import require_quota
from starsd.export.tokenizer_model import load_tokenizer
from starsd.export.train_data import read_chats
from starsd.shared import manifest
from starsd.shared.config import FLAVOURS, PRECISIONS
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.fingerprint import target_fingerprint
from starsd.shared.home import parse_ref
from starsd.shared.manifest import FeatureSpec, Manifest, Quality

_COPIED = ("config.json", "generation_config.json", "tokenizer_config.json")
# rough and of the largest flavour, for the space that is asked for
_BYTES_PER_WEIGHT = {"fp32": 4.3, "fp16": 2.3, "int8": 1.5, "int4": 1.25}
MIN_CONTEXT = 16  # an engine measures its noise with a pass of 8 rows behind 8
MIN_TAPPED_LAYERS = 7  # with fewer, EAGLE-3's three taps coincide


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to export; `taps` None means EAGLE-3's three, `context` 0 the model's own; `calibration`: chats that weights
    are rounded by, else each is rounded by itself."""

    precision: str
    flavour: str = "ort"
    taps: tuple[int, ...] | None = None
    last_hidden: bool = False
    context: int = 0
    check: bool = True
    calibration: Path | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an export made and took."""

    bundle: str
    precision: str
    bytes: int
    seconds: float
    peak_memory_mb: float
    quality: Quality | None


def export_onnx(ref: str, options: Options, out: Path | None = None, progress: Progress = no_progress) -> Report:
    """Write the bundle of `ref` (pulled first where missing) to `out`, or to its place in the store.

    Raises UsageError for options out of range, UnsupportedModelError for a family that is refused, ModelError for
    weights that do not fit their config, StorageError when disk or quota do not suffice.
    """
    _check_choice("precision", options.precision, PRECISIONS)
    _check_choice("flavour", options.flavour, FLAVOURS)
    check_offered(options.flavour, options.precision)
    started = time.monotonic()
    if out is not None:
        _check_replaceable(out)
    source = pull(ref, progress)
    checkpoint, tokenizer = Checkpoint(source), load_tokenizer(source)
    features = _features(checkpoint, options)
    context = _context(checkpoint, options)
    questions, why_plain = ask(source, tokenizer, check.PROMPTS, context // 2)
    _require_rows(source, tokenizer, questions, checkpoint.shape.vocab)
    final = out or parse_ref(ref).bundle(options.flavour, options.precision)
    needed = int(checkpoint.weights * _BYTES_PER_WEIGHT[options.precision])
    if out is None:
        require_quota(needed, replacing=final)
    if options.calibration is not None and (options.flavour != "ort" or options.precision not in ("int8", "int4")):
        got = f"{options.flavour} {options.precision}"
        raise UsageError(f"calibration is of no use to {got}, expected flavour ort and precision int8 or int4")
    compared = options.check and options.precision != "fp32"
    beside = int(checkpoint.weights * _BYTES_PER_WEIGHT["fp32"]) if compared or options.calibration else 0
    with staged(final, bytes_needed=needed + beside) as folder:
        _write_graph(
            folder, source, (options.flavour, options.precision), features, context, progress, options.calibration
        )
        _write_text_files(source, folder, tokenizer)
        eos = end_tokens(source)
        quality = None
        if compared:
            if why_plain:
                print(f"measured without a chat template: {why_plain}", file=sys.stderr, flush=True)
            quality = _quality(folder, options.flavour, checkpoint, questions, context, eos, progress)
        made = Manifest(
            name=parse_ref(ref).slug,
            source=ref,
            fingerprint=target_fingerprint(source, features, folder / manifest.TOKENIZER_FILE),
            architecture=str(checkpoint.config["model_type"]),
            flavour=options.flavour,
            precision=options.precision,
            shape=checkpoint.architecture.within(context).shape,
            features=features,
            eos=eos,
            files={path.name: manifest.entry(path) for path in sorted(folder.iterdir())},
            quality=quality,
            made_by={name: version(name) for name in ("starsd", "onnx", "numpy")},
        )
        manifest.write(made, folder)
    return Report(
        bundle=str(final),
        precision=options.precision,
        bytes=sum(file.bytes for file in made.files.values()),
        seconds=round(time.monotonic() - started, 1),
        peak_memory_mb=round(peak_memory() / 1e6, 1),
        quality=quality,
    )


def _check_replaceable(folder: Path) -> None:
    """Only a bundle may be replaced: what else lies there is somebody's, a file named manifest.json or not."""
    if os.path.isdir(folder):  # unlike Path's own, no names are too long for it: `staged` tells of those
        if any(folder.iterdir()) and not _is_bundle(folder):
            raise UsageError(f"{folder} is neither empty nor a bundle, expected a folder that may be replaced")
        return
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there):
        raise UsageError(f"{there} is no folder, expected one that may be made or replaced")


class _Marks(msgspec.Struct):
    """What every format of a manifest has and hardly another file of that name."""

    format: int
    fingerprint: str
    flavour: str
    precision: str
    files: dict[str, manifest.FileEntry]


def _is_bundle(folder: Path) -> bool:
    """Whether a manifest says so, of this version of starsd or another."""
    try:
        return manifest.GRAPH_FILE in msgspec.json.decode((folder / manifest.FILE_NAME).read_bytes(), type=_Marks).files
    except (OSError, msgspec.ValidationError, msgspec.DecodeError, RecursionError):
        return False


def _require_rows(source: Path, tokenizer: Any, questions: Sequence[Sequence[int]], rows: int) -> None:
    """Raise ModelError when the vocabulary or a question has ids beyond the model's rows. Added tokens that no question
    holds may have such: padding, say, which is never read."""
    tokens = max(tokenizer.get_vocab_size(with_added_tokens=False), 1 + max(map(max, questions)))
    if tokens > rows:
        raise ModelError(f"tokenizer of {source} has {tokens} tokens, the model has rows for {rows}")


def peak_memory() -> int:
    """Bytes that this process has had in memory at most. Mapped weights count while they are read."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss would count what the parent had when it forked
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _check_choice(what: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise UsageError(f"{what} is {got!r}, expected one of {', '.join(choices)}")


def _write_graph(
    folder: Path,
    source: Path,
    form: tuple[str, str],
    features: FeatureSpec,
    context: int,
    progress: Progress,
    calibration: Path | None = None,
) -> None:
    """The graph of `form`, flavour and precision. Weights stay mapped only while this runs."""
    checkpoint, recipe = make(source, *form)
    if calibration is not None:
        chats = read_chats(calibration, checkpoint.shape.vocab)
        checkpoint.curvatures = calibrate(checkpoint, chats, folder, progress)
    # values beyond what a precision holds are found as they are written, and told as an error
    with np.errstate(all="ignore"), GraphWriter(folder, recipe.flavour.opsets, recipe.flavour.ir_version) as graph:
        build(graph, checkpoint, recipe, features, context, progress)
        graph.save(checkpoint.folder.name)


def _features(checkpoint: Checkpoint, options: Options) -> FeatureSpec:
    layers, taps = checkpoint.shape.layers, options.taps
    if taps is None:
        taps = (2, layers // 2, layers - 3) if layers >= MIN_TAPPED_LAYERS else ()
    if any(not 0 <= tap < layers for tap in taps) or list(taps) != sorted(set(taps)):
        raise UsageError(f"taps are {list(taps)}, expected ascending layers from 0 to {layers - 1}")
    return FeatureSpec(taps, options.last_hidden, checkpoint.shape.hidden)


def _context(checkpoint: Checkpoint, options: Options) -> int:
    most = checkpoint.shape.context
    context = options.context or most
    if not MIN_CONTEXT <= context <= most:
        raise UsageError(f"context is {context}, expected {MIN_CONTEXT} to {most} tokens, or 0 for all")
    return context


def _write_text_files(source: Path, folder: Path, tokenizer: Any) -> None:
    """Tokenizer, chat template and configs, so that the bundle needs nothing else to talk."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if template := chat_template(source):
        (folder / "chat_template.jinja").write_text(template)


def _quality(
    folder: Path,
    flavour: str,
    checkpoint: Checkpoint,
    questions: Sequence[Sequence[int]],
    context: int,
    eos: tuple[int, ...],
    progress: Progress,
) -> Quality:
    """Compare with an fp32 graph of the same weights, made beside and thrown away."""
    capacity = min(max(map(len, questions)) + check.ANSWER_TOKENS, context)
    with TemporaryDirectory(dir=folder) as place:
        shape = checkpoint.shape
        form, features = (flavour, "fp32"), FeatureSpec((), False, shape.hidden)
        _write_graph(Path(place), checkpoint.folder, form, features, context, no_progress)
        reference = check.Runner(Path(place), shape, capacity, flavour=flavour, mapped=True)
        answers = check.write_answers(reference, questions, eos, progress)
        del reference
        return check.compare(answers, check.Runner(folder, shape, capacity, flavour=flavour))

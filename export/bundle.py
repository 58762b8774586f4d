"""From a model reference to a published bundle: graph, weights, tokenizer, manifest; whole or not at all."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from starsd.export import check
from starsd.export.calibrate import calibrate
from starsd.export.chat import ChatRenderer, end_tokens
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
from starsd.shared.errors import UsageError
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
    checkpoint = Checkpoint(source)
    features = _features(checkpoint, options)
    context = _context(checkpoint, options)
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
        _write_text_files(source, folder)
        eos = end_tokens(source)
        quality = _quality(folder, options.flavour, source, checkpoint, context, eos, progress) if compared else None
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
    """Only a bundle may be replaced: what else lies there is somebody's."""
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / manifest.FILE_NAME).is_file():
            raise UsageError(f"{folder} is neither empty nor a bundle, expected a folder that may be replaced")
    elif folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} is no folder, expected one that may be made or replaced")


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
    with GraphWriter(folder, recipe.flavour.opsets, recipe.flavour.ir_version) as graph:
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


def _write_text_files(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and configs, so that the bundle needs nothing else to talk."""
    load_tokenizer(source).save(str(folder / "tokenizer.json"))
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if template := chat_template(source):
        (folder / "chat_template.jinja").write_text(template)


def _quality(
    folder: Path,
    flavour: str,
    source: Path,
    checkpoint: Checkpoint,
    context: int,
    eos: tuple[int, ...],
    progress: Progress,
) -> Quality:
    """Compare with an fp32 graph of the same weights, made beside and thrown away."""
    tokenizer = load_tokenizer(source)
    renderer = ChatRenderer.find(source)
    asked = [renderer.render([{"role": "user", "content": text}]) if renderer else text for text in check.PROMPTS]
    prompts = [tokenizer.encode(text, add_special_tokens=renderer is None).ids[: context // 2] for text in asked]
    capacity = min(max(map(len, prompts)) + check.ANSWER_TOKENS, context)
    with TemporaryDirectory(dir=folder) as place:
        shape = checkpoint.shape
        _write_graph(Path(place), source, (flavour, "fp32"), FeatureSpec((), False, shape.hidden), context, no_progress)
        reference = check.Runner(Path(place), shape, capacity, flavour=flavour, mapped=True)
        answers = check.write_answers(reference, prompts, eos, progress)
        del reference
        return check.compare(answers, check.Runner(folder, shape, capacity, flavour=flavour))

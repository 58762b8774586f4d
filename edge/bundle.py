"""From a model reference to a bundle on disk; a missing or outdated one is exported first, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION, FLAVOURS, PRECISIONS
from starsd.shared.errors import BundleError, MissingExtraError, ModelError, OutdatedBundleError, UsageError
from starsd.shared.home import parse_ref

FLAVOUR = "ort"
STDERR = 2
_BUNDLE_NAME = re.compile(rf"(.+)/({'|'.join(FLAVOURS)})-({'|'.join(PRECISIONS)})")
_MODEL_FILES = (  # what an export reads
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "source.gguf",
    "tokenizer*.json",
    "tokenizer.model",
    "added_tokens.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
EXPORT_MODULES = ("onnx", "safetensors", "gguf")  # what the export extra brings


def ensure_bundle(model: str, precision: str | None = None) -> Path:
    """The folder of a complete bundle of `model`: a reference, or already such a folder or its name in the store.

    A folder's bundle is made again when a file of the model is newer, as is one of another version of starsd.
    Without `precision`: the default, or whatever a folder holds. What is exported is of flavour `ort`; bundles of the
    others are named: model/flavour-precision. Raises UsageError for an unknown model or precision,
    BundleError when the bundle is damaged or of another precision, ModelError when the export failed, and
    MissingExtraError when this machine cannot export.
    """
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if (given := manifest.find(model)) is not None:
        found = manifest.read(given).precision
        if precision not in (None, found):
            raise BundleError(f"{given} is a bundle in {found}, expected {precision}")
        return given
    if Path(model).expanduser().is_dir():
        _must_be_a_model(Path(model).expanduser())
    elif named := _BUNDLE_NAME.fullmatch(model):
        name, flavour, of = named.groups()
        export = f"starsd-export onnx {name} --flavour {flavour} --precision {of}"
        raise UsageError(f"bundle {model} is not here, expected a name that starsd models list shows: run {export}")
    wanted = precision or DEFAULT_PRECISION
    ref = parse_ref(model)
    folder = ref.bundle(FLAVOUR, wanted)
    if not (folder / manifest.FILE_NAME).is_file():
        _export(model, wanted, "has no bundle here")
    elif ref.is_local and (newer := _newer(ref.folder, folder)) is not None:
        print(
            f"{newer} is newer than its bundle: export the model again, which begins now", file=sys.stderr, flush=True
        )
        _export(model, wanted, f"has only a bundle here that is older than its {newer.name}")
    try:
        manifest.read(folder)
    except OutdatedBundleError as error:
        print(f"{error}, which begins now", file=sys.stderr, flush=True)
        _export(model, wanted, "has only a bundle of another version of starsd here")
        manifest.read(folder)
    return folder


def _newer(model: Path, bundle: Path) -> Path | None:
    """A file of a model's folder that was changed after the bundle was made; None where there is none."""
    made = _changed(bundle / manifest.FILE_NAME)
    files = (file for pattern in _MODEL_FILES for file in sorted(model.glob(pattern)))
    return next((file for file in files if _changed(file) > made), None)


def _changed(path: Path) -> int:
    """When a file's content, name or place changed last, in ns; the place of a link counts as well.

    A copy may keep the time of its content (mtime), not the time it was made (ctime). Times to come are those of a
    clock that was wrong: they would be newer than every bundle.
    """
    now = time.time_ns()
    try:
        looks = (path.lstat(), path.stat())
    except FileNotFoundError:  # gone since, or a link to nothing
        return 0
    return max((t for look in looks for t in (look.st_mtime_ns, look.st_ctime_ns) if t <= now), default=0)


def _must_be_a_model(folder: Path) -> None:
    """Tell a folder that cannot be exported from one that can, before a child process fails at it."""
    if (folder / manifest.GRAPH_FILE).is_file():
        raise BundleError(
            f"{folder} has {manifest.GRAPH_FILE} and no {manifest.FILE_NAME}, expected the whole folder of a bundle"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has neither {manifest.FILE_NAME} nor config.json, expected a bundle or a model")


def _export(model: str, precision: str, why: str) -> None:
    for module in EXPORT_MODULES:
        if find_spec(module) is None:
            raise CannotExportError(module, model, precision, why)
    argv = [sys.executable, "-m", "starsd.export.cli", "onnx", model, "--precision", precision]
    last = ""
    with subprocess.Popen(argv, stdout=STDERR, stderr=subprocess.PIPE, text=True, errors="replace") as child:
        assert child.stderr is not None
        for line in child.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
    if child.returncode:
        reason = last.removeprefix("starsd-export: ") or f"exit status {child.returncode}"
        raise ModelError(f"{model} could not be exported as {precision}: {reason}")


class CannotExportError(MissingExtraError):
    """Exporting is for larger machines; the message says how a bundle gets here from one."""

    def __init__(self, module: str, model: str, precision: str, why: str) -> None:
        super().__init__(module, "export")
        elsewhere = f"run starsd-export onnx {model} --precision {precision} on another machine and give its folder"
        self.args = (f"{model} {why} and {self.args[0]}, or {elsewhere} as --model",)

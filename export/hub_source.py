"""Models out of the Hugging Face hub: what a repository holds that we need, and bringing it with progress."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starsd.export.staging import require_space, storage_errors
from starsd.shared.console import Progress
from starsd.shared.errors import DownloadError, MissingExtraError, StorageError, UnsupportedModelError

_POLL_SECONDS = 0.5
_WANTED_ENDS = (".safetensors", ".json", ".jinja")
_WANTED = ("tokenizer.model",)
_DUPLICATES = "consolidated"  # the same weights in another naming


@dataclass(frozen=True)
class Repository:
    """A repository at one revision, and the files of it that are wanted, with their sizes."""

    name: str
    revision: str
    files: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())


def inspect(name: str) -> Repository:
    """Look a repository up. Raises DownloadError when it cannot be reached, is not there or is gated, and
    UnsupportedModelError when it holds no safetensors."""
    with _hub_errors(name):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, files_metadata=True)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    wanted = {file: size for file, size in sizes.items() if _is_wanted(file)}
    if not any(file.endswith(".safetensors") for file in wanted):
        others = sorted(file for file in sizes if file.endswith((".bin", ".pt", ".pth", ".gguf", ".h5")))
        held = ", ".join(others[:3]) or "no weights"
        raise UnsupportedModelError(f"{name} holds {held}, expected safetensors")
    if "config.json" not in wanted:
        raise UnsupportedModelError(f"{name} has no config.json, expected a model in Hugging Face layout")
    return Repository(name, info.sha or "main", wanted)


def _is_wanted(file: str) -> bool:
    if "/" in file or file.startswith(_DUPLICATES):
        return False
    return file in _WANTED or file.endswith(_WANTED_ENDS)


def fetch(repository: Repository, folder: Path, progress: Progress) -> None:
    """Bring the files into `folder`, going on with what is there. What came stays after a failure, unless the disk is
    full. Errors as of `inspect`, and StorageError."""
    require_space(folder, repository.size - _size(folder))
    try:
        with _hub_errors(repository.name), storage_errors(folder, bytes_needed=repository.size):
            from huggingface_hub import snapshot_download
            from huggingface_hub.utils.tqdm import disable_progress_bars

            disable_progress_bars()
            with _watched(folder, repository, progress):
                snapshot_download(
                    repository.name,
                    revision=repository.revision,
                    local_dir=folder,
                    allow_patterns=list(repository.files),
                )
    except StorageError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for name, size in repository.files.items():
        path = folder / name
        got = path.stat().st_size if path.is_file() else 0
        if size and got != size:
            raise DownloadError(f"{repository.name}: {name} got {got} bytes, expected {size}; pull again to go on")


@contextlib.contextmanager
def _watched(folder: Path, repository: Repository, progress: Progress) -> Iterator[None]:
    """Report the growth of `folder` meanwhile: the library's own bars are for people only."""
    done = threading.Event()
    what = f"downloading {repository.name}"

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            progress(what, min(_size(folder), repository.size - 1), repository.size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        done.set()
        thread.join()
        progress(what, repository.size, repository.size)
    finally:
        done.set()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """The library's many errors, and those of the network library it uses, in our words."""
    try:
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "export") from error
    try:
        yield
    except StorageError:
        raise
    except GatedRepoError:
        raise DownloadError(f"{name} is gated: accept its terms on its page, then log in with hf auth login") from None
    except RepositoryNotFoundError:
        raise DownloadError(f"{name} is not there, or private: check the name, or log in with hf auth login") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise DownloadError(f"{name} cannot be downloaded: the hub answered {status}") from error
    except Exception as error:  # httpx's, requests' or the library's own, by version
        raise DownloadError(
            f"{name} cannot be downloaded: the hub cannot be reached ({type(error).__name__})"
        ) from error

"""Brings one pinned file, of known size and hash, from a URL: with progress, and resumed where it stopped."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from starsd.export.staging import size_text, storage_errors
from starsd.shared.console import Progress
from starsd.shared.errors import DownloadError, HashMismatchError, StorageError

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 60
_FRUITLESS_TRIES = 3  # in a row that brought no byte


class UnreachableError(DownloadError):
    """Nothing came at all: no connection, no trust, or the server refuses. Another route may still work."""


@dataclass(frozen=True)
class PinnedFile:
    """A file that must be exactly this one."""

    name: str
    size: int
    sha256: str


def download(
    url: str, opener: urllib.request.OpenerDirector, file: PinnedFile, partial: Path, progress: Progress
) -> None:
    """Bring `file` to `partial`, going on after the bytes that are there already, and check its hash.

    Raises UnreachableError when the first request fails, DownloadError when the transfer ends early (what came is
    kept, and the next call goes on from there), HashMismatchError when it is another file and StorageError when the
    disk is full (nothing is kept in either case).
    """
    fruitless, reached, most = 0, False, _size(partial)
    while (got := _size(partial)) < file.size:
        progress(f"downloading {file.name}", got, file.size)
        reason = "the connection ended"
        try:
            _transfer(url, opener, file, partial, progress)
            reached = True
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
            if not reached and _size(partial) == got:
                raise UnreachableError(f"{file.name} cannot be downloaded: {reason}") from None
        fruitless = 0 if _size(partial) > most else fruitless + 1
        most = max(most, _size(partial))
        if fruitless == _FRUITLESS_TRIES:
            raise DownloadError(
                f"{file.name} got {_size(partial)} bytes, expected {file.size}: {reason}; "
                "pull again to go on from there"
            )
    check(file, partial)


def check(file: PinnedFile, path: Path) -> None:
    """Raise HashMismatchError, and remove `path`, unless it is the pinned file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        size = path.stat().st_size
        path.unlink()
        raise HashMismatchError(
            f"{file.name} got SHA-256 {digest.hexdigest()} ({size} bytes), "
            f"expected {file.sha256} ({file.size} bytes): removed"
        )


def _transfer(
    url: str, opener: urllib.request.OpenerDirector, file: PinnedFile, partial: Path, progress: Progress
) -> None:
    """One request, appended to `partial`; from the start when the server does not do ranges."""
    got = _size(partial)
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if got:
        request.add_header("Range", f"bytes={got}-")
    try:
        answer = opener.open(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            partial.unlink()  # it ends where we are, so it is not the pinned file
            raise DownloadError(f"{file.name} got {got} bytes, expected {file.size}: there is no more of it") from None
        raise
    with answer:
        resumed = answer.status == http.client.PARTIAL_CONTENT and _starts_at(answer, got)
        try:
            with storage_errors(partial, bytes_needed=file.size), partial.open("ab" if resumed else "wb") as stream:
                while block := answer.read(_CHUNK):
                    stream.write(block)
                    progress(f"downloading {file.name}", min(stream.tell(), file.size), file.size)
                    if stream.tell() > file.size:
                        break  # another file: the hash says so
        except StorageError:
            partial.unlink(missing_ok=True)
            raise


def _starts_at(answer: http.client.HTTPResponse, offset: int) -> bool:
    return (answer.headers.get("Content-Range") or "").startswith(f"bytes {offset}-")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: Exception) -> str:
    """Why, in a few words and without the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, http.client.IncompleteRead):
        return f"the connection ended after {size_text(len(reason.partial))}"
    return str(reason).lower() or type(reason).__name__

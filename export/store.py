"""What lies below `$STARSD_HOME` and how large it is; removing it; and the quota on it, `$STARSD_QUOTA_GB`."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from starsd.export.staging import discarded, is_staged, size_text, storage_errors
from starsd.shared.errors import StorageError, UsageError
from starsd.shared.home import home

QUOTA_VARIABLE = "STARSD_QUOTA_GB"


class StoredBundle(msgspec.Struct, frozen=True):
    name: str
    bytes: int


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with what was made from it; `model_bytes` is 0 when only bundles or a partial download are there."""

    name: str
    bytes: int  # all of it
    model_bytes: int
    partial_bytes: int
    bundles: list[StoredBundle]


def stored() -> list[StoredModel]:
    """Everything below home, by name. Sizes are what the files occupy in bytes, not what the disk rounds them to."""
    models, partials = _sizes(home() / "models"), _sizes(home() / "partial")
    bundles = {folder.name: _sizes(folder) for folder in _entries(home() / "bundles")}
    partials = {name.removesuffix(".whl"): size for name, size in partials.items() if size}
    rows = []
    for name in sorted(models.keys() | bundles.keys() | partials.keys()):
        own = [StoredBundle(bundle, size) for bundle, size in sorted(bundles.get(name, {}).items())]
        model, partial = models.get(name, 0), partials.get(name, 0)
        total = model + partial + sum(bundle.bytes for bundle in own)
        rows.append(StoredModel(name=name, bytes=total, model_bytes=model, partial_bytes=partial, bundles=own))
    return rows


def find(name: str) -> int:
    """Bytes that `remove` would free. Raises UsageError for a name that `stored` does not give."""
    model, separator, bundle = _slug(name).partition("/")
    rows = {row.name: row for row in stored()}
    if model in rows:
        if not separator:
            return rows[model].bytes
        for own in rows[model].bundles:
            if own.name == bundle:
                return own.bytes
    raise UsageError(f"nothing is stored as {name!r}, expected one of: {', '.join(rows) or 'nothing, it is empty'}")


def remove(name: str) -> int:
    """Remove a model with its bundles and partial download, or one bundle (`model/bundle`); the bytes that frees.

    Only names that `stored` gives can be removed, so that nothing outside home can be named; else UsageError.
    """
    size = find(name)
    model, _, bundle = _slug(name).partition("/")
    bundles = home() / "bundles" / model
    if bundle:
        _remove(bundles / bundle)
        with contextlib.suppress(OSError):
            bundles.rmdir()  # when that was the last one
        return size
    for path in (home() / "models" / model, bundles, *_partials(model)):
        _remove(path)
    return size


def _slug(name: str) -> str:
    return name.removeprefix("hf:").replace("/", "--") if name.startswith("hf:") else name


def require_quota(bytes_needed: int, *, replacing: Path | None = None) -> None:
    """Raise StorageError when `bytes_needed` more would pass the quota; what is at `replacing` is not counted."""
    limit = quota()
    if limit is None:
        return
    rows = stored()
    used = sum(row.bytes for row in rows) - (_size(replacing) if replacing is not None else 0)
    if used + bytes_needed > limit:
        largest = sorted((row for row in rows if row.bytes), key=lambda row: -row.bytes)[:3]
        hints = ", ".join(f"{row.name} ({size_text(row.bytes)})" for row in largest)
        raise StorageError(
            f"{home()} would hold {size_text(used + bytes_needed)}, the quota is {size_text(limit)}: "
            + (f"starsd models rm could remove {hints}, or " if hints else "")
            + f"raise {QUOTA_VARIABLE}"
        )


def quota() -> int | None:
    """Bytes that home may hold, from `$STARSD_QUOTA_GB`; None when it is not set. Raises UsageError for no number."""
    text = os.environ.get(QUOTA_VARIABLE)
    if not text:
        return None
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not 0 < gigabytes < float("inf"):
        raise UsageError(f"{QUOTA_VARIABLE} is {text!r}, expected a positive number of gigabytes")
    return int(gigabytes * 1e9)


def _partials(model: str) -> list[Path]:
    return [home() / "partial" / name for name in (model, f"{model}.whl")]


def _remove(path: Path) -> None:
    """Out of sight first, then gone: an interrupted removal leaves no half model."""
    with storage_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(discarded(path))
        else:
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not is_staged(path) and not path.name.startswith(".")]


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: _size(path) for path in _entries(folder)}


def _size(path: Path) -> int:
    """Bytes of a file, or of the files below a folder, links apart; a file that goes away meanwhile counts nothing."""
    if not path.is_dir():
        with contextlib.suppress(OSError):
            return path.stat().st_size
        return 0
    return sum(_size(child) for child in path.iterdir() if not child.is_symlink())

"""Where the tensors of a Hugging Face folder are: files, types and shapes, without reading a value.

The layout is safetensors': eight bytes of header length, a JSON header, then the values
(https://huggingface.co/docs/safetensors). Reading headers here lets every caller refuse a wrong folder before it
loads gigabytes, and read only the tensors that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from starsd.shared.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_NAMED_IN_MESSAGES = 6


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk; `dtype` as the format spells it (F32, BF16, I64, BOOL, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its values, in bytes from the front of the file


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ModelError when it is missing or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is no model folder: config.json is missing")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's safetensors file or shards, by name. Raises ModelError when a file is not whole."""
    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        for name, entry in file_index(file).items():
            if name in entries:
                raise ModelError(f"tensor {name} is in both {entries[name].file.name} and {file.name}")
            entries[name] = entry
    return entries


def check_tensors(
    what: str, got: Mapping[str, TensorEntry | Sequence[int]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelError naming tensors that are missing, unused, or of another shape than expected."""
    problems = []
    if missing := [f"{name} {list(shape)}" for name, shape in expected.items() if name not in got]:
        problems.append(f"lacks {_some(missing)}")
    shapes = {name: tuple(e.shape if isinstance(e, TensorEntry) else e) for name, e in got.items()}
    if unused := [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in expected]:
        problems.append(f"has {_some(unused)} that nothing uses")
    problems += [
        f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ModelError(f"{what} does not fit its config: {'; '.join(problems[: _NAMED_IN_MESSAGES + 2])}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_MESSAGES])
    rest = len(names) - _NAMED_IN_MESSAGES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single]
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
        names = sorted(set(msgspec.convert(weight_map, dict[str, str]).values()))
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, expected a file beside it")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing, {INDEX_FILE} names it")
    return [folder / name for name in names]


def file_index(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, by name. Raises ModelError when the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{file} is not whole: header of {length} bytes in a file of {size}")
        raw = stream.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
        values = 8 + length
        entries = {
            name: TensorEntry(file, str(e["dtype"]), tuple(map(int, e["shape"])), values + spans[name][0])
            for name, e in header.items()
        }
        ends = [end for _, end in spans.values()]
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{file} has no safetensors header: {error}") from error
    if bad := [name for name, (start, end) in spans.items() if not 0 <= start <= end]:
        raise ModelError(f"{file} has tensor {bad[0]} at bytes {spans[bad[0]]}, expected a start before an end")
    expected = values + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file} has {size} bytes, expected {expected}")
    return entries

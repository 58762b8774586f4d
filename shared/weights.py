"""Where the tensors of a Hugging Face folder are: files, types and shapes, without reading a value.

The layout is safetensors': eight bytes of header length, a JSON header, then the values
(https://huggingface.co/docs/safetensors). Reading headers here lets every caller refuse a wrong folder before it
loads gigabytes, and read only the tensors that it needs.
"""

from __future__ import annotations

import math
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
_LONGEST_FILE_NAME = 255  # bytes, on Linux
_LONGEST_SHOWN = 80  # of a name, in a message
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # of a value, by type
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
_BITS |= dict.fromkeys(("U32", "I32", "F32"), 32) | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
_UNREADABLE = (msgspec.ValidationError, msgspec.DecodeError, RecursionError)  # of JSON nested without end the last


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
    except _UNREADABLE as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def tensor_index(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's safetensors file or shards, by name. Raises ModelError when a file is not whole."""
    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        for name, entry in file_index(file).items():
            if name in entries:
                raise ModelError(f"tensor {_shown(name)} is in both {entries[name].file.name} and {file.name}")
            entries[name] = entry
    return entries


def check_tensors(
    what: str, got: Mapping[str, TensorEntry | Sequence[int]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelError naming tensors that are missing, unused, or of another shape than expected."""
    problems = []
    if missing := [f"{_shown(name)} {list(shape)}" for name, shape in expected.items() if name not in got]:
        problems.append(f"lacks {_some(missing)}")
    shapes = {name: tuple(e.shape if isinstance(e, TensorEntry) else e) for name, e in got.items()}
    if unused := [f"{_shown(name)} {list(shape)}" for name, shape in shapes.items() if name not in expected]:
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


def _shown(name: str) -> str:
    """A name out of a file as a message may hold it."""
    return name[:_LONGEST_SHOWN] if name.isprintable() else repr(name[:_LONGEST_SHOWN])


def _files(folder: Path) -> list[Path]:
    """The single file where there is one, whatever an index beside it says: so does transformers."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
        names = sorted(set(msgspec.convert(weight_map, dict[str, str]).values()))
    except (*_UNREADABLE, KeyError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error
    for name in names:
        if Path(name).name != name or not name.isprintable() or len(name.encode()) > _LONGEST_FILE_NAME:
            raise ModelError(f"{index} names {name[:_LONGEST_SHOWN]!r}, expected a file beside it")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing, {INDEX_FILE} names it")
    return [folder / name for name in names]


class _Header(msgspec.Struct):
    """What a file's header says of a tensor; the span is in bytes behind the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def file_index(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, by name. Raises ModelError when the file is not whole, or when types,
    shapes and spans contradict each other: tensors fill the file one behind the other, and nothing else does."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{file} is not whole: header of {length} bytes in a file of {size}")
        raw = stream.read(length)
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, Any])
        headers = {name: msgspec.json.decode(part, type=_Header) for name, part in parts.items()}
    except _UNREADABLE as error:
        raise ModelError(f"{file} has no safetensors header: {error}") from error
    values = end = 8 + length
    entries: dict[str, TensorEntry] = {}
    for name, header in sorted(headers.items(), key=lambda item: item[1].data_offsets):
        _check_span(f"{file} has tensor {_shown(name)}", header, end - values)
        entries[name] = TensorEntry(file, header.dtype, tuple(header.shape), end)
        end = values + header.data_offsets[1]
    if size != end:
        raise ModelError(f"{file} has {size} bytes, expected {end}")
    return {name: entries[name] for name in headers}  # in the header's order


def _check_span(what: str, header: _Header, start: int) -> None:
    """Raise ModelError unless the tensor's span begins at `start` and holds its shape in its type. Types that are not
    known here are for their reader to refuse."""
    first, end = header.data_offsets
    if not 0 <= first <= end:
        raise ModelError(f"{what} at bytes {first, end}, expected a start before an end")
    if first != start:
        raise ModelError(f"{what} from byte {first} on, expected it from {start}, behind the one before it")
    if min(header.shape, default=0) < 0:
        raise ModelError(f"{what} of shape {header.shape}, expected no size below 0")
    bits = _BITS.get(header.dtype)
    if bits is not None and math.prod(header.shape) * bits != 8 * (end - first):
        raise ModelError(
            f"{what} of type {header.dtype} and shape {header.shape} in {end - first} bytes, "
            f"expected {math.prod(header.shape) * bits / 8:.15g}"
        )

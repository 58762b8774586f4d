"""GGUF files: as a Hugging Face folder in fp32, and as the quantised blocks they hold.

What differs is undone here: Llama's query and key rows are in another order (the halves of a head interleaved), and
Gemma's norms hold one more than the folder's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf_config import config_from, generation_config_from
from starsd.export.gguf_file import GGUFFile, TensorInfo, dequantise, open_gguf
from starsd.export.gguf_names import hf_tensors, naming, row_order
from starsd.export.gguf_tokenizer import tokenizer_from
from starsd.export.hf_folder import write_json
from starsd.export.safetensors_writer import TensorSpec, write_safetensors
from starsd.export.staging import require_space
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ModelError

BLOCK = 32  # values that share a scale in Q4_0, Q4_1 and Q8_0
BLOCK_KINDS = ("Q4_0", "Q4_1", "Q8_0")
_CONVERTED_AT_ONCE = 1 << 24  # values; bounds what a conversion holds beside the mapped file


@dataclass(frozen=True)
class Blocks:
    """A matrix as the GGUF holds it: weight[n, k] = scale[n, k // 32] * quants[n, k] (+ minimum[n, k // 32]).

    kind is Q4_1 (quants uint8, 0 to 15, with a minimum), Q4_0 (int8, -8 to 7) or Q8_0 (int8); scale and minimum are
    float32 of shape (N, K / 32), quants of shape (N, K).
    """

    kind: str
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32] | None
    quants: NDArray[np.uint8] | NDArray[np.int8]

    def dequantise(self) -> NDArray[np.float32]:
        """The weight. Shape (N, K)."""
        grouped = self.quants.reshape(*self.scale.shape, BLOCK) * self.scale[..., None]
        if self.minimum is not None:
            grouped += self.minimum[..., None]
        return grouped.reshape(self.quants.shape)


def read_blocks(path: Path) -> Mapping[str, Blocks]:
    """The block-quantised matrices of a GGUF by their Hugging Face names; each is decoded when it is asked for.

    Tensors of other types (norms, k-quants) are not in it. Errors as of `convert`.
    """
    return _BlockMap(open_gguf(path))


class _BlockMap(Mapping[str, Blocks]):
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._names = {name: info for name, info in hf_tensors(file).items() if info.kind in BLOCK_KINDS}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Blocks:
        info = self._names[name]
        order = row_order(self._file, info)
        raw = self._file.data(info) if order is None else self._file.data(info)[order]
        return _decode(info.kind, raw.reshape(raw.shape[0], info.shape[-1] // BLOCK, -1))


def _decode(kind: str, blocks: NDArray[np.uint8]) -> Blocks:
    """Split raw blocks of shape (N, K / 32, bytes a block): float16 scale, float16 minimum (Q4_1), then the quants.

    A four-bit block keeps its first half of values in the low nibbles and its second half in the high ones.
    """
    rows, groups, _ = blocks.shape
    scale = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    if kind == "Q8_0":
        return Blocks(kind, scale, None, blocks[..., 2:].copy().view(np.int8).reshape(rows, groups * BLOCK))
    minimum = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32) if kind == "Q4_1" else None
    packed = blocks[..., -BLOCK // 2 :]
    quants = np.concatenate([packed & 0x0F, packed >> 4], axis=-1).reshape(rows, groups * BLOCK)
    if kind == "Q4_0":
        return Blocks(kind, scale, None, quants.view(np.int8) - np.int8(8))
    return Blocks(kind, scale, minimum, quants)


def converted_bytes(path: Path) -> int:
    """What the weights that `convert` writes take. Errors as of `convert`."""
    return sum(TensorSpec(name, "F32", info.shape).size for name, info in hf_tensors(open_gguf(path)).items())


def convert(path: Path, folder: Path, progress: Progress = no_progress) -> None:
    """Write `path` as a Hugging Face folder in fp32: config, weights, tokenizer, chat template, generation config.

    `folder` exists and is the caller's to throw away when this raises: ModelError for a file that is broken or
    truncated, UnsupportedModelError for another architecture, tokenizer or tensor type.
    """
    file = open_gguf(path)
    tensors = hf_tensors(file)
    config = config_from(file)
    tokenizer, tokenizer_config = tokenizer_from(file.metadata)
    specs = [TensorSpec(name, "F32", info.shape) for name, info in tensors.items()]
    require_space(folder, sum(spec.size for spec in specs))
    write_safetensors(folder / "model.safetensors", specs, _values(file, tensors, progress))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config_from(file.metadata))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template") or ""
    if not isinstance(template, str):
        raise ModelError(f"{path} has a chat template of type {type(template).__name__}, expected text")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _values(file: GGUFFile, tensors: Mapping[str, TensorInfo], progress: Progress) -> Iterator[NDArray[np.float32]]:
    """The weights in order, a bounded number of rows at a time."""
    total = sum(info.size for info in tensors.values())
    done = 0
    more = np.float32(naming(file).norm_offset)
    for name, info in tensors.items():
        raw = file.data(info)
        order = row_order(file, info)
        step = max(1, _CONVERTED_AT_ONCE // info.shape[-1])
        for start in range(0, len(raw), step):
            rows = slice(start, start + step)
            values = dequantise(raw[rows] if order is None else raw[order[rows]], info.kind)
            yield values - more if more and name.endswith("norm.weight") else values
        done += info.size
        progress("converting to fp32", done, total)

"""A Hugging Face folder as the exporter reads it: a tensor at a time, and the GGUF blocks it came from, if any.

Weights are what the safetensors say. A GGUF beside them may be of an earlier state or of another model (a copied folder
that was trained further keeps it), so its blocks count only where they are exactly what is stored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf import Blocks, read_blocks
from starsd.export.hf_folder import SOURCE_GGUF
from starsd.export.packed import PackedLayers, read_scheme
from starsd.export.rounding import Curvature
from starsd.export.stored import mapped, require_finite
from starsd.shared.errors import ModelError
from starsd.shared.families import read_architecture
from starsd.shared.weights import check_tensors, read_config, tensor_index

EMBEDDING = "model.embed_tokens.weight"
_UNUSED = ("rotary_emb.inv_freq",)  # derived values that old checkpoints carry along
_COMPARED_AT_ONCE = 1 << 22  # values


class Checkpoint:
    """Weights and config of a decoder. Raises UnsupportedModelError for a family or an option that is not supported,
    and ModelError when the tensors do not fit the config.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        scheme = read_scheme(self.config)
        self.architecture = read_architecture({**self.config, "quantization_config": None})
        self.shape = self.architecture.shape
        self.rope = self.architecture.rope
        self.norm_epsilon = self.architecture.norm_epsilon
        index = tensor_index(folder)
        self._index = {name: entry for name, entry in index.items() if not name.endswith(_UNUSED)}
        expected = self.architecture.tensors()
        self.head = "lm_head.weight" if "lm_head.weight" in expected else EMBEDDING
        if self.head == EMBEDDING:
            self._index.pop("lm_head.weight", None)  # some tied checkpoints store the copy
        self.packed = PackedLayers(scheme, self._index)
        for name in (*self.packed.parts, *self.packed.idle_biases(self._index, expected)):
            del self._index[name]
        check_tensors(str(folder), {**self._index, **self.packed.shapes}, expected)
        source = folder / SOURCE_GGUF
        self._finite: set[str] = set()
        self.blocks: Mapping[str, Blocks] = {}
        if source.is_file():
            with contextlib.suppress(ModelError):  # what cannot be read is not what this folder was made from
                self.blocks = _StoredBlocks(read_blocks(source), self._index, self.stored)
        self.curvatures: Mapping[str, Curvature] = {}  # by weight, once a calibration text was read

    def __contains__(self, name: str) -> bool:
        return name in self._index or name in self.packed.shapes

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return sorted({entry.file for entry in (*self._index.values(), *self.packed.parts.values())})

    @property
    def weights(self) -> int:
        """How many values all tensors hold."""
        shapes = [entry.shape for entry in self._index.values()]
        return sum(map(math.prod, [*shapes, *self.packed.shapes.values()]))

    def stored(self, name: str) -> NDArray[Any]:
        """A tensor as it lies on disk, mapped. What is packed there comes in float32.

        Raises ModelError when it holds values that are not finite.
        """
        if name in self.packed.shapes:
            return self.packed[name].dequantise()
        values = mapped(name, self._index[name])
        if name not in self._finite:
            require_finite(f"tensor {name}", values, "expected numbers")
            self._finite.add(name)
        return values

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32."""
        return np.asarray(self.stored(name), dtype=np.float32)

    def norm(self, name: str) -> NDArray[np.float32]:
        """The weights that a norm multiplies by: some families store what they are above one."""
        weight, offset = self.tensor(name), self.architecture.norm_offset
        return weight + np.float32(offset) if offset else weight

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by, rounded to the type they are stored in, as models are trained."""
        scale = np.float32(self.architecture.embedding_scale)
        return float(scale.astype(self.stored(EMBEDDING).dtype))


class _StoredBlocks(Mapping[str, Blocks]):
    """Those of a GGUF's matrices that are the checkpoint's own; each is decoded and compared when it is asked for."""

    def __init__(self, blocks: Mapping[str, Blocks], names: Container[str], stored: Callable[[str], NDArray[Any]]):
        self._blocks, self._names, self._stored = blocks, names, stored
        self._same: dict[str, bool] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._blocks if name in self)

    def __getitem__(self, name: str) -> Blocks:
        if name not in self._names or not self._same.get(name, True):
            raise KeyError(name)
        blocks = self._blocks[name]
        if name not in self._same:
            self._same[name] = _same(blocks, self._stored(name))
            if not self._same[name]:
                raise KeyError(name)
        return blocks


def _same(blocks: Blocks, stored: NDArray[Any]) -> bool:
    """Whether `blocks` are exactly these values; a bounded number is decoded at a time."""
    if blocks.quants.shape != stored.shape:
        return False
    step = max(1, _COMPARED_AT_ONCE // stored.shape[1])
    for start in range(0, len(stored), step):
        rows = slice(start, start + step)
        minimum = None if blocks.minimum is None else blocks.minimum[rows]
        part = Blocks(blocks.kind, blocks.scale[rows], minimum, blocks.quants[rows])
        if not np.array_equal(part.dequantise(), stored[rows]):
            return False
    return True

"""A Hugging Face folder as the exporter reads it: a tensor at a time, and the GGUF blocks it came from, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf import Blocks, read_blocks
from starsd.export.hf_folder import SOURCE_GGUF
from starsd.export.packed import PackedLayers, read_scheme
from starsd.export.rounding import Curvature
from starsd.export.stored import mapped
from starsd.shared.families import read_architecture
from starsd.shared.weights import check_tensors, read_config, tensor_index

EMBEDDING = "model.embed_tokens.weight"
_UNUSED = ("rotary_emb.inv_freq",)  # derived values that old checkpoints carry along


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
        self.blocks: Mapping[str, Blocks] = read_blocks(source) if source.is_file() else {}
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
        """A tensor as it lies on disk: mapped, not read. What is packed there comes in float32."""
        if name in self.packed.shapes:
            return self.packed[name].dequantise()
        return mapped(name, self._index[name])

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

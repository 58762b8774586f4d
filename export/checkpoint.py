"""A Hugging Face folder as the exporter reads it: a tensor at a time, and the GGUF blocks it came from, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf import Blocks, read_blocks
from starsd.export.hf_folder import SOURCE_GGUF
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.llama import expected_tensors, read_shape
from starsd.shared.rope import Rope, read_rope
from starsd.shared.weights import check_tensors, read_config, tensor_index

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
EMBEDDING = "model.embed_tokens.weight"
_UNUSED = ("rotary_emb.inv_freq",)  # derived values that old checkpoints carry along


class Checkpoint:
    """Llama-family weights and config. Raises ModelError when the tensors do not fit the config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self.shape = read_shape(self.config)
        self.rope: Rope = read_rope(self.config, self.shape.head_dim)
        epsilon = self.config.get("rms_norm_eps", 1e-6)
        if not isinstance(epsilon, float | int) or not 0 <= epsilon < 1:
            raise ModelError(f"config has rms_norm_eps {epsilon!r}, expected a small number")
        self.norm_epsilon = float(epsilon)
        index = tensor_index(folder)
        self._index = {name: entry for name, entry in index.items() if not name.endswith(_UNUSED)}
        expected = expected_tensors(self.config, self.shape)
        self.head = "lm_head.weight" if "lm_head.weight" in expected else EMBEDDING
        if self.head == EMBEDDING:
            self._index.pop("lm_head.weight", None)  # some tied checkpoints store the copy
        check_tensors(str(folder), self._index, expected)
        source = folder / SOURCE_GGUF
        self.blocks: Mapping[str, Blocks] = read_blocks(source) if source.is_file() else {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return sorted({entry.file for entry in self._index.values()})

    @property
    def weights(self) -> int:
        """How many values all tensors hold."""
        return sum(math.prod(entry.shape) for entry in self._index.values())

    def stored(self, name: str) -> NDArray[Any]:
        """A tensor as it lies on disk: mapped, not read."""
        entry = self._index[name]
        if entry.dtype not in _DTYPES:
            raise UnsupportedModelError(f"tensor {name} has type {entry.dtype}, expected one of {', '.join(_DTYPES)}")
        return np.memmap(entry.file, _DTYPES[entry.dtype], "r", entry.start, entry.shape)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32."""
        return np.asarray(self.stored(name), dtype=np.float32)

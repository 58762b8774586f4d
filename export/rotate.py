"""The same model in a rotated basis, where no single hidden channel dwarfs the others.

Llama-like models carry a few channels a hundred times larger than the rest; rounding a row to int8 with one scale would
spend its range on them. RMSNorm commutes with rotations once its weights are folded into the matrices that follow, so
an orthogonal Q can be multiplied into every weight beforehand: the function is unchanged and the outliers are spread
evenly (the idea of QuaRot, arXiv 2404.00456). Values inside each head turn likewise, between V and O.
Features are turned back before they leave the graph.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starsd.export.checkpoint import EMBEDDING, Checkpoint

Floats = NDArray[np.float32]
_SEED = 20260122  # any fixed number: two exports must agree


def hadamard(size: int) -> Floats:
    """Orthogonal Hadamard matrix; `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(size), np.float32)


@functools.cache
def rotation(size: int) -> Floats:
    """A fixed orthogonal (size, size): random over the odd part, Hadamard over the power of two, random signs."""
    power = size & -size
    generator = np.random.default_rng(_SEED)
    odd, _ = np.linalg.qr(generator.standard_normal((size // power, size // power)))
    signs = generator.choice([-1.0, 1.0], size)
    return np.asarray(np.kron(odd, hadamard(power)) * signs, np.float32)


class RotatedCheckpoint(Checkpoint):
    """A checkpoint whose residual stream is x·Q. Norm weights are folded away: all but the embedding is turned.

    Norms of heads stay: they lie behind the projections, on values that do not turn. A norm behind a layer is weighted
    by channel just before its result joins the stream, which no folding reaches: such families cannot be turned.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert not self.architecture.post_norms
        self.basis = rotation(self.shape.hidden)
        head_dim = self.shape.head_dim
        self._within_head = hadamard(head_dim) if head_dim & (head_dim - 1) == 0 else np.eye(head_dim, dtype=np.float32)
        embedding = self.blocks.get(EMBEDDING)  # the others are turned
        self.blocks = {} if embedding is None else {EMBEDDING: embedding}

    def tensor(self, name: str) -> Floats:
        value = super().tensor(name)
        if name == self.head:
            return self._read_from_stream(value, "model.norm.weight")
        layer, _, part = name.rpartition("self_attn." if "self_attn." in name else "mlp.")
        reads = {"q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm"}
        reads |= {"gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm"}
        projection, is_weight = part.split(".")[0], value.ndim == 2
        if is_weight and projection in reads:
            value = self._read_from_stream(value, f"{layer}{reads[projection]}.weight")
        elif projection in ("o_proj", "down_proj"):
            value = self.basis.T @ value  # writes to the stream: its outputs turn, those of a bias as well
        if projection == "v_proj":
            by_head = value.reshape(-1, len(self._within_head), *value.shape[1:])
            value = np.einsum("ij,hj...->hi...", self._within_head, by_head).reshape(value.shape)
        elif projection == "o_proj" and is_weight:
            by_head = value.reshape(len(value), -1, len(self._within_head))
            value = np.einsum("nhj,ij->nhi", by_head, self._within_head).reshape(value.shape)
        return np.asarray(value, np.float32)

    def _read_from_stream(self, weight: Floats, norm: str) -> Floats:
        return np.asarray((weight * self.norm(norm)) @ self.basis, np.float32)

"""The slow reference target: a Llama in plain torch, float32, written to be read and compared against.

Reads a Hugging Face folder (config.json and safetensors) of a family that computes as Llama does, biases or not. Every
pass computes what `LlamaForCausalLM` computes, with the tree's own mask and positions: row r of a tree sees all
committed rows, its ancestors and itself, at position length + depth(r).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional as F

from starsd.edge.cached_target import CachedTarget
from starsd.edge.target import Floats
from starsd.shared import tree
from starsd.shared.architecture import Architecture, require_plain
from starsd.shared.config import Engine
from starsd.shared.errors import UsageError
from starsd.shared.families import read_architecture
from starsd.shared.manifest import FeatureSpec
from starsd.shared.weights import TensorEntry, check_tensors, read_config, tensor_index

NOISE = 1e-4  # float32 sums in another order, on logits of some tens


def open_folder(
    folder: Path, config: Engine, *, taps: Sequence[int] | None = None, last_hidden: bool = False
) -> TorchTarget:
    """Open a Hugging Face folder. Raises UnsupportedModelError for a model that differs from Llama.

    `taps` are layers whose input becomes features, ascending; the layer count itself means what leaves the last layer,
    before the final norm. Left out, they are EAGLE-3's (2, L // 2, L - 3), as many of them as a shallow model has.
    `last_hidden` appends the final norm's output.
    """
    architecture = read_architecture(read_config(folder))
    require_plain(architecture, "the torch reference")
    shape = architecture.shape
    if taps is None:
        taps = sorted({2, shape.layers // 2, shape.layers - 3} & set(range(shape.layers)))
    if list(taps) != sorted(set(taps)) or any(not 0 <= tap <= shape.layers for tap in taps):
        raise UsageError(f"taps {list(taps)} cannot be taken, expected ascending layers 0 to {shape.layers}")
    features = FeatureSpec(tuple(taps), last_hidden, shape.hidden)
    if config.threads:
        torch.set_num_threads(config.threads)
    index = {n: e for n, e in tensor_index(folder).items() if not n.endswith("rotary_emb.inv_freq")}
    if architecture.tied_head:
        index.pop("lm_head.weight", None)
    check_tensors(str(folder), index, architecture.tensors())
    return TorchTarget(architecture, features, _load(index), config)


class TorchTarget(CachedTarget):
    """One model's weights and one conversation's cache; see `edge/target.py` for the contract."""

    def __init__(
        self,
        architecture: Architecture,
        features: FeatureSpec,
        weights: dict[str, torch.Tensor],
        engine: Engine,
    ) -> None:
        shape = architecture.shape
        super().__init__(shape, features, engine.max_context or shape.context, engine.prefill_chunk)
        self._weights = weights
        self._eps = architecture.norm_epsilon
        cos, sin = architecture.rope.tables(self._context)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)
        self._first_room = min(engine.initial_context, self._context)
        self._start_cache()

    @property
    def branch_noise(self) -> float:
        return self.noise

    @property
    def noise(self) -> float:
        return NOISE

    def _empty(self, rows: int) -> torch.Tensor:
        shape = self._shape
        return torch.zeros(shape.layers, 2, shape.kv_heads, rows, shape.head_dim)

    def _start_cache(self) -> None:
        self._cache = self._empty(self._first_room)

    def _make_room(self, length: int) -> None:
        capacity = self._cache.shape[3]
        if length > capacity:
            old = self._cache
            self._cache = self._empty(min(max(2 * capacity, length), self._context))
            self._cache[..., :capacity, :] = old

    def _keep(self, rows: Sequence[int]) -> None:
        start = self._length
        self._cache[..., start : start + len(rows), :] = self._cache[..., [start + row for row in rows], :]

    def _copy(self, other: TorchTarget, length: int) -> None:
        self._cache[..., :length, :] = other._cache[..., :length, :]

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        start, parents = self._length, tree.chain(len(tokens)) if parents is None else parents
        count = len(tokens)
        positions = start + torch.from_numpy(tree.depths(parents))
        turn = self._cos[positions], self._sin[positions]
        mask = torch.ones(count, start + count, dtype=torch.bool)
        mask[:, start:] = torch.from_numpy(tree.ancestor_mask(parents))

        hidden = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        entering = [hidden]
        for layer in range(self._shape.layers):
            hidden = hidden + self._attention(layer, self._norm(f"layers.{layer}.input_layernorm", hidden), turn, mask)
            hidden = hidden + self._mlp(layer, self._norm(f"layers.{layer}.post_attention_layernorm", hidden))
            entering.append(hidden)
        last = self._norm("norm", hidden)
        parts = [entering[tap] for tap in self._features.taps] + [last] * self._features.last_hidden
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return F.linear(last, head).numpy(), torch.cat([hidden[:, :0], *parts], dim=1).numpy()

    def _attention(
        self, layer: int, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        name, shape = f"layers.{layer}.self_attn", self._shape
        count, total = mask.shape
        q = self._linear(f"{name}.q_proj", x).view(count, shape.heads, -1).transpose(0, 1)
        k = self._linear(f"{name}.k_proj", x).view(count, shape.kv_heads, -1).transpose(0, 1)
        v = self._linear(f"{name}.v_proj", x).view(count, shape.kv_heads, -1).transpose(0, 1)
        keys, values = self._cache[layer, :, :, :total].unbind(0)
        keys[:, total - count :] = _rotate(k, *turn)
        values[:, total - count :] = v
        queries = _rotate(q, *turn).reshape(shape.kv_heads, -1, count, shape.head_dim)  # heads sharing one K/V head
        scores = queries @ keys[:, None].transpose(-1, -2) * shape.head_dim**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = (weights @ values[:, None]).reshape(shape.heads, count, -1).transpose(0, 1).reshape(count, -1)
        return self._linear(f"{name}.o_proj", mixed)

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.mlp"
        gated = F.silu(self._linear(f"{name}.gate_proj", x)) * self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", gated)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"model.{name}.weight"], self._weights.get(f"model.{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._weights[f"model.{name}.weight"] * (x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads of shape (heads, n, head_dim) by tables of shape (n, head_dim / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _load(index: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in index.values()}):
        with safe_open(file, framework="pt") as stream:
            for name in (name for name, entry in index.items() if entry.file == file):
                weights[name] = stream.get_tensor(name).float()
    return weights

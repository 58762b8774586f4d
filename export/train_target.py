"""The target as training needs it: many chats at once, keeping taps. A Llama in plain torch, in bf16 or fp32.

One set of layers, two ways to attend: `BatchTarget.forward` runs whole chats, padded on the right (a causal mask never
looks there); `Decoder.step` runs one token of every chat against a static cache. Both are `LlamaForCausalLM`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.shared.architecture import require_plain
from starsd.shared.errors import UsageError

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SAMPLE = 1 << 20  # bytes at either end of a file that stand for all of it
_BLOCK = 64
_SPAN = 64  # the cache is read up to a multiple of it, so that few shapes occur
_LOGIT_ROWS = {"cpu": 256}  # rows of logits at a time: 50 MB of float32 for the default model
_MANY_LOGIT_ROWS = 8192


def eagle3_taps(layers: int) -> tuple[int, int, int]:
    """The official three: inputs of layers 2, L // 2 and L - 3. Raises UsageError for a target too shallow for them."""
    taps = (2, layers // 2, layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UsageError(f"target has {layers} layers, expected at least 7: EAGLE-3 taps {taps} would coincide")
    return taps


def fingerprint(checkpoint: Checkpoint) -> str:
    """Names a target's weights by its config, and the size and both ends of each file of weights; hexadecimal."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for path in checkpoint.files:
        with path.open("rb") as file:
            digest.update(f"{path.stat().st_size}".encode() + file.read(_SAMPLE))
            file.seek(max(0, path.stat().st_size - _SAMPLE))
            digest.update(file.read())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Linear:
    """Projections of the same input as one product."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    norm: torch.Tensor
    qkv: _Linear
    out: _Linear
    after: torch.Tensor
    gate_up: _Linear
    down: _Linear


class BatchTarget:
    """Weights on one device in one dtype. Raises UnsupportedModelError for what is no Llama but for biases."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = Checkpoint(folder)
        require_plain(self.checkpoint.architecture, "training")
        self.shape = self.checkpoint.shape
        self.taps = eagle3_taps(self.shape.layers)
        self.width = len(self.taps) * self.shape.hidden
        self.device, self.dtype = device, dtype
        self._layers = [
            _Layer(
                self._tensor(f"model.layers.{i}.input_layernorm.weight"),
                self._linear(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                self._linear(i, "self_attn.o_proj"),
                self._tensor(f"model.layers.{i}.post_attention_layernorm.weight"),
                self._linear(i, "mlp.gate_proj", "mlp.up_proj"),
                self._linear(i, "mlp.down_proj"),
            )
            for i in range(self.shape.layers)
        ]
        self.embedding = self._tensor(EMBEDDING)
        self._norm = self._tensor("model.norm.weight")
        self.head = self.embedding if self.checkpoint.head == EMBEDDING else self._tensor(self.checkpoint.head)
        self._tables = torch.empty(2, 0, 0)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps (chats, n, width) and the final norm's output (chats, n, hidden) of padded chats, ids (chats, n)."""
        count, length = ids.shape
        cos, sin = self._turns(length)
        size = (self.shape.heads, self.shape.kv_heads)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.view(count, length, -1, self.shape.head_dim).transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(size[0] // size[1], 1) for x in (rotated(k, cos, sin), v))
            mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(count * length, -1)

        taps, last = self._run(ids.reshape(-1), attend)
        return taps.view(count, length, -1), last.view(count, length, -1)

    @torch.no_grad()
    def top(self, last: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next tokens behind rows (n, hidden), best first: ids int32 and probabilities float16 of the
        whole vocabulary's softmax, both (n, count)."""
        parts = [best(self.logits(part), count) for part in torch.split(last, logit_rows(self.device))]
        return torch.cat([ids for ids, _ in parts]), torch.cat([probs for _, probs in parts])

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """float32 (n, vocab)."""
        return F.linear(last, self.head).float()

    def decoder(self, chats: int, length: int) -> Decoder:
        return Decoder(self, chats, length)

    def _run(self, ids: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers over rows (n,): taps (n, width), last (n, hidden)."""
        shape, eps = self.shape, self.checkpoint.norm_epsilon
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        x, taps = self.embedding[ids], []
        for i, layer in enumerate(self._layers):
            if i in self.taps:
                taps.append(x)
            q, k, v = torch.split(layer.qkv(F.rms_norm(x, x.shape[-1:], layer.norm, eps)), [queries, keys, keys], -1)
            x = x + layer.out(attend(i, q, k, v))
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.after, eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return torch.cat(taps, -1), F.rms_norm(x, x.shape[-1:], self._norm, eps)

    def _turns(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions 0 … length - 1, (length, head_dim / 2)."""
        if self._tables.shape[1] < length:
            tables = self.checkpoint.rope.tables(max(length, 512))
            self._tables = torch.stack([torch.from_numpy(t) for t in tables]).to(self.device, self.dtype)
        cos, sin = self._tables[:, :length]
        return cos, sin

    def _linear(self, layer: int, *names: str) -> _Linear:
        paths = [f"model.layers.{layer}.{name}" for name in names]
        weight = torch.cat([self._tensor(f"{path}.weight") for path in paths])
        if f"{paths[0]}.bias" not in self.checkpoint:
            return _Linear(weight, None)
        return _Linear(weight, torch.cat([self._tensor(f"{path}.bias") for path in paths]))

    def _tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.checkpoint.tensor(name).copy()).to(self.device, self.dtype)


class Decoder:
    """A static cache for `chats` conversations of at most `length` tokens."""

    def __init__(self, target: BatchTarget, chats: int, length: int) -> None:
        shape = target.shape
        self._target = target
        size = (shape.layers, 2, chats, shape.kv_heads, length, shape.head_dim)
        self._cache = torch.zeros(size, dtype=target.dtype, device=target.device)
        self._rows = torch.arange(chats, device=target.device)
        target._turns(length)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one token of each chat, both (chats,); `longest` is the largest position. Taps (chats, width) and last
        (chats, hidden)."""
        target, shape = self._target, self._target.shape
        span = min((longest // _SPAN + 1) * _SPAN, self._cache.shape[4])
        table_cos, table_sin = target._turns(self._cache.shape[4])
        cos, sin = table_cos[positions][:, None], table_sin[positions][:, None]
        seen = (torch.arange(span, device=target.device) <= positions[:, None])[:, None, None]
        chats = len(tokens)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.view(chats, -1, shape.head_dim) for x in (q, k, v))
            keys, values = self._cache[layer]
            keys[self._rows, :, positions] = rotated(k, cos, sin)
            values[self._rows, :, positions] = v
            grouped = rotated(q, cos, sin).view(chats, shape.kv_heads, -1, shape.head_dim)
            mixed = F.scaled_dot_product_attention(grouped, keys[:, :, :span], values[:, :, :span], attn_mask=seen)
            return mixed.reshape(chats, -1)

        return target._run(tokens, attend)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads (…, head_dim) by angles (…, head_dim / 2), half-split."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` likeliest ids int32 and their probabilities float16 of rows (n, vocab), best first."""
    rows, vocab = logits.shape
    if vocab % _BLOCK or vocab // _BLOCK < 2 * count:
        values, ids = logits.topk(count)
    else:  # they lie in the blocks with the largest maxima: twice as fast as looking through whole rows
        blocks = logits.view(rows, -1, _BLOCK).amax(-1).topk(count).indices
        inside = logits.view(rows, -1, _BLOCK).gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK))
        values, places = inside.view(rows, -1).topk(count)
        ids = blocks.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    mass = (logits - values[:, :1]).exp_().sum(-1, keepdim=True)
    return ids.to(torch.int32), ((values - values[:, :1]).exp() / mass).to(torch.float16)


def logit_rows(device: torch.device) -> int:
    return _LOGIT_ROWS.get(device.type, _MANY_LOGIT_ROWS)

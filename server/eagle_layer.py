"""The one decoder layer of an EAGLE head, row by row; attention's keys and values live with the caller.

`enter` and `leave` know nothing of sessions, trees or caches: a row of one session may sit beside a row of another.
What mixes rows is `attend`, within one session of its batch and only through the mask that the caller passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from starsd.server.eagle_heads import HeadWeights, Tensors
from starsd.server.products import Linear

_ATTENTION, _MLP = "layers.0.self_attn.", "layers.0.mlp."
# projections that read the same input are one product
_FUSED = {
    "qkv": tuple(f"{_ATTENTION}{name}_proj" for name in "qkv"),
    "o": (f"{_ATTENTION}o_proj",),
    "gate_up": tuple(f"{_MLP}{name}_proj" for name in ("gate", "up")),
    "down": (f"{_MLP}down_proj",),
    "lm_head": ("lm_head",),
}
_BLOCK = 64  # draft ids in a block of `EagleLayer.best`
_MANY = 3  # blocks for each child: with fewer, looking for the blocks costs as much as it saves


@dataclass(frozen=True)
class Entered:
    """Rows on their way into attention: queries (n, heads, head_dim), keys and values (n, kv_heads, head_dim)."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    residual: torch.Tensor


class EagleLayer:
    """The arithmetic of a head. All tensors are in its dtype on its device unless a docstring says otherwise.

    `precision` is what its products are computed in: the dtype, or int8 (`Linear`) with everything else in float32.
    """

    def __init__(self, weights: HeadWeights) -> None:
        self.spec = weights.spec
        self.precision = weights.precision
        self.to_target = weights.to_target
        self.dtype = weights.tensors["fc.weight"].dtype
        self.device = weights.tensors["fc.weight"].device
        int8 = self.precision == "int8"
        self._linears = {name: _fuse(weights.tensors, parts, int8) for name, parts in _FUSED.items()}
        # features may hold a few huge values, which would flatten a whole row's int8 steps
        self._linears["fc"] = _fuse(weights.tensors, ("fc",), False)
        taken = {f"{part}.weight" for parts in _FUSED.values() for part in parts} | {"fc.weight"}
        self._tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in taken}
        self._frequencies = torch.from_numpy(self.spec.rope.inverse_frequencies()).to(self.device)
        self._turned = self.spec.heads + self.spec.kv_heads  # heads that rotate: queries, then keys
        if self.spec.qk_norm:
            gains = [self._tensors[f"{_ATTENTION}{name}_norm.weight"] for name in "qk"]
            counts = (self.spec.heads, self.spec.kv_heads)
            self._head_gain = torch.cat([g.expand(count, -1) for g, count in zip(gains, counts, strict=True)])

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """True features (n, features.width) as the `hidden` of rows, (n, hidden); EAGLE-1 takes them as they are."""
        x = features.to(self.device, self.dtype)
        if not self.spec.eagle3:
            return x
        if self.spec.input_norm:
            x = self._norm("input_norm", x)
        if self.spec.fc_norm:
            taps = x.chunk(len(self.spec.taps), -1)
            x = torch.cat([self._norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)], -1)
        return self._linears["fc"](x)

    def enter(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Entered:
        """Everything before attention, for rows of `tokens` (n,), `hidden` (n, hidden) and `positions` (n,).

        `hidden` is a fused true feature or the `latent` of the parent row.
        """
        embedding = F.embedding(tokens, self._tensors["embed_tokens.weight"])
        if self.spec.eagle3:
            normed = self._norm("layers.0.hidden_norm", hidden)
            residual = normed if self.spec.norm_before_residual else hidden
            x = torch.cat([self._norm("layers.0.input_layernorm", embedding), normed], -1)
        else:  # this layer has no input norm: attention reads the residual itself
            x = residual = self._linears["fc"](torch.cat([embedding, hidden], -1))
        mixed = self._linears["qkv"](x).view(len(x), -1, self.spec.head_dim)
        turning, values = mixed[:, : self._turned], mixed[:, self._turned :]
        if self.spec.qk_norm:
            turning = self._normed(turning) * self._head_gain
        phase = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None]
        cos, sin = phase.cos(), phase.sin()
        if (scale := self.spec.rope.attention_factor) != 1.0:
            cos, sin = cos * scale, sin * scale
        turned = _rotate(turning, cos.to(self.dtype), sin.to(self.dtype))
        return Entered(turned[:, : self.spec.heads], turned[:, self.spec.heads :], values, residual)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, unseen: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of queries (sessions, n, heads, head_dim) over keys and values (sessions, kv_heads, total,
        head_dim); (sessions, n, heads · head_dim).

        `unseen` (sessions, n, total) is True where a row must not look; None when every row sees everything.
        """
        sessions, count, heads, width = queries.shape
        kv_heads, total = keys.shape[1:3]
        # each key and value head serves `heads / kv_heads` query heads
        grouped = (queries * width**-0.5).view(sessions, count, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        scores = torch.matmul(grouped.reshape(sessions, kv_heads, -1, width), keys.transpose(2, 3)).float()
        if unseen is not None:
            scores.view(sessions, heads, count, total).masked_fill_(unseen[:, None], -torch.inf)
        mixed = torch.matmul(scores.softmax(-1).to(self.dtype), values)
        return mixed.view(sessions, heads, count, width).transpose(1, 2).reshape(sessions, count, heads * width)

    def leave(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Everything after attention, of rows (n, heads · head_dim): the layer's output o, (n, hidden)."""
        x = residual + self._linears["o"](mixed)
        gate, up = self._linears["gate_up"](self._norm("layers.0.post_attention_layernorm", x)).chunk(2, -1)
        return x + self._linears["down"](F.silu(gate) * up)

    def latent(self, output: torch.Tensor) -> torch.Tensor:
        """What children of these rows get for `hidden`: o itself, or normed where the head was trained so."""
        return self._norm("norm", output) if self.spec.norm_output else output

    def best(
        self, output: torch.Tensor, count: int, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` likeliest draft ids of each row (n, hidden), best first: int64 and log-probabilities float32,
        both (n, count). The log-softmax runs over the whole draft vocabulary. `noise` float32 (n, draft_vocab) is what
        is known of how the target draws (`race.py`)."""
        x = self._norm("norm", output) if self.spec.eagle3 else output
        logits = self._linears["lm_head"](x).float()
        if noise is not None:
            logits = logits + noise
        rows, vocab = logits.shape
        if vocab % _BLOCK or vocab // _BLOCK < _MANY * count:
            values, ids = logits.topk(count)
        else:  # the best ids lie in the blocks with the largest maxima: three times faster than sorting whole rows
            blocks = logits.view(rows, -1, _BLOCK).amax(-1).topk(count).indices
            inside = logits.view(rows, -1, _BLOCK).gather(1, blocks[:, :, None].expand(-1, -1, _BLOCK))
            values, places = inside.view(rows, -1).topk(count)
            ids = blocks.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
        largest = values[:, :1]
        return ids, values - largest - logits.sub_(largest).exp_().sum(-1, keepdim=True).log_()

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.to_target is None else self.to_target[draft_ids]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._tensors[f"{name}.weight"] * self._normed(x)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.eps)).to(self.dtype)


def _fuse(tensors: Tensors, parts: tuple[str, ...], int8: bool) -> Linear:
    weights = [tensors[f"{part}.weight"] for part in parts]
    biases = [tensors.get(f"{part}.bias") for part in parts]
    if any(bias is not None for bias in biases):
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        return Linear(torch.cat(weights), torch.cat(filled), int8=int8)
    return Linear(torch.cat(weights), int8=int8)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads (n, heads, head_dim) by (n, 1, head_dim / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

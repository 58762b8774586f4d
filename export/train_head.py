"""The EAGLE-3 head as a module whose parameters are named as on disk, and its training-time test (arXiv 2503.01840).

Row i pairs feature i with token i + 1 at position i and predicts token i + 2. A drafter goes on from its last true row:
depth j reads token i + 1 + j at position i + j and, in place of a feature, the output of depth j - 1; it sees the rows
0 … i that were made from features, its own ancestors and itself. `Head.unroll` does this for all rows i at once: row i
of depth j is the drafted node j levels under row i, so it sees depth 0 causally and depths 1 … j in its own row. No row
of a later depth sees another row's, so any of them may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from starsd.export.checkpoint import Checkpoint
from starsd.export.train_target import rotated
from starsd.shared.manifest import ModelShape
from starsd.shared.rope import Rope

EMBEDDING_SHARE = 0.1  # of the copied projections, for the token's half of their input


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head for a target: its layer is as wide as the target's."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    draft_vocab: int
    eps: float

    @classmethod
    def of(cls, checkpoint: Checkpoint, draft_vocab: int) -> HeadShape:
        shape: ModelShape = checkpoint.shape
        inner, eps = checkpoint.architecture.inner, checkpoint.norm_epsilon
        return cls(shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, inner, draft_vocab, eps)


class Norm(nn.Module):
    """RMS norm in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        h, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj, self.k_proj, self.v_proj = _linear(2 * h, queries), _linear(2 * h, keys), _linear(2 * h, keys)
        self.o_proj = _linear(queries, h)

    @property
    def reading(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The projections that read a row."""
        return self.q_proj, self.k_proj, self.v_proj


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, inner), _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape.hidden, shape.inner)


class Head(nn.Module):
    """`rope` turns queries and keys; official heads know the default kind only."""

    def __init__(self, shape: HeadShape, rope: Rope) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden
        self.fc = _linear(3 * h, h)
        self.midlayer = _Layer(shape)
        self.norm = Norm(h, shape.eps)
        self.lm_head = _linear(h, shape.draft_vocab)
        self._frequencies = torch.from_numpy(rope.inverse_frequencies())
        self._scale = rope.attention_factor

    def unroll(
        self, embedded: torch.Tensor, taps: torch.Tensor, steps: int, later: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Outputs before the final norm of depths 0 … steps - 1: depth 0 (chats, n, hidden), the others (chats, c,
        hidden) of the rows `later` (c,), ascending; None: all n.

        `embedded` (chats, n, hidden) are the target's embeddings of tokens 0 … n - 1, `taps` (chats, n, 3 · hidden) its
        features. Where depth j would read a token behind the end, rows n - 1 - j …, outputs mean nothing.
        """
        hidden = self.fc(taps)
        chats, length = hidden.shape[:2]
        every = rows = torch.arange(length, device=hidden.device)
        embedded = F.pad(embedded, (0, 0, 0, steps))
        true_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        ancestors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            if step == 1 and later is not None:
                hidden, rows = hidden[:, later], later
            queries, keys, values = self._enter(embedded[:, rows + 1 + step], hidden, rows + step)
            if true_rows is None:
                true_rows = keys, values
                groups = self.shape.heads // self.shape.kv_heads
                wide = [x.repeat_interleave(groups, 1) for x in (keys, values)]
                mixed = F.scaled_dot_product_attention(queries, wide[0], wide[1], is_causal=True)
            else:
                ancestors.append((keys, values))
                with torch.autocast(hidden.device.type, enabled=False):
                    mixed = _attend(queries, *true_rows, ancestors, every > rows[:, None])
            hidden = self._leave(hidden, mixed.transpose(1, 2).reshape(chats, len(rows), -1))
            yield hidden

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Over draft ids, of rows (n, hidden)."""
        logits: torch.Tensor = self.lm_head(self.norm(output))
        return logits

    def _enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (chats, heads or kv_heads, n, head_dim)."""
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embedded.to(hidden.dtype)), layer.hidden_norm(hidden)], -1)
        sides = [part(x).unflatten(-1, (-1, self.shape.head_dim)) for part in layer.self_attn.reading]
        sides = [side.transpose(1, 2) for side in sides]
        phase = positions.float()[:, None] * self._frequencies.to(x.device)
        cos, sin = ((part * self._scale).to(sides[0].dtype) for part in (phase.cos(), phase.sin()))
        return rotated(sides[0], cos, sin), rotated(sides[1], cos, sin), sides[2]

    def _leave(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = residual + self.midlayer.self_attn.o_proj(mixed)
        out: torch.Tensor = x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))
        return out


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ancestors: list[tuple[torch.Tensor, torch.Tensor]],
    hides: torch.Tensor,
) -> torch.Tensor:
    """Attention of c rows to the n true rows that `hides` (c, n) does not hide, and to ancestors, itself included:
    (chats, heads, c, head_dim)."""
    chats, heads, rows, width = queries.shape
    kv_heads, length = keys.shape[1:3]
    grouped = (queries * width**-0.5).view(chats, kv_heads, -1, rows, width)  # query heads that share keys
    true_scores = (grouped @ keys[:, :, None].transpose(-1, -2)).masked_fill(hides, -torch.inf)
    own_scores = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k, _ in ancestors]
    weights = torch.cat([true_scores, *own_scores], -1).softmax(-1)
    mixed = weights[..., :length] @ values[:, :, None]
    for number, (_, v) in enumerate(ancestors):
        mixed = mixed + weights[..., length + number, None] * v[:, :, None]
    return mixed.view(chats, heads, rows, width)


def initialise(head: Head, checkpoint: Checkpoint, draft_ids: torch.Tensor, seed: int) -> None:
    """Start as the target's last layer reading its highest tap, with the target's own rows for the draft vocabulary:
    some tokens are right before training begins. What the target does not give is drawn from `seed`."""
    last = f"model.layers.{checkpoint.shape.layers - 1}."
    draw = torch.Generator().manual_seed(seed)

    def target(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensor(name).copy())

    layer, h = head.midlayer, head.shape.hidden
    with torch.no_grad():
        head.fc.weight.normal_(std=0.02 / h**0.5, generator=draw)
        head.fc.weight[:, 2 * h :] += torch.eye(h)
        for name, part in zip("qkv", layer.self_attn.reading, strict=True):
            weight = target(f"{last}self_attn.{name}_proj.weight")
            part.weight.copy_(torch.cat([EMBEDDING_SHARE * weight, weight], 1))
        layer.self_attn.o_proj.weight.copy_(target(f"{last}self_attn.o_proj.weight"))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(target(f"{last}mlp.{name}.weight"))
        layer.hidden_norm.weight.copy_(target(f"{last}input_layernorm.weight"))
        layer.post_attention_layernorm.weight.copy_(target(f"{last}post_attention_layernorm.weight"))
        head.norm.weight.copy_(target("model.norm.weight"))
        head.lm_head.weight.copy_(target(checkpoint.head)[draft_ids])


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)

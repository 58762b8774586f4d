"""A second EAGLE head, written node by node in float64 from `golden/README.md` and FACTS: slow, cacheless, obvious.

Takes the tensors by their names in the EAGLE layouts and the flags as keyword arguments, so that it shares nothing with
`starsd.server` but the rope frequencies (which are compared with transformers in `test_rope.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Row:
    """K and V of one row, each (kv_heads, head_dim), and the layer's output."""

    keys: Array
    values: Array
    output: Array


@dataclass
class ReferenceHead:
    tensors: dict[str, Array]  # without the layer's prefix: q_proj.weight, hidden_norm.weight, …
    heads: int
    frequencies: Array
    eps: float = 1e-6
    eagle3: bool = True
    d2t: NDArray[np.int64] | None = None
    norm_before_residual: bool = False
    input_norm: bool = False
    fc_norm: int = 0
    norm_output: bool = False
    window: int = 0
    lasting: list[Row] = field(default_factory=list)

    def norm(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Array) -> Array:
        return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", 0.0)

    def turn(self, x: Array, position: int) -> Array:
        half = x.shape[-1] // 2
        angle = position * self.frequencies
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def fuse(self, feature: Array) -> Array:
        if not self.eagle3:
            return feature
        if self.input_norm:
            feature = self.norm("input_norm", feature)
        if self.fc_norm:
            parts = np.split(feature, self.fc_norm)
            feature = np.concatenate([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        return self.linear("fc", feature)

    def run(self, token: int, hidden: Array, position: int, before: list[Row]) -> Row:
        embedding = self.tensors["embed_tokens.weight"][token]
        if self.eagle3:
            normed = self.norm("hidden_norm", hidden)
            x = np.concatenate([self.norm("input_layernorm", embedding), normed])
            residual = normed if self.norm_before_residual else hidden
        else:
            x = residual = self.linear("fc", np.concatenate([embedding, hidden]))
        q = self.linear("q_proj", x).reshape(self.heads, -1)
        width = q.shape[1]
        k, v = (self.linear(f"{name}_proj", x).reshape(-1, width) for name in "kv")
        if "q_norm.weight" in self.tensors:
            q, k = self.norm("q_norm", q), self.norm("k_norm", k)
        q, k = self.turn(q, position), self.turn(k, position)
        keys = np.stack([*(row.keys for row in before), k])
        values = np.stack([*(row.values for row in before), v])
        mixed = []
        for head in range(self.heads):
            shared = head * k.shape[0] // self.heads
            score = keys[:, shared] @ q[head] / np.sqrt(width)
            weight = np.exp(score - score.max())
            mixed.append(weight / weight.sum() @ values[:, shared])
        x = residual + self.linear("o_proj", np.concatenate(mixed))
        normed = self.norm("post_attention_layernorm", x)
        gate = self.linear("gate_proj", normed)
        x = x + self.linear("down_proj", gate / (1 + np.exp(-gate)) * self.linear("up_proj", normed))
        return Row(k, v, x)

    def visible(self, path: list[Row], position: int) -> list[Row]:
        """Lasting rows inside the window, then the path from the root down."""
        first = max(0, position - self.window + 1) if self.window else 0
        return [*self.lasting[first:], *path]

    def extend(self, features: Array, next_tokens: list[int]) -> None:
        for feature, token in zip(features.astype(np.float64), next_tokens, strict=True):
            position = len(self.lasting)
            before = self.visible([], position)
            self.lasting.append(self.run(token, self.fuse(feature), position, before))

    def children(self, output: Array, count: int) -> list[tuple[int, float]]:
        """The best next tokens (draft ids) with their log-probabilities."""
        logits = self.linear("lm_head", self.norm("norm", output) if self.eagle3 else output)
        logp = logits - logits.max()
        logp -= np.log(np.exp(logp).sum())
        return [(int(token), float(logp[token])) for token in np.argsort(-logp, kind="stable")[:count]]

    def latent(self, output: Array) -> Array:
        return self.norm("norm", output) if self.norm_output else output

    def target(self, token: int) -> int:
        return token if self.d2t is None else token + int(self.d2t[token])

    def grow(self, root: int, total: int, depth: int, top_k: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and scores of the official dynamic tree."""
        first = self.lasting[-1].output
        # candidate: token, score, parent's candidate number, output above it, path of rows above it
        everything: list[tuple[int, float, int, Array, list[Row]]] = [
            (self.target(token), score, -1, first, []) for token, score in self.children(first, top_k)
        ]
        frontier = list(range(top_k))
        for level in range(depth):
            start = len(everything)
            for number in frontier:
                token, score, _, above, path = everything[number]
                position = len(self.lasting) + level
                row = self.run(token, self.latent(above), position, self.visible(path, position))
                for child, logp in self.children(row.output, top_k):
                    everything.append((self.target(child), score + logp, number, row.output, [*path, row]))
            frontier = sorted(range(start, len(everything)), key=lambda i: -everything[i][1])[:top_k]
        kept = sorted(sorted(range(len(everything)), key=lambda i: -everything[i][1])[: total - 1])
        numbers = {-1: 0, **{candidate: node + 1 for node, candidate in enumerate(kept)}}
        return (
            [root, *(everything[i][0] for i in kept)],
            [-1, *(numbers[everything[i][2]] for i in kept)],
            [0.0, *(everything[i][1] for i in kept)],
        )

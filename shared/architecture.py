"""What a decoder computes, whichever family it is of: sizes, norms, biases, rotary embeddings, windows, caps.

All families here are one computation with parts switched on. With x the residual stream and N an RMSNorm:

    x = embedding[token] · embedding_scale
    each layer    x += P(attention(N(x)))    x += P(mlp(N(x)))       P: another norm where `post_norms`, else nothing
    logits = cap(head · N(x))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from starsd.shared.errors import UnsupportedModelError
from starsd.shared.manifest import ModelShape
from starsd.shared.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model's. `shape.window` is how many positions a local layer sees, its own included; 0: all of them."""

    family: str  # the config's model_type
    shape: ModelShape
    inner: int  # width of the MLP
    norm_epsilon: float
    rope: Rope
    local_rope: Rope  # that of `local_layers`; the same where the family knows but one
    attention_scale: float
    local_layers: frozenset[int] = frozenset()
    tied_head: bool = False
    activation: str = "silu"  # or gelu_tanh
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # an RMSNorm of each head's queries and keys, before they turn
    post_norms: bool = False
    norm_offset: float = 0.0  # added to every stored norm weight
    embedding_scale: float = 1.0
    attention_cap: float = 0.0  # scores s become cap · tanh(s / cap); 0: they stay
    logit_cap: float = 0.0

    @property
    def before_mlp(self) -> str:
        """Name of the norm that the MLP reads."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    def is_local(self, layer: int) -> bool:
        """Whether this layer turns by `local_rope` and sees a window (of any size)."""
        return layer in self.local_layers

    def is_windowed(self, layer: int) -> bool:
        """Whether this layer needs a mask of its own: a window as long as the context hides nothing."""
        return self.shape.window > 0 and self.is_local(layer)

    def within(self, context: int) -> Architecture:
        """The same for texts of at most `context` tokens; without a window where none is needed for them."""
        window = self.shape.window if context > self.shape.window else 0
        return replace(self, shape=msgspec.structs.replace(self.shape, context=context, window=window))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor such a model has on disk, with its shape; a tied LM head is not there."""
        shape, hidden = self.shape, self.shape.hidden
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        projections = {
            "self_attn.q_proj": ((queries, hidden), self.qkv_bias),
            "self_attn.k_proj": ((keys, hidden), self.qkv_bias),
            "self_attn.v_proj": ((keys, hidden), self.qkv_bias),
            "self_attn.o_proj": ((hidden, queries), self.out_bias),
            "mlp.gate_proj": ((self.inner, hidden), self.mlp_bias),
            "mlp.up_proj": ((self.inner, hidden), self.mlp_bias),
            "mlp.down_proj": ((hidden, self.inner), self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        layer["post_attention_layernorm.weight"] = (hidden,)
        if self.post_norms:
            layer["pre_feedforward_layernorm.weight"] = layer["post_feedforward_layernorm.weight"] = (hidden,)
        if self.head_norms:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (shape.head_dim,)
        for name, (size, biased) in projections.items():
            layer[f"{name}.weight"] = size
            if biased:
                layer[f"{name}.bias"] = size[:1]
        tensors = {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in layer.items()}
        tensors["model.embed_tokens.weight"] = (shape.vocab, hidden)
        tensors["model.norm.weight"] = (hidden,)
        if not self.tied_head:
            tensors["lm_head.weight"] = (shape.vocab, hidden)
        return tensors


def require_plain(architecture: Architecture, who: str) -> None:
    """Raise UnsupportedModelError, naming what is too much, unless `who` can compute it as a Llama with biases."""
    more = {
        "norms of heads": architecture.head_norms,
        "norms behind layers": architecture.post_norms or architecture.norm_offset != 0,
        "a window": bool(architecture.local_layers),
        f"activation {architecture.activation}": architecture.activation != "silu",
        "a scaled embedding": architecture.embedding_scale != 1,
        "another attention scale": architecture.attention_scale != architecture.shape.head_dim**-0.5,
        "soft caps": bool(architecture.attention_cap or architecture.logit_cap),
    }
    if found := [name for name, has in more.items() if has]:
        raise UnsupportedModelError(
            f"{who} computes no {architecture.family} with {', '.join(found)}, expected a model like Llama"
        )

"""What a head is, whatever layout it came in: sizes, flags, and the tensors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from starsd.shared.manifest import FeatureSpec
from starsd.shared.rope import Rope

LAYER = "layers.0."


@dataclass(frozen=True)
class HeadSpec:
    """Everything about a head but its values. Sizes in elements; `taps` are layers whose input is tapped."""

    layout: str
    eagle3: bool
    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    draft_vocab: int
    eps: float
    rope: Rope
    taps: tuple[int, ...] = ()
    window: int = 0  # rows that attention sees, itself included; 0 means all
    own_embedding: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mapped: bool = False  # d2t is present
    t2d: bool = False
    norm_before_residual: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def features(self) -> FeatureSpec:
        """What the target must hand out for this head."""
        return FeatureSpec(self.taps, not self.eagle3, self.target_hidden)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names (as after `eagle_formats.normalise`) and shapes of every tensor that this head uses."""
        h, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        width = 2 * h if self.eagle3 else h
        sizes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.features.width if self.eagle3 else 2 * h),
            f"{LAYER}self_attn.q_proj.weight": (queries, width),
            f"{LAYER}self_attn.k_proj.weight": (keys, width),
            f"{LAYER}self_attn.v_proj.weight": (keys, width),
            f"{LAYER}self_attn.o_proj.weight": (h, queries),
            f"{LAYER}mlp.gate_proj.weight": (self.inner, h),
            f"{LAYER}mlp.up_proj.weight": (self.inner, h),
            f"{LAYER}mlp.down_proj.weight": (h, self.inner),
            f"{LAYER}post_attention_layernorm.weight": (h,),
        }
        biased = [("self_attn.q_proj", self.qkv_bias), ("self_attn.k_proj", self.qkv_bias)]
        biased += [("self_attn.v_proj", self.qkv_bias), ("self_attn.o_proj", self.o_bias)]
        biased += [(f"mlp.{name}_proj", self.mlp_bias) for name in ("gate", "up", "down")]
        sizes |= {f"{LAYER}{name}.bias": sizes[f"{LAYER}{name}.weight"][:1] for name, has in biased if has}
        if self.eagle3:
            sizes |= {f"{LAYER}input_layernorm.weight": (h,), f"{LAYER}hidden_norm.weight": (h,)}
            sizes |= {"norm.weight": (h,), "lm_head.weight": (self.draft_vocab, h)}
        optional: list[tuple[str, tuple[int, ...], bool]] = [
            ("fc.bias", (h,), self.fc_bias),
            ("embed_tokens.weight", (self.vocab, h), self.own_embedding),
            (f"{LAYER}self_attn.q_norm.weight", (self.head_dim,), self.qk_norm),
            (f"{LAYER}self_attn.k_norm.weight", (self.head_dim,), self.qk_norm),
            ("d2t", (self.draft_vocab,), self.mapped),
            ("t2d", (self.vocab,), self.t2d),
            ("input_norm.weight", (self.features.width,), self.input_norm),
            *((f"fc_norm.{i}.weight", (self.target_hidden,), self.fc_norm) for i in range(len(self.taps))),
        ]
        return sizes | {name: size for name, size, present in optional if present}

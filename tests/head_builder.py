"""Random heads for the tiny target, written in each published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_reference import ReferenceHead
from safetensors.torch import save_file
from torch_helpers import tokens

from starsd.server.drafter import DraftSession
from starsd.shared.rope import read_rope

TARGET_HIDDEN, VOCAB = 32, 96  # of torch_helpers.tiny_llama
LAYER_BLOCKS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "": ("input_layernorm", "hidden_norm", "post_attention_layernorm"),
}


def random_tensors(
    *,
    eagle3: bool = True,
    hidden: int = 32,
    target_hidden: int = TARGET_HIDDEN,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    inner: int = 40,
    draft_vocab: int = 48,
    taps: int = 3,
    embed: bool = False,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    input_norm: bool = False,
    fc_norm: bool = False,
    seed: int = 5,
) -> dict[str, torch.Tensor]:
    """Tensors under our own names: `layers.0.` for the layer."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * (1.2 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3)

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=draw)

    width = 2 * hidden if eagle3 else hidden
    out = {
        "fc.weight": normal(hidden, taps * target_hidden if eagle3 else 2 * hidden),
        "layers.0.self_attn.q_proj.weight": normal(heads * head_dim, width),
        "layers.0.self_attn.k_proj.weight": normal(kv_heads * head_dim, width),
        "layers.0.self_attn.v_proj.weight": normal(kv_heads * head_dim, width),
        "layers.0.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
        "layers.0.mlp.gate_proj.weight": normal(inner, hidden),
        "layers.0.mlp.up_proj.weight": normal(inner, hidden),
        "layers.0.mlp.down_proj.weight": normal(hidden, inner),
        "layers.0.post_attention_layernorm.weight": gain(hidden),
    }
    if eagle3:
        out["layers.0.input_layernorm.weight"] = gain(hidden)
        out["layers.0.hidden_norm.weight"] = gain(hidden)
        out["norm.weight"] = gain(hidden)
        out["lm_head.weight"] = 2 * normal(draft_vocab, hidden)
        if draft_vocab != VOCAB:
            ids = torch.randperm(VOCAB, generator=draw)[:draft_vocab].sort().values
            out["d2t"] = ids - torch.arange(draft_vocab)
            out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    if embed:
        out["embed_tokens.weight"] = normal(VOCAB, hidden)
    if fc_bias:
        out["fc.bias"] = normal(hidden)
    if qkv_bias:
        for name in "qkv":
            out[f"layers.0.self_attn.{name}_proj.bias"] = normal(len(out[f"layers.0.self_attn.{name}_proj.weight"]))
    if qk_norm:
        out["layers.0.self_attn.q_norm.weight"] = gain(head_dim)
        out["layers.0.self_attn.k_norm.weight"] = gain(head_dim)
    if input_norm:
        out["input_norm.weight"] = gain(taps * target_hidden)
    if fc_norm:
        out |= {f"fc_norm.{i}.weight": gain(target_hidden) for i in range(taps)}
    return out


def base_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        **changes,
    }


def speculators_config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 48,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": {**base_config(), **(layer or {})},
        **changes,
    }


def write_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, midlayer: bool = True, file: str = ""
) -> Path:
    """Write a head folder; `midlayer` names the layer as official EAGLE-3 and SpecForge do."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {name.replace("layers.0.", "midlayer.") if midlayer else name: t for name, t in tensors.items()}
    if file == "pytorch_model.bin":
        torch.save(named, folder / file)
    else:
        save_file({name: t.contiguous() for name, t in named.items()}, folder / "model.safetensors")
    return folder


def reference(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    target: dict[str, torch.Tensor],
    head_dim: int = 8,
    **flags: Any,
) -> ReferenceHead:
    """The float64 head of the same tensors; what they lack comes from the target's."""
    plain = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("layers.0.").removeprefix("self_attn.").removeprefix("mlp.")
        plain[short] = tensor.double().numpy()
    d2t = plain.pop("d2t", None)
    plain.setdefault("embed_tokens.weight", target["model.embed_tokens.weight"].double().numpy())
    plain.setdefault("lm_head.weight", target["lm_head.weight"].double().numpy())
    return ReferenceHead(
        plain,
        heads=config["num_attention_heads"],
        frequencies=read_rope(config, head_dim).inverse_frequencies().astype(np.float64),
        eps=config["rms_norm_eps"],
        d2t=None if d2t is None else d2t.astype(np.int64),
        **flags,
    )


def rows(count: int, width: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random features and the tokens that follow them."""
    features = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    return features, np.array(tokens(count, VOCAB, seed))


def compare(session: DraftSession, head: ReferenceHead, width: int, sizes: tuple[int, int, int] = (16, 4, 4)) -> None:
    """Feed both the same rows twice and require the same trees."""
    from starsd.server.drafter import DynamicTree

    for seed, count in ((1, 9), (2, 3)):
        features, following = rows(count, width, seed)
        session.extend(features, following)
        head.extend(features, following.tolist())
        tree = session.draft(DynamicTree(*sizes))
        expected_tokens, expected_parents, expected_scores = head.grow(int(following[-1]), *sizes)
        assert tree.tokens.tolist() == expected_tokens
        assert tree.parents.tolist() == expected_parents
        np.testing.assert_allclose(tree.scores, expected_scores, atol=3e-5)

"""The Llama family as it lies on disk: Llama 1 to 3, Vicuna, SmolLM2. What a config means and which tensors follow."""

from __future__ import annotations

from typing import Any

from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.manifest import ModelShape

MODEL_TYPES = ("llama",)
MAX_SIZE, MAX_LAYERS = 1 << 24, 1000  # beyond them a config is a mistake or worse, and would fill the memory


def read_shape(config: dict[str, Any]) -> ModelShape:
    """The sizes in a Hugging Face config. Raises UnsupportedModelError for another family and names what is missing."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(f"model type {kind!r} is not supported, expected one of {', '.join(MODEL_TYPES)}")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors are not supported, expected fp32, bf16 or fp16")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {config['hidden_act']!r} is not supported, expected silu")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        shape = ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            context=int(config.get("max_position_embeddings") or 2048),
        )
    except KeyError as error:
        raise ModelError(f"config lacks {error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config has a size that is no number: {error}") from error
    for name in shape.__struct_fields__:
        if not 0 < (size := getattr(shape, name)) <= MAX_SIZE:
            raise ModelError(f"config has a size out of range: {name} is {size}, expected 1 to {MAX_SIZE}")
    if shape.layers > MAX_LAYERS:
        raise ModelError(f"config has {shape.layers} layers, expected 1 to {MAX_LAYERS}")
    return shape


def expected_tensors(config: dict[str, Any], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor such a model has on disk, with its shape; a tied LM head is not there."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = config.get("intermediate_size")
    if not isinstance(inner, int) or not 0 < inner <= MAX_SIZE:
        raise ModelError(f"config has intermediate_size {inner!r}, expected 1 to {MAX_SIZE}")
    attention = {
        "q_proj": (queries, shape.hidden),
        "k_proj": (keys, shape.hidden),
        "v_proj": (keys, shape.hidden),
        "o_proj": (shape.hidden, queries),
    }
    mlp = {"gate_proj": (inner, shape.hidden), "up_proj": (inner, shape.hidden), "down_proj": (shape.hidden, inner)}
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (shape.hidden,)}
    layer["post_attention_layernorm.weight"] = (shape.hidden,)
    for block, projections, flag in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
        for name, size in projections.items():
            layer[f"{block}.{name}.weight"] = size
            if config.get(flag):
                layer[f"{block}.{name}.bias"] = size[:1]
    expected = {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in layer.items()}
    expected["model.embed_tokens.weight"] = (shape.vocab, shape.hidden)
    expected["model.norm.weight"] = (shape.hidden,)
    if not config.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (shape.vocab, shape.hidden)
    return expected

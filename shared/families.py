"""Model families by their Hugging Face config: what its fields mean, and which of them are refused.

A field that transformers reads for a family is read here or refused by name; one that a config leaves out has the value
that transformers gives it. The numbers of layers, heads, channels and tokens have no default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from starsd.shared.architecture import Architecture
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.manifest import MAX_LAYERS, MAX_SIZE, ModelShape
from starsd.shared.rope import Rope, read_layer_rope, read_rope

Config = Mapping[str, Any]

LOCAL, GLOBAL = "sliding_attention", "full_attention"

_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma2": {**_GEMMA, **_GEMMA2_CAPS, "max_position_embeddings": 8192},
    "gemma3_text": {**_GEMMA, "max_position_embeddings": 131_072},
}
MODEL_TYPES = tuple(_DEFAULTS)

# What would change the result and is computed for no family, or for these alone
_REFUSED = {
    "use_bidirectional_attention": (),
    "use_qk_norm": (),
    "clip_qkv": (),
    "attn_logit_softcapping": ("gemma2",),  # transformers reads it for Gemma 3 and does nothing with it
    "final_logit_softcapping": ("gemma2", "gemma3_text"),
}


def read_architecture(config: Config) -> Architecture:
    """What a config describes. Raises UnsupportedModelError naming what is not supported, ModelError what is wrong."""
    config = _completed(config)
    family = config["model_type"]
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors are not supported, expected fp32, bf16 or fp16")
    activation = _activation(config)
    for name, families in _REFUSED.items():
        if config.get(name) and family not in families:
            raise UnsupportedModelError(f"{family} with {name} {_short(config[name])} is not supported, expected none")
    shape = _shape(config)
    rope = _rope(config, GLOBAL, shape.head_dim)
    general = Architecture(
        family=family,
        shape=shape,
        inner=_whole(config, "intermediate_size", 1),
        norm_epsilon=_epsilon(config),
        rope=rope,
        local_rope=rope,
        attention_scale=shape.head_dim**-0.5,
        tied_head=bool(config.get("tie_word_embeddings")),
        activation=activation,
    )
    return _READERS[family](config, general)


def _llama(config: Config, general: Architecture) -> Architecture:
    general = _windows(config, general, None, ())
    biased = bool(config.get("attention_bias"))
    return replace(general, qkv_bias=biased, out_bias=biased, mlp_bias=bool(config.get("mlp_bias")))


def _mistral(config: Config, general: Architecture) -> Architecture:
    window = config.get("sliding_window")
    return _windows(config, general, window, range(0 if window is None else general.shape.layers))


def _qwen2(config: Config, general: Architecture) -> Architecture:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = general.shape.layers if window is None else _whole(config, "max_window_layers", 0)
    return replace(_windows(config, general, window, range(first, general.shape.layers)), qkv_bias=True)


def _qwen3(config: Config, general: Architecture) -> Architecture:
    biased = bool(config.get("attention_bias"))
    return replace(_qwen2(config, general), qkv_bias=biased, out_bias=biased, head_norms=True)


def _gemma(config: Config, general: Architecture, every: int) -> Architecture:
    """`every` so many layers one sees everything."""
    biased = bool(config.get("attention_bias"))
    layers = [i for i in range(general.shape.layers) if (i + 1) % every]
    return replace(
        _windows(config, general, config.get("sliding_window"), layers),
        attention_scale=_whole(config, "query_pre_attn_scalar", 1) ** -0.5,
        qkv_bias=biased,
        out_bias=biased,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=general.shape.hidden**0.5,
        attention_cap=_positive(config, "attn_logit_softcapping"),
        logit_cap=_positive(config, "final_logit_softcapping"),
    )


def _gemma2(config: Config, general: Architecture) -> Architecture:
    return _gemma(config, general, 2)


def _gemma3(config: Config, general: Architecture) -> Architecture:
    found = _gemma(config, general, _whole({"sliding_window_pattern": 6, **config}, "sliding_window_pattern", 1))
    return replace(found, local_rope=_rope(config, LOCAL, general.shape.head_dim), head_norms=True)


_READERS: dict[str, Callable[[Config, Architecture], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def _completed(config: Config) -> Config:
    """The config with its family's defaults. Raises UnsupportedModelError for a family that is not known."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {kind!r:.80} is not supported, expected one of {', '.join(MODEL_TYPES)}"
        )
    return {**_DEFAULTS[kind], **config}


def _shape(config: Config) -> ModelShape:
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        shape = ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            context=int(config.get("max_position_embeddings") or _DEFAULTS["llama"]["max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config lacks {error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config has a size that is no number: {error}") from error
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "context"):
        if not 0 < (size := getattr(shape, name)) <= MAX_SIZE:
            raise ModelError(f"config has a size out of range: {name} is {_short(size)}, expected 1 to {MAX_SIZE}")
    if shape.layers > MAX_LAYERS:
        raise ModelError(f"config has {shape.layers} layers, expected 1 to {MAX_LAYERS}")
    if shape.heads % shape.kv_heads:
        raise ModelError(f"config has {shape.heads} heads for {shape.kv_heads} of K/V, expected a multiple of them")
    return shape


def _windows(config: Config, general: Architecture, window: Any, layers: Sequence[int]) -> Architecture:
    """With a window for `layers`, or for those that `layer_types` names where transformers goes by it."""
    count, kinds = general.shape.layers, config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count or not {LOCAL, GLOBAL}.issuperset(map(str, kinds)):
            raise UnsupportedModelError(
                f"layer_types {_short(kinds)} are not supported, expected {count} of {LOCAL} and {GLOBAL}"
            )
        named = [i for i, kind in enumerate(kinds) if kind == LOCAL]
        if general.family in ("llama", "mistral") and named != list(layers):
            raise UnsupportedModelError(f"{general.family} with layer_types {_short(kinds)} is not supported")
        layers = named
    if not layers:
        return general
    size = _whole({"sliding_window": window}, "sliding_window", 1)
    return replace(general, shape=msgspec.structs.replace(general.shape, window=size), local_layers=frozenset(layers))


def _rope(config: Config, kind: str, head_dim: int) -> Rope:
    """That of one kind of layers. Gemma 3 has two, the others one."""
    if config["model_type"] != "gemma3_text":
        return read_rope(config, head_dim)
    return read_layer_rope(config, head_dim, kind)


def _activation(config: Config) -> str:
    gemma = config["model_type"].startswith("gemma")
    expected = "gelu_pytorch_tanh" if gemma else "silu"
    got = config.get("hidden_activation" if gemma else "hidden_act") or expected
    if got != expected:
        raise UnsupportedModelError(f"activation {got!r:.80} is not supported, expected {expected}")
    return "gelu_tanh" if gemma else "silu"


def _epsilon(config: Config) -> float:
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, float | int) or not 0 <= epsilon < 1:
        raise ModelError(f"config has rms_norm_eps {_short(epsilon)}, expected a small number")
    return float(epsilon)


def _whole(config: Config, name: str, least: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise ModelError(f"config has {name} {_short(value)}, expected {least} to {MAX_SIZE}")
    return value


def _positive(config: Config, name: str) -> float:
    """A number above 0, or 0 where the config has none."""
    value = config.get(name) or 0
    if not isinstance(value, float | int) or not 0 <= value <= MAX_SIZE:
        raise ModelError(f"config has {name} {_short(value)}, expected a number above 0")
    return float(value)


def _short(value: Any) -> str:
    return repr(value)[:80]

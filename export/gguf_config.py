"""A model's config.json and generation_config.json out of a GGUF's metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf_file import GGUFFile
from starsd.export.gguf_names import naming, number
from starsd.shared.errors import ModelError, UnsupportedModelError

_ORIGINAL_CONTEXT = 8192  # of Llama 3.1, whose rope scaling is recognised
_GEMMA_THETA = 1e6  # of Gemma 3's global layers
_LOCAL_THETA = 10000.0
_GEMMA2_CAPS = (50.0, 30.0)  # of attention and of logits, where a file names none
_BIGGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, which scale attention by hidden / heads

# What changes the result where an architecture does not read it below
_CHANGING = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
_NEUTRAL = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}  # and what changes it unless it is this


def config_from(file: GGUFFile) -> dict[str, Any]:
    """config.json of the model. Raises UnsupportedModelError for an architecture, a rope scaling or an option that
    cannot be taken over."""
    hidden, heads = number(file, "embedding_length"), number(file, "attention.head_count")
    head_dim = number(file, "attention.key_length", hidden // heads)
    values = number(file, "attention.value_length", head_dim)
    if values != head_dim:
        raise UnsupportedModelError(f"{file.path} has values of {values} channels, expected the {head_dim} of its keys")
    model_type = naming(file).model_type
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": number(file, "feed_forward_length"),
        "num_hidden_layers": number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": number(file, "context_length"),
        "rms_norm_eps": _exact(_real(file, "attention.layer_norm_rms_epsilon", 1e-6)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    rotated = number(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(f"{file.path} rotates {rotated} of {head_dim} dimensions, expected all of them")
    more, read = _READERS[model_type](file, config)
    for name in _CHANGING:
        if name not in read and option(file, name):
            raise UnsupportedModelError(f"{file.path} has {name} {option(file, name)!r}, which a {model_type} lacks")
    for name, neutral in _NEUTRAL.items():
        if (value := option(file, name, neutral)) != neutral:
            raise UnsupportedModelError(f"{file.path} has {name} {value!r}, expected {neutral}")
    return config | more | _end_tokens(file.metadata)


def generation_config_from(metadata: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: where a text starts and ends."""
    return _end_tokens(metadata)


def option(file: GGUFFile, key: str, default: Any = None) -> Any:
    """A value of the architecture's own metadata."""
    return file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)


Config = dict[str, Any]
Read = tuple[Config, tuple[str, ...]]  # more of the config, and the options that it took in


def _llama(file: GGUFFile, config: Config) -> Read:
    theta = _real(file, "rope.freq_base", 10000.0)
    return {
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, config["head_dim"], theta),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }, ()


def _qwen(file: GGUFFile, config: Config) -> Read:
    more, _ = _llama(file, config)
    del more["mlp_bias"]
    return more | {"use_sliding_window": False}, ()


def _gemma(file: GGUFFile, config: Config) -> Config:
    """Of both generations. The scale of attention is not in the file: it is told by the model's size, as by its peers
    that read these files."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    biggest = config["num_hidden_layers"] == _BIGGEST_GEMMA[file.metadata["general.architecture"]]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if biggest else config["head_dim"],
        "sliding_window": number(file, "attention.sliding_window"),
    }


def _gemma2(file: GGUFFile, config: Config) -> Read:
    theta = _real(file, "rope.freq_base", 10000.0)
    more = _gemma(file, config) | {
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, config["head_dim"], theta),
        "attn_logit_softcapping": option(file, "attn_logit_softcapping", _GEMMA2_CAPS[0]),
        "final_logit_softcapping": option(file, "final_logit_softcapping", _GEMMA2_CAPS[1]),
    }
    return more, ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def _gemma3(file: GGUFFile, config: Config) -> Read:
    theta = _real(file, "rope.freq_base", _GEMMA_THETA)
    local = option(file, "attention.sliding_window_pattern")
    if not isinstance(local, list):
        every = number(file, "attention.sliding_window_pattern", 6)
        local = [(layer + 1) % every > 0 for layer in range(config["num_hidden_layers"])]
    more = _gemma(file, config) | {
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, config["head_dim"], theta),
        "rope_local_base_freq": _real(file, "rope.freq_base_swa", _LOCAL_THETA),
        "final_logit_softcapping": option(file, "final_logit_softcapping"),
        "layer_types": ["sliding_attention" if here else "full_attention" for here in local],
    }
    return more, ("attention.sliding_window", "final_logit_softcapping")


_READERS: dict[str, Callable[[GGUFFile, Config], Read]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def _end_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    turn = metadata.get("tokenizer.ggml.eot_token_id")  # the end of a turn, where that is another token
    if turn is not None and turn != ids["eos_token_id"]:
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if ids["eos_token_id"] is not None else turn
    return ids


def _exact(value: float) -> float:
    """The short decimal that was stored as a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _real(file: GGUFFile, key: str, default: float) -> float:
    """A number above 0 of the architecture's metadata."""
    value = option(file, key, default)
    if not isinstance(value, float | int) or not 0 < value < math.inf:
        raise ModelError(f"{file.path}: {key} is {value!r:.80}, expected a number above 0")
    return float(value)


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """As llama.cpp reads it: a factor without a type is linear, one of 0 says nothing."""
    kind = option(file, "rope.scaling.type", "linear")
    key = "rope.scaling.factor" if option(file, "rope.scaling.factor") is not None else "rope.scale_linear"
    factor = 1.0 if kind == "none" or option(file, key) == 0 else _real(file, key, 1.0)
    factors = file.tensors.get("rope_freqs.weight")
    if factor != 1 and (kind != "linear" or factors is not None):
        beside = "" if factors is None else " beside rope_freqs"
        raise UnsupportedModelError(
            f"{file.path} has rope scaling {kind!r:.80}{beside}, expected none, linear or llama3"
        )
    if factors is not None:
        if factors.kind != "F32":
            raise UnsupportedModelError(f"{file.path} has rope_freqs of type {factors.kind}, expected F32")
        return _llama3_scaling(file, file.data(factors)[0].view(np.float32), head_dim, theta)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _llama3_scaling(file: GGUFFile, stored: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling: a GGUF only keeps what each frequency is divided by, so check that its rule gives the same.

    Long wavelengths are divided by the factor, short ones are left, those between are blended (Llama 3.1 release).
    """
    rule = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    turns = _ORIGINAL_CONTEXT / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    blend = np.clip((turns - rule["low_freq_factor"]) / (rule["high_freq_factor"] - rule["low_freq_factor"]), 0, 1)
    expected = 1 / ((1 - blend) / rule["factor"] + blend)
    if stored.shape != expected.shape:
        raise ModelError(f"{file.path} has {stored.size} rope_freqs, expected {expected.size}")
    if not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{file.path} has rope_freqs other than those of Llama 3, expected llama3 scaling")
    return {"rope_type": "llama3", **rule, "original_max_position_embeddings": _ORIGINAL_CONTEXT}

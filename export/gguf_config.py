"""A Llama's config.json and generation_config.json out of a GGUF's metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf_file import GGUFFile
from starsd.export.gguf_names import number
from starsd.shared.errors import ModelError, UnsupportedModelError


def config_from(file: GGUFFile) -> dict[str, Any]:
    """config.json of the model. Raises UnsupportedModelError for a rope scaling that cannot be told from the file."""
    metadata = file.metadata
    hidden, heads = number(file, "embedding_length"), number(file, "attention.head_count")
    head_dim = number(file, "attention.key_length", hidden // heads)
    theta = float(metadata.get("llama.rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": number(file, "feed_forward_length"),
        "num_hidden_layers": number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": number(file, "context_length"),
        "rms_norm_eps": _exact(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, head_dim, theta),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    rotated = number(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(f"{file.path} rotates {rotated} of {head_dim} dimensions, expected all of them")
    return config | _end_tokens(metadata)


def generation_config_from(metadata: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: where a text starts and ends."""
    return _end_tokens(metadata)


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


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        if factors.kind != "F32":
            raise UnsupportedModelError(f"{file.path} has rope_freqs of type {factors.kind}, expected F32")
        return _llama3_scaling(file, file.data(factors)[0].view(np.float32), head_dim, theta)
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = file.metadata.get("llama.rope.scaling.factor", file.metadata.get("llama.rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    raise UnsupportedModelError(f"{file.path} has rope scaling {kind!r}, expected none, linear or llama3")


def _llama3_scaling(file: GGUFFile, stored: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling: a GGUF only keeps what each frequency is divided by, so check that its rule gives the same.

    Long wavelengths are divided by the factor, short ones are left, those between are blended (Llama 3.1 release).
    """
    rule = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    blend = np.clip((turns - rule["low_freq_factor"]) / (rule["high_freq_factor"] - rule["low_freq_factor"]), 0, 1)
    expected = 1 / ((1 - blend) / rule["factor"] + blend)
    if stored.shape != expected.shape:
        raise ModelError(f"{file.path} has {stored.size} rope_freqs, expected {expected.size}")
    if not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{file.path} has rope_freqs other than those of Llama 3, expected llama3 scaling")
    return {"rope_type": "llama3", **rule, "original_max_position_embeddings": original}

"""Tiny random models and the recorded fixtures, shared by the tests that need torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = {
    "e1_mha_bias": "llama_mha",
    "e1_gqa_nobias": "llama_gqa_l3",
    "e3_gqa_d2t": "llama_gqa_l3",
    "e3_mha_fullvocab": "llama_mha",
}

HALF = 8  # head_dim / 2 of the tiny model
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100_000.0},
    "linear": {"rope_theta": 10_000.0, "factor": 3.0},
    "dynamic": {"rope_theta": 10_000.0, "factor": 2.0},
    "yarn": {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
        "long_factor": [2.0 + 0.3 * i for i in range(HALF)],
        "original_max_position_embeddings": 256,
    },
    "llama3": {
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def tiny_llama(rope: str = "default", **changes: Any) -> LlamaForCausalLM:
    """A random seven-layer Llama whose weights are large enough for positions to matter."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2 * HALF,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": rope, **ROPES[rope]},
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}, attn_implementation="eager")).eval()
    with torch.no_grad():  # biases start at zero: a forgotten one must show
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.2)
    return model


def tokens(count: int, vocab: int = 96, seed: int = 3) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def golden_target(variant: str) -> Path:
    return GOLDEN / "targets" / VARIANTS[variant]


@cache
def recording(variant: str, name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / variant / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)

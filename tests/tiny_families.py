"""Very small random models of every family, as transformers writes them, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_session import VOCAB, write_text_files
from torch_helpers import tokens
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from starsd.edge.target_onnx import open_bundle
from starsd.shared import tree
from starsd.shared.config import Engine

CONTEXT, WINDOW = 256, 24
LAYERS, HIDDEN = 7, 64
TAPS = (0, 2, 6)
TREE = (-1, 0, 0, 1, 2, 2, 5, 0, 6)
ACCEPTED = (0, 2, 5, 6)
ENGINE = Engine(threads=1, initial_context=4, prefill_chunk=17)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
_GEMMA: dict[str, Any] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
_THETAS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

# name → family and what its config says beside the sizes
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "llama, a head of K/V for each": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows in upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, windows by name": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "rope_parameters": _THETAS}),
    "gemma3, capped": (
        "gemma3_text",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}
        | {"final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "gemma3, a window as long as the context": ("gemma3_text", {**_GEMMA, "sliding_window": CONTEXT}),
}


def write_family(folder: Path, case: str, dtype: Any = None, **changes: Any) -> Path:
    """A random model of `case` with a tokenizer; `changes` replace config values, `dtype` is what it is stored in."""
    family, options = CASES[case]
    write_text_files(folder)
    torch.manual_seed(11)
    config = CONFIG_MAPPING[family](**{**_SIZES, **options, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms start at one (or nought) and biases at nought: a forgotten one must show
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(0 if family.startswith("gemma") else 1, 0.2)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
    model.to(dtype or model.dtype).save_pretrained(folder)
    return folder


@cache
def eager(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def plain(folder: Path, ids: Sequence[int], taps: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, vocab) and features (n, width), taps then the last hidden state, of one forward over `ids`."""
    model = eager(folder)
    out = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    features = [out.hidden_states[tap][0].numpy() for tap in (*taps, model.config.num_hidden_layers)]
    return out.logits[0].numpy(), np.concatenate(features, axis=1)


class Errors(NamedTuple):
    """The largest difference from transformers, and the root mean square of all in shares of that of the values."""

    logits: float
    features: float
    logits_share: float
    features_share: float


def compare(folder: Path, bundle: Path, reference: Path | None = None) -> Errors:
    """A prompt in chunks, two trees of which a path is committed each time: every node of a tree, and every feature,
    against a forward over the plain text that leads to it. `reference` is the folder to compare with if another.
    """
    target, against = open_bundle(bundle, ENGINE), reference or folder
    ids = tokens(80, VOCAB)
    features = [target.prefill(ids)]
    pairs = []
    for seed in (1, 2):
        drafted = tokens(len(TREE), VOCAB, seed=seed)
        logits = target.score(drafted, TREE)
        for row in range(len(TREE)):
            text = ids + [drafted[node] for node in tree.path_to(TREE, row)]
            pairs.append((logits[row], plain(against, text, TAPS)[0][-1]))
        features.append(target.commit(ACCEPTED))
        ids = ids + [drafted[node] for node in ACCEPTED]
    got, expected = (np.stack(side) for side in zip(*pairs, strict=True))
    read, hidden = np.concatenate(features), plain(against, ids, TAPS)[1]
    assert np.abs(expected).max() > 2  # small values would hide errors
    return Errors(
        float(np.abs(got - expected).max()),
        float(np.abs(read - hidden).max()),
        float(np.linalg.norm(got - expected) / np.linalg.norm(expected)),
        float(np.linalg.norm(read - hidden) / np.linalg.norm(hidden)),
    )

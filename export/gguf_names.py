"""What an architecture's tensors in a GGUF are called in Hugging Face's folders, and how their values differ there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from starsd.export.gguf_file import GGUFFile, TensorInfo
from starsd.shared.errors import ModelError, UnsupportedModelError

_ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DERIVED = ("rope_freqs.weight",)  # follows from the configuration


@dataclass(frozen=True)
class Naming:
    """One architecture. A GGUF's rotary embedding pairs neighbours or halves of a head; Hugging Face's, halves.

    `norm_offset` is what its norms have more than the folder's.
    """

    model_type: str
    layer: Mapping[str, str]
    pairs_neighbours: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Naming("llama", _LAYER, pairs_neighbours=True),  # Mistral as well
    "qwen2": Naming("qwen2", _LAYER),
    "qwen3": Naming("qwen3", _LAYER | _HEAD_NORMS),
    "gemma2": Naming("gemma2", _LAYER | _POST_NORMS, norm_offset=1.0),
    "gemma3": Naming("gemma3_text", _LAYER | _HEAD_NORMS | _POST_NORMS, norm_offset=1.0),
}


def naming(file: GGUFFile) -> Naming:
    """Of the file's architecture. Raises UnsupportedModelError when it is none of `ARCHITECTURES`."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has architecture {architecture!r:.80}, expected one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


def hf_tensors(file: GGUFFile) -> dict[str, TensorInfo]:
    """The tensors by Hugging Face name. Raises UnsupportedModelError for another architecture or an unknown tensor,
    ModelError when one is missing."""
    parts = naming(file).layer
    names = {_hf_name(file, name): info for name, info in file.tensors.items() if name not in _DERIVED}
    layers = number(file, "block_count")
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    expected |= {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in parts.values()}
    if missing := sorted(expected - names.keys()):
        raise ModelError(f"{file.path} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} among them")
    return names


def _hf_name(file: GGUFFile, name: str) -> str:
    parts = naming(file).layer
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if part in parts and int(layer) < number(file, "block_count"):
            return f"model.layers.{layer}.{parts[part]}.{kind}"
    elif (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in _ROOT:
        return f"{_ROOT[match[1]]}.weight"
    architecture = file.metadata["general.architecture"]
    raise UnsupportedModelError(f"{file.path} has the tensor {name}, which a plain {architecture} lacks")


def row_order(file: GGUFFile, info: TensorInfo) -> NDArray[np.intp] | None:
    """Which stored row is each row of the Hugging Face tensor; None when they are in that order already.

    For queries and keys a GGUF whose rotary embedding pairs neighbours stores rows i and i + d/2 of each head beside
    each other.
    """
    if not naming(file).pairs_neighbours:
        return None
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", info.name)
    if match is None:
        return None
    heads = number(file, "attention.head_count")
    if match[1] == "k":
        heads = number(file, "attention.head_count_kv", heads)
    count = info.shape[0]
    if count % (2 * heads):
        raise ModelError(f"{file.path}: tensor {info.name} has {count} rows, expected a multiple of {2 * heads}")
    order: NDArray[np.intp] = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return order


def number(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive whole number of the architecture's metadata."""
    value = file.metadata.get(f"{file.metadata.get('general.architecture')}.{key}", default)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{file.path}: {key} is {value!r}, expected a positive whole number")
    return value

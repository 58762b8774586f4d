"""A GGUF of a very small Llama, written with the gguf package's own writer and quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]


def tiny_gguf(
    path: Path, *, kind: str = "Q4_1", architecture: str = "llama", metadata: dict[str, Any] | None = None
) -> Path:
    """Write `path`; matrices are of type `kind`, the embedding Q8_0, norms F32. `metadata` overrides strings."""
    values = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    strings = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"} | (metadata or {})
    for key, value in strings.items():
        writer.add_string(key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")

    def matrix(name: str, rows: int, columns: int, kind: str = kind) -> None:
        tensor_type = gguf.GGMLQuantizationType[kind]
        weight = values.normal(0, 0.2, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(weight, tensor_type), raw_dtype=tensor_type)

    def norm(name: str) -> None:
        writer.add_tensor(name, values.normal(1, 0.1, HIDDEN).astype(np.float32))

    matrix("token_embd.weight", len(TOKENS), HIDDEN, "Q8_0")
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{layer}.attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        matrix(f"blk.{layer}.attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        matrix(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        matrix(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    norm("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

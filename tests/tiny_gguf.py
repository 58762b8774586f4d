"""GGUFs of very small models, written with the gguf package's own writer and quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]
WIDE = 256  # what rows of k-quants are a multiple of
WINDOW = 4

_GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
_GEMMA_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_GEMMA_RUNS = ["  ", "   ", "\n\n"]
_GEMMA_WORDS = ["he", "ll", "▁he", "llo", "▁hello", "▁", "\n", *(chr(c) for c in range(33, 127))]
GEMMA_TOKENS = [*_GEMMA_SPECIAL, *_GEMMA_BYTES, *_GEMMA_RUNS, *_GEMMA_WORDS]
_GEMMA_KINDS = [3, 3, 3, 2, 3, 3, *[6] * 256, *[4] * len(_GEMMA_RUNS), *[1] * len(_GEMMA_WORDS)]


def tiny_gguf(
    path: Path,
    *,
    kind: str = "Q4_1",
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    layers: int = LAYERS,
    tied: bool = True,
    caps: bool = True,
) -> Path:
    """Write `path`; matrices are of type `kind`, the embedding Q8_0, norms F32. `metadata` overrides strings.

    With k-quants, hidden and inner width are `WIDE`. Gemma's have a window of `WINDOW` and norms around two; without
    `caps` those of Gemma 2 are not named.
    """
    gemma = architecture.startswith("gemma")
    hidden, inner = (WIDE, WIDE) if kind.endswith("_K") else (HIDDEN, FEED_FORWARD)
    head_dim = hidden // HEADS
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        head_dim = 32  # one of its own
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if gemma:
        writer.add_sliding_window(WINDOW)
        _gemma_tokenizer(writer, metadata or {})
    else:
        _byte_level_tokenizer(writer, {"tokenizer.ggml.pre": "smollm"} | (metadata or {}))
    if architecture == "gemma2" and caps:
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    tensors = _Tensors(writer, kind, around=2.0 if gemma else 1.0)
    vocabulary = len(GEMMA_TOKENS if gemma else TOKENS)
    tensors.matrix("token_embd.weight", vocabulary, hidden, "Q8_0")
    for layer in range(layers):
        tensors.layer(f"blk.{layer}.", architecture, hidden, inner, head_dim)
    tensors.norm("output_norm.weight", hidden)
    if not tied:
        tensors.matrix("output.weight", vocabulary, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Tensors:
    """Adds random ones: matrices of `kind`, norms `around` a value."""

    def __init__(self, writer: gguf.GGUFWriter, kind: str, around: float) -> None:
        self._writer, self._kind, self._around = writer, kind, around
        self._values = np.random.default_rng(7)

    def matrix(self, name: str, rows: int, columns: int, kind: str = "") -> None:
        tensor_type = gguf.GGMLQuantizationType[kind or self._kind]
        if tensor_type.name.endswith("_K"):
            raw = random_blocks(self._values, tensor_type.name, rows * columns // WIDE).reshape(rows, -1)
        else:
            raw = gguf.quantize(self._values.normal(0, 0.2, (rows, columns)).astype(np.float32), tensor_type)
        self._writer.add_tensor(name, raw, raw_dtype=tensor_type)

    def norm(self, name: str, size: int) -> None:
        self._writer.add_tensor(name, self._values.normal(self._around, 0.1, size).astype(np.float32))

    def layer(self, prefix: str, architecture: str, hidden: int, inner: int, head_dim: int) -> None:
        behind = ["post_attention_norm", "post_ffw_norm"] if architecture.startswith("gemma") else []
        for name in ("attn_norm", "ffn_norm", *behind):
            self.norm(f"{prefix}{name}.weight", hidden)
        for name in ("attn_q_norm", "attn_k_norm") if architecture in ("qwen3", "gemma3") else ():
            self.norm(f"{prefix}{name}.weight", head_dim)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.matrix(f"{prefix}attn_{part}.weight", heads * head_dim, hidden)
            if architecture == "qwen2":
                self.norm(f"{prefix}attn_{part}.bias", heads * head_dim)
        self.matrix(f"{prefix}attn_output.weight", hidden, HEADS * head_dim)
        self.matrix(f"{prefix}ffn_gate.weight", inner, hidden)
        self.matrix(f"{prefix}ffn_up.weight", inner, hidden)
        self.matrix(f"{prefix}ffn_down.weight", hidden, inner)


def random_blocks(values: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Blocks of a k-quant with random contents and small scales: the package has no quantisers for them."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = values.integers(0, 256, (count, size), np.uint8)
    steps = {"Q2_K": (-4, -2), "Q3_K": (-2,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (-2,)}[kind]  # where they lie
    for start in steps:
        step = values.uniform(0.5, 1.5, count) * {"Q2_K": 0.02, "Q6_K": 1e-4}.get(kind, 5e-4)
        at = start % size
        blocks[:, at : at + 2] = step.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def _byte_level_tokenizer(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in ({"tokenizer.ggml.model": "gpt2"} | metadata).items():
        _add(writer, key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


def _gemma_tokenizer(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"} | metadata).items():
        _add(writer, key, value)
    writer.add_token_list(GEMMA_TOKENS)
    writer.add_token_scores([-float(row) for row in range(len(GEMMA_TOKENS))])
    writer.add_token_types(_GEMMA_KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(5)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Of the type that the value has in Python."""
    add: dict[type, Any] = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}
    add |= {float: writer.add_float32, list: writer.add_array}
    add[type(value)](key, value)

"""Very small Llama folders as `starsd-export` takes them, and their bundles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_session import VOCAB, write_text_files
from torch_helpers import tiny_llama

from starsd.edge.target_onnx import OnnxTarget, open_bundle
from starsd.edge.target_torch import TorchTarget, open_folder
from starsd.export.bundle import Options, export_onnx
from starsd.shared.config import Engine
from starsd.shared.manifest import read

ENGINE = Engine(threads=1, initial_context=4, prefill_chunk=50)
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": 64, "attention_bias": False}


def write_folder(folder: Path, rope: str = "default", *, shard: str = "5GB", dtype: Any = None, **config: Any) -> Path:
    """A random model with a tokenizer; `config` replaces sizes and options, `dtype` is what weights are stored in."""
    write_text_files(folder)
    model = tiny_llama(rope, **{**SIZES, **config})
    with torch.no_grad():  # norms start at one: a forgotten one must show
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1, 0.2)
    model.to(dtype or model.dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def export(source: Path, out: Path, precision: str = "fp32", **options: Any) -> Path:
    """The bundle of `source` at `out`, its agreement with fp32 not measured unless asked for."""
    export_onnx(str(source), Options(precision=precision, **{"check": False, **options}), out)
    return out


def open_pair(source: Path, bundle: Path, engine: Engine = ENGINE) -> tuple[OnnxTarget, TorchTarget]:
    """A bundle on ONNX Runtime, and the slow reference of what it was made from."""
    features = read(bundle).features
    reference = open_folder(source, engine, taps=features.taps, last_hidden=features.last_hidden)
    return open_bundle(bundle, engine), reference


def rewrite(folder: Path, copy: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A copy of a folder with config values replaced, and tensors replaced, added or (None) removed."""
    shutil.copytree(folder, copy)
    raw = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, **config}))
    if tensors:
        merged = {**load_file(folder / "model.safetensors"), **tensors}
        save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, copy / "model.safetensors")
    return copy


def plain_logits(target: Any, tokens: list[int]) -> Any:
    """What plain decoding says after each of `tokens`, a pass for each; the tokens stay in the cache."""
    rows = []
    for token in tokens:
        rows.append(target.score([token], [-1])[0])
        target.commit([0])
    return rows

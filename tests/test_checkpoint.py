"""What a model folder must hold, and by which words it is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import LAYERS, tiny_gguf
from tiny_model import VOCAB, export, rewrite, write_folder

from starsd.export import gguf
from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.export.rotate import RotatedCheckpoint
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.manifest import WEIGHTS_FILE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint") / "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, r"^model type 'mamba' is not supported, expected one of llama, mistral, qwen2,"),
        ({"model_type": None}, r"^model type None is not supported, expected one of llama, mistral, qwen2,"),
        ({"hidden_act": "gelu"}, r"^activation 'gelu' is not supported, expected silu$"),
        (
            {"quantization_config": {"bits": 4}},
            r"^quantisation method None is not supported, expected one of gptq, awq$",
        ),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            r"^rope type 'spiral' is not supported, expected one of default, linear, dynamic, yarn, longrope, llama3$",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"^partial_rotary_factor 0.5 is not supported, expected 1.0$",
        ),
    ],
)
def test_what_is_not_supported(source: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(rewrite(source, tmp_path / "copy", config))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"model.norm.weight": None}, r"m lacks model.norm.weight \[32\]$"),
        ({}, {"extra.weight": torch.zeros(3)}, r"has extra.weight \[3\] that nothing uses$"),
        ({"num_hidden_layers": 8}, {}, r"lacks model.layers.7.input_layernorm.weight \[32\], .* and 3 more$"),
        ({"num_hidden_layers": 6}, {}, r"has model.layers.6.\S+ \[\S+.* and 3 more that nothing uses$"),
        ({"head_dim": 32}, {}, r"q_proj.weight has shape \[64, 32\], expected \[128, 32\]"),
        ({"mlp_bias": True}, {}, r"lacks model.layers.0.mlp.gate_proj.bias \[64\]"),
        ({"tie_word_embeddings": False}, {"lm_head.weight": None}, rf"lacks lm_head.weight \[{VOCAB}, 32\]$"),
        ({"vocab_size": None}, {}, r"config has a size that is no number"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    source: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message.replace("m lacks", "copy does not fit its config: lacks")):
        Checkpoint(rewrite(source, tmp_path / "copy", config, tensors))


def test_buffers_and_copies_of_old_checkpoints_are_ignored(source: Path, tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    checkpoint = Checkpoint(rewrite(source, tmp_path / "a", {}, buffer))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in checkpoint
    assert checkpoint.head == "lm_head.weight"
    tied = Checkpoint(rewrite(source, tmp_path / "b", {"tie_word_embeddings": True}))
    assert tied.head == EMBEDDING
    assert "lm_head.weight" not in tied
    assert checkpoint.weights - tied.weights == VOCAB * 32


def test_a_type_of_number_that_is_not_read(source: Path, tmp_path: Path) -> None:
    copy = rewrite(source, tmp_path / "copy", {}, {"model.norm.weight": torch.ones(32, dtype=torch.float64)})
    with pytest.raises(
        UnsupportedModelError, match=r"^tensor model.norm.weight has type F64, expected one of F32, F16, BF16$"
    ):
        Checkpoint(copy).tensor("model.norm.weight")


def test_tensors_are_mapped_and_converted(source: Path, tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 32).to(torch.bfloat16)
    checkpoint = Checkpoint(rewrite(source, tmp_path / "copy", {}, {"model.norm.weight": values}))
    stored = checkpoint.stored("model.norm.weight")
    assert isinstance(stored, np.memmap)
    assert stored.dtype == ml_dtypes.bfloat16
    assert checkpoint.tensor("model.norm.weight").dtype == np.float32
    np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), values.float().numpy())
    assert checkpoint.files == [tmp_path / "copy" / "model.safetensors"]


def test_blocks_come_with_a_gguf(source: Path, tmp_path: Path) -> None:
    assert not Checkpoint(source).blocks
    gguf.convert(tiny_gguf(tmp_path / "source.gguf"), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.blocks) == 1 + 7 * LAYERS
    for name, held in checkpoint.blocks.items():
        np.testing.assert_array_equal(held.dequantise(), checkpoint.tensor(name))


def test_blocks_of_another_model_are_not_taken(source: Path, tmp_path: Path) -> None:
    """A copied folder that was trained further, or that was given a foreign file, keeps the old `source.gguf`."""
    gguf.convert(tiny_gguf(tmp_path / "source.gguf"), tmp_path)
    query, embedding = "model.layers.0.self_attn.q_proj.weight", Checkpoint(tmp_path).stored(EMBEDDING)
    trained = torch.from_numpy(np.array(embedding))
    trained[3, 5] += 0.01
    folder = rewrite(tmp_path, tmp_path / "trained", {}, {EMBEDDING: trained, query: torch.ones(64, 64)})
    checkpoint = Checkpoint(folder)
    assert checkpoint.blocks.get(EMBEDDING) is checkpoint.blocks.get(query) is None
    assert query not in checkpoint.blocks
    assert len(checkpoint.blocks) == 7 * LAYERS - 1
    rotated = RotatedCheckpoint(folder)
    assert not rotated.blocks
    tiny_gguf(folder / "source.gguf", architecture="qwen3", layers=7)  # heads of another width, and more layers
    assert list(Checkpoint(folder).blocks) == []
    (folder / "source.gguf").write_bytes(b"no GGUF")
    assert not Checkpoint(folder).blocks


@pytest.mark.parametrize(
    "form", [("ort", "fp32"), ("ort", "fp16"), ("ort", "int8"), ("ort", "int4"), ("portable", "int4")]
)
def test_a_stale_gguf_changes_no_bundle(form: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    gguf.convert(tiny_gguf(tmp_path / "source.gguf"), tmp_path / "a")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    matrices = {name: weight.roll(1, 0).contiguous() for name, weight in weights.items() if weight.ndim == 2}
    trained = rewrite(tmp_path / "a", tmp_path / "trained", {}, matrices)
    flavour, precision = form
    made = []
    for stale in (False, True):
        if stale:
            shutil.copyfile(tmp_path / "source.gguf", trained / "source.gguf")
        bundle = export(trained, tmp_path / f"stale-{stale}", precision, flavour=flavour, taps=(0,))
        made.append((bundle / WEIGHTS_FILE).read_bytes())
    assert made[0] == made[1]


def test_values_that_are_no_numbers(source: Path, tmp_path: Path) -> None:
    """In every type that is read, and in scales; a value that float16 does not hold is told from them."""
    name = "model.layers.0.mlp.up_proj.weight"
    for number, value in enumerate((math.nan, math.inf, -math.inf)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            weight = torch.ones(64, 32, dtype=dtype)
            weight[63, 31] = value
            copy = rewrite(source, tmp_path / f"{number}-{dtype}", {}, {name: weight})
            with pytest.raises(
                ModelError, match=rf"^tensor {name} holds values that are not finite, expected numbers$"
            ):
                Checkpoint(copy).stored(name)
            for precision in ("fp32", "int4"):
                with pytest.raises(ModelError, match=rf"^tensor {name} holds values that are not finite"):
                    export(copy, tmp_path / "b", precision)
    large = rewrite(source, tmp_path / "large", {}, {name: torch.full((64, 32), 1e30)})
    export(large, tmp_path / "b", "fp32")
    with pytest.raises(ModelError, match=r"^constant \S+ holds .* not finite, float16 reaches 65504: expected another"):
        export(large, tmp_path / "c", "fp16")


def test_files_that_are_not_whole(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model folder: config.json is missing$"):
        Checkpoint(tmp_path)
    copy = rewrite(source, tmp_path / "copy", {})
    raw = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(raw[:-4])
    with pytest.raises(ModelError, match=rf"model.safetensors has {len(raw) - 4} bytes, expected {len(raw)}$"):
        Checkpoint(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor model.safetensors.index.json$"):
        Checkpoint(copy)
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"part-1.safetensors is missing, model.safetensors.index.json names it$"):
        Checkpoint(copy)
    save_file({"model.norm.weight": torch.ones(32)}, copy / "part-1.safetensors")
    with pytest.raises(ModelError, match=r"lacks model.layers.0.input_layernorm.weight \[32\]"):
        Checkpoint(copy)

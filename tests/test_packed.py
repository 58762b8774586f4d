"""GPTQ and AWQ checkpoints: which weights they stand for, in which graphs they run, by which words they are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packing import config, pack
from safetensors.numpy import load_file, save_file
from tiny_model import ENGINE, export, open_pair, plain_logits, rewrite, write_folder

from starsd.edge.target_onnx import open_bundle
from starsd.edge.target_torch import open_folder
from starsd.export.checkpoint import Checkpoint
from starsd.export.packed import PackedLayers, read_scheme
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.weights import tensor_index

FORMS: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq-symmetric-16": {"symmetric": True, "group": 16},
    "gptq-shuffled": {"shuffled": True},
    "gptq-shuffled-128": {"shuffled": True, "group": 128},
    "gptq-one-group": {"group": -1},
    "gptq-v2": {"version": 2},
    "gptq-8": {"bits": 8, "size": 0.001},
    "gptq-8-one-group": {"bits": 8, "size": 0.001, "group": -1},
    "gptq-2": {"bits": 2},
    "awq": {"method": "awq"},
    "awq-64": {"method": "awq", "group": 64},
    "awq-one-group": {"method": "awq", "group": -1},
}


def settings(form: dict[str, Any]) -> dict[str, Any]:
    """The config that tells of such layers."""
    layout = {"checkpoint_format": "gptq_v2"} if form.get("version") == 2 else {}
    return config(form.get("method", "gptq"), form.get("bits", 4), form.get("group", 32), **layout)


def layers(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> PackedLayers:
    save_file(tensors, folder / "model.safetensors")
    return PackedLayers(read_scheme(config), tensor_index(folder))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_packed_weights_are_what_was_packed(form: dict[str, Any], tmp_path: Path) -> None:
    layer = pack(32, 128, **form)
    got = layers(tmp_path, {f"up.{part}": tensor for part, tensor in layer.tensors.items()}, settings(form))
    assert got.shapes == {"up.weight": (32, 128)}
    packed = got["up.weight"]
    np.testing.assert_array_equal(packed.dequantise(), layer.weight)
    group = form.get("group", 32)
    assert packed.size == (128 if group == -1 else group)
    assert packed.bits == max(form.get("bits", 4), 4)
    assert (packed.order is not None) == (form.get("shuffled", False) and packed.size < 128)


@pytest.mark.parametrize(("inputs", "group", "size"), [(256, 256, 128), (192, -1, 64), (96, 48, 16), (96, -1, 32)])
def test_wide_groups_are_cut_into_blocks_that_the_operator_takes(
    inputs: int, group: int, size: int, tmp_path: Path
) -> None:
    layer = pack(8, inputs, group=group)
    tensors = {f"up.{part}": tensor for part, tensor in layer.tensors.items()}
    packed = layers(tmp_path, tensors, config("gptq", 4, group))["up.weight"]
    assert (packed.size, packed.scale.shape) == (size, (8, inputs // size))
    np.testing.assert_array_equal(packed.dequantise(), layer.weight)


def test_without_an_index_groups_follow_one_another(tmp_path: Path) -> None:
    layer = pack(8, 64)
    tensors = {f"up.{part}": tensor for part, tensor in layer.tensors.items() if part != "g_idx"}
    packed = layers(tmp_path, tensors, config("gptq"))["up.weight"]
    assert packed.order is None
    np.testing.assert_array_equal(packed.dequantise(), layer.weight)


def test_a_shuffled_layer_needs_its_index(tmp_path: Path) -> None:
    """Nothing else tells which group an input is of; with one group for all there is nothing to tell."""
    for group, refused in ((32, True), (-1, False)):
        layer = pack(8, 64, group=group)
        tensors = {f"up.{part}": tensor for part, tensor in layer.tensors.items() if part != "g_idx"}
        if refused:
            with pytest.raises(ModelError, match=r"^layer up lacks g_idx, expected it with desc_act$"):
                layers(tmp_path, tensors, config("gptq", 4, group, desc_act=True))
        else:
            got = layers(tmp_path, tensors, config("gptq", 4, group, desc_act=True))
            np.testing.assert_array_equal(got["up.weight"].dequantise(), layer.weight)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    tensors = {f"up.{part}": tensor for part, tensor in pack(8, 64).tensors.items()}
    tensors["up.scales"][1, 3] = np.nan
    got = layers(tmp_path, tensors, config("gptq"))
    with pytest.raises(ModelError, match=r"^tensor up.scales holds values that are not finite, expected numbers$"):
        got["up.weight"]


def test_a_checkpoint_without_packed_layers_has_none(tmp_path: Path) -> None:
    assert not layers(tmp_path, {"up.weight": np.ones((2, 2))}, {"quantization_config": None})


def packed_folder(source: Path, copy: Path, form: dict[str, Any], **more: Any) -> Path:
    """A copy of a folder with every projection packed."""
    weights = load_file(source / "model.safetensors")
    tensors: dict[str, Any] = {}
    for row, name in enumerate(sorted(name for name in weights if "_proj.weight" in name)):
        seed = 7 if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else row  # these share the order of inputs
        layer = pack(*weights[name].shape, **{"size": 0.01, **form}, seed=seed)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{part}": torch.from_numpy(tensor) for part, tensor in layer.tensors.items()}
        tensors[name] = None
    return rewrite(source, copy, {**settings(form), **more}, tensors)


def plain_folder(packed: Path, copy: Path) -> Path:
    """The same weights as fp32 tensors."""
    checkpoint = Checkpoint(packed)
    names = checkpoint.packed.shapes
    parts = dict.fromkeys(checkpoint.packed.parts)
    weights = {name: torch.from_numpy(checkpoint.tensor(name)) for name in names}
    return rewrite(packed, copy, {"quantization_config": None}, {**parts, **weights})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("packed") / "m", hidden_size=64, intermediate_size=96)


@pytest.mark.parametrize(
    "form",
    [FORMS["gptq"], FORMS["gptq-shuffled"], FORMS["gptq-8"], FORMS["awq"], FORMS["awq-one-group"]],
    ids=["gptq", "gptq-shuffled", "gptq-8", "awq", "awq-one-group"],
)
def test_a_whole_model(form: dict[str, Any], source: Path, tmp_path: Path) -> None:
    """fp32 computes with the packed weights exactly; int4 keeps them, so it only adds the rounding of activations."""
    packed = packed_folder(source, tmp_path / "packed", form)
    plain = plain_folder(packed, tmp_path / "plain")
    reference = open_folder(plain, ENGINE, taps=(1,), last_hidden=False)
    tokens = [3, 9, 4, 4, 17]
    expected = np.stack(plain_logits(reference, tokens))
    assert np.abs(expected).max() > 0.1
    for precision, atol in (("fp32", 1e-4), ("int4", 0.05 * np.abs(expected).max())):
        bundle = export(packed, tmp_path / precision, precision, taps=(1,))
        got = np.stack(plain_logits(open_bundle(bundle, ENGINE), tokens))
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_int8_rounds_the_packed_weights_anew(source: Path, tmp_path: Path) -> None:
    packed = packed_folder(source, tmp_path / "packed", FORMS["awq"])
    bundle = export(packed, tmp_path / "int8", "int8", taps=(1,))
    ours, reference = open_pair(plain_folder(packed, tmp_path / "plain"), bundle)
    expected = np.stack(plain_logits(reference, [3, 9, 4]))
    got = np.stack(plain_logits(ours, [3, 9, 4]))
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_what_a_checkpoint_counts(source: Path, tmp_path: Path) -> None:
    packed, plain = Checkpoint(packed_folder(source, tmp_path / "packed", FORMS["gptq"])), Checkpoint(source)
    assert packed.weights == plain.weights
    assert [file.name for file in packed.files] == ["model.safetensors"]
    assert "model.layers.0.mlp.up_proj.weight" in packed
    assert "model.layers.0.mlp.up_proj.qweight" not in packed
    assert not plain.packed


def test_biases_that_older_files_store_for_nothing(source: Path, tmp_path: Path) -> None:
    packed = packed_folder(source, tmp_path / "packed", FORMS["gptq"])
    zero = {"model.layers.0.mlp.up_proj.bias": torch.zeros(96, dtype=torch.float16)}
    checkpoint = Checkpoint(rewrite(packed, tmp_path / "zero", {}, zero))
    assert "model.layers.0.mlp.up_proj.bias" not in checkpoint
    one = {"model.layers.0.mlp.up_proj.bias": torch.ones(96, dtype=torch.float16)}
    with pytest.raises(ModelError, match=r"has model.layers.0.mlp.up_proj.bias \[96\] that nothing uses$"):
        Checkpoint(rewrite(packed, tmp_path / "one", {}, one))


def test_other_engines_go_on_refusing(source: Path, tmp_path: Path) -> None:
    packed = packed_folder(source, tmp_path / "packed", FORMS["gptq"])
    with pytest.raises(UnsupportedModelError, match=r"^quantised safetensors are not supported, expected fp32, bf16"):
        open_folder(packed, ENGINE, taps=(1,), last_hidden=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quantisation method 'compressed-tensors' is not supported, expected"),
        (
            {"quant_method": "bitsandbytes"},
            "quantisation method 'bitsandbytes' is not supported, expected one of gptq,",
        ),
        ({"bits": 4}, "quantisation method None is not supported, expected one of gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits is not supported, expected 2, 4, 8"),
        ({"quant_method": "awq", "bits": 8}, "awq of 8 bits is not supported, expected 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "gptq groups of 24 are not supported, expected a mult"),
        ({"quant_method": "gptq", "bits": 4, "group_size": None}, "gptq groups of None are not supported, expected a"),
        ("gptq", "quantization_config 'gptq' is not supported, expected an object"),
        (["gptq"], "quantization_config ['gptq'] is not supported, expected an object"),
        ({"quant_method": "gptq", "bits": 4.0}, "gptq of 4.0 bits is not supported, expected 2, 4, 8"),
        ({"quant_method": "awq", "bits": [4]}, "awq of [4] bits is not supported, expected 4"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "gptq format 'marlin' is not supported, expected gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"},
            "gptq pack_dtype 'int16' is not supported, expected int32",
        ),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "awq version 'gemv' is not supported, expected gemm",
        ),
    ],
)
def test_what_is_not_supported(options: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match="^" + re.escape(message)):
        read_scheme({"quantization_config": options})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("up.scales"), ModelError, "layer up lacks scales, expected qweight, qzeros, scales"),
        (
            lambda t: t.update({"up.qzeros": t["up.qzeros"][:1]}),
            ModelError,
            "tensor up.qzeros has shape [1, 3], expected [2, 3]",
        ),
        (
            lambda t: t.update({"up.scales": t["up.scales"].T.copy()}),
            ModelError,
            "tensor up.scales has shape [24, 2], expected [2, 24]",
        ),
        (
            lambda t: t.update({"up.qweight": t["up.qweight"][:, :20].copy()}),
            ModelError,
            "layer up has 20 outputs, expected a multiple of 8",
        ),
        (
            lambda t: t.update({"up.qweight": t["up.qweight"].reshape(-1)}),
            ModelError,
            "tensor up.qweight has shape [192], expected two dimensions",
        ),
        (
            lambda t: t.update({"up.g_idx": np.minimum(t["up.g_idx"], 0)}),
            ModelError,
            "tensor up.g_idx fills groups unevenly, expected 32 inputs in each of 2",
        ),
        (
            lambda t: t.update({"up.qweight": t["up.qweight"].astype(np.int64)}),
            UnsupportedModelError,
            "tensor up.qweight has type I64, expected I32",
        ),
        (
            lambda t: t.update({"up.qweight": t["up.qweight"][:6]}),
            UnsupportedModelError,
            "layer up has 48 inputs, expected a multiple of its 32",
        ),
        (
            lambda t: [t.update({name.replace("up", "a.weight"): t.pop(name)}) for name in list(t) if "qw" in name],
            ModelError,
            "layer a.weight lacks qzeros, scales, expected qweight, qzeros, scales",
        ),
        (
            lambda t: t.update({"up.weight": np.ones((24, 64), np.float32)}),
            ModelError,
            "layer up has both weight and qweight, expected one of them",
        ),
        (
            lambda t: t.update({"up.weight": t.pop("up.qweight")}),
            ModelError,
            "config says that weights are of gptq, but no tensor is named qweight",
        ),
    ],
)
def test_layers_that_are_not_whole(
    change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    tensors = {f"up.{part}": tensor for part, tensor in pack(24, 64).tensors.items()}
    change(tensors)
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        layers(tmp_path, tensors, config("gptq"))["up.weight"]


def test_one_group_of_an_odd_number_of_inputs(tmp_path: Path) -> None:
    layer = pack(8, 24, group=-1)
    tensors = {f"up.{part}": tensor for part, tensor in layer.tensors.items()}
    with pytest.raises(UnsupportedModelError, match=r"^layer up has groups of 24, expected a multiple of 16$"):
        layers(tmp_path, tensors, config("gptq", 4, -1))


def test_a_quantised_folder_without_weights_of_that_kind(source: Path, tmp_path: Path) -> None:
    copy = rewrite(source, tmp_path / "copy", config("awq"))
    with pytest.raises(ModelError, match=r"^config says that weights are of awq, but no tensor is named qweight$"):
        Checkpoint(copy)
    (copy / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text())}))
    assert not Checkpoint(copy).packed

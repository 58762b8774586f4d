"""Every family and precision against eager transformers: a prompt, trees, commits, on tiny random models.

`pytest -s tests/test_families.py` prints the errors that docs/targets.md lists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_families import CASES, CONTEXT, ENGINE, TAPS, VOCAB, WINDOW, compare, plain, write_family
from tiny_model import export, open_pair, rewrite
from torch_helpers import tokens

from starsd.edge.target_onnx import open_bundle
from starsd.edge.target_torch import open_folder
from starsd.export.check import Runner
from starsd.export.quantise import blocks_of
from starsd.shared import manifest, tree
from starsd.shared.errors import BundleError, UnsupportedModelError

# what may be lost: fp32 differs in the order of its sums, fp16 by 2**-11 a rounding, int8 by its weights; int4 is
# compared with weights that lie on its grid, so what remains is the rounding of activations
SHARES = {"fp32": 5e-6, "fp16": 5e-3, "int8": 0.08, "int4": 0.05}
GEMMA = [case for case in CASES if case.startswith("gemma")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {case: write_family(place / str(i) / "m", case) for i, case in enumerate(CASES)}


def on_the_grid(folder: Path, copy: Path) -> Path:
    """A copy whose matrices are rounded to 4 bits already, the embedding and the LM head to 8."""
    changed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2:
            bits = 8 if name.startswith(("lm_head", "model.embed")) else 4
            changed[name] = torch.from_numpy(np.ascontiguousarray(blocks_of(tensor.numpy(), bits).dequantise()))
    return rewrite(folder, copy, {}, changed)


@pytest.mark.parametrize("precision", SHARES)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, precision: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders[case]
    if precision == "int4":
        source = on_the_grid(source, tmp_path / "m")
    errors = compare(source, export(source, tmp_path / "b", precision, taps=TAPS, last_hidden=True))
    print(f"{case} | ort | {precision} | {' | '.join(f'{error:.1e}' for error in errors)}")
    assert max(errors.logits_share, errors.features_share) < SHARES[precision]
    if precision == "fp32":
        assert max(errors.logits, errors.features) < 1e-4
    else:
        assert errors.logits_share > 1e-4  # it is not fp32 under another name


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("qwen2, windows in upper layers", {"use_sliding_window": False}),
        ("qwen2, windows in upper layers", {"layer_types": None, "max_window_layers": 6}),
        ("qwen3, windows by name", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 64}),
        ("gemma2", {"layer_types": ["full_attention"] * 7}),
        ("gemma3", {"sliding_window": 2 * WINDOW}),
        ("gemma3, capped", {"final_logit_softcapping": 40.0}),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}}),
    ],
)
def test_options_are_read_and_matter(
    case: str, config: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The same weights under another config: another model, for transformers and for the engine alike."""
    if "layer_types" not in json.loads((folders[case] / "config.json").read_text()):
        config = {name: value for name, value in config.items() if name != "layer_types"}
    other = rewrite(folders[case], tmp_path / "m", {"layer_types": None, **config})
    ids = tokens(100, VOCAB)
    assert np.abs(plain(other, ids, TAPS)[0] - plain(folders[case], ids, TAPS)[0]).max() > 1e-2
    errors = compare(other, export(other, tmp_path / "b", taps=TAPS, last_hidden=True))
    assert max(errors.logits, errors.features) < 1e-4


def test_the_first_configs_of_gemma3(folders: dict[str, Path], tmp_path: Path) -> None:
    """Released before configs named the kind of each layer and had a rope for each."""
    written = {"sliding_window_pattern": 3, "rope_theta": 50_000.0, "rope_local_base_freq": 300.0}
    written["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    source = rewrite(folders["gemma3"], tmp_path / "m", {})
    raw = json.loads((source / "config.json").read_text())
    kept = {name: raw[name] for name in raw if name not in ("layer_types", "rope_parameters")}
    (source / "config.json").write_text(json.dumps(kept | written))
    errors = compare(source, export(source, tmp_path / "b", taps=TAPS, last_hidden=True))
    assert max(errors.logits, errors.features) < 1e-4
    ids = tokens(100, VOCAB)
    assert np.abs(plain(source, ids, TAPS)[0] - plain(folders["gemma3"], ids, TAPS)[0]).max() > 1e-2


def test_the_embedding_scale_is_rounded_as_it_was_trained(tmp_path: Path) -> None:
    """sqrt(96) = 9.798, in the bf16 of the weights 9.8125: what a bf16 model computes, in fp32 from there on."""
    source = write_family(tmp_path / "m", "gemma3", dtype=torch.bfloat16, hidden_size=96, num_attention_heads=4)
    stored = {"embed_tokens": load_file(source / "model.safetensors")["model.embed_tokens.weight"]}
    bundle = export(source, tmp_path / "b", taps=(0,))
    ids = tokens(20, VOCAB)
    features = open_bundle(bundle, ENGINE).prefill(ids)
    np.testing.assert_array_equal(features, stored["embed_tokens"].float().numpy()[ids] * np.float32(9.8125))


def test_a_stream_beyond_float16(folders: dict[str, Path], tmp_path: Path) -> None:
    """Gemma's grows past 65,504; in fp16 it is kept, with its norms, in float32."""
    tensors = {f"model.layers.{i}.post_feedforward_layernorm.weight": torch.full((64,), 4e4) for i in (1, 3)}
    source = rewrite(folders["gemma3"], tmp_path / "m", {}, tensors)
    assert np.abs(plain(source, tokens(40, VOCAB), TAPS)[1]).max() > 1e5
    errors = compare(source, export(source, tmp_path / "b", "fp16", taps=TAPS, last_hidden=True))
    assert max(errors.logits_share, errors.features_share) < SHARES["fp16"]


@pytest.mark.parametrize("case", ["mistral", "gemma3"])
def test_a_window_as_long_as_the_context_is_none(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for context, window in ((WINDOW, 0), (WINDOW + 1, WINDOW), (CONTEXT, WINDOW)):
        bundle = export(folders[case], tmp_path / str(context), context=context)
        shape = manifest.read(bundle).shape
        assert (shape.context, shape.window) == (context, window)
        ids = tokens(context - 1, VOCAB)
        target = open_bundle(bundle, ENGINE)
        target.prefill(ids)
        got = target.score([7], [-1])[0]
        np.testing.assert_allclose(got, plain(folders[case], [*ids, 7], TAPS)[0][-1], atol=1e-4)


def test_a_graph_with_another_window_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    bundles = {case: export(folders[case], tmp_path / case) for case in ("mistral", "llama")}
    for case, window in (("mistral", 0), ("llama", WINDOW)):
        made = manifest.read(bundles[case])
        shape = msgspec.structs.replace(made.shape, window=window)
        manifest.write(msgspec.structs.replace(made, shape=shape), bundles[case])
        says = rf"has a window {window == 0}, its manifest says {window > 0}$"
        with pytest.raises(BundleError, match=says):
            open_bundle(bundles[case], ENGINE)


@pytest.mark.parametrize("case", ["mistral", "gemma3", "qwen3, windows by name"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_trunk_is_plain_decoding(case: str, precision: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """To the last bit, with windows as without."""
    target = open_bundle(export(folders[case], tmp_path / "b", precision), ENGINE)
    ids, drafted = tokens(60, VOCAB), tokens(6, VOCAB, seed=4)
    target.prefill(ids)
    logits = target.score([*drafted, 9, 9, 9], [*tree.chain(6), 0, 2, 3])
    for row, token in enumerate(drafted):
        np.testing.assert_array_equal(target.score([token], [-1])[0], logits[row])
        target.commit([0])
    assert target.noise == 0


@pytest.mark.parametrize("case", ["mistral", "gemma3"])
def test_quality_is_measured_with_the_window(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(folders[case], tmp_path / "b")
    ids = tokens(3 * WINDOW, VOCAB)
    runner = Runner(bundle, manifest.read(bundle).shape, 100)
    runner.run(ids[:50], 0)
    logits = runner.run(ids[50:], 50)["logits"]
    np.testing.assert_allclose(logits, plain(folders[case], ids, TAPS)[0][50:], atol=1e-4)


def test_the_reference_computes_what_is_like_llama(folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(folders["qwen2"], tmp_path / "b", taps=TAPS)
    target, reference = open_pair(folders["qwen2"], bundle)
    ids = tokens(30, VOCAB)
    np.testing.assert_allclose(reference.prefill(ids), target.prefill(ids), atol=1e-4)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mistral", "^the torch reference computes no mistral with a window, expected a model like Llama$"),
        ("qwen3", "^the torch reference computes no qwen3 with norms of heads, expected a model like Llama$"),
        (
            "gemma2",
            "^the torch reference computes no gemma2 with norms behind layers, a window, activation gelu_tanh, "
            "a scaled embedding, another attention scale, soft caps, expected a model like Llama$",
        ),
    ],
)
def test_the_reference_refuses_the_rest(case: str, message: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_folder(folders[case], ENGINE)

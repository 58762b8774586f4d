"""Every published layout and every trap seen in one, against a float64 head that shares no code with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_builder import (
    VOCAB,
    base_config,
    compare,
    random_tensors,
    reference,
    rows,
    speculators_config,
    write_head,
)
from safetensors.torch import load_file, save_file
from torch_helpers import ROPES, tiny_llama

from starsd.server.drafter import DynamicTree
from starsd.server.drafter_eagle import EagleDrafter, open_drafter
from starsd.server.eagle_heads import load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.shared.errors import ModelError, UnsupportedModelError, UsageError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers, 32 wide, 96 ids."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


def check(
    tmp_path: Path,
    target: Path,
    config: dict[str, Any],
    tensors: Tensors,
    *,
    midlayer: bool = True,
    file: str = "",
    head_dim: int = 8,
    **flags: Any,
) -> EagleDrafter:
    """Load the head, compare its trees with the reference's, and hand the drafter back."""
    write_head(tmp_path / "head", config, tensors, midlayer=midlayer, file=file)
    drafter = open_drafter(str(tmp_path / "head"), str(target))
    layer = config.get("transformer_layer_config", config)
    oracle = reference(tensors, layer, load_file(target / "model.safetensors"), head_dim, **flags)
    compare(drafter.open(), oracle, drafter.features.width)
    return drafter


# ---- layouts


@pytest.mark.parametrize("bias", [None, True, False])
@pytest.mark.parametrize("file", ["", "pytorch_model.bin"])
def test_eagle1(tmp_path: Path, target: Path, bias: bool | None, file: str) -> None:
    """`fc.bias` is there unless the config says otherwise; embeddings and LM head are the target's."""
    config = base_config() if bias is None else base_config(bias=bias)
    tensors = random_tensors(eagle3=False, fc_bias=bias is not False)
    drafter = check(tmp_path, target, config, tensors, midlayer=False, file=file, eagle3=False)
    assert (drafter.features.taps, drafter.features.last_hidden) == ((), True)


def test_eagle1_of_a_tied_target(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    tensors = random_tensors(eagle3=False, fc_bias=True)
    write_head(tmp_path / "head", base_config(), tensors, midlayer=False)
    stored = load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    drafter = open_drafter(str(tmp_path / "head"), str(tmp_path / "tied"))
    compare(drafter.open(), reference(tensors, base_config(), stored, eagle3=False), 32)


@pytest.mark.parametrize("draft_vocab", [48, VOCAB])
@pytest.mark.parametrize("embed", [False, True])
def test_eagle3(tmp_path: Path, target: Path, draft_vocab: int, embed: bool) -> None:
    tensors = random_tensors(draft_vocab=draft_vocab, embed=embed)
    assert ("d2t" in tensors) == (draft_vocab != VOCAB)
    drafter = check(tmp_path, target, base_config(draft_vocab_size=draft_vocab, bias=True), tensors)
    assert drafter.features.taps == (2, 3, 4)
    assert drafter.warnings == ()


def test_specforge_counts_layer_outputs(tmp_path: Path, target: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    config = base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=48, eagle_config=ids)
    drafter = check(tmp_path, target, config, random_tensors())
    assert drafter.layer.spec.layout == "SpecForge"
    assert drafter.features.taps == (2, 3, 4)


@pytest.mark.parametrize("taps", [[3], [1, 5], [2, 3, 4], [0, 2, 4, 6, 7]])
def test_speculators_count_layer_inputs_and_take_any_number(tmp_path: Path, target: Path, taps: list[int]) -> None:
    config = speculators_config(eagle_aux_hidden_state_layer_ids=taps)
    drafter = check(tmp_path, target, config, random_tensors(taps=len(taps)), midlayer=False)
    assert drafter.layer.spec.layout == "speculators"
    assert drafter.features.taps == tuple(taps)


@pytest.mark.parametrize(
    ("stored", "tensors", "flags"),
    [
        ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        ({"norm_before_fc": True}, {"input_norm": True}, {"input_norm": True}),
        ({"fc_norm": True}, {"fc_norm": True}, {"fc_norm": 3}),
        ({"norm_output": True}, {}, {"norm_output": True}),
        (
            {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
            {"input_norm": True, "fc_norm": True},
            {"norm_before_residual": True, "input_norm": True, "fc_norm": 3, "norm_output": True},
        ),
    ],
)
def test_speculators_flags(
    tmp_path: Path, target: Path, stored: dict[str, bool], tensors: dict[str, bool], flags: dict[str, Any]
) -> None:
    check(tmp_path, target, speculators_config(**stored), random_tensors(**tensors), midlayer=False, **flags)


def test_speculators_omit_transformers_defaults(tmp_path: Path, target: Path) -> None:
    """Their configs hold only what differs: 32 heads are not written."""
    config = speculators_config(draft_vocab_size=48)
    tensors = random_tensors(heads=32, kv_heads=32, head_dim=4)
    layer = config["transformer_layer_config"]
    for name in ("num_attention_heads", "num_key_value_heads"):
        del layer[name]
    write_head(tmp_path / "head", config, tensors, midlayer=False)
    drafter = open_drafter(str(tmp_path / "head"), str(target))
    stored = load_file(target / "model.safetensors")
    compare(drafter.open(), reference(tensors, {**layer, "num_attention_heads": 32}, stored, 4), 96)


def test_speculators_sliding_window(tmp_path: Path, target: Path) -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 7}
    drafter = check(tmp_path, target, speculators_config(layer), random_tensors(), midlayer=False, window=7)
    assert drafter.layer.spec.window == 7


def test_sharded_heads_are_one_head(tmp_path: Path, target: Path) -> None:
    tensors = random_tensors()
    head = write_head(tmp_path / "head", base_config(draft_vocab_size=48), {})
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, head / file)
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    drafter = open_drafter(str(head), str(target))
    compare(drafter.open(), reference(tensors, base_config(), load_file(target / "model.safetensors")), 96)
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../x"}}))
    with pytest.raises(ModelError, match=r"names '../x', expected a file beside it"):
        load_head(str(head), str(target))


def test_prefixed_names_and_buffers_are_understood(tmp_path: Path, target: Path) -> None:
    tensors = random_tensors()
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    stored["verifier_norm.weight"] = torch.ones(32)
    write_head(tmp_path / "head", base_config(draft_vocab_size=48), stored, midlayer=False)
    drafter = open_drafter(str(tmp_path / "head"), str(target))
    compare(drafter.open(), reference(tensors, base_config(), load_file(target / "model.safetensors")), 96)


# ---- traps


def test_head_dim_comes_from_the_projections(tmp_path: Path, target: Path) -> None:
    """Four heads of 6 in a head 32 wide: neither hidden / heads nor anything in the config says 6."""
    check(tmp_path, target, base_config(draft_vocab_size=48), random_tensors(head_dim=6), head_dim=6)


def test_head_dim_of_the_config_is_only_a_cross_check(tmp_path: Path, target: Path) -> None:
    drafter = check(
        tmp_path, target, base_config(draft_vocab_size=48, head_dim=8), random_tensors(head_dim=12), head_dim=12
    )
    assert drafter.warnings == ("config says head_dim 8, its projections have 12: the projections are believed",)


@pytest.mark.parametrize("said", [{"qkv_bias": True}, {"attention_bias": True}, {}])
@pytest.mark.parametrize("eagle3", [False, True])
def test_qkv_bias(tmp_path: Path, target: Path, eagle3: bool, said: dict[str, bool]) -> None:
    tensors = random_tensors(eagle3=eagle3, fc_bias=not eagle3, qkv_bias=True)
    check(tmp_path, target, base_config(**said), tensors, midlayer=eagle3, eagle3=eagle3)


def test_query_and_key_norms(tmp_path: Path, target: Path) -> None:
    config = speculators_config({"model_type": "qwen3"})
    check(tmp_path, target, config, random_tensors(qk_norm=True), midlayer=False)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 500_000.0}, {"rope_theta": 500_000.0, "rope_scaling": ROPES["llama3"]}]
)
def test_rope_is_the_heads_own(tmp_path: Path, target: Path, rope: dict[str, Any]) -> None:
    if "rope_scaling" in rope:
        rope = {**rope, "rope_scaling": {"rope_type": "llama3", **rope["rope_scaling"]}}
    check(tmp_path, target, base_config(draft_vocab_size=48, **rope), random_tensors())


def test_a_wider_target_needs_the_heads_own_embeddings(tmp_path: Path, target: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 24, "heads": 4, "head_dim": 6}
    config = base_config(hidden_size=24, target_hidden_size=32, draft_vocab_size=48)
    check(tmp_path, target, config, random_tensors(embed=True, **sizes), head_dim=6)
    write_head(tmp_path / "bare", config, random_tensors(**sizes))
    with pytest.raises(ModelError, match=r"head is 24 wide and has no embed_tokens.weight, target's is 32 wide"):
        load_head(str(tmp_path / "bare"), str(target))


def test_missing_tap_ids_are_assumed_aloud(tmp_path: Path, target: Path) -> None:
    config = speculators_config()
    del config["eagle_aux_hidden_state_layer_ids"]
    drafter = check(tmp_path, target, config, random_tensors(), midlayer=False)
    assert drafter.features.taps == (2, 3, 4)
    assert drafter.warnings == ("config names no tapped layers, the inputs of layers [2, 3, 4] are assumed",)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"midlayer.hidden_norm.weight": None}, r"lacks layers.0.hidden_norm.weight \[32\]"),
        ({}, {"norm.weight": None, "fc.weight": None}, r"head lacks fc.weight"),
        ({}, {"fc.bias": torch.zeros(32)}, r"has fc.bias \[32\] that nothing uses"),
        ({}, {"midlayer.mlp.up_proj.weight": torch.zeros(41, 32)}, r"has shape \[41, 32\], expected \[40, 32\]"),
        ({}, {"d2t": None}, r"lacks d2t \[48\]"),
        ({}, {"d2t": torch.arange(48) + 60}, r"d2t maps to ids 60 to 154, expected 0 to 95"),
        ({}, {"d2t": -torch.arange(48)}, r"d2t maps 48 draft ids to 1 target ids"),
        ({}, {"t2d": torch.zeros(96, dtype=torch.bool)}, "d2t and t2d disagree"),
        ({"draft_vocab_size": 50}, {}, "lm_head has 48 rows, expected draft_vocab_size = 50"),
        ({"vocab_size": 100}, {}, "head has vocab_size 100, target has 96"),
        ({"target_hidden_size": 64}, {}, "head is for targets 64 wide, target is 32 wide"),
        ({}, {"fc.weight": torch.zeros(32, 64)}, r"fc takes 64 values \(2 taps of 32\), expected 3 taps \[2, 3, 4\]"),
        ({"num_attention_heads": 5}, {}, "q_proj has 32 rows, expected a multiple of num_attention_heads = 5"),
        ({"num_key_value_heads": 4}, {}, "k_proj has 16 rows, expected 4 heads of 8 = 32"),
        ({"num_hidden_layers": 2}, {}, "head has 2 layers, expected 1"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.zeros(40, 32)}, "head has 2 layers, expected 1"),
        ({"num_attention_heads": "four"}, {}, "head's config has a value of the wrong type"),
        ({"eagle_config": [1, 2, 3]}, {}, "head's config has a value of the wrong type"),
        ({"hidden_act": "gelu"}, {}, "activation 'gelu' is not supported"),
        ({"model_type": "mamba"}, {}, "head model type 'mamba' is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, {}, "rope type 'spiral' is not supported"),
        ({"qkv_bias": True}, {}, r"lacks layers.0.self_attn.q_proj.bias \[32\]"),
        ({"attention_bias": True}, {}, r"lacks layers.0.self_attn.q_proj.bias \[32\]"),
        ({"qkv_bias": False}, {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}, r"q_proj.bias \[32\] that nothing"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, {}, r"taps \[2, 3, 9\] do not exist in a target of 7 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state false is not supported"),
        ({"speculators_model_type": "dflash"}, {}, "speculators model type 'dflash' is not supported"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, target: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in random_tensors().items()}
    merged = {name: tensor for name, tensor in {**named, **tensors}.items() if tensor is not None}
    write_head(tmp_path / "head", base_config(**{"draft_vocab_size": 48, **config}), merged)
    with pytest.raises(ModelError, match=message):
        load_head(str(tmp_path / "head"), str(target))


def test_eagle1_without_its_bias_is_refused(tmp_path: Path, target: Path) -> None:
    write_head(tmp_path / "head", base_config(), random_tensors(eagle3=False), midlayer=False)
    with pytest.raises(ModelError, match=r"lacks fc.bias \[32\]"):
        load_head(str(tmp_path / "head"), str(target))


def test_eagle1_must_be_as_wide_as_its_target(tmp_path: Path, target: Path) -> None:
    """It predicts the target's own features and borrows its LM head."""
    tensors = random_tensors(eagle3=False, hidden=24, head_dim=6, fc_bias=True, embed=True)
    config = base_config(hidden_size=24, target_hidden_size=32)
    write_head(tmp_path / "head", config, tensors, midlayer=False)
    with pytest.raises(ModelError, match=r"head without lm_head.weight is 24 wide, expected the target's 32"):
        load_head(str(tmp_path / "head"), str(target))


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_code_never_runs(tmp_path: Path, target: Path) -> None:
    write_head(tmp_path / "head", base_config(), {"fc.weight": torch.zeros(1)})
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save({"fc.weight": Trap(tmp_path / "ran")}, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model.bin holds more than tensors"):
        load_head(str(tmp_path / "head"), str(target))
    assert not (tmp_path / "ran").exists()
    torch.save([torch.zeros(1)], tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="holds more than named tensors"):
        load_head(str(tmp_path / "head"), str(target))


def test_broken_files_are_refused(tmp_path: Path, target: Path) -> None:
    head = write_head(tmp_path / "head", base_config(draft_vocab_size=48), random_tensors())
    file = head / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(ModelError, match=rf"has {len(raw) - 1} bytes, expected {len(raw)}"):
        load_head(str(head), str(target))
    file.write_bytes(b"\xff" * 8)
    with pytest.raises(ModelError, match="is not whole"):
        load_head(str(head), str(target))
    file.unlink()
    with pytest.raises(ModelError, match="has neither"):
        load_head(str(head), str(target))


# ---- references, types, devices


def test_pulled_heads_are_found(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARSD_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="hf:org/head is not here yet: run starsd pull hf:org/head"):
        load_head("hf:org/head", str(target))
    write_head(tmp_path / "models" / "org--head", base_config(draft_vocab_size=48), random_tensors())
    assert load_head("hf:org/head", str(target)).spec.draft_vocab == 48


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_types_and_what_is_read_of_the_target(tmp_path: Path, target: Path, dtype: str) -> None:
    write_head(tmp_path / "head", base_config(), random_tensors(eagle3=False, fc_bias=True), midlayer=False)
    weights = load_head(str(tmp_path / "head"), str(target), dtype=dtype)
    assert {tensor.dtype for tensor in weights.tensors.values()} == {
        {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    }
    stored = load_file(target / "model.safetensors")
    assert torch.equal(
        weights.tensors["embed_tokens.weight"].float(),
        stored["model.embed_tokens.weight"].to(weights.tensors["embed_tokens.weight"].dtype).float(),
    )
    session = EagleDrafter(EagleLayer(weights)).open()
    session.extend(*rows(6, 32))
    tree = session.draft(DynamicTree(8, 3, 2))
    full = EagleDrafter(EagleLayer(load_head(str(tmp_path / "head"), str(target)))).open()
    full.extend(*rows(6, 32))
    np.testing.assert_allclose(tree.scores[1:3], full.draft(DynamicTree(8, 3, 2)).scores[1:3], atol=0.1)


def test_unknown_types_and_devices_are_refused(tmp_path: Path, target: Path) -> None:
    head = str(write_head(tmp_path / "head", base_config(draft_vocab_size=48), random_tensors()))
    with pytest.raises(UsageError, match="dtype 'fp8' is unknown, expected one of fp32, bf16, fp16"):
        load_head(head, str(target), dtype="fp8")
    with pytest.raises(UsageError, match="device 'moon' cannot be used"):
        load_head(head, str(target), device="moon")
    with pytest.raises(UsageError, match="nowhere"):
        load_head("nowhere", str(target))

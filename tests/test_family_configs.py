"""What a config means, family by family: transformers' defaults, layouts of released models, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import write_family
from tiny_model import rewrite
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from starsd.export.train_target import BatchTarget
from starsd.server.eagle_heads import load_head
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.families import MODEL_TYPES, read_architecture

SIZES = {"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 30, "vocab_size": 300}
INNER = {"intermediate_size": 512}
LOCAL = "sliding_attention"


def config(family: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **INNER, **more}


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_what_is_left_out_is_what_transformers_takes(family: str) -> None:
    theirs, ours = CONFIG_MAPPING[family](**SIZES, **INNER), read_architecture(config(family))
    shape = ours.shape
    assert shape.kv_heads == theirs.num_key_value_heads
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or 1024 // 32)
    assert shape.context == theirs.max_position_embeddings
    assert (ours.norm_epsilon, ours.tied_head) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.qkv_bias == (family == "qwen2" or bool(getattr(theirs, "attention_bias", False)))
    kinds = getattr(theirs, "layer_types", None) or [LOCAL if family == "mistral" else "full_attention"] * 30
    assert [ours.is_local(i) for i in range(30)] == [kind == LOCAL for kind in kinds]
    assert shape.window == (theirs.sliding_window if LOCAL in kinds else 0)
    scalar = getattr(theirs, "query_pre_attn_scalar", None) or shape.head_dim
    assert ours.attention_scale == scalar**-0.5
    assert ours.logit_cap == (getattr(theirs, "final_logit_softcapping", None) or 0)
    assert ours.attention_cap == (getattr(theirs, "attn_logit_softcapping", None) or 0)
    ropes = theirs.rope_parameters
    by_kind = [ropes[kind] for kind in ("full_attention", LOCAL)] if "full_attention" in ropes else [ropes, ropes]
    assert [ours.rope.theta, ours.local_rope.theta] == [rope["rope_theta"] for rope in by_kind]


_EIGHTH = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "more",
    [
        {"rope_theta": 500.0, "rope_local_base_freq": 77.0, "rope_scaling": _EIGHTH},
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 77.0,
            "rope_parameters": {"full_attention": _EIGHTH, LOCAL: {"rope_type": "default"}},
        },
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"full_attention": {**_EIGHTH, "rope_theta": 1e5}, LOCAL: {"rope_type": "default"}},
        },
    ],
)
def test_ropes_of_gemma_3_are_those_that_transformers_takes(more: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING["gemma3_text"](**SIZES, **INNER, **copy.deepcopy(more)).rope_parameters
    ours = read_architecture(config("gemma3_text", **more))
    for rope, kind in ((ours.rope, "full_attention"), (ours.local_rope, LOCAL)):
        expected = theirs[kind]["rope_type"], theirs[kind]["rope_theta"], theirs[kind].get("factor", 1.0)
        assert (rope.kind, rope.theta, rope.factor) == expected


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 32, "head_dim": 32}),
        ("mistral", {"sliding_window": None, "head_dim": None}, {"window": 0, "head_dim": 32}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 131072}, {"window": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 30}, {"window": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 100}, {"window": 100, "head_dim": 128}),
        ("gemma3_text", {"sliding_window": 512, "num_key_value_heads": 1}, {"window": 512, "kv_heads": 1}),
    ],
)
def test_sizes(family: str, more: dict[str, Any], expected: dict[str, int]) -> None:
    shape = read_architecture(config(family, **more)).shape
    assert {name: getattr(shape, name) for name in expected} == expected


def test_within_a_context() -> None:
    """A window that hides nothing is dropped; the rope of local layers stays theirs."""
    whole = read_architecture(config("gemma3_text", sliding_window=512))
    for context, window in ((513, 512), (512, 0)):
        cut = whole.within(context)
        assert (cut.shape.context, cut.shape.window) == (context, window)
        assert cut.is_local(0)
        assert not cut.is_local(5)
        assert cut.is_windowed(0) == (window > 0)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("gemma", {}, r"^model type 'gemma' is not supported, expected one of llama, mistral, qwen2, qwen3, gemma2, "),
        ("gemma3", {}, r"^model type 'gemma3' is not supported, "),
        ("gemma3_text", {"hidden_activation": "silu"}, "^activation 'silu' is not supported, expected gelu_pytorch_"),
        ("qwen3", {"hidden_act": "gelu"}, "^activation 'gelu' is not supported, expected silu$"),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0},
            "^gemma3_text with attn_logit_softcapping 50.0 is not supported, expected none$",
        ),
        ("llama", {"final_logit_softcapping": 30.0}, "^llama with final_logit_softcapping 30.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "^gemma3_text with use_bidirectional_attention True"),
        ("llama", {"layer_types": [LOCAL] * 30}, r"^llama with layer_types \['sliding_attention', .* not supported$"),
        ("mistral", {"layer_types": ["full_attention"] * 30}, r"^mistral with layer_types \['full_attention', "),
        ("qwen3", {"layer_types": ["full_attention"]}, r"^layer_types \['full_attention'\] are not supported, expect"),
        ("qwen3", {"layer_types": ["linear_attention"] * 30}, r"^layer_types .* expected 30 of sliding_attention and "),
        ("qwen3", {"rope_parameters": {"full_attention": {}}}, "^rope parameters per layer type .* not supported$"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "spiral"}}, "^rope type 'spiral' is not supported"),
    ],
)
def test_what_is_not_supported(family: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_architecture(config(family, **more))


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("qwen3", {"num_attention_heads": 6}, "^config has 6 heads for 32 of K/V, expected a multiple of them$"),
        ("gemma2", {"sliding_window": None}, "^config has sliding_window None, expected 1 to 16777216$"),
        ("mistral", {"sliding_window": 0}, "^config has sliding_window 0, expected 1 to 16777216$"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "^config has sliding_window 0, expected 1 to "),
        ("mistral", {"sliding_window": -4}, "^config has sliding_window -4, expected 1 to 16777216$"),
        ("gemma2", {"query_pre_attn_scalar": "x"}, "^config has query_pre_attn_scalar 'x', expected 1 to 16777216$"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "^config has final_logit_softcapping -1.0, expected a number ab"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "^config has sliding_window_pattern 0, expected 1 to "),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "^config has max_window_layers None, exp"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 9.0}}, "^rope_parameters are not by kind of layer, expect"),
        ("qwen3", {"layer_types": [LOCAL] * 30}, "^config has sliding_window None, expected 1 to 16777216$"),
        ("llama", {"hidden_size": 10**9}, "^config has a size out of range: hidden is 1000000000, expected 1 to "),
    ],
)
def test_what_cannot_be(family: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(config(family, **more))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_without_a_default(name: str) -> None:
    with pytest.raises(ModelError, match=f"^config lacks {name}$"):
        read_architecture({key: value for key, value in config("gemma3_text").items() if key != name})


def test_others_refuse_what_they_do_not_compute(tmp_path: Path) -> None:
    source = write_family(tmp_path / "m", "gemma2")
    with pytest.raises(UnsupportedModelError, match=r"^training computes no gemma2 with norms behind layers, "):
        BatchTarget(source, torch.device("cpu"), torch.float32)


def test_heads_that_borrow_what_a_target_caps(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden"
    gemma = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}
    folder = rewrite(golden / "targets" / "llama_gqa_l3", tmp_path / "m", gemma)
    message = "^a head cannot borrow lm_head.weight of a gemma3_text, which scales or caps: expected its own$"
    with pytest.raises(UnsupportedModelError, match=message):
        load_head(str(golden / "e1_gqa_nobias" / "head"), str(folder))

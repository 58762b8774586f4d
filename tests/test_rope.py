"""Frequencies and tables against transformers' own, for every rope type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_helpers import HALF, ROPES
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.rope import read_layer_rope, read_rope

VARIED = {
    **{kind: {"rope_type": kind, **values} for kind, values in ROPES.items()},
    "yarn with mscale": {
        "rope_type": "yarn",
        **ROPES["yarn"],
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
        "beta_fast": 16.0,
    },
    "yarn with attention_factor": {"rope_type": "yarn", **ROPES["yarn"], "attention_factor": 1.25},
}


YARN = {"rope_type": "yarn", "factor": 4.0}


def llama_config(parameters: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(parameters)
    )


@pytest.mark.parametrize("length", [100, 512, 9000])
@pytest.mark.parametrize("name", VARIED)
def test_tables_equal_transformers(name: str, length: int) -> None:
    config = llama_config(VARIED[name])
    module = LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.arange(length)[None])
    rope = read_rope(config.to_dict())
    np.testing.assert_allclose(rope.inverse_frequencies(length), module.inv_freq.numpy(), rtol=1.3e-7)
    ours = rope.tables(length)
    assert [table.dtype for table in ours] == [np.float32, np.float32]
    assert ours[0].shape == (length, HALF)
    # one ulp of an inverse frequency is all that may differ, hence the slack that grows with position
    slack = 2e-7 + 6e-8 * length
    np.testing.assert_allclose(ours[0], cos[0, :, :HALF].numpy(), atol=slack)
    np.testing.assert_allclose(ours[1], sin[0, :, :HALF].numpy(), atol=slack)


@pytest.mark.parametrize("name", [name for name in VARIED if name != "default"])
def test_every_scaling_differs_from_the_default(name: str) -> None:
    """The comparison above would pass with scaling ignored on both sides."""
    config = llama_config(VARIED[name]).to_dict()
    plain = llama_config({"rope_type": "default", "rope_theta": VARIED[name]["rope_theta"]}).to_dict()
    assert np.abs(read_rope(config).tables(9000)[0] - read_rope(plain).tables(9000)[0]).max() > 0.1


def test_older_configs_mean_the_same() -> None:
    new = read_rope(llama_config(VARIED["llama3"]).to_dict())
    scaling = {key: value for key, value in VARIED["llama3"].items() if key not in ("rope_theta", "rope_type")}
    old = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": "llama3", **scaling},
    }
    assert read_rope(old) == new


def test_base_is_ten_thousand_when_absent_and_head_dim_can_be_given() -> None:
    rope = read_rope({"hidden_size": 64, "num_attention_heads": 4}, head_dim=32)
    assert (rope.kind, rope.theta, rope.head_dim) == ("default", 10_000.0, 32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModelError, "rope type 'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ModelError, "lacks low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, ModelError, "lacks factor"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedModelError, "per layer type"),
        ({"head_dim": 15}, ModelError, "head_dim 15 is odd"),
        ({"rope_theta": "big"}, ModelError, "rope parameters cannot be read: could not convert string to float: 'big'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ModelError,
            "short_factor has 1 values, expected head_dim / 2 = 8",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": -1.0}}, ModelError, "^rope parameters cannot be read: math domain"),
        ({"rope_scaling": {**YARN, "beta_slow": float("nan")}}, ModelError, "^rope parameters cannot be read: cannot"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": -1}}, ModelError, "^rope parameters cannot be"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, ModelError, "^rope parameters cannot be read: .*division by zero"),
        (
            {"rope_scaling": {**YARN, "attention_factor": float("nan")}},
            ModelError,
            "^rope of type 'yarn' has parameters that give no numbers to turn by$",
        ),
    ],
)
def test_refusals(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_rope({"hidden_size": 64, "num_attention_heads": 4, **changes})


LOCAL, GLOBAL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (("default", 10_000.0), ("default", 1_000_000.0))),
        ({"rope_theta": 5e5, "rope_local_base_freq": 99.0}, (("default", 99.0), ("default", 5e5))),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (("default", 10_000.0), ("linear", 1_000_000.0))),
        ({"rope_parameters": {LOCAL: None}}, (("default", 10_000.0), ("default", 1_000_000.0))),
        ({"rope_parameters": {LOCAL: {"rope_theta": 7.0}}}, (("default", 7.0), ("default", 1_000_000.0))),
        (
            {"rope_theta": 3.0, "rope_parameters": {GLOBAL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}},
            (("default", 10_000.0), ("linear", 5.0)),
        ),
    ],
)
def test_local_and_global_layers(config: dict[str, object], expected: tuple[tuple[str, float], ...]) -> None:
    ropes = [read_layer_rope(config, 16, kind) for kind in (LOCAL, GLOBAL)]
    assert tuple((rope.kind, rope.theta) for rope in ropes) == expected
    assert {rope.head_dim for rope in ropes} == {16}


def test_a_scaling_of_global_layers_says_its_kind_as_transformers_reads_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^rope_scaling has type 'linear', expected it as rope_type$"):
        read_layer_rope({"rope_scaling": {"type": "linear", "factor": 8.0}}, 16, GLOBAL)
    with pytest.raises(ModelError, match=r"^rope_scaling is a list, expected an object$"):
        read_layer_rope({"rope_scaling": ["linear"]}, 16, GLOBAL)


@pytest.mark.parametrize("parameters", [{"rope_theta": 9.0}, [1]])
def test_parameters_that_are_not_by_kind_of_layer(parameters: object) -> None:
    with pytest.raises(ModelError, match=r"^rope_parameters are not by kind of layer, expected sliding_attention and"):
        read_layer_rope({"rope_parameters": parameters}, 16, GLOBAL)

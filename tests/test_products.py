"""Matrix products in every precision, and the layer's search for the likeliest tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from starsd.server.eagle_layer import EagleLayer
from starsd.server.products import Linear
from starsd.server.random_head import DEFAULT_SPEC, random_head
from starsd.shared.errors import UsageError


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("dtype", "int8", "tolerance"), [("float32", False, 1e-5), ("bfloat16", False, 0.15), ("float32", True, 0.12)]
)
def test_products(dtype: str, int8: bool, tolerance: float, biased: bool) -> None:
    kind = getattr(torch, dtype)
    x, weight, bias = normal(9, 64).to(kind), normal(24, 64, seed=2).to(kind), normal(24, seed=3).to(kind) * 5
    linear = Linear(weight, bias if biased else None, int8=int8)
    out = linear(x)
    assert out.dtype == kind
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert wanted.std() > 5
    error = (out.double() - wanted).abs()
    assert error.max() < 4 * tolerance
    assert error.mean() < tolerance


def test_int8_keeps_small_rows_beside_large_ones() -> None:
    """A scale for each row: what a neighbour holds changes not one bit, and zeros stay zeros."""
    x, linear = normal(6, 64), Linear(normal(24, 64, seed=2), int8=True)
    alone = [linear(x[row : row + 1])[0] for row in range(6)]
    x[3] *= 1e6
    x[5] = 0
    together = linear(x)
    for row in (0, 1, 2, 4):
        assert torch.equal(together[row], alone[row])
    assert not together[5].any()


def test_int8_shows_what_is_not_a_number() -> None:
    x = normal(3, 64)
    x[1, 7] = torch.nan
    out = Linear(normal(24, 64, seed=2), int8=True)(x)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("vocab", [2048, 2000])
def test_the_likeliest_tokens_are_found_by_blocks_and_without(vocab: int) -> None:
    """2048 ids are searched by blocks of 64, 2000 are not a multiple and are sorted whole."""
    spec = replace(DEFAULT_SPEC, hidden=32, target_hidden=32, inner=40, heads=4, kv_heads=2, head_dim=8)
    layer = EagleLayer(random_head(replace(spec, vocab=4096, draft_vocab=vocab)))
    output = normal(7, 32)
    ids, steps = layer.best(output, 10)
    normed = output / output.square().mean(-1, keepdim=True).add(spec.eps).sqrt()
    expected = layer._linears["lm_head"](normed).log_softmax(-1).topk(10)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(steps, expected.values, atol=2e-6, rtol=0)


def test_random_heads_name_unknown_types() -> None:
    with pytest.raises(UsageError, match="dtype 'int4' is unknown, expected one of fp32, bf16, fp16, int8"):
        random_head(dtype="int4")

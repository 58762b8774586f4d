"""A head of random weights, for measuring time without a trained one. What it drafts means nothing."""

from __future__ import annotations

import torch

from starsd.server.eagle_heads import DTYPES, HeadWeights
from starsd.server.eagle_spec import HeadSpec
from starsd.shared.errors import UsageError
from starsd.shared.rope import read_rope

# the head of SmolLM2-135M: sizes of its target's layers, and a draft vocabulary of 8,192
DEFAULT_SPEC = HeadSpec(
    layout="EAGLE-3",
    eagle3=True,
    hidden=576,
    target_hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    inner=1536,
    vocab=49152,
    draft_vocab=8192,
    eps=1e-5,
    rope=read_rope({"rope_theta": 100_000.0, "max_position_embeddings": 8192}, 64),
    taps=(2, 15, 27),
    mapped=True,
)


def random_head(
    spec: HeadSpec = DEFAULT_SPEC, *, dtype: str = "fp32", device: str = "cpu", seed: int = 0
) -> HeadWeights:
    """Weights whose outputs keep the size of their inputs, so that trees branch as they do with a trained head."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown, expected one of {', '.join(DTYPES)}")
    draw = torch.Generator().manual_seed(seed)
    sizes = spec.expected_tensors() | {"embed_tokens.weight": (spec.vocab, spec.hidden)}
    sizes.setdefault("lm_head.weight", (spec.draft_vocab, spec.hidden))
    sizes.pop("d2t", None)
    tensors = {}
    for name, size in sizes.items():
        gain = len(size) == 1
        values = torch.ones(size) if gain else torch.randn(size, generator=draw) * size[-1] ** -0.5
        tensors[name] = values.to(device, DTYPES[dtype])
    tensors["lm_head.weight"] *= 2  # the likeliest of 8,192 tokens then has a few per cent, not a thousandth
    ids = torch.randperm(spec.vocab, generator=draw)[: spec.draft_vocab].sort().values
    return HeadWeights(spec, tensors, ids.to(device) if spec.mapped else None, dtype)

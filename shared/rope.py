"""Rotary position embeddings: what a config asks for, as inverse frequencies and cos/sin tables.

Formulas follow transformers' `modeling_rope_utils` (one function per `rope_type` there), which is what checkpoints are
trained against: default, linear, dynamic (NTK), yarn (arXiv 2309.00071), longrope (arXiv 2402.13753), llama3.

`dynamic` and `longrope` depend on how long the text is. That length is fixed once, for a bundle at export as its
context: were it to follow the text, a row's keys would turn under later rows and logits would depend on what else is in
the pass. Hence `tables(length)` is for a text of exactly `length` tokens, and equals transformers' forward over that
many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ModelError, UnsupportedModelError

Floats = NDArray[np.float32]

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DEFAULT_THETA = 10_000.0  # transformers' and EAGLE's when a config names none
LAYER_THETAS = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}  # transformers' for Gemma 3

MAX_CONTEXT = 1 << 24  # tokens; more is a mistake, and its tables would fill the memory

_KIND_ALIASES = {"su": "longrope"}  # what longrope was called at first
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class Rope:
    """One model's rotary embedding. Half-split layout: value i of a head turns with value i + head_dim / 2."""

    kind: str
    theta: float
    head_dim: int
    context: int  # max_position_embeddings
    original_context: int  # what the model was trained for before its context was stretched
    factor: float = 1.0
    attention_factor: float = 1.0  # both cos and sin are multiplied by it
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def inverse_frequencies(self, length: int = 0) -> Floats:
        """Radians per position for a text of `length` tokens, shape (head_dim / 2,).

        `length` matters to `dynamic` and `longrope` only; 0 means within the trained context.
        """
        with np.errstate(all="ignore"):  # `read_rope` looks at what comes out
            return _FREQUENCIES[self.kind](self, length)

    def tables(self, length: int) -> tuple[Floats, Floats]:
        """cos and sin of positions 0 … length - 1 times `attention_factor`, each of shape (length, head_dim / 2).

        The phase is a float32 product, as in transformers: at position 8,192 its rounding is 5e-4 radians, so a more
        exact one would move logits away from those that the model gives elsewhere.
        """
        phase = np.arange(length, dtype=np.float32)[:, None] * self.inverse_frequencies(length)[None, :]
        exact = phase.astype(np.float64)
        scale = np.float32(self.attention_factor)
        return np.cos(exact).astype(np.float32) * scale, np.sin(exact).astype(np.float32) * scale


def read_rope(config: Mapping[str, Any], head_dim: int | None = None) -> Rope:
    """The rotary embedding that a Hugging Face config describes, from whichever keys its transformers version wrote.

    `head_dim` overrides the config's (heads infer it from their projections). Raises UnsupportedModelError for an
    unknown `rope_type` and ModelError for missing or impossible parameters.
    """
    try:
        rope = _read_rope(config, head_dim or _head_dim(config))
        turning = [rope.inverse_frequencies(length) for length in (0, rope.context)]
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"rope parameters cannot be read: {error}") from error
    if not np.isfinite([*turning, np.full_like(turning[0], rope.attention_factor)]).all():
        raise ModelError(f"rope of type {rope.kind!r} has parameters that give no numbers to turn by")
    return rope


def read_layer_rope(config: Mapping[str, Any], head_dim: int, kind: str) -> Rope:
    """The rotary embedding of one kind of layers of a Gemma 3, `sliding_attention` or `full_attention`.

    Newer configs have `rope_parameters` for each kind. `rope_scaling` goes on top of those of the global layers; where
    they name no theta it is `rope_theta`, for local layers `rope_local_base_freq`. Raises what `read_rope` raises.
    """
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or not all(isinstance(p, Mapping | None) for p in parameters.values()):
        raise ModelError("rope_parameters are not by kind of layer, expected sliding_attention and full_attention")
    local = kind == "sliding_attention"
    raw = dict(parameters.get(kind) or {})
    if not local and (scaling := config.get("rope_scaling")):
        if not isinstance(scaling, Mapping):
            raise ModelError(f"rope_scaling is a {type(scaling).__name__}, expected an object")
        if "rope_type" not in scaling and scaling.get("type", "default") != "default":
            # releases of transformers differ in whether they go by it
            raise UnsupportedModelError(f"rope_scaling has type {scaling['type']!r:.80}, expected it as rope_type")
        raw |= scaling
    theta = raw.get("rope_theta") or config.get("rope_local_base_freq" if local else "rope_theta") or LAYER_THETAS[kind]
    return read_rope({**config, "rope_scaling": None, "rope_parameters": {**raw, "rope_theta": theta}}, head_dim)


def _read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModelError(f"rope parameters per layer type ({', '.join(raw)}) are not supported")
    name = raw.get("rope_type") or raw.get("type") or "default"
    kind = _KIND_ALIASES.get(name, name)
    if kind not in KINDS:
        raise UnsupportedModelError(f"rope type {name!r:.80} is not supported, expected one of {', '.join(KINDS)}")
    if missing := [key for key in _REQUIRED.get(kind, ()) if raw.get(key) is None]:
        raise ModelError(f"rope type {kind!r} lacks {', '.join(missing)}")
    partial = raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {partial!r:.80} is not supported, expected 1.0")
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
    context = int(config.get("max_position_embeddings") or 2048)
    original = int(
        config.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or context
    )
    factor = raw.get("factor")
    factor = float(context / original if factor is None else factor)
    rope = Rope(
        kind=kind,
        theta=float(raw.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
        head_dim=head_dim,
        context=context,
        original_context=original,
        factor=factor,
        attention_factor=_attention_factor(kind, raw, factor, original),
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        truncate=bool(raw.get("truncate", True)),
        short_factor=tuple(map(float, raw.get("short_factor") or ())),
        long_factor=tuple(map(float, raw.get("long_factor") or ())),
    )
    if not (rope.theta > 0 and rope.factor > 0 and 0 < context <= MAX_CONTEXT):
        got = f"rope_theta {rope.theta}, factor {factor} and a context of {context}"
        raise ModelError(f"rope has {got}, expected theta and factor above 0 and 1 to {MAX_CONTEXT} tokens")
    if kind == "longrope":
        for key, values in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            if len(values) != head_dim // 2:
                raise ModelError(f"rope {key} has {len(values)} values, expected head_dim / 2 = {head_dim // 2}")
    return rope


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    try:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    except KeyError as error:
        raise ModelError(f"config lacks {error.args[0]}") from error


def _attention_factor(kind: str, raw: Mapping[str, Any], factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if raw.get("attention_factor") is not None:
        return float(raw["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    mscale, all_dim = raw.get("mscale"), raw.get("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _wavelengths(theta: float, head_dim: int) -> Floats:
    """theta ** (2i / head_dim) rounded once to float32; float32 powers differ by an ulp between libraries."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _default(rope: Rope, length: int) -> Floats:
    return np.float32(1) / _wavelengths(rope.theta, rope.head_dim)


def _linear(rope: Rope, length: int) -> Floats:
    return _default(rope, length) / np.float32(rope.factor)


def _dynamic(rope: Rope, length: int) -> Floats:
    stretch = rope.factor * max(length, rope.context) / rope.context - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2))
    return np.float32(1) / _wavelengths(theta, rope.head_dim)


def _yarn(rope: Rope, length: int) -> Floats:
    def turning(rotations: float) -> float:  # the pair that makes this many rotations over the original context
        ratio = math.log(rope.original_context / (rotations * 2 * math.pi))
        return rope.head_dim * ratio / (2 * math.log(rope.theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    span = (high - low) or 0.001
    pairs = np.arange(rope.head_dim // 2, dtype=np.float32)
    keep = np.float32(1) - np.clip((pairs - np.float32(low)) / np.float32(span), 0, 1).astype(np.float32)
    wavelengths = _wavelengths(rope.theta, rope.head_dim)
    stretched = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    blended: Floats = stretched * (np.float32(1) - keep) + (np.float32(1) / wavelengths) * keep
    return blended


def _longrope(rope: Rope, length: int) -> Floats:
    factors = rope.long_factor if length > rope.original_context else rope.short_factor
    return np.float32(1) / (np.array(factors, np.float32) * _wavelengths(rope.theta, rope.head_dim))


def _llama3(rope: Rope, length: int) -> Floats:
    plain = _default(rope, length)
    factor, low, high = (np.float32(x) for x in (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    original = np.float32(rope.original_context)
    # torch divides a number by a tensor as number · (1 / tensor); the rounding is kept
    wavelengths = np.float32(2 * math.pi) * (np.float32(1) / plain)
    smooth = (original * (np.float32(1) / wavelengths) - low) / (high - low)
    blended = (np.float32(1) - smooth) * plain / factor + smooth * plain
    short, long = wavelengths < original / high, wavelengths > original / low
    return np.where(short, plain, np.where(long, plain / factor, blended))


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}

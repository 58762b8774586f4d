"""How much context fits into the memory that is available now: on a small device less than the model could have."""

from __future__ import annotations

import msgspec

from starsd.edge.telemetry_files import ROOT, Files
from starsd.edge.telemetry_system import memory
from starsd.shared.config import Engine
from starsd.shared.manifest import Manifest

WEIGHTS = 1.6  # bytes of memory for one of a bundle: int4 weights are kept as they came and arranged anew
RESERVE = 192 << 20  # bytes for libraries, activations, and others on the device
GROWING = 2  # a cache that grows is there twice for a moment
LEAST_CONTEXT = 256  # tokens; below, a model is of no use, so that this is tried whatever is available
STEP = 64  # tokens; contexts that are chosen here are multiples


def fitting(bundle: Manifest, engine: Engine, conversations: int, files: Files = ROOT) -> tuple[Engine, str]:
    """`engine` with a context of which one conversation can fill the whole while others begin, and why, for people.

    It is as asked, and "" the reason, where that fits or where this system does not tell.
    """
    known = memory(files)
    wanted = engine.max_context or bundle.shape.context
    if known is None or wanted > bundle.shape.context:  # the engine says what is wrong with that
        return engine, ""
    weights = int(WEIGHTS * sum(file.bytes for file in bundle.files.values()))
    row = row_bytes(bundle)

    def needed(context: int) -> int:
        begun = (conversations - 1) * min(engine.initial_context, context)
        return weights + RESERVE + row * (GROWING * context + begun)

    if needed(wanted) <= known.available:
        return engine, ""
    least = min(LEAST_CONTEXT, wanted)
    fits = (context for context in range(wanted // STEP * STEP, least, -STEP) if needed(context) <= known.available)
    context = next(fits, least)
    if context == wanted:
        return engine, ""
    reason = (
        f"context is {context} tokens instead of {wanted}: {known.available / 1e9:.2f} GB of memory are available, "
        f"expected {needed(wanted) / 1e9:.2f}: end other programs, or take a smaller model"
    )
    return msgspec.structs.replace(engine, max_context=context), reason


def row_bytes(bundle: Manifest) -> int:
    """Of a token's keys and values."""
    shape, cell = bundle.shape, 2 if bundle.precision == "fp16" else 4
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * cell

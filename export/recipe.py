"""Flavour and precision together: which spelling, which number types, and which form each linear layer takes.

This is the one place that knows which combinations there are. A combination is a function of a checkpoint's folder;
whatever is not in the table is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from starsd.export.checkpoint import Checkpoint
from starsd.export.flavour import Flavour
from starsd.export.flavour_decomposed import DecomposedFlavour, DecomposedFlavour21
from starsd.export.flavour_ort import OrtFlavour
from starsd.export.flavour_portable import PortableFlavour
from starsd.export.linear import Dense, GroupsOf32, Linear, Rows
from starsd.export.linear_plain import Channels, Groups
from starsd.export.rotate import RotatedCheckpoint
from starsd.shared.config import PRECISIONS
from starsd.shared.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """How each part is computed: in which spelling, activations in `dtype`, linear layers by their form.

    The residual stream and its norms are in `stream`: float32 where float16 would overflow. With `packed_embedding` a
    GGUF's 8-bit blocks stay as they are; TensorRT computes with no bytes, so its flavours have a table of `dtype`.
    """

    flavour: type[Flavour]
    dtype: Any
    body: Linear
    down: Linear
    head: Linear
    stream: Any
    packed_embedding: bool = True


Made = tuple[Checkpoint, Recipe]
_Form = Callable[[Checkpoint, Any], Linear]


def make(folder: Path, flavour: str, precision: str) -> Made:
    """The checkpoint in `folder`, in the basis that the precision wants, and its recipe.

    Raises UsageError for a combination that is not offered, and what `Checkpoint` raises.
    """
    check_offered(flavour, precision)
    return _MADE[flavour, precision](folder)


def check_offered(flavour: str, precision: str) -> None:
    """Raise UsageError unless bundles of this flavour and precision can be made."""
    if (flavour, precision) not in _MADE:
        offered = [p for p in PRECISIONS if (flavour, p) in _MADE]
        raise UsageError(f"flavour {flavour} has no {precision}, expected one of {', '.join(offered)}")


def _dense(flavour: type[Flavour], dtype: Any) -> Callable[[Path], Made]:
    return _alike(flavour, dtype, Dense, Dense, packed_embedding=flavour is OrtFlavour)


def _alike(
    flavour: type[Flavour], dtype: Any, body: _Form, head: _Form, *, packed_embedding: bool = False
) -> Callable[[Path], Made]:
    """The same form for all layers but the head."""

    def made(folder: Path) -> Made:
        checkpoint = Checkpoint(folder)
        form, last, stream = body(checkpoint, dtype), head(checkpoint, dtype), _stream(checkpoint, dtype)
        return checkpoint, Recipe(flavour, dtype, form, form, last, stream, packed_embedding)

    return made


def _ort_int4(folder: Path) -> Made:
    checkpoint = Checkpoint(folder)
    four = GroupsOf32(checkpoint, 4)
    return checkpoint, Recipe(OrtFlavour, np.float32, four, four, GroupsOf32(checkpoint, 8), np.float32)


def _ort_int8(folder: Path) -> Made:
    """Rounding a row with one scale needs a basis without outliers. Norms behind layers bind the stream to its own, so
    there a second int8 holds what the first left over, for every layer."""
    plain = Checkpoint(folder)
    double = plain.architecture.post_norms
    checkpoint = plain if double else RotatedCheckpoint(folder)
    body, down = Rows(checkpoint, double=double), Rows(checkpoint, double=True)
    head = Rows(checkpoint, like="logit_rows", double=double)
    return checkpoint, Recipe(OrtFlavour, np.float32, body, down, head, np.float32)


def _stream(checkpoint: Checkpoint, dtype: Any) -> Any:
    """Gemma's residual stream grows beyond what float16 holds."""
    return np.float32 if checkpoint.architecture.post_norms else dtype


_MADE: dict[tuple[str, str], Callable[[Path], Made]] = {
    ("ort", "fp32"): _dense(OrtFlavour, np.float32),
    ("ort", "fp16"): _dense(OrtFlavour, np.float16),
    ("ort", "int8"): _ort_int8,
    ("ort", "int4"): _ort_int4,
    ("portable", "fp32"): _dense(PortableFlavour, np.float32),
    ("portable", "fp16"): _dense(PortableFlavour, np.float16),
    ("portable", "int8"): _alike(PortableFlavour, np.float16, Channels, Channels),
    ("portable", "int4"): _alike(PortableFlavour, np.float16, Groups, Channels),
    ("decomposed", "fp32"): _dense(DecomposedFlavour, np.float32),
    ("decomposed", "fp16"): _dense(DecomposedFlavour, np.float16),
    ("decomposed", "int8"): _alike(DecomposedFlavour, np.float16, Channels, Channels),
    ("decomposed", "int4"): _alike(DecomposedFlavour21, np.float16, Groups, Channels),
}

"""A head in this process, that gets features as a deployment's server would.

Rows are kept as float16, then go through the head's projector (the file's default dtype) and the codec, and back. Codec
`none` leaves all of this out: the head gets what the target computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import numpy as np

from starsd.edge.projector import Projector
from starsd.server.drafter import Draft, DynamicTree, Floats, Ints, SlotLimits, chain
from starsd.shared.features import codec
from starsd.shared.home import parse_ref
from starsd.shared.messages import Race

if TYPE_CHECKING:
    from starsd.server.live_session import LiveSession

NO_CODEC = "none"
_LARGEST_HALF = float(np.finfo(np.float16).max)


class Drafting(Protocol):
    """What `decode` asks of a `DraftSession`."""

    def extend(self, features: Floats, next_tokens: Ints) -> None: ...

    def draft(self, shape: DynamicTree) -> Draft: ...


class LocalHead:
    """A head in this process, with what lies between it and a target. Raises what `load_head` does."""

    def __init__(self, head: str, model: str, codec_name: str, dtype: str, shapes: Sequence[DynamicTree]) -> None:
        import torch

        from starsd.server.batch import BatchDrafter
        from starsd.server.eagle_heads import load_head
        from starsd.server.eagle_layer import EagleLayer
        from starsd.server.projector import save_projector
        from starsd.server.selftest import self_test

        torch.set_num_threads(1)  # a few rows a pass: a second one waits for cores that the target's threads still hold
        self._codec = None if codec_name == NO_CODEC else codec(codec_name)
        weights = load_head(head, model, dtype=dtype)
        layer = EagleLayer(weights)
        self.features = layer.spec.features
        self.warnings = (*layer.spec.warnings, *self_test(layer, parse_ref(head).folder))
        self._project: Callable[[Floats], Floats] | None = None
        if self._codec is not None and layer.spec.eagle3:
            with TemporaryDirectory() as place:
                save_projector(weights, file := Path(place) / "projector.safetensors")
                self._project = Projector(file)
        entries = max(1, *(shape.depth * shape.top_k for shape in shapes))
        self.drafter = BatchDrafter(layer, SlotLimits(slots=1, entries=entries), chain(1))

    def open(self, race: Race | None = None) -> LocalSession:
        """A conversation whose answer is drawn so; one at a time."""
        live = self.drafter.open(projected=self._project is not None)
        live.draw(race)
        return LocalSession(self, live)

    def received(self, rows: Floats) -> Floats:
        """What the server makes of features (n, width) that the target computed."""
        if self._codec is None:
            return rows
        rows = np.clip(rows, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)
        sent = rows if self._project is None else self._project(rows)
        return self._codec.decode(self._codec.encode(sent), sent.shape[1])


class LocalSession:
    """`Drafting` on a session of the server's; close it to open the next."""

    def __init__(self, head: LocalHead, live: LiveSession) -> None:
        self._head, self._live = head, live
        self.close = live.close

    def extend(self, features: Floats, next_tokens: Ints) -> None:
        start = self._live.rows.count
        # a text's first token is in no row, so that any will do
        self._live.commit(next_tokens if self._live.base else np.append(0, next_tokens))
        self._live.feed(start, self._head.received(features))

    def draft(self, shape: DynamicTree) -> Draft:
        return self._head.drafter.trees([self._live], shape)[0]

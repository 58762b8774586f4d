"""A real head for a virtual star: what it drafts is computed, what its passes take is charged."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from starsd.edge.projector import Projector
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_star import ChargedDrafter
from starsd.server.limits import ServerLimits
from starsd.server.served import Head
from starsd.shared.messages import HeadInfo

if TYPE_CHECKING:
    from starsd.server.eagle_layer import EagleLayer


class DraftCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds of a pass: `base`, and `row` for each of its rows.

    The defaults are near what one core with int8 products takes for the default head (`starsd bench drafter`: a tree of
    60 nodes in six passes takes 12 ms).
    """

    base: float = 1.2
    row: float = 0.02

    def seconds(self, rows: int, sessions: int) -> float:
        return (self.base + self.row * rows) / 1e3


class VirtualHead:
    """A head loaded once, for any number of stars."""

    def __init__(self, head: str, model: str, fingerprint: str, dtype: str = "int8") -> None:
        from starsd.server.eagle_heads import load_head
        from starsd.server.eagle_layer import EagleLayer
        from starsd.server.projector import save_projector

        weights = load_head(head, model, dtype=dtype)
        self.layer: EagleLayer = EagleLayer(weights)
        self.projector, size = None, 0
        if self.layer.spec.eagle3:
            with TemporaryDirectory() as place:
                size = save_projector(weights, file := Path(place) / "projector.safetensors")
                self.projector = Projector(file)
        self.info = HeadInfo(fingerprint, "0" * 16, model, size)

    def on(self, clock: VirtualClock, limits: ServerLimits, cost: DraftCost) -> Head:
        """For a server of this clock."""
        from starsd.server.batch import BatchDrafter

        drafter = BatchDrafter(self.layer, limits.slot_limits, limits.tree)
        charged = ChargedDrafter(drafter, clock, cost.seconds)
        return Head(self.info, charged, self.layer.spec.vocab, self.layer.spec.eagle3)

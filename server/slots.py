"""Memory of all sessions, allocated once: a slot each of K/V and of layer outputs.

A slot's K/V lies in one run of columns, tree first and backwards, then the window of rows as a ring:

    column   0 … entries - 1                     entries … entries + window - 1
    holds    tree entry entries - 1 … 0          place 0 … window - 1

so that what a pass looks at, the entries and places in use, is one slice. Slots are zeroed when they are given back.
"""

from __future__ import annotations

import heapq

import torch

from starsd.server.drafter import SlotLimits
from starsd.server.eagle_layer import EagleLayer
from starsd.shared.errors import CapacityError


class SlotPool:
    """K/V (slots, kv_heads, entries + window, head_dim) and outputs (slots, entries + 3, hidden)."""

    def __init__(self, layer: EagleLayer, limits: SlotLimits) -> None:
        spec, self.limits = layer.spec, limits
        columns = limits.entries + limits.window

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(limits.slots, *shape, dtype=layer.dtype, device=layer.device)

        self.keys = zeros(spec.kv_heads, columns, spec.head_dim)
        self.values = zeros(spec.kv_heads, columns, spec.head_dim)
        # after the entries' latents, of the newest row that ran: its latent, what it was fed, its output
        self.hidden = zeros(limits.entries + 3, spec.hidden)
        self.latent, self.fed, self.output = range(limits.entries, limits.entries + 3)
        self._free = list(range(limits.slots))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.hidden))

    def acquire(self) -> int:
        """The lowest free slot, so that busy slots stay side by side. Raises CapacityError when none is free."""
        if not self._free:
            raise CapacityError(f"all {self.limits.slots} drafter slots are taken: close a session or raise the limit")
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        for tensor in (self.keys, self.values, self.hidden):
            tensor[slot].zero_()
        heapq.heappush(self._free, slot)

    def window(self, slots: list[int], entries: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (n, kv_heads, entries + places, head_dim) of these slots; no copy when they are consecutive."""
        columns = slice(self.limits.entries - entries, self.limits.entries + places)
        if slots == list(range(slots[0], slots[0] + len(slots))):
            rows = slice(slots[0], slots[0] + len(slots))
            return self.keys[rows, :, columns], self.values[rows, :, columns]
        index = torch.tensor(slots, device=self.keys.device)
        return self.keys[:, :, columns].index_select(0, index), self.values[:, :, columns].index_select(0, index)

    def write(self, slots: torch.Tensor, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows (n, kv_heads, head_dim) at these columns of these slots."""
        kv_heads, total, width = self.keys.shape[1:]
        heads = torch.arange(kv_heads, device=self.keys.device)
        # one row of a flat view each: several times faster than indexing two dimensions around a slice
        lines = ((slots[:, None] * kv_heads + heads) * total + columns[:, None]).flatten()
        self.keys.view(-1, width).index_copy_(0, lines, keys.reshape(-1, width))
        self.values.view(-1, width).index_copy_(0, lines, values.reshape(-1, width))

"""What the target said about every token, kept on disk so that nothing is computed twice: one file a quantity.

    tokens.bin     int32     (rows,)          the chats, end to end
    roles.bin      uint8     (rows,)          train_data.Role
    top_ids.bin    int32     (rows, top)      the target's likeliest next tokens behind this one, best first
    top_probs.bin  float16   (rows, top)      their probabilities at temperature 1
    taps.bin       bfloat16  (kept, width)    the hidden states that a drafter reads, of the first `kept` rows
    index.json     what counts: lengths of the chats, written last; what the files hold beyond it is cut off

Taps are most of it: 3 · 576 · 2 = 3,456 bytes a token for the default model (3.5 GB a million tokens) beside 197 for
all else, where a training step over that token costs about 0.3 GFLOP and the target's layers another 0.21. So keeping
them saves two fifths of the work of every epoch but the first; a budget bounds them, and chats beyond it are run
through the target again when their turn comes. bfloat16 is what the target computes in on machines that are fast at it,
so nothing is lost; float16 is as large and overflows where a model's residual stream has values beyond 65,504.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from starsd.export.staging import replace, storage_errors
from starsd.export.train_data import Chats
from starsd.shared.errors import UsageError

_INDEX = "index.json"


class _Index(msgspec.Struct):
    fingerprint: str
    width: int
    top: int
    lengths: list[int]
    kept: int = 0  # chats, from the first, whose taps are stored
    complete: bool = False  # no more chats will come


@dataclass(frozen=True)
class Rows:
    """Everything in the store as tensors; `taps` (kept, width) may be fewer rows than `top_ids` and `top_probs`."""

    chats: Chats
    kept: int
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    taps: torch.Tensor


@dataclass
class Store:
    """Chats and their taps in a folder. `fingerprint` names target and data: another's folder is refused."""

    folder: Path
    fingerprint: str
    width: int
    top: int
    budget: int  # bytes of taps
    _index: _Index = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._index = _Index(self.fingerprint, self.width, self.top, [])
        if (path := self.folder / _INDEX).is_file():
            try:
                self._index = msgspec.json.decode(path.read_bytes(), type=_Index)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path} cannot be read: {error}: delete {self.folder}") from error
        index = self._index
        if (index.fingerprint, index.width, index.top) != (self.fingerprint, self.width, self.top):
            raise UsageError(
                f"{self.folder} was made from another target, data or options "
                f"({index.fingerprint[:12]}, expected {self.fingerprint[:12]}): choose another --out or delete it"
            )
        for name, size in self._sizes().items():
            with storage_errors(self.folder), (self.folder / name).open("ab") as file:
                if file.tell() < size:
                    raise UsageError(
                        f"{self.folder / name} has {file.tell()} bytes, expected {size}: delete the folder"
                    )
                file.truncate(size)

    @property
    def chats(self) -> int:
        return len(self._index.lengths)

    @property
    def tokens(self) -> int:
        return sum(self._index.lengths)

    @property
    def complete(self) -> bool:
        return self._index.complete

    def append(
        self, tokens: torch.Tensor, roles: torch.Tensor, taps: torch.Tensor, top: tuple[torch.Tensor, ...]
    ) -> None:
        """Add one chat of n tokens: `roles` (n,), `taps` (n, width), `top` ids and probabilities (n, top)."""
        count = len(tokens)
        if taps.shape != (count, self.width) or any(part.shape != (count, self.top) for part in top):
            raise ValueError(f"taps {list(taps.shape)}, top {[list(p.shape) for p in top]} of {count} tokens")
        parts = {
            "tokens.bin": tokens.to(torch.int32),
            "roles.bin": roles.to(torch.uint8),
            "top_ids.bin": top[0].to(torch.int32),
            "top_probs.bin": top[1].to(torch.float16),
        }
        room = (self._rows(self._index.kept) + count) * self.width * 2 <= self.budget
        if room and self._index.kept == self.chats:
            parts["taps.bin"] = taps.to(torch.bfloat16)
            self._index.kept += 1
        for name, part in parts.items():
            with storage_errors(self.folder / name), (self.folder / name).open("ab") as file:
                file.write(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        self._index.lengths.append(count)

    def commit(self, *, complete: bool = False) -> None:
        """Make what was appended count, whatever happens afterwards."""
        self._index.complete = complete
        with storage_errors(self.folder):
            for name in self._sizes():
                with (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            replace(self.folder / _INDEX, msgspec.json.encode(self._index))

    def load(self) -> Rows:
        """All rows, mapped from disk: pages are read when they are used."""
        rows, kept = self.tokens, self._rows(self._index.kept)
        offsets = np.concatenate([[0], np.cumsum(self._index.lengths)]).astype(np.int64)
        tokens = self._map("tokens.bin", rows, torch.int32).numpy().astype(np.int64)
        roles = self._map("roles.bin", rows, torch.uint8).numpy()
        return Rows(
            Chats(tokens, roles, offsets),
            self._index.kept,
            self._map("top_ids.bin", rows * self.top, torch.int32).view(rows, self.top),
            self._map("top_probs.bin", rows * self.top, torch.float16).view(rows, self.top),
            self._map("taps.bin", kept * self.width, torch.bfloat16).view(kept, self.width),
        )

    def _rows(self, chats: int) -> int:
        return sum(self._index.lengths[:chats])

    def _sizes(self) -> dict[str, int]:
        rows = self.tokens
        return {
            "tokens.bin": 4 * rows,
            "roles.bin": rows,
            "top_ids.bin": 4 * rows * self.top,
            "top_probs.bin": 2 * rows * self.top,
            "taps.bin": 2 * self._rows(self._index.kept) * self.width,
        }

    def _map(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(self.folder / name), shared=False, size=count, dtype=dtype)

"""The small files of /proc and /sys, below any root: tests have trees of their own."""

from __future__ import annotations

import math
import os
from pathlib import Path

_MOST = 65_536  # bytes of a file
_DIGITS = 15


class Files:
    """Paths are given without the root's slash. What is not there, or cannot be read now, is None."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def find(self, pattern: str) -> list[str]:
        """Paths that match, in order."""
        try:
            return sorted(path.relative_to(self.root).as_posix() for path in self.root.glob(pattern))
        except OSError:
            return []

    def text(self, path: str) -> str | None:
        try:
            with open(self.root / path, "rb", buffering=0) as file:
                data = os.read(file.fileno(), _MOST)
        except OSError:  # a sensor that is off answers EAGAIN, ENODATA and others
            return None
        return data.decode("utf-8", "replace").strip("\0 \t\r\n")

    def number(self, path: str) -> float | None:
        """A finite one."""
        text = self.text(path)
        try:
            value = float(text or "")
        except ValueError:
            return None
        return value if math.isfinite(value) else None


def whole(text: str) -> int | None:
    """A count as Linux writes it, of at most 15 digits: bytes and kilobytes of any machine."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


ROOT = Files()  # this machine's

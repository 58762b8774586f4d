"""The small files of /proc and /sys, below any root: tests have trees of their own."""

from __future__ import annotations

import os
from pathlib import Path

_MOST = 65_536  # bytes of a file


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
        text = self.text(path)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None


ROOT = Files()  # this machine's

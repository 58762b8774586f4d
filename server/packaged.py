"""Heads that come with the package."""

from __future__ import annotations

from pathlib import Path

from starsd.shared.errors import UsageError
from starsd.shared.home import parse_ref

HEADS = Path(__file__).parent / "assets" / "heads"


def packaged_head(model: str) -> Path:
    """The folder of the head that is packaged for a model. Raises UsageError where there is none."""
    folder = HEADS / parse_ref(model).slug
    if not (folder / "config.json").is_file():
        raise UsageError(f"no head is packaged for {model}: name one as {model}=HEAD, a folder or hf:org/name")
    return folder

"""Where a model's phrasebook lies: beside its engine, below the home, or in the package."""

from __future__ import annotations

from pathlib import Path

from starsd import shared
from starsd.shared.home import home
from starsd.shared.phrases import Phrasebook, read_phrases

FILE_NAME = "phrases.npz"


def find_phrases(name: str, vocab: int, bundle: Path | None = None) -> Phrasebook | None:
    """The first there is, None where there is none. Raises ModelError when it is not whole or another model's."""
    packaged = Path(shared.__file__).parent / "assets" / "phrases" / f"{name}.npz"
    beside = [bundle / FILE_NAME] if bundle is not None else []
    for file in (*beside, home() / "phrases" / f"{name}.npz", packaged):
        if file.is_file():
            return read_phrases(file, vocab)
    return None

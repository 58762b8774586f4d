"""The device half: target engines, the decoding loop, sampling on the device, chat.

An app needs `Runtime` and what it takes and gives, which are here; docs/python.md shows them at work. They are imported
when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starsd.edge.answer import Outcome, Piece
    from starsd.edge.grammar import Grammar
    from starsd.edge.runtime import Drafting, Runtime, Status
    from starsd.shared.config import Engine, Limits, Sampling
    from starsd.shared.sampling import TokenLogprob

_PLACES = {
    "Drafting": "starsd.edge.runtime",
    "Engine": "starsd.shared.config",
    "Grammar": "starsd.edge.grammar",
    "Limits": "starsd.shared.config",
    "Outcome": "starsd.edge.answer",
    "Piece": "starsd.edge.answer",
    "Runtime": "starsd.edge.runtime",
    "Sampling": "starsd.shared.config",
    "Status": "starsd.edge.runtime",
    "TokenLogprob": "starsd.shared.sampling",
}

__all__ = [
    "Drafting",
    "Engine",
    "Grammar",
    "Limits",
    "Outcome",
    "Piece",
    "Runtime",
    "Sampling",
    "Status",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)

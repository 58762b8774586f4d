"""What the loop needs from a target engine, and how one is chosen.

The cache holds `length` committed rows. The newest committed token, the tip, has *not* been through the target: it is
row 0 of the next tree. So the life of an engine is

    prefill(all prompt tokens but the last) · score(tree from the tip) · commit(accepted rows, the root first) · score …

A pass leaves its rows beyond `length`, where nothing but `commit` looks; a second `score` simply overwrites them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from starsd.shared.config import Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.manifest import FeatureSpec, ModelShape

Floats = NDArray[np.float32]


class Target(Protocol):
    """One model's weights and one conversation's cache."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def features(self) -> FeatureSpec: ...

    @property
    def length(self) -> int:
        """Committed rows in the cache."""
        ...

    @property
    def context(self) -> int:
        """Most rows the cache can ever hold."""
        ...

    @property
    def noise(self) -> float:
        """Promise 2's ε: how far a logit of a trunk row was measured to be from plain decoding's. 0: equal bit for bit.

        The trunk are the leading rows of a pass that form a path from the root: they lie as plain decoding lays them.
        """
        ...

    @property
    def branch_noise(self) -> float:
        """The same for rows behind the trunk: other nodes lie between them and their ancestors."""
        ...

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Floats:
        """Run and commit `tokens`; features of these rows, shape (len(tokens), features.width).

        Raises ContextOverflowError when they do not fit.
        """
        ...

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        """Run a tree (row 0 the tip, parent -1) in one pass; logits of every node, shape (n, vocab).

        The committed cache is unchanged. Raises ContextOverflowError when the rows do not fit.
        """
        ...

    def commit(self, rows: Sequence[int]) -> Floats:
        """Keep these rows of the newest pass (a path from the root down); their features, shape (len(rows), width).

        Raises EngineError when no pass is open or the rows are not a path in it.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        ...

    def sibling(self) -> Target:
        """Another conversation's cache on the same weights. Siblings may be used at a time; their passes take turns."""
        ...

    def adopt(self, other: Target, length: int) -> None:
        """Hold a copy of the first `length` rows of a sibling's cache, and no others; nothing is computed.

        Raises EngineError when it has fewer, or is no sibling.
        """
        ...


# kind → (module, function making a Target from a bundle, extra that brings its libraries)
_KINDS: dict[str, tuple[str, str, str]] = {
    "onnx": ("starsd.edge.target_onnx", "open_bundle", "edge"),
    "tensorrt": ("starsd.edge.target_tensorrt", "open_bundle", "edge"),
    "torch": ("starsd.edge.target_torch", "open_folder", "server"),
}


def open_target(kind: str, folder: Path, config: Engine) -> Target:
    """Open the bundle (`onnx`, `tensorrt`) or Hugging Face folder (`torch`, the slow reference) in `folder`."""
    if kind not in _KINDS:
        raise UsageError(f"target engine {kind!r} is unknown, expected one of {', '.join(_KINDS)}")
    module, function, extra = _KINDS[kind]
    try:
        factory: Callable[[Path, Engine], Target] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or module, extra) from error
    target: Any = factory(folder, config)
    return target  # type: ignore[no-any-return]

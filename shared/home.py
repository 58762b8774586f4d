"""Where models and bundles live, and how a model is named.

A model reference is a name we pin (`smollm2-135m`), `hf:org/name`, or a local folder in Hugging Face layout, used in
place. Everything we write goes below `$STARSD_HOME` (default: `starsd` in the user's cache folder):

    models/<slug>/                          a Hugging Face folder
    bundles/<slug>/<flavour>-<precision>/   an exported target engine with its manifest
    partial/                                downloads under way; safe to delete
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from starsd.shared.errors import UsageError

PINNED_MODELS = ("smollm2-135m",)


def home() -> Path:
    """`$STARSD_HOME`, or `starsd` in the user's cache folder."""
    if configured := os.environ.get("STARSD_HOME"):
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "starsd"


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference; `folder` is where its Hugging Face layout is, or will be once pulled."""

    text: str
    slug: str
    folder: Path

    @property
    def is_local(self) -> bool:
        return self.text not in PINNED_MODELS and not self.text.startswith("hf:")

    def bundle(self, flavour: str, precision: str) -> Path:
        """Where the exported engine of this flavour and precision is, or will be."""
        return home() / "bundles" / self.slug / f"{flavour}-{precision}"


def parse_ref(text: str) -> ModelRef:
    """Parse a model reference. Raises UsageError when it is neither pinned, nor `hf:`, nor an existing folder."""
    if text in PINNED_MODELS:
        return ModelRef(text, text, home() / "models" / text)
    if text.startswith("hf:"):
        if not re.fullmatch(r"hf:[\w.-]+/[\w.-]+", text):
            raise UsageError(f"model reference {text!r} is malformed, expected hf:org/name")
        slug = text.removeprefix("hf:").replace("/", "--")
        return ModelRef(text, slug, home() / "models" / slug)
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"model {text!r} is unknown, expected one of {', '.join(PINNED_MODELS)}, hf:org/name or an existing folder"
        )
    folder = folder.resolve()
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return ModelRef(text, f"{folder.name}-{digest}", folder)

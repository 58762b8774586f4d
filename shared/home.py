"""Where models and bundles live, and how a model is named.

A model reference is a name we pin (`smollm2-135m`), `hf:org/name`, a local folder in Hugging Face layout, used in
place, or a local GGUF file, converted to such a folder. Everything we write goes below `$STARSD_HOME` (default:
`starsd` in the user's cache folder):

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
_LONGEST_STEM = 80  # characters of a file's name that ours begin with


def home() -> Path:
    """`$STARSD_HOME`, or `starsd` in the user's cache folder."""
    if configured := os.environ.get("STARSD_HOME"):
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "starsd"


@dataclass(frozen=True)
class ModelRef:
    """A parsed model reference; `folder` is where its Hugging Face layout is, or will be once pulled, from `gguf` where
    the reference is such a file."""

    text: str
    slug: str
    folder: Path
    gguf: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether `folder` is the user's own, used in place."""
        return self.gguf is None and self.text not in PINNED_MODELS and not self.text.startswith("hf:")

    def bundle(self, flavour: str, precision: str) -> Path:
        """Where the exported engine of this flavour and precision is, or will be."""
        return home() / "bundles" / self.slug / f"{flavour}-{precision}"


def parse_ref(text: str) -> ModelRef:
    """Parse a model reference. Raises UsageError when it is neither pinned, nor `hf:`, nor there on this machine."""
    if text in PINNED_MODELS:
        return ModelRef(text, text, home() / "models" / text)
    if text.startswith("hf:"):
        if not re.fullmatch(r"hf:[\w.-]+/[\w.-]+", text):
            raise UsageError(f"model reference {text!r} is malformed, expected hf:org/name")
        slug = text.removeprefix("hf:").replace("/", "--")
        return ModelRef(text, slug, home() / "models" / slug)
    path = Path(text).expanduser()
    is_gguf = path.suffix.lower() == ".gguf" and os.path.isfile(path)
    if not text or not (is_gguf or os.path.isdir(path)):  # unlike Path's own, these take any text for an answer
        known = ", ".join(PINNED_MODELS)
        raise UsageError(
            f"model {text!r:.200} is unknown, expected one of {known}, hf:org/name or an existing folder or GGUF file"
        )
    path = path.resolve()
    if not is_gguf:
        return ModelRef(text, f"{path.name}-{_digest(path)}", path)
    about = path.stat()  # a file that was replaced is another model
    stem = re.sub(r"[^\w.-]+", "-", path.stem)[:_LONGEST_STEM].strip("-.")
    slug = f"{stem}-{_digest(path, about.st_size, about.st_mtime_ns)}".lstrip("-")
    return ModelRef(text, slug, home() / "models" / slug, path)


def _digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()[:8]

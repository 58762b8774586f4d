"""Which target a head is for: the name by which an edge finds its drafter.

Weights, the meaning of each token id, and taps enter it; precision and flavour of an engine do not. It is taken from
the files that both sides have, and is the same whatever library wrote the tokenizer's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from starsd.shared.errors import ModelError
from starsd.shared.manifest import TOKENIZER_FILE, FeatureSpec, file_sha256
from starsd.shared.weights import tensor_index


def target_fingerprint(folder: Path, features: FeatureSpec, tokenizer: Path | None = None) -> str:
    """Of a model in Hugging Face layout; hexadecimal. Reads all its weights once.

    `tokenizer` is the file to read where it is not the folder's own tokenizer.json. Raises ModelError when weights or
    tokenizer are missing or cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted({entry.file for entry in tensor_index(folder).values()}):
        digest.update(file_sha256(file).encode())
    digest.update(msgspec.json.encode(_tokens(tokenizer or folder / TOKENIZER_FILE)))
    digest.update(msgspec.json.encode(features))
    return digest.hexdigest()


def _tokens(file: Path) -> list[tuple[int, str]]:
    """Id and text of every token, ascending."""
    if not file.is_file():
        raise ModelError(f"{file} is missing, expected the target's tokenizer: pull the model again")
    try:
        read = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        vocab = read["model"]["vocab"]
        listed = (
            enumerate(text for text, *_ in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
        )
        added = ((token["id"], token["content"]) for token in read.get("added_tokens") or ())
        return sorted(dict([*listed, *added]).items())
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error!r}") from error

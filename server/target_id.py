"""Which target a head is for: the fingerprint that the exporter writes into a manifest, from the same files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from tokenizers import Tokenizer

from starsd.shared.errors import ModelError
from starsd.shared.manifest import FeatureSpec, file_sha256
from starsd.shared.weights import tensor_index


def target_fingerprint(folder: Path, features: FeatureSpec) -> str:
    """Names weights, tokenizer and taps of a target in Hugging Face layout. Reads all its weights once.

    Raises ModelError when weights or tokenizer.json are missing.
    """
    digest = hashlib.sha256()
    for file in sorted({entry.file for entry in tensor_index(folder).values()}):
        digest.update(file_sha256(file).encode())
    digest.update(_tokenizer_sha256(folder / "tokenizer.json").encode())
    digest.update(msgspec.json.encode(features))
    return digest.hexdigest()


def _tokenizer_sha256(file: Path) -> str:
    """Of the tokenizer as a bundle has it: written anew by the same library."""
    if not file.is_file():
        raise ModelError(f"{file} is missing, expected the target's tokenizer: pull the model again")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{file} cannot be read: {error}") from error
    with TemporaryDirectory() as place:
        tokenizer.save(copy := f"{place}/tokenizer.json")
        return file_sha256(Path(copy))

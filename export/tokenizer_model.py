"""SentencePiece vocabularies (`tokenizer.model`, or inside a GGUF) as a `tokenizers` tokenizer.

Field numbers and meanings: sentencepiece_model.proto. GGUF's token types use the same numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from starsd.export.hf_folder import read_json
from starsd.shared.errors import MissingExtraError, ModelError, UnsupportedModelError

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
except ImportError as error:
    raise MissingExtraError("tokenizers", "export") from error

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Vocabulary:
    """What a SentencePiece model says of itself; the defaults are Llama's."""

    pieces: Sequence[Piece]
    unigram: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    bos: str | None = "<s>"
    eos: str | None = "</s>"
    add_bos: bool = True
    add_eos: bool = False
    legacy: bool = True  # a blank before the text after every special token, as Llama 1 and 2 were trained


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a SentencePiece vocabulary. Raises ModelError when the vocabulary contradicts itself."""
    pieces = vocabulary.pieces
    ids = {piece.text: row for row, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ModelError(f"vocabulary has {len(ids)} different pieces, expected {len(pieces)}")
    unknown = next((row for row, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    byte_fallback = any(piece.kind == BYTE for piece in pieces)
    if vocabulary.unigram:
        scores = [(piece.text, piece.score) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unknown, byte_fallback))
    else:
        tokenizer = Tokenizer(
            models.BPE(
                vocab=ids,
                merges=merges(pieces),
                unk_token=None if unknown is None else pieces[unknown].text,
                fuse_unk=True,
                byte_fallback=byte_fallback,
            )
        )
    _set_spaces(tokenizer, vocabulary)
    for piece in pieces:  # in the order of their ids
        if piece.kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=False)])
    _set_ends(tokenizer, vocabulary, ids)
    return tokenizer


def merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """The merge list that makes plain BPE do what SentencePiece's does: join the pair whose piece scores highest."""
    ids = {piece.text: row for row, piece in enumerate(pieces) if piece.kind == NORMAL}
    found = []
    for text, row in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                found.append((-pieces[row].score, row, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _set_spaces(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    steps: list[Any] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.add_dummy_prefix and not vocabulary.legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    else:
        if vocabulary.add_dummy_prefix:
            steps.append(normalizers.Prepend(_SPACE))
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_dummy_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)


def _set_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, ids: dict[str, int]) -> None:
    ends = ((vocabulary.add_bos, vocabulary.bos), (vocabulary.add_eos, vocabulary.eos))
    before, after = ([token] if wanted and token is not None else [] for wanted, token in ends)
    for token in before + after:
        if token not in ids:
            raise ModelError(f"vocabulary lacks {token!r}, expected it at the ends of a text")
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=None, special_tokens=[(token, ids[token]) for token in before + after]
        )


def read_model(path: Path, config: dict[str, Any] | None = None) -> Vocabulary:
    """The vocabulary in a `tokenizer.model`; `config` is the tokenizer_config.json beside it, which overrules."""
    try:
        messages: Any = importlib.import_module("google.protobuf.message")
        protos: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise MissingExtraError("sentencepiece with protobuf", "export") from error
    proto = protos.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except messages.DecodeError as error:
        raise ModelError(f"{path} cannot be read, expected a SentencePiece model: {error}") from error
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if not proto.pieces:
        raise ModelError(f"{path} has no pieces, expected a SentencePiece model")
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(f"{path} is of model type {trainer.model_type}, expected 1 (unigram) or 2 (BPE)")
    config = config or {}
    pieces = [Piece(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    legacy = config.get("legacy")
    return Vocabulary(
        pieces,
        unigram=trainer.model_type == _UNIGRAM,
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
        bos=_token_text(config.get("bos_token")) or _piece_at(pieces, trainer.bos_id),
        eos=_token_text(config.get("eos_token")) or _piece_at(pieces, trainer.eos_id),
        add_bos=bool(config.get("add_bos_token", True)),
        add_eos=bool(config.get("add_eos_token", False)),
        legacy=True if legacy is None else bool(legacy),
    )


def _piece_at(pieces: Sequence[Piece], row: int) -> str | None:
    return pieces[row].text if 0 <= row < len(pieces) else None


def _token_text(token: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: its tokenizer.json, or its tokenizer.model converted.

    Raises ModelError when there is neither, or when it cannot be read.
    """
    if (path := folder / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer, expected tokenizer.json or tokenizer.model")
    config = read_json(folder / "tokenizer_config.json")
    tokenizer = build(read_model(path, config))
    for row, token in sorted(_added_tokens(folder, config).items()):
        if row >= tokenizer.get_vocab_size():
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != row:
            raise ModelError(f"{folder}: added token {token.content!r} has id {row}, which the vocabulary contradicts")
    return tokenizer


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    added = {
        int(row): AddedToken(text, normalized=False) for text, row in read_json(folder / "added_tokens.json").items()
    }
    for row, entry in config.get("added_tokens_decoder", {}).items():
        added[int(row)] = AddedToken(
            entry["content"],
            special=bool(entry.get("special", False)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
            normalized=bool(entry.get("normalized", False)),
        )
    return added


def ensure_tokenizer(folder: Path) -> None:
    """Write tokenizer.json from tokenizer.model unless it is there."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        text = load_tokenizer(folder).to_str()
        path.write_text(text)

"""The tokenizer that a GGUF file describes, as a `tokenizers` tokenizer and its tokenizer_config.json.

How text is cut before merging is only named in the file (`tokenizer.ggml.pre`); the cuts themselves are those the
models were trained with, as in their own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starsd.export.tokenizer_model import CONTROL, NORMAL, USER_DEFINED, Piece, Vocabulary, build
from starsd.shared.errors import MissingExtraError, ModelError, UnsupportedModelError

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
except ImportError as error:
    raise MissingExtraError("tokenizers", "export") from error

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Cut:
    """How one kind of model cuts text. `whole_words`: a word that is a token needs no merges (Llama 3)."""

    words: Callable[[], Any]
    whole_words: bool = False
    add_bos: bool = False
    composed: bool = False  # text is brought to Unicode's composed form first


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_words(digits: int) -> Any:
    """Words with the character before them, numbers in runs of at most `digits`."""
    words = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = _Cut(lambda: _by_words(3), whole_words=True, add_bos=True)
_CUTS = {
    "gpt-2": _Cut(_gpt2),
    "smollm": _Cut(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Cut(lambda: _by_words(1), composed=True),
}


def tokenizer_from(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and its tokenizer_config. Raises UnsupportedModelError for kinds that are not built here."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _column(metadata, "tokens", str)
    if not tokens:
        raise ModelError("GGUF has no tokenizer.ggml.tokens, expected a vocabulary")
    kinds = _column(metadata, "token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"GGUF has {len(kinds)} token types, expected {len(tokens)}: one per token")
    if kind == "gpt2":
        return _byte_level(metadata, tokens, kinds), _config(metadata, tokens, add_bos=False)
    if kind == "llama":
        config = _config(metadata, tokens, add_bos=True)
        scores = _column(metadata, "scores", float | int)
        if len(scores) != len(tokens):
            raise ModelError(f"GGUF has {len(scores)} token scores, expected {len(tokens)}: one per token")
        vocabulary = Vocabulary(
            [Piece(*piece) for piece in zip(tokens, scores, kinds, strict=True)],
            add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            bos=config.get("bos_token"),
            eos=config.get("eos_token"),
            add_bos=config["add_bos_token"],
            add_eos=config["add_eos_token"],
        )
        return build(vocabulary), config
    raise UnsupportedModelError(f"GGUF tokenizer {kind!r:.80} is not supported, expected gpt2 or llama")


def _byte_level(metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _CUTS:
        known = ", ".join(_CUTS)
        raise UnsupportedModelError(f"GGUF pre-tokenizer {name!r:.80} is not supported, expected one of {known}")
    cut = _CUTS[name]
    ids = {token: row for row, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in _column(metadata, "merges", str)]
    try:
        model = models.BPE(vocab=ids, merges=pairs, ignore_merges=cut.whole_words)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"GGUF merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.words()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            added = AddedToken(token, normalized=False, special=special)
            _ = tokenizer.add_special_tokens([added]) if special else tokenizer.add_tokens([added])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", cut.add_bos) and bos is not None:
        start = _token(tokens, bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[start, "$A"], pair=None, special_tokens=[(start, bos)]
        )
    return tokenizer


def _config(metadata: dict[str, Any], tokens: list[str], *, add_bos: bool) -> dict[str, Any]:
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for theirs, ours in named.items():
        row = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if row is not None:
            config[f"{ours}_token"] = _token(tokens, row)
    return config


def _column(metadata: dict[str, Any], name: str, kind: Any) -> list[Any]:
    """One of the lists that say something of each token or merge; empty where the file has none."""
    column = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(column, list) or not all(isinstance(value, kind) for value in column):
        expected = "texts" if kind is str else "numbers"
        raise ModelError(f"GGUF has tokenizer.ggml.{name} {column!r:.60}, expected a list of {expected}")
    return column


def _token(tokens: list[str], row: Any) -> str:
    if not isinstance(row, int) or not 0 <= row < len(tokens):
        raise ModelError(f"GGUF names token {row!r:.80}, expected 0 to {len(tokens) - 1}")
    return tokens[row]

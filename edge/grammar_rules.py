"""What llguidance makes of a schema, a regular expression or a grammar: rules, and the matcher at their beginning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from starsd.shared.errors import UnsupportedModelError, UsageError

_JSON: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}

# What a step may take is the library's to bound. Its states take 1 to 2 kB each: an answer makes few of them, or one
# for each character of a string of bounded length.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def json_rules(schema: Mapping[str, Any]) -> str:
    """Rules of JSON that a schema describes; whether they are any good shows in `root`. Raises UsageError."""
    if not isinstance(schema, Mapping):
        raise UsageError(f"JSON schema is a {type(schema).__name__}, expected an object")
    try:
        written = msgspec.json.encode(schema).decode()
        return LLMatcher.grammar_from_json_schema(written, overrides=_JSON)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"JSON schema cannot be used: {first_line(str(error))}") from error


def regex_rules(pattern: str) -> str:
    """As `json_rules`, for a regular expression."""
    return _written(LLMatcher.grammar_from_regex, pattern)


def lark_rules(grammar: str) -> str:
    """As `json_rules`, for a context-free grammar."""
    return _written(LLMatcher.grammar_from_lark, grammar)


def token_table(written: str, ends: Collection[int]) -> LLTokenizer:
    """Of the tokenizer that is `written` as in tokenizer.json, `ends` its end tokens; takes a good part of a second.

    Raises UnsupportedModelError for one that the library does not know.
    """
    try:
        return LLTokenizer(written, eos_token=sorted(ends) or None)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"tokenizer cannot be used with grammars: {first_line(str(error))}") from error


def root(table: LLTokenizer, rules: str, what: str) -> LLMatcher:
    """Where an answer under these rules begins; to be copied, not moved.

    Rules of a few words may take minutes of CPU time here. Raises UsageError, which calls them `what`, where they are
    no good.
    """
    made = LLMatcher(table, rules, log_level=0, limits=_LIMITS)
    first = made.deep_copy()
    if not first.is_error():
        first.compute_bitmask()  # what nothing matches shows only here
    if first.is_error():
        raise UsageError(f"{what} cannot be used: {first_line(first.get_error())}")
    return made


_NO_DETAILS = "<non-verbose/>"  # what the library ends its messages with


def first_line(message: str) -> str:
    """All of a library's message on one line, its drawings left out."""
    lines = [line.strip() for line in message.splitlines()]
    said = "; ".join(line for line in lines if line and not (set(line) <= set("^ |~") or line == _NO_DETAILS))
    return said if len(said) <= 300 else f"{said[:297]}…"


def _written(read: Callable[[str], str], source: str) -> str:
    try:
        return read(source)
    except UnicodeEncodeError as error:
        raise UsageError(f"grammar cannot be read: {error}") from error

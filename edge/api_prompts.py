"""From messages to the ids that the target reads.

What stands in a message is text: a special token spelled there must not end the message, or speak in another's name. So
it is encoded in pieces that are not special; all else is encoded as `Text.encode_chat` does it. The prompts of
/v1/completions are raw, and may hold special tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from starsd.edge.api_errors import ApiError, overflow
from starsd.edge.api_requests import MOST_PROMPTS, Message
from starsd.edge.text import Text
from starsd.shared.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
NOTHING = r"(?!)"  # matches nowhere
DEEPEST = 32  # levels of a schema or of a call's arguments
PART = 16_384  # characters that are encoded at a time, of a text that may be too long
SEAM = 64  # tokens by which a text may have fewer than its parts have, for each seam


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates take them: text contents, arguments as objects. Raises ApiError for what is no text."""
    if not messages:
        raise ApiError("messages are empty, expected at least one", param="messages")
    return [_plain(message, f"messages[{at}]") for at, message in enumerate(messages)]


def encode(
    text: Text, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, most: int
) -> list[int]:
    """Ids of a conversation up to where the answer begins. Raises ApiError where the template refuses the messages, and
    where they are certain to have more than `most` tokens; a few more may come."""
    spelled = _special(text)
    mark = f"\ue000{secrets.token_hex(8)}:"  # nobody can have written this
    found: list[str] = []

    def hide(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"{mark}{len(found) - 1}\ue001"

    def hidden(value: Any) -> Any:
        return _map(value, lambda string: spelled.sub(hide, string))

    try:
        rendered = text.render(hidden(messages), hidden(tools))
        pieces = re.split(f"{mark}(\\d+)\ue001", rendered)
        ids: list[int] = []
        for at, piece in enumerate(pieces):
            if len(ids) > most:
                raise overflow(most, len(ids), "messages", exact=False)
            if at % 2:
                ids += _as_text(text, spelled, found[int(piece)])
            else:
                _check_length(text, piece, most, "messages")
                ids += text.encode(piece, add_special_tokens=False)
        return ids
    except UsageError as error:
        raise ApiError(str(error), param="messages") from error


def raw_prompts(text: Text, given: Any, vocab: int, most: int) -> list[list[int]]:
    """What `prompt` of /v1/completions may be: a text, ids, or a list of either. Raises ApiError for anything else, and
    for a text that is certain to have more than `most` tokens."""
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = given if several else [given]
    if len(prompts) > MOST_PROMPTS:
        raise ApiError(f"prompt is {len(prompts)} prompts, expected at most {MOST_PROMPTS}", param="prompt")
    return [_raw(text, prompt, vocab, most) for prompt in prompts]


def check_depth(value: Any, param: str, left: int = DEEPEST) -> None:
    """Raise ApiError for JSON that is nested more deeply than anything sensible."""
    if left < 0:
        raise ApiError(f"{param} is nested too deeply, expected at most {DEEPEST} levels", param=param)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_depth(item, param, left - 1)


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError(
            f"{where}.role is {message.role[:40]!r}, expected one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = _content(message, where)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id or "", "type": "function", "function": _called(call.function, f"{where}.tool_calls[{at}]")}
            for at, call in enumerate(message.tool_calls)
        ]
    return plain


def _called(function: Any, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"{param} are no JSON object", param=param) from error
    check_depth(arguments, param)
    return {"name": function.name, "arguments": arguments}


def _content(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise ApiError(f"{where}.content is missing, expected a text", param=f"{where}.content")
    for at, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise ApiError(
                f"{where}.content[{at}] is of type {part.type[:40]!r}, expected text: this model reads nothing else",
                param=f"{where}.content[{at}]",
            )
    return "".join(part.text or "" for part in message.content)


def _raw(text: Text, prompt: Any, vocab: int, most: int) -> list[int]:
    if isinstance(prompt, str):
        try:
            _check_length(text, prompt, most, "prompt")
            ids = text.encode(prompt)
        except UsageError as error:
            raise ApiError(str(error), param="prompt") from error
        ids = ids or ([text.bos] if text.bos is not None else [])
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        ids = prompt
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise ApiError(f"prompt holds token {str(wrong[0])[:24]}, expected 0 to {vocab - 1}", param="prompt")
    else:
        raise ApiError("prompt is neither text nor token ids, expected one of them, or a list of them", param="prompt")
    if not ids:
        raise ApiError("prompt is empty, expected at least one token", param="prompt")
    return ids


def _check_length(text: Text, string: str, most: int, param: str) -> None:
    """Raise ApiError where a text is certain to have more than `most` tokens, which its beginning tells: all of it may
    take seconds. Few texts have more tokens than half their characters."""
    if len(string) <= 2 * most:
        return
    least = SEAM
    for start in range(0, len(string), PART):
        least += len(text.encode(string[start : start + PART], add_special_tokens=False)) - SEAM
        if least > most:
            raise overflow(most, least, param, exact=False)


def _special(text: Text) -> re.Pattern[str]:
    """Finds the special tokens' spellings, the longest of those that begin alike."""
    spelled = {token for id in text.special_ids if (token := text.tokenizer.id_to_token(id))}
    longest = sorted(spelled, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) if longest else NOTHING)


def _as_text(text: Text, spelled: re.Pattern[str], token: str) -> list[int]:
    """Ids that spell a special token without being it: its first character apart from the rest."""
    first, rest = text.encode(token[:1], add_special_tokens=False), token[1:]
    if spelled.search(rest):
        return first + _as_text(text, spelled, rest)
    return first + text.encode(rest, add_special_tokens=False)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON with every text changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map(item, change) for key, item in value.items()}
    return [_map(item, change) for item in value] if isinstance(value, (list, tuple)) else value

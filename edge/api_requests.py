"""What clients may send, as OpenAI's API has it. Fields that we do not know are let be; those that we know but cannot
honour are refused by name, for an answer that quietly ignores them would be another one than was asked for.

Beyond OpenAI's fields: top_k, min_p and repetition_penalty, as other local servers have them, and `starsd`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from starsd.edge.api_errors import ApiError, unreadable

Request = TypeVar("Request", bound="_Common")
MOST_STOPS = 4
LONGEST_STOP = 1000  # characters; each token is compared with it
MOST_CHOICES = 16
MOST_PROMPTS = 16
MOST_ANSWERS = 32  # of one request, which takes one turn in the line
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, MOST_CHOICES),
    "max_tokens": (1, 2**31 - 1),
    "max_completion_tokens": (1, 2**31 - 1),
    "top_logprobs": (0, 20),
    "seed": (-(2**63), 2**63 - 1),
}
MOST_LOGPROBS = 5  # of a completion's tokens
BIAS = 100


class Ours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `starsd`: `private` keeps a conversation on this device, `show_drafts` says where tokens are from.

    Nothing else is let pass: a misspelt `private` must not be taken for a no.
    """

    private: bool = False
    show_drafts: bool = False


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: Function | None = None


class Schema(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Format(msgspec.Struct, frozen=True):
    type: str
    json_schema: Schema | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    starsd: Ours | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    # known, and refused unless neutral
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: Any
    logprobs: int | None = None

    # known, and refused unless neutral
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this model reads and writes text alone"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "modalities": ((["text"], []), "this model reads and writes text alone"),
    "moderation": ((), "nothing here moderates"),
    "reasoning_effort": (("none",), "this model does not reason apart from its answer"),
    "store": ((False,), "answers are not stored"),
    "verbosity": (("medium",), "say in the messages how long an answer should be"),
    "web_search_options": ((), "nothing here searches the web"),
    "best_of": ((1,), "use n, and choose among the answers"),
    "echo": ((False,), "put the prompt before the answer yourself"),
    "suffix": (("",), "this model writes what comes after a prompt, not between two texts"),
}


def decode(body: bytes, kind: type[Request]) -> Request:
    """The request that a body holds. Raises ApiError when it holds none, or one that cannot be honoured."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from error
    for name, (neutral, remedy) in REFUSED.items():
        if (value := getattr(request, name, None)) is not None and value not in neutral:
            raise ApiError(f"{name} is not supported: {remedy}", param=name, code="unsupported_parameter")
    for name, (least, most) in RANGES.items():
        if (number := getattr(request, name, None)) is not None and not least <= number <= most:
            raise ApiError(f"{name} is {str(number)[:24]}, expected {least} to {most}", param=name)
    _check_stop(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are given without stream, expected stream to be true", param="stream_options")
    if isinstance(request, CompletionRequest) and not 0 <= (request.logprobs or 0) <= MOST_LOGPROBS:
        raise ApiError(f"logprobs is {request.logprobs}, expected 0 to {MOST_LOGPROBS}", param="logprobs")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs is given without logprobs, expected logprobs to be true", param="top_logprobs")
    return request


def stops(request: _Common) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def _check_stop(request: _Common) -> None:
    given = stops(request)
    if len(given) > MOST_STOPS:
        raise ApiError(f"stop has {len(given)} strings, expected at most {MOST_STOPS}", param="stop")
    if (longest := max(map(len, given), default=0)) > LONGEST_STOP:
        raise ApiError(f"stop has {longest} characters, expected at most {LONGEST_STOP}", param="stop")
    if "" in given:
        raise ApiError("stop has an empty string, expected at least one character", param="stop")

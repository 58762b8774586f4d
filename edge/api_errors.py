"""Refusals in the shape that OpenAI's clients know: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from starsd.shared.errors import CapacityError, ContextOverflowError, GrammarError, UsageError

INVALID = "invalid_request_error"
INTERNAL = 500
_WHERE = re.compile(r" - at `\$\.?(.*?)`$")


class ApiError(Exception):
    """What a client is told instead of an answer; `status` is HTTP's."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unreadable(error: Exception) -> ApiError:
    """A body that is no JSON, or not of the shape that was expected; says where."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "nested too deeply" if isinstance(error, RecursionError) else _lowered(str(error))
        return ApiError(f"body cannot be parsed as JSON: {reason}")
    text = str(error)
    where = _WHERE.search(text)
    param = where.group(1).partition("[...]")[0] or None if where else None  # the rest is in any key, or any item
    return ApiError(f"{param or 'body'}: {_lowered(_WHERE.sub('', text))}", param=param)


def overflow(context: int, tokens: int, param: str, *, exact: bool = True) -> ApiError:
    """In OpenAI's words, by which clients know when to shorten a conversation. Not `exact`: there may be more."""
    what, least = "messages" if param == "messages" else "prompt", "" if exact else "at least "
    return ApiError(
        f"This model's maximum context length is {context} tokens. "
        f"However, your {what} resulted in {least}{tokens} tokens. "
        f"Please reduce the length of the {what}.",
        param=param,
        code="context_length_exceeded",
    )


def full(seconds: float, message: str) -> ApiError:
    """As many answers are under way or waited for as may be; trying again is worth it after so many seconds."""
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(max(1, math.ceil(seconds)))},
    )


def ending() -> ApiError:
    return ApiError(
        "the server is ending, expected to be asked again later",
        status=503,
        kind="server_error",
        code="server_ending",
        headers={"retry-after": "5"},
    )


def from_starsd(error: Exception) -> ApiError:
    """What a client is told of an error. Those that are not the request's fault keep their details to themselves."""
    match error:
        case ContextOverflowError():
            return ApiError(str(error), code="context_length_exceeded")
        case CapacityError():
            return full(1.0, str(error))
        case GrammarError():
            return ApiError(str(error), param="response_format")
        case UsageError():
            return ApiError(str(error))
    return internal()


def internal() -> ApiError:
    return ApiError("the server failed at this request; its log says where", status=INTERNAL, kind="server_error")


def _lowered(text: str) -> str:
    return text if text.startswith("JSON") else text[:1].lower() + text[1:]

"""Who may ask, and what is written down of it: the layers around the API's routes.

Envelope   a number for each request, a line in the log without anything a user wrote, never a traceback outside
Door       on this machine alone: neither other names for it (DNS rebinding) nor other sites' pages
Keys       where keys are set: one of them, compared in constant time
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starsd.edge.api_errors import ApiError, internal
from starsd.edge.api_responses import refusal

CLIENT_LEFT = 499  # before there was anything to tell it
OPEN_PATHS = ("/", "/health")
OPEN_FOLDER = "/web/"
QUIET_PATHS = ("/", OPEN_FOLDER, "/health", "/metrics", "/v1/starsd/status")  # asked for all the time
Report = Callable[[str, int, float], None]


def to_stderr(line: str) -> None:
    print(f"starsd-edge: {line}", file=sys.stderr, flush=True)


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine by itself."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Envelope:
    """`report` is told path, status and seconds of every request; `log` a line of most."""

    def __init__(self, app: ASGIApp, report: Report, log: Callable[[str], None] = to_stderr) -> None:
        self.app, self.report, self.log = app, report, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number, began, status = f"req_{secrets.token_hex(12)}", time.monotonic(), 0

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
                MutableHeaders(scope=message)["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, numbered)
        except Exception as error:
            self.log(f"{number} failed: {_place(error)}")
            if not status:
                await refusal(internal())(scope, receive, numbered)
        finally:
            seconds, status = time.monotonic() - began, status or CLIENT_LEFT
            path = _route(scope)
            self.report(path, status, seconds)
            if path not in QUIET_PATHS or status >= 400:
                self.log(f"{number} {_method(scope)} {path} {status} {seconds:.2f} s")


class Door:
    """Every program of this machine reaches a server on loopback, browsers among them.

    A page from elsewhere could have its name resolve to 127.0.0.1, so `alone`, which is without a key, only names of
    this machine are answered; and it could send what needs no answer, so an `Origin` has to be ours, or one of
    `origins`.
    """

    def __init__(self, app: ASGIApp, alone: bool, origins: Collection[str]) -> None:
        self.app, self.alone, self.origins = app, alone, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refused(Headers(scope=scope))) is not None:
            await refusal(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refused(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.alone and not is_loopback(_name(host)):
            return ApiError("host is not this machine, expected localhost or 127.0.0.1", status=403, code="wrong_host")
        if origin is None or "*" in self.origins or origin in self.origins:
            return None
        if urlsplit(origin).netloc.lower() != host.lower() or not host:
            return ApiError("origin is another site: --allow-origin lets it in", status=403, code="wrong_origin")
        return None


class Keys:
    """`keys` are what `Authorization: Bearer` may say; none: everybody may ask."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.keys and not _is_open(scope["path"]) and not self._known(scope):
            error = ApiError(
                "API key is missing or wrong, expected Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        said = given.strip().encode()
        right = [hmac.compare_digest(said, key) for key in self.keys]  # all of them, whichever is right
        return scheme.lower() == "bearer" and any(right)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _name(host: str) -> str:
    """Of a Host header, without the port; empty where it makes no sense."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _route(scope: Scope) -> str:
    """The path as we know it, not as a stranger wrote it."""
    folder = OPEN_FOLDER if scope["path"].startswith(OPEN_FOLDER) else "other"
    return str(getattr(scope.get("route"), "path", folder))


def _method(scope: Scope) -> str:
    method = scope["method"]
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"


def _place(error: Exception) -> str:
    """Kind and place of an error. Not its message, which may hold what a user wrote."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"

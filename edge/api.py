"""The device's HTTP server: OpenAI's API, the runtime's state, and the chat page."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from starsd.edge import api_web
from starsd.edge.api_answers import Answers
from starsd.edge.api_errors import ApiError, ending, from_starsd
from starsd.edge.api_guard import Door, Envelope, Keys, is_loopback, to_stderr
from starsd.edge.api_line import Line
from starsd.edge.api_metrics import Metrics
from starsd.edge.api_orders import Order, chat_order, completion_order
from starsd.edge.api_requests import ChatRequest, CompletionRequest, decode
from starsd.edge.api_responses import Answered, Desk, JsonResponse, refusal
from starsd.edge.api_settings import Settings
from starsd.edge.api_shapes import ChatShape, CompletionShape, Frame
from starsd.shared.errors import StarsdError

if TYPE_CHECKING:
    from starsd.edge.runtime import Runtime

READERS = 2  # requests read at a time: templates, tokens and grammars cost CPU time that the engine wants too
Kind = TypeVar("Kind", ChatRequest, CompletionRequest)
Reader = Callable[[Kind, "Runtime", str, Any], Order]


def create_app(
    runtime: Runtime,
    settings: Settings,
    *,
    web: Path = api_web.FOLDER,
    log: Callable[[str], None] = to_stderr,
) -> FastAPI:
    """The application; `app.state.ending`, once set, ends all answers. One for each event loop.

    The page's files are served where the folder `web` is there.
    """
    about = runtime.status()
    name = settings.name or about.model
    line = Line(settings.conversations, settings.queue)
    metrics = Metrics(runtime, line)
    desk = Desk(line, metrics, asyncio.Event(), settings.stall_seconds)
    readers = asyncio.Semaphore(READERS)
    fingerprint = hashlib.sha256(f"{runtime.model.fingerprint} {about.precision}".encode()).hexdigest()[:16]

    app = FastAPI(title="starsd", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.ending, app.state.line = desk.ending, line
    app.add_middleware(Keys, keys=settings.keys)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    alone = is_loopback(settings.host) and not settings.keys  # who has the key may come by any name, as proxies do
    app.add_middleware(Door, alone=alone, origins=settings.origins)
    app.add_middleware(Envelope, report=metrics.request, log=log)  # the outermost

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return refusal(error)

    @app.exception_handler(StarsdError)
    async def failed(request: Request, error: StarsdError) -> Response:
        told = from_starsd(error)
        if told.status >= 500:  # without its message, which may hold what a user wrote
            log(f"a request met {type(error).__name__}")
        return refusal(told)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = "path is not served here" if error.status_code == 404 else error.detail.lower()
        code = "unknown_url" if error.status_code == 404 else None
        return refusal(ApiError(what, status=error.status_code, code=code, headers=error.headers))

    async def take(request: Request, kind: type[Kind], reader: Reader[Kind]) -> Order:
        if desk.ending.is_set():
            raise ending()
        asked = decode(await _body(request, settings), kind)
        async with readers:
            return await asyncio.to_thread(reader, asked, runtime, name, settings.sampling)

    def frame(order: Order) -> Frame:
        return Frame(name, f"fp_{fingerprint}", order.sampling.seed)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        order = await take(request, ChatRequest, chat_order)
        shape = ChatShape(frame(order), runtime.text, order.top_logprobs is not None)
        return Answered(desk, Answers(runtime, order, metrics.tokens), shape)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        order = await take(request, CompletionRequest, completion_order)
        shape = CompletionShape(frame(order), runtime.text, order.top_logprobs is not None)
        return Answered(desk, Answers(runtime, order, metrics.tokens), shape)

    model = {"id": name, "object": "model", "created": 0, "owned_by": "starsd"}
    model |= {"starsd": {"precision": about.precision, "context": about.context}}

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> Response:
        if asked != name:
            raise ApiError(f"model {asked[:100]!r} is not here, expected {name}", status=404, code="model_not_found")
        return JsonResponse(model)

    @app.get("/v1/starsd/status")
    async def status() -> Response:
        now = {"running": line.running, "queue": line.waiting, "tokens_per_second": metrics.tokens_per_second()}
        return JsonResponse({**msgspec.structs.asdict(runtime.status()), "model": name, **now})

    @app.get("/health")
    async def health() -> Response:
        return JsonResponse({"status": "ending" if desk.ending.is_set() else "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    if (web / api_web.INDEX).is_file():
        page = api_web.Page(web)
        app.mount("/web", page)

        @app.api_route("/", methods=["GET", "HEAD"])
        async def index(request: Request) -> Response:
            return await page.get_response(api_web.INDEX, request.scope)

    return app


async def _body(request: Request, settings: Settings) -> bytes:
    """What the client sent; no more of it than may be, and no longer waited for."""
    most = settings.most_bytes
    too_large = ApiError(f"body is larger than expected, at most {most} bytes", status=413, code="body_too_large")
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said[:20]) > most:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), settings.body_seconds)
    except asyncio.TimeoutError as error:
        message = f"body did not arrive within {settings.body_seconds:g} seconds"
        raise ApiError(message, status=408, code="body_too_slow") from error
    except ClientDisconnect as error:
        raise ApiError("the client left before its request was whole", status=400) from error

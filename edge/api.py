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
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from starsd.edge import api_web
from starsd.edge.api_answers import Answers
from starsd.edge.api_errors import ApiError, ending, from_starsd
from starsd.edge.api_grammars import Grammars
from starsd.edge.api_guard import Door, Envelope, Keys, is_loopback, to_stderr
from starsd.edge.api_line import Line
from starsd.edge.api_metrics import Metrics
from starsd.edge.api_orders import Order, chat_order, completion_order
from starsd.edge.api_requests import ChatRequest, CompletionRequest, decode
from starsd.edge.api_responses import AnswerResponse, Desk, JsonResponse, refusal
from starsd.edge.api_settings import RECOMMENDED, Settings
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
    desk = Desk(line, metrics, Grammars(runtime.text), asyncio.Event(), settings.stall_seconds)
    readers = asyncio.Semaphore(READERS)
    fingerprint = hashlib.sha256(f"{runtime.model.fingerprint} {about.precision}".encode()).hexdigest()[:16]

    app = FastAPI(title="starsd", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.ending, app.state.line, app.state.grammars = desk.ending, line, desk.grammars
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
        return refusal(_unserved(request, error))

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
        return AnswerResponse(desk, Answers(runtime, order, metrics.tokens), shape)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        order = await take(request, CompletionRequest, completion_order)
        shape = CompletionShape(frame(order), runtime.text, order.top_logprobs is not None)
        return AnswerResponse(desk, Answers(runtime, order, metrics.tokens), shape)

    shown = {"id": name, "object": "model", "created": 0, "owned_by": "starsd"}
    shown |= {"starsd": {"precision": about.precision, "context": about.context}}

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [shown]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        if model != name:
            raise ApiError(f"model {model[:100]!r} is not here, expected {name}", status=404, code="model_not_found")
        return JsonResponse(shown)

    @app.get("/v1/starsd/status")
    async def status() -> Response:
        now = {"running": line.running, "queue": line.waiting, "tokens_per_second": metrics.tokens_per_second()}
        sampling = {field: getattr(settings.sampling, field) for field in RECOMMENDED}
        state = msgspec.structs.asdict(runtime.status())
        return JsonResponse({**state, "model": name, **now, "sampling": sampling})

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


def _unserved(request: Request, error: HTTPException) -> ApiError:
    """Of a path or a method that is none of ours."""
    if error.status_code == 404:
        served = ", ".join(sorted({route.path_format for route in request.app.routes if isinstance(route, Route)}))
        return ApiError(f"path is not served here, expected one of {served}", status=404, code="unknown_url")
    if error.status_code == 405:
        allowed = Headers(error.headers).get("allow", "GET, HEAD")  # which is what files are for
        what = f"method {request.method[:20]} is not allowed here, expected {allowed}"
        return ApiError(what, status=405, code="method_not_allowed", headers={"allow": allowed})
    return ApiError(error.detail.lower(), status=error.status_code, headers=error.headers)


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

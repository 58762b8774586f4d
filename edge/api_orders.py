"""What a request comes to: the prompts, how to sample, when to end, and what to tell of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from starsd.edge.api_errors import ApiError, overflow
from starsd.edge.api_grammars import ANY_OBJECT, Form
from starsd.edge.api_prompts import check_depth, encode, plain_messages, raw_prompts
from starsd.edge.api_requests import (
    BIAS,
    MOST_ANSWERS,
    ChatRequest,
    CompletionRequest,
    Format,
    Ours,
    StreamOptions,
    stops,
)
from starsd.edge.api_tools import Offer, offer
from starsd.shared.config import Limits, Sampling

if TYPE_CHECKING:
    from starsd.edge.runtime import Runtime

COMPLETION_TOKENS = 16  # OpenAI's, where /v1/completions is not told
SEED_BITS = 32
LEAST = 1e-9  # of temperature and top_p; what is below means the likeliest token alone, as 0 does
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Order:
    """Answers to `prompts`, `n` to each. `top_logprobs` None: none are told."""

    prompts: list[list[int]]
    n: int
    context: int  # tokens that prompt and answer may have together
    sampling: Sampling
    limits: Limits
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    private: bool
    show_drafts: bool
    offer: Offer | None = None
    form: Form | None = None  # what every answer is, or, of an offer, every call

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, as OpenAI counts."""
        return sum(map(len, self.prompts))


def chat_order(request: ChatRequest, runtime: Runtime, model: str, defaults: Sampling) -> Order:
    """Raises ApiError for a request that cannot be met. Takes CPU time: not on the event loop."""
    _check_model(request.model, model)
    offered = offer(request, runtime.text)
    form = _form(request.response_format)
    if offered is not None and form is not None:
        raise ApiError("response_format is given together with tools, expected one of them", param="response_format")
    messages = plain_messages(request.messages)
    prompt = encode(runtime.text, messages, None if offered is None else offered.tools, runtime.context)
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    order = _order(request, [prompt], most, top, runtime, defaults)
    return replace(order, offer=offered, form=form if offered is None else Form(offered.schema, "tools"))


def completion_order(request: CompletionRequest, runtime: Runtime, model: str, defaults: Sampling) -> Order:
    """As chat_order."""
    _check_model(request.model, model)
    prompts = raw_prompts(runtime.text, request.prompt, runtime.model.shape.vocab, runtime.context)
    if (answers := len(prompts) * (request.n or 1)) > MOST_ANSWERS:
        raise ApiError(f"prompts times n are {answers} answers, expected at most {MOST_ANSWERS}", param="n")
    most = request.max_tokens if request.max_tokens is not None else COMPLETION_TOKENS
    return _order(request, prompts, most, request.logprobs, runtime, defaults)


def _order(
    request: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    most: int | None,
    top_logprobs: int | None,
    runtime: Runtime,
    defaults: Sampling,
) -> Order:
    context = runtime.context
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    for prompt in prompts:
        if len(prompt) > context:
            raise overflow(context, len(prompt), param)
    ours = request.starsd or Ours()
    return Order(
        prompts=prompts,
        n=request.n or 1,
        context=context,
        sampling=_sampling(request, defaults, runtime.model.shape.vocab),
        limits=Limits(max_new_tokens=context if most is None else min(most, context), stop=stops(request)),
        top_logprobs=top_logprobs,
        stream=bool(request.stream),
        include_usage=bool((request.stream_options or StreamOptions()).include_usage),
        private=ours.private,
        show_drafts=ours.show_drafts,
    )


def _check_model(asked: str | None, model: str) -> None:
    if asked and asked != model:
        raise ApiError(
            f"model {asked[:100]!r} is not here, expected {model}", status=404, param="model", code="model_not_found"
        )


def _sampling(request: ChatRequest | CompletionRequest, defaults: Sampling, vocab: int) -> Sampling:
    given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if given.get("temperature", 1) < LEAST:
        given["temperature"] = 0.0
    if given.get("top_p", 1) < LEAST:
        given["top_p"] = LEAST
    seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
    bias = {_token(name, vocab): value for name, value in (request.logit_bias or {}).items()}
    for token, value in bias.items():
        if not -BIAS <= value <= BIAS:
            raise ApiError(f"logit_bias of token {token} is {value}, expected -{BIAS} to {BIAS}", param="logit_bias")
    return msgspec.structs.replace(defaults, **given, seed=seed, logit_bias=bias)


def _token(name: str, vocab: int) -> int:
    if name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocab:
        return int(name)
    raise ApiError(f"logit_bias names token {name[:40]!r}, expected an id from 0 to {vocab - 1}", param="logit_bias")


def _form(given: Format | None) -> Form | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    if given.type != "json_schema":
        raise ApiError(
            f"response_format.type is {given.type[:40]!r}, expected text, json_object or json_schema",
            param="response_format.type",
        )
    if given.json_schema is None or given.json_schema.schema is None:
        raise ApiError("response_format has no json_schema.schema", param="response_format.json_schema")
    check_depth(given.json_schema.schema, "response_format.json_schema.schema")
    return Form(given.json_schema.schema, "response_format.json_schema.schema")

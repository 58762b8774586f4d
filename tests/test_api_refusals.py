"""What is no good is refused in OpenAI's shape, by name; nothing that a client sends makes the server fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import TOOL_TEMPLATE, Served, open_runtime, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starsd.edge.api_settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "Is this so?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
DEEP = b'{"a":' * 200 + b"1" + b"}" * 200
SMALL = Settings(most_bytes=20_000, body_seconds=0.5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(open_runtime(tmp_path_factory.mktemp("bundle"), context=256), SMALL) as place:
        yield place


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Whose model knows tools."""
    with served(open_runtime(tmp_path_factory.mktemp("caller"), template=TOOL_TEMPLATE), SMALL) as place:
        yield place


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKED, "max_tokens": 4, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Yes", "max_tokens": 4, **fields}


FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, None, "body: object missing required field `messages`"),
    ({"messages": []}, "messages", "messages are empty, expected at least one"),
    ({"messages": [{}]}, "messages[0]", "messages[0]: object missing required field `role`"),
    (chat(messages=[{"role": "boss", "content": "x"}]), "messages[0].role", "expected one of system, developer, user"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "messages[0].content is missing, expected a text"),
    (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content", "expected `str | array | null`"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0]",
        "messages[0].content[0] is of type 'image_url', expected text: this model reads nothing else",
    ),
    (chat(temperature=2.5), "temperature", "temperature is 2.5, expected 0 to 2"),
    (chat(temperature="hot"), "temperature", "temperature: expected `float | null`, got `str`"),
    (chat(top_p=-1), "top_p", "top_p is -1.0, expected 0 to 1"),
    (chat(min_p=2), "min_p", "min_p is 2.0, expected 0 to 1"),
    (chat(top_k=-1), "top_k", "top_k is -1, expected 0 to 2147483647"),
    (chat(presence_penalty=3), "presence_penalty", "presence_penalty is 3.0, expected -2 to 2"),
    (chat(frequency_penalty=-3), "frequency_penalty", "frequency_penalty is -3.0, expected -2 to 2"),
    (chat(repetition_penalty=0), "repetition_penalty", "repetition_penalty is 0.0, expected 0.01 to 100"),
    (chat(n=0), "n", "n is 0, expected 1 to 16"),
    (chat(n=10**30), "n", "n is 100000000000000000000000, expected 1 to 16"),
    (chat(n=True), "n", "n: expected `int | null`, got `bool`"),
    (chat(seed=2**63), "seed", "seed is 9223372036854775808, expected -9223372036854775808 to 9223372036854775807"),
    (chat(max_tokens=0), "max_tokens", "max_tokens is 0, expected 1 to 2147483647"),
    (chat(max_completion_tokens=-1), "max_completion_tokens", "max_completion_tokens is -1, expected 1 to 2147483647"),
    (chat(stop=["a", "b", "c", "d", "e"]), "stop", "stop has 5 strings, expected at most 4"),
    (chat(stop=["x", "y" * 1001]), "stop", "stop has 1001 characters, expected at most 1000"),
    (chat(stop=""), "stop", "stop has an empty string, expected at least one character"),
    (chat(stop=["x", ""]), "stop", "stop has an empty string, expected at least one character"),
    (chat(logit_bias={"x": 1}), "logit_bias", "logit_bias names token 'x', expected an id from 0 to 299"),
    (chat(logit_bias={"300": 1}), "logit_bias", "logit_bias names token '300', expected an id from 0 to 299"),
    (chat(logit_bias={"-1": 1}), "logit_bias", "logit_bias names token '-1', expected an id from 0 to 299"),
    (chat(logit_bias={"3": "x"}), "logit_bias", "logit_bias: expected `float`, got `str`"),
    (chat(stop=["x", 1]), "stop[1]", "stop[1]: expected `str`, got `int`"),
    (chat(logit_bias={"3": 101}), "logit_bias", "logit_bias of token 3 is 101.0, expected -100 to 100"),
    (chat(top_logprobs=2), "top_logprobs", "top_logprobs is given without logprobs, expected logprobs to be true"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs is 21, expected 0 to 20"),
    (chat(stream_options={}), "stream_options", "stream_options are given without stream, expected stream to be true"),
    (chat(response_format={"type": "xml"}), "response_format.type", "expected text, json_object or json_schema"),
    (
        chat(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        "response_format has no json_schema.schema",
    ),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "starfish"}}}),
        "response_format.json_schema.schema",
        "JSON schema cannot be used: ",
    ),
    (chat(tools=[TOOL]), "tools", "this model cannot call tools: its chat template does not write <tool_call> JSON"),
    (chat(messages=[*ASKED, {"role": "tool", "content": "x"}]), "messages", "this model cannot call tools"),
    (chat(tool_choice="required"), "tool_choice", "tool_choice is given without tools, expected both"),
    (chat(starsd={"private": "yes"}), "starsd.private", "starsd.private: expected `bool`, got `str`"),
]
UNSUPPORTED: dict[str, Any] = {
    "audio": {"voice": "x"},
    "functions": [{"name": "look"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "reasoning_effort": "high",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize(("body", "param", "message"), FIELDS, ids=lambda value: str(value)[:40])
def test_fields_of_chats(place: Served, body: dict[str, Any], param: str | None, message: str) -> None:
    error = place.refused(CHAT, body, 400)
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_cannot_be_honoured_is_refused_by_name(place: Served, name: str, value: Any) -> None:
    error = place.refused(CHAT, chat(**{name: value}), 400)
    assert error["message"].startswith(f"{name} is not supported: ")
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_what_asks_for_nothing_is_not(place: Served) -> None:
    place.chat(
        **chat(functions=[], modalities=["text"], store=False, verbosity="medium", audio=None, tools=[], stop=[])
    )
    place.chat(**chat(service_tier="auto", prediction={"type": "content", "content": "x"}, safety_identifier="me"))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (completion(prompt=None), "prompt", "prompt is neither text nor token ids"),
        (completion(prompt=[]), "prompt", "prompt is empty, expected at least one token"),
        (completion(prompt=""), "prompt", "prompt is empty, expected at least one token"),
        (completion(prompt=[["x"]]), "prompt", "prompt is neither text nor token ids"),
        (completion(prompt=[True]), "prompt", "prompt is neither text nor token ids"),
        (completion(prompt=[1, 300]), "prompt", "prompt holds token 300, expected 0 to 299"),
        (completion(prompt=["x"] * 17), "prompt", "prompt is 17 prompts, expected at most 16"),
        (completion(logprobs=6), "logprobs", "logprobs is 6, expected 0 to 5"),
        (completion(logprobs=-1), "logprobs", "logprobs is -1, expected 0 to 5"),
        (completion(echo=True), "echo", "echo is not supported: put the prompt before the answer yourself"),
        (completion(best_of=3), "best_of", "best_of is not supported: use n, and choose among the answers"),
        (completion(suffix="x"), "suffix", "suffix is not supported: this model writes what comes after a prompt"),
    ],
)
def test_fields_of_completions(place: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = place.refused(COMPLETIONS, body, 400)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body cannot be parsed as JSON: input data was truncated"),
        (b"{", "body cannot be parsed as JSON: input data was truncated"),
        (b"\xff\xfe", "body cannot be parsed as JSON: JSON is malformed"),
        (b'{"model": "\xff"}', "body cannot be parsed as JSON: invalid UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "body cannot be parsed as JSON"),
        (b'{"temperature": NaN, "messages": []}', "body cannot be parsed as JSON"),
        (b"[]", "body: expected `object`, got `array`"),
        (b'{"x": ' + b"[" * 5000, "body cannot be parsed as JSON: nested too deeply"),
        (b'{"messages": [], "temperature": 1e999}', "temperature: number out of range"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies(place: Served, path: str, body: bytes, message: str) -> None:
    error = place.refused(path, body, 400)
    assert message in error["message"]


def test_models_that_are_not_here(place: Served) -> None:
    error = place.refused(CHAT, chat(model="gpt-9"), 404)
    assert error == {
        "message": "model 'gpt-9' is not here, expected toy",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_prompts_that_do_not_fit_meet_openais_words(place: Served) -> None:
    error = place.refused(CHAT, chat(messages=[{"role": "user", "content": "x" * 400}]), 400)
    assert error == {
        "message": "This model's maximum context length is 256 tokens. However, your messages resulted in 425 tokens. "
        "Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    error = place.refused(COMPLETIONS, completion(prompt=["x", "x" * 300]), 400)
    assert "your prompt resulted in 300 tokens" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_bodies_that_are_too_large_or_too_slow(place: Served) -> None:
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        body = b"x" * 20_001
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if headers else body
        error = place.refused(CHAT, sent, 413, headers)
        assert error["message"] == "body is larger than expected, at most 20000 bytes"
    error = place.refused(CHAT, b"{", 408, {"Content-Length": "10"})
    assert (error["message"], error["code"]) == ("body did not arrive within 0.5 seconds", "body_too_slow")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0]", "tools[0] is of type 'custom', expected a function"),
        (
            {"tools": [{"type": "function", "function": {"name": "no way"}}]},
            "tools[0].function.name",
            "tools[0].function.name is 'no way', expected 1 to 64 letters, digits, _ and -",
        ),
        ({"tools": [TOOL] * 129}, "tools", "tools are 129, expected at most 128"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "expected none, auto, required or a tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice is no {"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "tool_choice names 'fly', expected one of the tools",
        ),
        (
            {"tools": [TOOL], "response_format": {"type": "json_object"}},
            "response_format",
            "response_format is given together with tools, expected one of them",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "messages[0].tool_calls[0].function.arguments are no JSON object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": json.loads(DEEP)}}]},
            "tools[0].function.parameters",
            "tools[0].function.parameters is nested too deeply, expected at most 32 levels",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tools(caller: Served, fields: dict[str, Any], param: str, message: str) -> None:
    error = caller.refused(CHAT, chat(**fields), 400)
    assert message in error["message"]
    assert error["param"] == param


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    *(
        "messages",
        "prompt",
        "model",
        "n",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "echo",
    ),
    *(
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "presence_penalty",
        "response_format",
        "tools",
        "tool_choice",
    ),
    *("parallel_tool_calls", "stream", "stream_options", "starsd", "user", "suffix", "modalities", "unknown"),
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
        optional={"content": st.text(max_size=20) | ANYTHING, "tool_calls": ANYTHING, "name": ANYTHING},
    ),
    max_size=3,
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("json_schema")},
    optional={
        "json_schema": st.fixed_dictionaries(
            {"name": st.text(max_size=4)},
            optional={
                "schema": st.fixed_dictionaries(
                    {},
                    optional={
                        "type": st.sampled_from(["object", "array", "string", "number", "null", "x"]) | ANYTHING,
                        "properties": ANYTHING,
                        "required": ANYTHING,
                        "enum": ANYTHING,
                        "pattern": st.text(max_size=6),
                        "$ref": st.text(max_size=6),
                        "minItems": st.integers(),
                        "items": ANYTHING,
                    },
                )
            },
        )
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    fields=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3),
    messages=MESSAGES,
    schema=st.none() | SCHEMAS,
)
def test_whatever_is_sent_is_answered_or_refused(
    caller: Served, path: str, fields: dict[str, Any], messages: Any, schema: Any
) -> None:
    body = {"messages": messages, "prompt": "x", "response_format": schema, **fields, "max_tokens": 2}
    status, headers, said = caller.ask("POST", path, json.dumps(body).encode())
    assert status in (200, 400, 404, 413), said
    assert headers["x-request-id"].startswith("req_")
    if status != 200:
        assert list(said["error"]) == ["message", "type", "param", "code"]
        assert said["error"]["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=60))
def test_bytes_are_refused(place: Served, body: bytes) -> None:
    assert place.refused(CHAT, body, 400)["type"] == "invalid_request_error"


def test_one_request_takes_no_more_than_its_turn(place: Served) -> None:
    body = json.dumps({"prompt": ["a"] * 3, "n": 11, "max_tokens": 1}).encode()
    error = place.refused(COMPLETIONS, body, 400)
    assert (error["message"], error["param"]) == ("prompts times n are 33 answers, expected at most 32", "n")

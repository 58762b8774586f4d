"""The API as real clients use it: the official `openai` package, and the `llm` command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_helpers import TOOL_TEMPLATE, ScriptedTarget, Served, SlowTarget, open_runtime, served, wait_until
from pydantic import BaseModel
from tiny_session import EOS

from starsd.edge.api_settings import Settings

KEY = "a-key-of-some-length"
ASKED: Any = [{"role": "user", "content": "Is this so?"}]
ENDLESS = {str(EOS): -100}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(open_runtime(tmp_path_factory.mktemp("bundle"), context=512), Settings(keys=(KEY,))) as place:
        yield place


@pytest.fixture
def client(place: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """In front of a model that says its script."""
    runtime = open_runtime(tmp_path, ScriptedTarget, template=TOOL_TEMPLATE)
    with served(runtime) as place, openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"model": "toy", "messages": ASKED, "seed": 1, "max_tokens": 12, "logit_bias": ENDLESS}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2, n=2)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.model_extra is not None
    assert whole.usage.model_extra["starsd"]["passes"] > 0
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    assert (whole._request_id or "").startswith("req_")
    said = ["", ""]
    for chunk in client.chat.completions.create(**fields, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
        if not chunk.choices:
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == 24
    assert said == [choice.message.content for choice in whole.choices]
    sampled = client.chat.completions.create(**fields, extra_body={"top_k": 1, "starsd": {"private": True}})
    greedy = client.chat.completions.create(**fields, temperature=0)
    assert sampled.choices[0].message.content == greedy.choices[0].message.content


def test_completions_and_models(client: openai.OpenAI) -> None:
    fields: Any = {"model": "toy", "prompt": ["Is this", "so"], "seed": 1, "logit_bias": ENDLESS, "logprobs": 1}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[1].logprobs is not None
    assert len(whole.choices[1].logprobs.tokens or []) == 16
    said = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == [choice.text for choice in whole.choices]
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "starsd"


def test_the_asynchronous_client(place: Served) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key=KEY, max_retries=0) as client:
            fields: Any = {"model": "toy", "messages": ASKED, "max_tokens": 12, "logit_bias": ENDLESS}
            answers = await asyncio.gather(*(client.chat.completions.create(**fields, seed=seed) for seed in range(4)))
            texts = [answer.choices[0].message.content for answer in answers]
            assert len(set(texts)) == 4
            stream = await client.chat.completions.create(**fields, seed=2, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == texts[2]

    asyncio.run(run())


def test_errors_are_the_clients_own(place: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{place.url}/v1", api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not here, expected toy"):
        client.chat.completions.create(model="gpt-9", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match=r"temperature is 3\.0, expected 0 to 2") as wrong:
        client.chat.completions.create(model="toy", messages=ASKED, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as long:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 1000}])
    assert long.value.code == "context_length_exceeded"


def test_a_full_server_and_one_that_ends(tmp_path: Path) -> None:
    settings = Settings(conversations=1, queue=0)
    with served(open_runtime(tmp_path, SlowTarget), settings) as place:
        client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="toy", messages=ASKED, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="toy", messages=ASKED)
        assert full.value.response.headers["retry-after"] == "5"
        place.end()
        with pytest.raises(openai.APIError, match="the server is ending"):
            list(stream)
        client.close()


def test_leaving_a_stream_ends_its_answer(tmp_path: Path) -> None:
    with served(open_runtime(tmp_path, SlowTarget)) as place:
        client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
        with client.chat.completions.create(model="toy", messages=ASKED, stream=True) as stream:
            next(iter(stream))
        wait_until(lambda: place.app.state.line.running == 0 and place.runtime.status().busy == 0, 1.0)
        client.close()


def test_tools(speaker: openai.OpenAI) -> None:
    ScriptedTarget.scripts = ('<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>',)
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    answer = speaker.chat.completions.create(model="toy", messages=ASKED, tools=tools)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "here"})
    with speaker.chat.completions.stream(model="toy", messages=ASKED, tools=tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert (final.choices[0].message.tool_calls or [])[0].function.name == "look"


class Verdict(BaseModel):
    so: bool
    reasons: list[str]


def test_a_pydantic_model_is_parsed(speaker: openai.OpenAI) -> None:
    ScriptedTarget.scripts = ("Well!", '{"so": true, "reasons": ["it is"]}')
    answer = speaker.chat.completions.parse(model="toy", messages=ASKED, response_format=Verdict)
    assert answer.choices[0].message.parsed == Verdict(so=True, reasons=["it is"])


@pytest.mark.parametrize("stream", [True, False])
def test_the_llm_command(place: Served, client: openai.OpenAI, tmp_path: Path, stream: bool) -> None:
    entry = {"model_id": "device", "model_name": "toy", "api_base": f"{place.url}/v1", "api_key_name": "device"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"device": KEY}))
    options = {"seed": "7", "max_tokens": "12", "temperature": "0.9", "logit_bias": json.dumps(ENDLESS)}
    given = [part for name, value in options.items() for part in ("-o", name, value)]
    argv = [sys.executable, "-m", "llm", "-m", "device", "--no-log", *given, "Is this so?"]
    done = subprocess.run(
        argv if stream else [*argv, "--no-stream"],
        env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    same: Any = {"seed": 7, "max_tokens": 12, "temperature": 0.9, "logit_bias": ENDLESS}
    answer = client.chat.completions.create(model="toy", messages=ASKED, **same)
    said = (answer.choices[0].message.content or "").replace("\r\n", "\n").replace("\r", "\n")  # as text=True reads it
    assert done.stdout.removesuffix("\n") == said.removesuffix("\n")

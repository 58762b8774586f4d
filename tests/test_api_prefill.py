"""A prompt that fills the context takes long to read: others are answered meanwhile, and who leaves ends it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Served, open_runtime, served, wait_until
from tiny_session import EOS, ToyTarget

from starsd.edge.api_settings import Settings
from starsd.shared.profiles import Profile

CONTEXT = 8192
DEVICE = Profile(name="toy", hidden=1, pass_ms=((1, 10.0), (64, 10.0)), interpolation="linear", prefill_tok_s=2000.0)
ASKED = [{"role": "user", "content": "Is this so?"}]
LONG = {"prompt": [5] * CONTEXT, "max_tokens": 1}  # some seconds


class Shared(ToyTarget):
    """Siblings count together what they read."""

    reads: list[int] = []  # noqa: RUF012  each test has its own

    def prefill(self, tokens: Any, *progress: Any) -> Any:
        self.reads.append(len(tokens))
        return super().prefill(tokens, *progress)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(Shared, "reads", [])
    runtime = open_runtime(tmp_path, Shared, context=CONTEXT, profile=DEVICE)
    with served(runtime, Settings(conversations=2, queue=1)) as place:
        yield place


def opened(place: Served, **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}).encode())
    wait_until(lambda: len(Shared.reads) > 1)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_others_are_answered_while_a_long_prompt_is_read(place: Served, stream: bool) -> None:
    long = opened(place, stream=stream)
    answer = place.chat(messages=ASKED, max_tokens=5, logit_bias={str(EOS): -100})
    assert answer["usage"]["completion_tokens"] == 5
    assert place.ask("GET", "/health")[0] == 200
    assert sum(Shared.reads) < CONTEXT - 1  # still at it
    assert place.app.state.line.running == 1
    long.close()


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_reading(place: Served, stream: bool) -> None:
    long = opened(place, stream=stream)
    long.close()
    wait_until(lambda: place.app.state.line.running == 0)
    wait_until(lambda: place.runtime.status().busy == 0)
    read = sum(Shared.reads)
    assert read < CONTEXT - 1
    time.sleep(0.5)
    assert sum(Shared.reads) == read
    assert place.counted("prompt_tokens_total") == CONTEXT


def test_a_chats_stream_begins_while_its_prompt_is_read(place: Served) -> None:
    """So that neither the client nor a proxy takes it for dead."""
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    asked = [{"role": "user", "content": "so? " * 1500}]
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": asked, "stream": True}).encode())
    first = connection.getresponse().readline()
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    prompt = len(place.runtime.text.encode_chat(asked))
    assert sum(Shared.reads) < prompt - 1
    connection.close()

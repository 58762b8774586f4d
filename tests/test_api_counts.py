"""What is counted of answers: once, however they end; and the bytes that leave the device, none for private ones."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Served, SlowTarget, open_runtime, served, wait_until
from bigram_server import serving
from star import MarkedTarget
from tiny_session import EOS

from starsd.edge.api_settings import Settings
from starsd.edge.runtime import Drafting

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is this so?"}]
ENDLESS = {str(EOS): -100}


class Repeating(SlowTarget):
    """Says the same again and again, so that n-grams are right."""

    def logits(self, context: Any) -> Any:
        logits = super().logits(context)
        logits[40] += 50
        return logits


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Served]:
    with served(open_runtime(tmp_path, Repeating, conversations=1), Settings(conversations=1, queue=1)) as place:
        yield place


def leave(place: Served, stream: bool) -> None:
    """In the middle of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    connection.request("POST", CHAT, json.dumps({"messages": ASKED, "stream": stream}).encode())
    wait_until(lambda: place.counted("tokens_total") > 20)
    connection.close()
    wait_until(lambda: place.app.state.line.running == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_whose_client_left_are_counted(place: Served, stream: bool) -> None:
    leave(place, stream)
    passes, right = place.counted("passes_total"), place.counted("accepted_drafts_total", source="ngram")
    assert passes > 1
    assert right > 1
    assert place.counted("tokens_total") == passes + right + 1  # the first token is the prefill's
    prompt = len(place.runtime.text.encode_chat(ASKED))
    assert place.counted("prompt_tokens_total") == prompt
    assert place.counted("first_token_seconds_count") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_whole_answers_are_counted_once(place: Served, stream: bool) -> None:
    fields: dict[str, Any] = {"messages": ASKED, "max_tokens": 30, "n": 2}
    if stream:
        usage = place.stream(**fields, stream_options={"include_usage": True})[-1]["usage"]
    else:
        usage = place.chat(**fields)["usage"]
    assert place.counted("passes_total") == usage["starsd"]["passes"] > 0
    assert place.counted("accepted_drafts_total", source="ngram") == usage["starsd"]["accepted_ngram"] > 0
    assert place.counted("prompt_tokens_total") == usage["prompt_tokens"]
    assert place.counted("tokens_total") == usage["completion_tokens"] == 60


def test_who_never_had_a_turn_is_not_counted(place: Served) -> None:
    first = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    first.request("POST", CHAT, json.dumps({"messages": ASKED, "stream": True}).encode())
    wait_until(lambda: place.app.state.line.running == 1)
    second = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    second.request("POST", CHAT, json.dumps({"messages": ASKED}).encode())
    wait_until(lambda: place.app.state.line.waiting == 1)
    second.close()
    wait_until(lambda: place.app.state.line.waiting == 0)
    assert place.ask("POST", CHAT, {"messages": []})[0] == 400
    first.close()
    wait_until(lambda: place.app.state.line.running == 0)
    assert place.counted("prompt_tokens_total") == len(place.runtime.text.encode_chat(ASKED))


def test_nothing_of_a_private_request_is_sent(tmp_path: Path) -> None:
    with serving() as (_, url, _):
        runtime = open_runtime(tmp_path, MarkedTarget, drafting=Drafting(server=url))
        with served(runtime) as place:
            wait_until(lambda: runtime.status().link == "up")
            fields: dict[str, Any] = {"messages": ASKED, "max_tokens": 40, "logit_bias": ENDLESS, "temperature": 0}
            private = place.chat(**fields, starsd={"private": True})
            ours = private["usage"]["starsd"]
            assert (ours["bytes_up"], ours["bytes_down"], ours["accepted_remote"]) == (0, 0, 0)
            heard = place.counted("link_bytes_total", way="up")
            public = place.chat(**fields)
            assert public["choices"][0]["message"] == private["choices"][0]["message"]
            ours = public["usage"]["starsd"]
            assert ours["bytes_up"] > 40
            assert place.counted("link_bytes_total", way="up") - heard >= ours["bytes_up"]

"""The API while its server dies and comes back, and conversations that idle: they say what they say without one."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Served, served, wait_until
from bigram import FINGERPRINT
from bigram_server import child, serving
from star import MarkedTarget
from tiny_session import EOS, write_text_files

from starsd.edge import Drafting, Limits, Runtime, Sampling
from starsd.edge.policy import Policy
from starsd.edge.target import Floats
from starsd.edge.text import Text

MESSAGES = [{"role": "user", "content": "Is this so?"}]
FIELDS = {"messages": MESSAGES, "temperature": 0.7, "top_p": 1, "seed": 5, "logit_bias": {str(EOS): -100}}
SAMPLING = Sampling(temperature=0.7, seed=5, logit_bias={EOS: -100})
DRAFTED = Policy.STOP_AND_WAIT  # the one whose only drafts are the server's
SOME = 5  # tokens from the server that show that it drafts


class Slow(MarkedTarget):
    """Leaves a drafter some time."""

    pause = 0.004

    def score(self, tokens: Any, parents: Any) -> Floats:
        time.sleep(self.pause)
        return super().score(tokens, parents)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


def plain(text: Text, tokens: int) -> str:
    """What the model says without any drafts."""
    with Runtime.around(MarkedTarget(), text=text) as runtime:
        *_, last = runtime.generate(MESSAGES, sampling=SAMPLING, limits=Limits(max_new_tokens=tokens))
    assert last.outcome is not None
    return last.outcome.text


@contextlib.contextmanager
def streamed(device: Served) -> Iterator[Iterator[tuple[str, int, int]]]:
    """An endless answer: of each chunk its text, how many tokens it has, and how many of them the server proposed."""
    connection = http.client.HTTPConnection("127.0.0.1", device.port, timeout=30)
    with contextlib.closing(connection):
        body = {**FIELDS, "stream": True, "max_tokens": 4000, "starsd": {"show_drafts": True}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        yield chunks(connection.getresponse())


def chunks(answer: http.client.HTTPResponse) -> Iterator[tuple[str, int, int]]:
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                sources = [token["source"] for token in choice.get("starsd", {}).get("tokens", [])]
                yield choice["delta"].get("content", ""), len(sources), sources.count("remote")


def test_a_server_that_dies_in_the_middle_of_an_answer_and_comes_back(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child() as server:
        drafting = Drafting(server=server.url, policy=DRAFTED)
        runtime = Runtime.around(Slow(), text=text, fingerprint=FINGERPRINT, drafting=drafting)
        wait_until(lambda: runtime.status().link == "up")
        with served(runtime) as device, streamed(device) as answer:
            said, count = "", 0

            def until(holds: Callable[[int], bool]) -> None:
                """Read on, until what holds of the tokens of the server that came meanwhile."""
                nonlocal said, count
                remote = 0
                while not holds(remote):
                    piece, tokens, drafted = next(answer)
                    said, count, remote = said + piece, count + tokens, remote + drafted

            until(lambda remote: remote >= SOME)
            server.end()
            wait_until(lambda: runtime.status().link == "lost")
            at = count
            until(lambda remote: count > at + 30)  # the device goes on alone
            monkeypatch.setattr(Slow, "pause", 0.2)  # that starting may take a while
            server.start()
            wait_until(lambda: runtime.status().link == "up")
            monkeypatch.setattr(Slow, "pause", 0.004)
            at = count
            until(lambda remote: count > at + 150)  # what came before the link did is behind us
            until(lambda remote: remote >= SOME)
    alone = plain(text, 2 * count)  # some tokens have no text of their own, and are not counted
    assert len(alone) > len(said) > 200
    assert alone[: len(said)] == said


def test_an_idle_conversation_leaves_its_place_and_gets_one_again(text: Text) -> None:
    with serving() as (_, url, drafter):
        places = len(drafter.free)
        drafting = Drafting(server=url, idle_seconds=0.5, policy=DRAFTED)
        with Runtime.around(Slow(), text=text, fingerprint=FINGERPRINT, drafting=drafting) as runtime:
            wait_until(lambda: runtime.status().link == "up")
            messages = list(MESSAGES)
            with Runtime.around(MarkedTarget(), text=text) as alone:
                for _ in range(3):
                    limits = Limits(max_new_tokens=120)
                    drafted, undrafted = (
                        list(one.generate(messages, sampling=SAMPLING, limits=limits)) for one in (runtime, alone)
                    )
                    outcome, wanted = drafted[-1].outcome, undrafted[-1].outcome
                    assert outcome is not None
                    assert wanted is not None
                    assert outcome.token_ids == wanted.token_ids
                    assert outcome.accepted_remote >= SOME
                    wait_until(lambda: len(drafter.free) == places)
                    messages += [{"role": "assistant", "content": outcome.text}, {"role": "user", "content": "And?"}]


def test_a_server_that_was_never_there(tmp_path: Path) -> None:
    text = Text.open(write_text_files(tmp_path))
    runtime = Runtime.around(Slow(), text=text, fingerprint=FINGERPRINT, server="ws://127.0.0.1:9")
    with served(runtime) as device:
        said = device.chat(**FIELDS, max_tokens=60)["choices"][0]["message"]["content"]
    assert said == plain(text, 60)

"""Grammars that clients ask for: what they may cost, and whom they hold up."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import TOOL_TEMPLATE, Served, SlowTarget, open_runtime, served, wait_until
from test_grammar_trial import HOSTILE

from starsd.edge import api_grammars, grammar_trial
from starsd.edge.grammar_trial import Trial

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is this so?"}]
REFUSAL = "JSON schema cannot be used: it takes more than 0 seconds or 256 MB to compile, expected a simpler one"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Served]:
    with served(open_runtime(tmp_path, template=TOOL_TEMPLATE)) as place:
        yield place


@pytest.fixture
def strict(place: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Gives trials no more than a second of CPU time, however long that takes."""
    monkeypatch.setattr(grammar_trial, "PATIENCE", 60.0)
    place.app.state.grammars._trial._cpu_seconds = 0
    return place


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Trials last until it is set."""
    go_on = threading.Event()
    monkeypatch.setattr(Trial, "check", lambda self, rules, what: go_on.wait(30))
    yield go_on
    go_on.set()


def body(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": ASKED, "max_tokens": 2, "response_format": form, **fields}


def opened(place: Served, schema: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    connection.request("POST", CHAT, json.dumps(body(schema)).encode())
    return connection


def waiting(place: Served) -> int:
    return int(place.app.state.grammars._waiting)


def test_a_hostile_schema_is_refused_while_others_are_answered(strict: Served) -> None:
    place = strict
    place.chat(**body({"enum": ["so"]}))  # the process for trials is there
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(place.refused(CHAT, body(HOSTILE), 400)))
    thread.start()
    wait_until(lambda: waiting(place) == 1)
    place.chat(messages=ASKED, max_tokens=2)
    place.chat(**body({"enum": ["so"]}))  # which is known
    assert place.ask("GET", "/health")[0] == 200
    assert not said  # all of them went ahead
    thread.join()
    assert (said[0]["message"], said[0]["param"]) == (REFUSAL, "response_format.json_schema.schema")
    place.chat(**body({"enum": ["no"]}))


def test_a_busy_device_says_so_and_may_be_asked_again(place: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "PATIENCE", 0.0)
    status, headers, said = place.ask("POST", CHAT, body({"enum": ["so"]}))
    assert (status, headers["retry-after"]) == (429, "1")
    assert said["error"]["message"] == "JSON schema was not compiled in 0 seconds: try again later"
    monkeypatch.undo()
    place.chat(**body({"enum": ["so"]}))


def test_tools_are_tried_too(strict: Served) -> None:
    place = strict
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": HOSTILE}}}}
    error = place.refused(CHAT, {"messages": ASKED, "tools": [tool]}, 400)
    assert (error["message"], error["param"]) == (REFUSAL, "tools")


def test_each_grammar_is_tried_once(place: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    check = Trial.check

    def counted(self: Trial, rules: str, what: str) -> None:
        tried.append(rules)
        check(self, rules, what)

    monkeypatch.setattr(Trial, "check", counted)
    monkeypatch.setattr(api_grammars, "KEPT", 3)
    for _ in range(3):
        place.chat(**body({"enum": ["so"]}))
        error = place.refused(CHAT, body({"type": "foo"}), 400)
        assert error["message"] == "JSON schema cannot be used: Invalid type: foo"
        place.chat(**body({}, response_format={"type": "json_object"}))
    assert len(tried) == 3
    place.chat(**body({"enum": ["no"]}))  # in whose place the oldest goes
    for schema in ({"enum": ["no"]}, {"enum": ["so"]}):
        place.chat(**body(schema))
    assert len(tried) == 5


def test_not_everybody_may_wait(place: Served, held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_grammars, "WAITING", 2)
    first, second = (opened(place, {"enum": [word]}) for word in ("so", "no"))
    wait_until(lambda: waiting(place) == 2)
    status, headers, said = place.ask("POST", CHAT, body({"enum": ["yes"]}))
    assert (status, headers["retry-after"], said["error"]["code"]) == (429, "15", "rate_limit_exceeded")
    assert said["error"]["message"] == "2 grammars wait to be compiled, expected fewer: try again later"
    second.close()  # who leaves does not wait
    wait_until(lambda: waiting(place) == 1)
    third = opened(place, {"enum": ["yes"]})
    held.set()
    for connection in (first, third):
        assert connection.getresponse().status == 200
        connection.close()


def test_who_waits_for_a_grammar_has_no_turn(tmp_path: Path, held: threading.Event) -> None:
    with served(open_runtime(tmp_path, SlowTarget, conversations=1)) as place:
        connection = opened(place, {"enum": ["so"]})
        wait_until(lambda: waiting(place) == 1)
        assert place.app.state.line.running == 0
        held.set()
        assert connection.getresponse().status == 200
        connection.close()


def test_a_client_that_leaves_ends_its_trial(place: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "PATIENCE", 60.0)
    place.app.state.grammars._trial._cpu_seconds = 60
    place.chat(**body({"enum": ["so"]}))
    connection = opened(place, HOSTILE)
    wait_until(lambda: waiting(place) == 1)
    began = time.monotonic()
    connection.close()
    place.chat(**body({"enum": ["no"]}))  # which waits for the trial
    assert time.monotonic() - began < 20
    assert waiting(place) == 0


def test_a_schema_that_proves_too_wide_within_an_answer_names_the_field(place: Served) -> None:
    wide = [
        {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(3000)
    ]
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ab"]}, "x": {"anyOf": wide}},
        "required": ["name", "x"],
        "additionalProperties": False,
    }
    status, _, answer = place.ask("POST", CHAT, body(schema, max_tokens=40))
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert re.match(
        r"grammar cannot be followed behind \d+ tokens, expected a simpler one: ", answer["error"]["message"]
    )
    assert "verbose" not in answer["error"]["message"]

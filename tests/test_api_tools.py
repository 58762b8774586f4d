"""Tool calls: what the model is offered, and that what it calls is certain to be one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import TOOL_TEMPLATE, ScriptedTarget, Served, open_runtime, served
from tiny_session import TEMPLATE

from starsd.edge.api_tools import knows_calls, read_call
from starsd.edge.text import Text

ASKED = [{"role": "user", "content": "Is this so?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop_it"}}
LOOKED = '<tool_call>\n{"name": "look", "arguments": {"place": "there", "days": 3}}\n</tool_call>'
STOPPED = '<tool_call>\n{"name": "stop_it", "arguments": {}}\n</tool_call>'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Served]:
    with served(open_runtime(tmp_path, ScriptedTarget, template=TOOL_TEMPLATE)) as place:
        yield place


def say(*scripts: str) -> None:
    ScriptedTarget.scripts = scripts


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def test_the_model_sees_the_tools_and_may_let_them_be(place: Served) -> None:
    say("Yes, it is.")
    answer = place.chat(messages=ASKED, tools=[LOOK, STOP])
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes, it is.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    text = place.runtime.text
    shown = [LOOK, {"type": "function", "function": {**STOP["function"], "description": "", "parameters": {}}}]
    shown[1]["function"]["parameters"] = {"type": "object", "properties": {}}
    assert answer["usage"]["prompt_tokens"] == len(text.encode_chat(ASKED, shown))
    without = place.chat(messages=ASKED, tools=[LOOK], tool_choice="none")
    assert without["usage"]["prompt_tokens"] == len(text.encode_chat(ASKED))


def test_a_call(place: Served) -> None:
    say(f"Let me see. {LOOKED}")
    (choice,) = place.chat(messages=ASKED, tools=[LOOK, STOP])["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see. "
    assert calls(message) == [("look", {"place": "there", "days": 3})]
    assert message["tool_calls"][0]["type"] == "function"
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls"


def test_several_calls_and_only_one(place: Served) -> None:
    say(f"{LOOKED}\n{STOPPED}")
    (choice,) = place.chat(messages=ASKED, tools=[LOOK, STOP])["choices"]
    assert choice["message"]["content"] is None
    assert calls(choice["message"]) == [("look", {"place": "there", "days": 3}), ("stop_it", {})]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    (choice,) = place.chat(messages=ASKED, tools=[LOOK, STOP], parallel_tool_calls=False)["choices"]
    assert calls(choice["message"]) == [("look", {"place": "there", "days": 3})]


def test_each_turn_has_noise_of_its_own(place: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[int] = []
    generate = place.runtime.agenerate

    def agenerate(prompt: Any, **named: Any) -> Any:
        choices.append(named["choice"])
        return generate(prompt, **named)

    monkeypatch.setattr(place.runtime, "agenerate", agenerate)
    say(f"Hm. {LOOKED}")
    place.chat(messages=ASKED, tools=[LOOK], n=2)
    assert len(choices) == len(set(choices)) == 6  # free, a call, what follows it; twice
    assert (choices[0], choices[3]) == (0, 1)


def test_a_stream_of_calls(place: Served) -> None:
    say(f"Hm. {LOOKED}\n{STOPPED}")
    chunks = place.stream(messages=ASKED, tools=[LOOK, STOP], stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm. "
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in told] == [(0, "look"), (1, "stop_it")]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 10


@pytest.mark.parametrize(
    "wish",
    [
        '<tool_call>\n{"name": "fly", "arguments": {"place": "away"}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {"place": "nowhere", "days": "many"}}\n</tool_call>',
        "<tool_call>\nno JSON at all",
    ],
)
def test_a_call_is_one_of_the_tools_whatever_the_model_wants(place: Served, wish: str) -> None:
    good = '<tool_call>\n{"name": "look", "arguments": {"place": "here", "days": 1}}'
    say(wish, good)
    (choice,) = place.chat(messages=ASKED, tools=[LOOK], temperature=0, max_tokens=300)["choices"]
    ((name, arguments),) = calls(choice["message"])
    assert name == "look"
    assert arguments["place"] in ("here", "there")
    assert isinstance(arguments["days"], int)


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "stop_it"}}, "stop")],
)
def test_a_call_that_must_be(place: Served, choice: Any, finish: str) -> None:
    say("Never.", STOPPED)
    (said,) = place.chat(messages=ASKED, tools=[LOOK, STOP], tool_choice=choice)["choices"]
    assert calls(said["message"]) == [("stop_it", {})]
    assert said["message"]["content"] is None
    assert said["finish_reason"] == finish


def test_half_a_call_is_none(place: Served) -> None:
    say(f"Hm. {LOOKED}")
    whole = place.chat(messages=ASKED, tools=[LOOK])["usage"]["completion_tokens"]
    answer = place.chat(messages=ASKED, tools=[LOOK], max_tokens=whole - 3)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hm. ", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == whole - 3


def test_a_clients_stop_string_is_no_call(place: Served) -> None:
    say(f"Hm. {LOOKED}")
    (choice,) = place.chat(messages=ASKED, tools=[LOOK], stop=["m. "])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "stop")
    assert "tool_calls" not in choice["message"]


def test_a_call_and_its_result_come_back(place: Served) -> None:
    say(f"Hm. {LOOKED}")
    message = place.chat(messages=ASKED, tools=[LOOK])["choices"][0]["message"]
    say("Done.")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    answer = place.chat(messages=[*ASKED, message, result], tools=[LOOK])
    assert answer["choices"][0]["message"]["content"] == "Done."
    call = {"name": "look", "arguments": {"place": "there", "days": 3}}
    plain = [*ASKED, {"role": "assistant", "content": "Hm. ", "tool_calls": [{"function": call}]}]
    prompt = place.runtime.text.encode_chat([*plain, {"role": "tool", "content": "sunny"}], [LOOK])
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        (TOOL_TEMPLATE, True),
        (TEMPLATE, False),
        (TOOL_TEMPLATE.replace("tool_call>", "function>"), False),  # another format
        (TOOL_TEMPLATE.replace('"arguments"', '"parameters"'), False),
        (TOOL_TEMPLATE.replace("{{ tool | tojson }}", ""), False),  # shows no tools
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_which_templates_know_calls(tmp_path: Path, template: str, knows: bool) -> None:
    runtime = open_runtime(tmp_path, template=template)
    assert knows_calls(runtime.text) is knows
    runtime.close()


@pytest.mark.parametrize("said", ["", "{}", '{"name": 1, "arguments": {}}', '{"name": "x", "arguments": []}', "[1]"])
def test_what_is_no_call(said: str) -> None:
    with pytest.raises(ValueError, match=r"^no call: "):
        read_call(said)


@pytest.mark.model
def test_the_default_models_template_knows_no_calls(smollm2_folder: Path) -> None:
    assert not knows_calls(Text.open(smollm2_folder))

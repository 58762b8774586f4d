"""Tool calls, for models whose chat template knows them: what the model is offered, and how its calls are made certain.

The one format known here is Hermes', which Qwen and others share: the model writes

    <tool_call>
    {"name": …, "arguments": {…}}
    </tool_call>

once or several times, after some text or none. Whether a template writes this is found out by rendering a call with it.
What comes before a call is free; from `<tool_call>` on a grammar holds, so that every call names a tool that was
offered, with arguments of its schema.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from starsd.edge.api_errors import ApiError
from starsd.edge.api_prompts import check_depth
from starsd.edge.api_requests import ChatRequest, Tool
from starsd.edge.text import Text
from starsd.shared.errors import StarsdError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_TOOLS = 128
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_PROBE = "starsd_probe"


@dataclass(frozen=True)
class Offer:
    """What the model may call: `tools` as the template takes them, and the schema of one call.

    `must` says that the answer is a call, `several` that it may be more than one. `named`: the client chose the tool.
    """

    tools: list[dict[str, Any]]
    schema: dict[str, Any]
    must: bool
    several: bool
    named: bool


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON

    def shape(self, index: int | None = None) -> dict[str, Any]:
        """As a message has it, or, with an index, a streamed piece of one."""
        function = {"name": self.name, "arguments": self.arguments}
        numbered = {} if index is None else {"index": index}
        return {**numbered, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class _Said(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


def offer(request: ChatRequest, text: Text) -> Offer | None:
    """The tools of a request; None when it has none, or wants none called. Raises ApiError for what is no good."""
    tools = request.tools or []
    choice = request.tool_choice if request.tool_choice is not None else "auto" if tools else "none"
    uses = any(message.role == "tool" or message.tool_calls for message in request.messages)
    if (tools or uses) and not knows_calls(text):
        where = "tools" if tools else "messages"
        raise ApiError(
            "this model cannot call tools: its chat template does not write <tool_call> JSON",
            param=where,
            code="unsupported_parameter",
        )
    if len(tools) > MOST_TOOLS:
        raise ApiError(f"tools are {len(tools)}, expected at most {MOST_TOOLS}", param="tools")
    for at, tool in enumerate(tools):
        _check(tool, f"tools[{at}]")
    name = _choice(choice, tools)
    if choice == "none":
        return None
    asked = [tool for tool in tools if name is None or (tool.function is not None and tool.function.name == name)]
    return Offer(
        tools=[_plain(tool) for tool in tools],
        schema=_schema(asked),
        must=choice != "auto",
        several=name is None and request.parallel_tool_calls is not False,
        named=name is not None,
    )


def knows_calls(text: Text) -> bool:
    """Whether this model's template writes calls in the format above, and shows tools to the model."""
    function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "0", "type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}}
    asked = [{"role": "user", "content": "x"}]
    try:
        offered = text.render(asked, [{"type": "function", "function": function}])
        called = text.render([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except StarsdError:  # no template, or one that such messages break
        return False
    written = re.search(f"{OPEN}\\s*(.*?)\\s*{CLOSE}", called, re.DOTALL)
    try:
        return _PROBE in offered and written is not None and read_call(written.group(1)).arguments == '{"x": 1}'
    except ValueError:
        return False


def read_call(said: str) -> Call:
    """The call that a grammar made certain. Raises ValueError for anything else."""
    try:
        call = msgspec.json.decode(said, type=_Said)
    except msgspec.DecodeError as error:
        raise ValueError(f"no call: {error}") from error
    return Call(call.name, json.dumps(call.arguments, ensure_ascii=False))


def _choice(choice: str | dict[str, Any], tools: Sequence[Tool]) -> str | None:
    """The name of the tool that is to be called, where `choice` names one."""
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise ApiError(f"tool_choice is {choice!r}, expected none, auto, required or a tool", param="tool_choice")
        if choice != "none" and not tools:
            raise ApiError("tool_choice is given without tools, expected both", param="tool_choice")
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ApiError('tool_choice is no {"type": "function", "function": {"name"}}', param="tool_choice")
    if not any(tool.function is not None and tool.function.name == name for tool in tools):
        raise ApiError(f"tool_choice names {name[:64]!r}, expected one of the tools", param="tool_choice")
    return name


def _check(tool: Tool, where: str) -> None:
    if tool.type != "function" or tool.function is None:
        raise ApiError(f"{where} is of type {tool.type!r}, expected a function", param=where)
    if not _NAME.fullmatch(tool.function.name):
        raise ApiError(
            f"{where}.function.name is {tool.function.name[:80]!r}, expected 1 to 64 letters, digits, _ and -",
            param=f"{where}.function.name",
        )
    check_depth(tool.function.parameters, f"{where}.function.parameters")


def _plain(tool: Tool) -> dict[str, Any]:
    assert tool.function is not None
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """One call of one of the tools. Their own definitions move along, for references count from the root."""
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        assert tool.function is not None
        place = f"tool{number}"
        definitions[place] = _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/{place}")
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema

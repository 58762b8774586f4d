"""Chat templates: a model's own jinja program that turns messages into a prompt, run in a sandbox.

The environment offers what templates in the wild rely on (documented by Hugging Face under "Chat templates"): the
variables `messages`, `tools`, `documents`, `add_generation_prompt` and the special tokens; the functions
`raise_exception` and `strftime_now`; the filter `tojson` without HTML escapes; `break` and `continue`; and the block
`generation`, which marks trained text and prints its body. Devices and exports render by it alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from starsd.shared.errors import MissingExtraError, ModelError, UsageError

try:
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise MissingExtraError("jinja2", "edge") from error

DEFAULT = "default"
TOOL_USE = "tool_use"
FILE_NAME = "chat_template.jinja"

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One compiled template. `source` is its text, `special_tokens` are variables such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template has a syntax error in line {error.lineno}: {error.message}") from error
        except (ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ModelError(f"chat template cannot be compiled: {type(error).__name__} {error}") from error

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text. `tools` are JSON schemas; `variables` are whatever else this template understands.

        Raises UsageError when the template refuses the messages or cannot render them, ModelError when it tries to
        leave the sandbox.
        """
        given = {**self._special_tokens, "documents": None, **variables}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            plain: dict[str, Any] = {name: _plain(value, name) for name, value in given.items()}
            return self._template.render(plain)
        except _Refused as error:
            raise UsageError(f"chat template refuses these messages: {error.message}") from error
        except SecurityError as error:
            raise ModelError(f"chat template tried what a template must not: {error.message}") from error
        except (MemoryError, RecursionError) as error:
            raise ModelError(f"chat template asks for more than there is: {type(error).__name__}") from error
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"chat template cannot render these messages: {error}") from error


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a Hugging Face folder by name: from `config`, its tokenizer_config.json, overridden by
    `.jinja` files. Raises ModelError for what is no text."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates[DEFAULT] = given
    elif isinstance(given, list):
        try:
            templates |= {str(entry["name"]): str(entry["template"]) for entry in given}
        except (KeyError, TypeError) as error:
            raise ModelError("chat_template is a list, expected objects with name and template in it") from error
    elif given is not None:
        raise ModelError(f"chat_template is a {type(given).__name__}, expected a string or a list of named templates")
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / FILE_NAME).is_file():
        files[DEFAULT] = file
    return templates | {name: _text(file) for name, file in files.items()}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `*_token` entries of a tokenizer_config.json, each a string or an object with `content`, as text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8, expected a chat template: {error}") from error


class _Refused(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: prints its body."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any, name: str) -> Any:
    """A copy made of dicts, lists, strings, numbers, booleans and None only: nothing a template could climb out by."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, name) for item in value]
    raise UsageError(f"{name} hold a {type(value).__name__}, expected JSON values")


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made


_ENVIRONMENT = _environment()

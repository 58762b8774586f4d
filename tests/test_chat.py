"""Conversations as the exporter renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from starsd.edge.text import Text
from starsd.export.chat import ChatRenderer, ask, end_tokens
from starsd.export.hf_folder import chat_template
from starsd.shared.errors import ModelError

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ add_generation_prompt }}"


def folder_with(folder: Path, template: str | None, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None, **config})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_conversation_is_rendered_up_to_the_answer(tmp_path: Path) -> None:
    renderer = ChatRenderer.find(folder_with(tmp_path, TEMPLATE))
    assert renderer is not None
    assert renderer.render([{"role": "user", "content": "hi"}]) == "<s>user: hiTrue"


def test_a_folder_without_a_template_has_no_renderer(tmp_path: Path) -> None:
    assert ChatRenderer.find(folder_with(tmp_path, None)) is None


def test_a_broken_template_is_a_broken_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r": chat template has a syntax error in line 1: "):
        ChatRenderer.find(folder_with(tmp_path, "{% if %}"))
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    renderer = ChatRenderer.find(folder_with(tmp_path, escape))
    assert renderer is not None
    with pytest.raises(ModelError, match=r": chat template tried what a template must not: "):
        renderer.render([])


WILD = (
    "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}{{ tools is none }}"
    "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
)


def test_exports_render_what_devices_render(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    folder_with(tmp_path, WILD)
    renderer = ChatRenderer.find(tmp_path)
    assert renderer is not None
    messages = [{"role": "user", "content": "<>"}, {"role": "user", "content": "two"}]
    assert renderer.render(messages) == '4True{"role": "user", "content": "<>"}' == Text.open(tmp_path).render(messages)


@pytest.mark.parametrize(
    ("template", "why_not"),
    [
        ("{{ raise_exception('no users') }}", "chat template refuses these messages: no users"),
        ("{{ 1 / 0 }}", "chat template cannot render these messages: division by zero"),
        ("{{ messages[0] + 1 }}", "chat template cannot render these messages: unsupported operand"),
        ("{{ 9.0 ** 9999 }}", "chat template cannot render these messages: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template asks for more than there is: Recursion"),
        ("{{ 'x' * 10 ** 18 }}", "chat template asks for more than there is: MemoryError"),
        ("{% if %}", "chat template has a syntax error in line 1: "),
        ("", "chat template renders nothing"),
    ],
)
def test_questions_go_without_a_template_that_fails(template: str, why_not: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    asked, said = ask(tmp_path, tokenizer, ["a", "b"], 8)
    assert asked == [[0], [1]]
    assert said.startswith(f"{tmp_path}: {why_not}")


def test_questions_by_a_template_and_without_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert ask(tmp_path, tokenizer, ["b"], 8) == ([[1]], "")
    (tmp_path / "chat_template.jinja").write_text("{{ 'b' }}")
    assert ask(tmp_path, tokenizer, ["a"], 8) == ([[1]], "")
    with pytest.raises(ModelError, match=r"^tokenizer of .* makes no tokens of a question, expected some$"):
        ask(tmp_path, tokenizer, [""], 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"name": "default"}], "chat_template is a list, expected objects with name and template in it"),
        (["x"], "chat_template is a list, expected objects with name and template in it"),
        (3, "chat_template is a int, expected a string or a list of named templates"),
    ],
)
def test_templates_that_are_none(given: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^{message}$"):
        chat_template(folder_with(tmp_path, None, chat_template=given))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (folder_with(tmp_path, None) / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8, expected a chat template"):
        chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        chat_template(tmp_path)


def test_special_and_end_tokens(tmp_path: Path) -> None:
    renderer = ChatRenderer.find(folder_with(tmp_path, TEMPLATE, eos_token="</s>"))
    assert renderer is not None
    assert renderer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert end_tokens(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert end_tokens(tmp_path) == (7, 8)

"""Conversations as the exporter renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starsd.export.chat import ChatRenderer, end_tokens, special_tokens
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
    with pytest.raises(ModelError, match="cannot be read"):
        ChatRenderer.find(folder_with(tmp_path, "{% if %}"))
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    renderer = ChatRenderer.find(folder_with(tmp_path, escape))
    assert renderer is not None
    with pytest.raises(ModelError, match="cannot be rendered"):
        renderer.render([])


def test_special_and_end_tokens(tmp_path: Path) -> None:
    folder_with(tmp_path, None, eos_token="</s>")
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert end_tokens(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert end_tokens(tmp_path) == (7, 8)

"""Chat templates as the exporter needs them: a conversation as the model expects it, for measuring and for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starsd.export.hf_folder import chat_template, read_json
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.template import ChatTemplate, special_tokens


class ChatRenderer:
    """The template of a Hugging Face folder, which must have one: see `find`."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.special = special_tokens(read_json(folder / "tokenizer_config.json"))
        try:
            self._template = ChatTemplate(source, self.special)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    @classmethod
    def find(cls, folder: Path) -> ChatRenderer | None:
        """The folder's renderer, None where it has no template. Raises ModelError for one with a syntax error."""
        source = chat_template(folder)
        return None if source is None else cls(folder, source)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation up to where the next answer begins. Raises ModelError when the template cannot render it."""
        try:
            return self._template.render(messages)
        except (ModelError, UsageError) as error:
            raise ModelError(f"{self.folder}: {error}") from error


def ask(folder: Path, tokenizer: Any, texts: Sequence[str], longest: int) -> tuple[list[list[int]], str]:
    """Each text as a question to the model of a folder, at most `longest` ids; and why they go without its chat
    template, empty where they do not or there is none.

    Raises ModelError when a question has no tokens.
    """
    try:
        if (renderer := ChatRenderer.find(folder)) is not None:
            rendered = [renderer.render([{"role": "user", "content": text}]) for text in texts]
            asked = [tokenizer.encode(text, add_special_tokens=False).ids[:longest] for text in rendered]
            if all(asked):
                return asked, ""
            raise ModelError(f"{folder}: chat template renders nothing")
        why_not = ""
    except ModelError as error:
        why_not = str(error)
    asked = [tokenizer.encode(text).ids[:longest] for text in texts]
    if not all(asked):
        raise ModelError(f"tokenizer of {folder} makes no tokens of a question, expected some")
    return asked, why_not


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ModelError(f"{folder / name} has eos_token_id {value!r}, expected token ids")
        return tuple(ids)
    return ()

"""Chat templates as the exporter needs them: a conversation as the model expects it, for measuring and for training.

The templates come with downloaded models, so they run in jinja's sandbox. What users type is the edge's business, which
has a renderer with everything that templates may ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from starsd.export.hf_folder import chat_template, read_json
from starsd.shared.errors import ModelError


class ChatRenderer:
    """The template of a Hugging Face folder, which must have one: see `find`."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.special = special_tokens(folder)
        try:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"chat template of {folder} cannot be read: {error}") from error

    @classmethod
    def find(cls, folder: Path) -> ChatRenderer | None:
        """The folder's renderer, None where it has no template. Raises ModelError for one with a syntax error."""
        source = chat_template(folder)
        return None if source is None else cls(folder, source)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation up to where the next answer begins. Raises ModelError when the template cannot render it."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self.special)
        except TemplateError as error:
            raise ModelError(f"chat template of {self.folder} cannot be rendered: {error}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that templates name, such as `bos_token`, as text."""
    config = read_json(folder / "tokenizer_config.json")
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {"bos_token": "", "eos_token": "", **{name: text for name, text in texts.items() if isinstance(text, str)}}


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

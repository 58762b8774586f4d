"""A model's text side: its tokenizer, its chat template and the tokens that end a generation.

Everything is read from the model's folder, in Hugging Face layout, with `tokenizers` and `jinja2` alone.

Special tokens spelled out inside a message become special tokens, as with transformers' `apply_chat_template`: the
template's text is encoded as one. Who serves strangers must refuse or escape them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from starsd.edge.detokenize import TextStream
from starsd.shared.errors import ModelError, UsageError
from starsd.shared.template import DEFAULT, TOOL_USE, ChatTemplate, Messages, read_templates, special_tokens


class Text:
    """Made by `Text.open`. Chat templates are compiled when first used: a broken one hurts only who needs it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        eos: frozenset[int],
        folder: Path,
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)  # role, such as bos_token, to its text
        self.eos = eos
        self.special_ids = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._templates = dict(templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> Text:
        """Read `folder`. Raises ModelError when its tokenizer is missing or a file is not what it should be."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing, expected a fast tokenizer beside the model")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ModelError(f"{path} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        eos = _eos_ids(folder)
        if "eos_token" in special and (id := tokenizer.token_to_id(special["eos_token"])) is not None:
            eos |= {id}
        return cls(tokenizer, read_templates(folder, config), special, frozenset(eos), folder)

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text, where the model has one."""
        name = self.special_tokens.get("bos_token")
        return None if name is None else self.tokenizer.token_to_id(name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text, by default with what the tokenizer itself puts around it (often the bos token)."""
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # a lone surrogate: bytes that came in undecoded
            raise UsageError("text holds bytes that are not UTF-8, expected valid Unicode") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """Text as tokens arrive, up to a stop string."""
        return TextStream(self.tokenizer, stops)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation as text; see ChatTemplate.render.

        With `tools` a template named `tool_use` is preferred, where the model has several. Raises UsageError when
        the model has no template.
        """
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise UsageError(
                f"model has no chat template: put one in {self._folder / 'chat_template.jinja'}, or give a prompt"
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name], self.special_tokens)
        return self._compiled[name].render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)

    def leading_tokens(self, system: Messages = ()) -> int:
        """How many tokens all conversations under these `system` messages begin with: what stays when one overflows."""
        a, b = (self.encode_chat([*system, {"role": "user", "content": content}]) for content in ("a", "b"))
        return shared_length(a, b)

    def encode_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of `render`'s text; the template alone decides on special tokens, none is added."""
        text = self.render(messages, tools, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _eos_ids(folder: Path) -> set[int]:
    """End tokens of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        text_config = config.get("text_config")
        value = config.get("eos_token_id")
        if value is None and isinstance(text_config, dict):
            value = text_config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if all(isinstance(id, int) for id in ids):
            return set(ids)
        if value is not None:
            raise ModelError(f"{folder / name} has eos_token_id {value}, expected an integer or a list of them")
    return set()


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)

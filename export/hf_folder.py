"""The small files of a Hugging Face folder: JSON objects, and the chat template that some models do not ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starsd.shared.errors import ModelError
from starsd.shared.template import DEFAULT, FILE_NAME, read_templates

SOURCE_GGUF = "source.gguf"  # the file that a folder was converted from, beside the result

# Vicuna v1.1 to v1.5 were trained on this one layout and ship no template: blanks between turns, </s> after answers
VICUNA_TEMPLATE = """\
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system, turns = messages[0]['content'], messages[1:] -%}
{%- else -%}
    {%- set system = "A chat between a curious user and an artificial intelligence assistant. The assistant gives \
helpful, detailed, and polite answers to the user's questions." -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- bos_token ~ system ~ ' ' -}}
{%- for turn in turns -%}
    {%- if turn['role'] == 'user' -%}
        {{- 'USER: ' ~ turn['content'] ~ ' ' -}}
    {%- elif turn['role'] == 'assistant' -%}
        {{- 'ASSISTANT: ' ~ turn['content'] ~ eos_token -}}
    {%- else -%}
        {{- raise_exception('role ' ~ turn['role'] ~ ', expected user or assistant') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'ASSISTANT:' -}}
{%- endif -%}
"""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no file. Raises ModelError when it holds anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def chat_template(folder: Path) -> str | None:
    """The chat template of a Hugging Face folder (its own, else Vicuna's when it is one); None when it has none.

    Raises ModelError when a file that could hold it cannot be read."""
    templates = read_templates(folder, read_json(folder / "tokenizer_config.json"))
    return templates.get(DEFAULT, VICUNA_TEMPLATE if not templates and _is_vicuna(folder) else None)


def ensure_chat_template(folder: Path) -> bool:
    """Write the folder's chat template to chat_template.jinja unless it is there. False when there is none to write."""
    path = folder / FILE_NAME
    if path.is_file():
        return True
    template = chat_template(folder)
    if template is None:
        return False
    path.write_text(template, encoding="utf-8")
    return True


def _is_vicuna(folder: Path) -> bool:
    names = [folder.resolve().name, read_json(folder / "starsd.json").get("source")]
    names += [read_json(folder / file).get("_name_or_path") for file in ("config.json", "tokenizer_config.json")]
    return any("vicuna" in str(name).lower() for name in names)

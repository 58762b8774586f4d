"""Prompt files: what is read, and where exactly a line is wrong."""

from __future__ import annotations

import re
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from tiny_session import write_text_files

from starsd.edge.text import Text
from starsd.shared.errors import UsageError
from starsd.shared.prompts import Prompt, read_prompts


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_both_forms_and_other_fields_are_read(tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "category": "x", "turns": ["Grüße 👋", "second"]}',
        "",
        '{"prompt": "one\\u2028line", "id": 7}\r',
    ]
    found = read_prompts(written(tmp_path, "\ufeff" + "\n".join(lines)))
    assert found == [Prompt("a", ("Grüße 👋", "second")), Prompt(7, ("one\u2028line",))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "input data was truncated"),
        ("[]", "expected `object`, got `array`"),
        ('{"turns": ["x"]}', "object missing required field `id`"),
        ('{"id": 1.5, "turns": ["x"]}', r"expected `int \| str`, got `float` - at `\$.id`"),
        ('{"id": "a", "turns": "x"}', r"expected `array \| null`, got `str` - at `\$.turns`"),
        ('{"id": "a", "turns": ["x", 1]}', r"expected `str`, got `int` - at `\$.turns\[1\]`"),
        ('{"id": "a"}', "got neither turns nor prompt"),
        ('{"id": "a", "turns": ["x"], "prompt": "x"}', "got both turns and prompt"),
        ('{"id": "a", "turns": []}', "got no turns"),
        ('{"id": "a", "prompt": " "}', "got an empty text"),
        (b'{"id": "a", "prompt": "\xff"}', "invalid UTF-8 encoded string"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    content = b'{"id": "good", "prompt": "x"}\n\n' + (line.encode() if isinstance(line, str) else line)
    path = written(tmp_path, content)
    expected = re.escape(', expected {"id", "turns": [texts]} or {"id", "prompt": text}')
    with pytest.raises(UsageError, match=f"^{re.escape(str(path))} line 3: {message}{expected}$"):
        read_prompts(path)


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prompts\.jsonl cannot be read: no such file or directory$"):
        read_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(UsageError, match=r"prompts\.jsonl holds no prompts, expected \{"):
        read_prompts(written(tmp_path, "\n \n"))


def test_our_own_prompts_are_sound() -> None:
    with as_file(files("starsd.scripts") / "assets" / "prompts.jsonl") as path:
        prompts = read_prompts(path)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == len({prompt.turns[0] for prompt in prompts}) == 60
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 10
    assert max(len(prompt.turns[0]) for prompt in prompts) > 800


def test_leading_tokens_are_those_of_every_conversation(tmp_path: Path) -> None:
    text = Text.open(write_text_files(tmp_path))
    given = [{"role": "system", "content": "x"}]
    for system, expected in (([], "<s>be kind</s><s>user:"), (given, "<s>system: x</s><s>user:")):
        count = text.leading_tokens(system)
        ids = text.encode_chat([*system, {"role": "user", "content": "Is this so?"}])
        assert text.tokenizer.decode(ids[:count], skip_special_tokens=False) == expected

"""Prompt files: one JSON object a line, `{"id", "turns": [...]}` or `{"id", "prompt"}`; other fields are let be."""

from __future__ import annotations

from pathlib import Path

import msgspec

from starsd.shared.errors import UsageError

EXPECTED = 'expected {"id", "turns": [texts]} or {"id", "prompt": text}'


class Prompt(msgspec.Struct, frozen=True):
    """What a user says, turn by turn. An `id` of the file is given back as it came."""

    id: str | int
    turns: tuple[str, ...]


class _Line(msgspec.Struct, frozen=True):
    id: str | int
    turns: tuple[str, ...] | None = None
    prompt: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file; blank lines are skipped. Raises UsageError, with file and line, for anything else."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    prompts = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path} holds no prompts, {EXPECTED} on each line")
    return prompts


def _parse(line: bytes, where: str) -> Prompt:
    try:
        row = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
        lowered = reason if reason.startswith("JSON") else reason[:1].lower() + reason[1:]
        raise UsageError(f"{where}: {lowered}, {EXPECTED}") from error
    if (row.turns is None) == (row.prompt is None):
        got = "neither turns nor prompt" if row.turns is None else "both turns and prompt"
        raise UsageError(f"{where}: got {got}, {EXPECTED}")
    turns = (row.prompt,) if row.prompt is not None else row.turns or ()
    if not turns or not turns[0].strip():
        raise UsageError(f"{where}: got {'no turns' if not turns else 'an empty text'}, {EXPECTED}")
    return Prompt(row.id, turns)

"""What the members of TensorRT's Python module that we use look like, read from the docstrings of its classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "tensorrt_signatures.json"  # by member, then by version or "all" of VERSIONS
VERSIONS = ("10.3", "10.13", "10.16", "11.4")
_SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> .*)?$")
_NESTED = re.compile(r"\[[^\[\]]*\]|<[^<>]*>|\([^()]*\)")  # brackets that may hold a comma


def signatures(module: Any, owner: str, member: str) -> list[list[str]] | str | None:
    """Parameters of each overload, self apart, those with a default marked by "="; "value" for what is no method.

    None where the module has no such member.
    """
    found = getattr(getattr(module, owner, None), member, None)
    if found is None:
        return None
    if not callable(found):
        return "value"
    return [parsed for line in (found.__doc__ or "").splitlines() if (parsed := _parameters(line)) is not None]


def _parameters(line: str) -> list[str] | None:
    match = _SIGNATURE.match(line.strip())
    if match is None or "self" not in match[1] or "*args" in match[1]:
        return None
    text = match[1]
    while _NESTED.search(text):
        text = _NESTED.sub("", text)
    parts = [part.strip() for part in text.split(",")]
    return [part.partition(":")[0].strip() + ("=" if "=" in part else "") for part in parts[1:]]


def recorded(member: str, version: str) -> Any:
    table = json.loads(RECORDED.read_text())[member]
    return table.get("all", table.get(version))

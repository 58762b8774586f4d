"""The default model behind the API: what a schema describes is what comes, whatever is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_helpers import served

from starsd.edge.runtime import Runtime

MOODS = ["calm", "curious", "sleepy"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 40},
        "moods": {"type": "array", "items": {"enum": MOODS}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "moods"],
    "additionalProperties": False,
}


@pytest.mark.model
def test_answers_are_of_the_schema_whatever_the_seed(smollm2_bundle: Callable[[str], Path]) -> None:
    asked = [{"role": "user", "content": "Invent a cat."}]
    wanted = {"type": "json_schema", "json_schema": {"name": "cat", "strict": True, "schema": SCHEMA}}
    seen: set[str] = set()
    with served(Runtime.open(str(smollm2_bundle("int8")))) as place:
        for seed in range(20):
            answer = place.chat(
                messages=asked, response_format=wanted, seed=seed, temperature=1.2, top_p=1, max_tokens=60
            )
            (choice,) = answer["choices"]
            said = choice["message"]["content"]
            cat = json.loads(said)
            assert choice["finish_reason"] == "stop"
            assert list(cat) == ["name", "age", "moods"]
            assert cat["name"].isalpha()
            assert cat["name"] == cat["name"].title()
            assert 2 <= len(cat["name"]) <= 12
            assert type(cat["age"]) is int
            assert 1 <= cat["age"] <= 40
            assert 1 <= len(cat["moods"]) <= 2
            assert set(cat["moods"]) <= set(MOODS)
            seen.add(said)
    assert len(seen) > 10

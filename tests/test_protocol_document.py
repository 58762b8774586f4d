"""docs/protocol.md says what the code does: vectors, tags, ranges, levels."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from starsd.shared import limits, messages
from starsd.shared.codec import CONTROL_BYTES, TAGS, Layout, decode, encode
from starsd.shared.hot_codec import LEVELS
from starsd.shared.messages import (
    HeadInfo,
    Message,
    Race,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"


def documented() -> list[tuple[Message, Layout, bytes]]:
    """Messages, layouts and bytes of the blocks marked `vector`: a call with literals, then hexadecimal lines."""
    found = []
    for vocab, row_bytes, block in re.findall(
        r"^```vector vocab=(\d+) row_bytes=(\d+)\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S
    ):
        call, _, dump = block.partition("\n\n")
        node = ast.parse(call, mode="eval").body
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        for name, dtype in (("tokens", np.int64), ("parents", np.int64), ("steps", np.float32)):
            if name in fields:
                fields[name] = np.array(fields[name], dtype)
        if "heads" in fields:
            fields["heads"] = tuple(HeadInfo(**head) for head in fields["heads"])
        if "race" in fields:
            fields["race"] = Race(**fields["race"])
        message = getattr(messages, node.func.id)(**fields)
        data = bytes.fromhex("".join(line.partition("#")[0] for line in dump.splitlines()))
        found.append((message, Layout(int(vocab), int(row_bytes)), data))
    return found


def test_documented_vectors() -> None:
    found = documented()
    assert {type(message) for message, _, _ in found} == set(TAGS)
    for message, layout, data in found:
        assert encode(message, layout).hex(" ") == data.hex(" ")
        back = decode(data, lambda session, layout=layout: layout)  # type: ignore[misc]
        assert encode(back, layout) == data


def test_documented_tags_sizes_and_ranges() -> None:
    text = DOCUMENT.read_text()
    for kind, tag in TAGS.items():
        section = re.search(rf"^### {kind.__name__}, `0x{tag:02x}`\n(.*?)(?=^##)", text, re.M | re.S)
        assert section, f"docs/protocol.md has no section for {kind.__name__} with tag 0x{tag:02x}"
        body = section.group(1).replace(",", "")
        if kind in CONTROL_BYTES:
            assert f"at most {CONTROL_BYTES[kind]} bytes" in body, kind
        for field, low, high in limits.RANGES.get(kind, ()):
            row = re.search(rf"^\|[^|]*\|?[^\n]*`{field}`[^\n]*\| {low} to (\S+)[^\n]*\|$", body, re.M)
            assert row, f"{kind.__name__} has no range of {field} from {low}"
            names = {"2³¹-1": 2**31 - 1, "2³²-1": 2**32 - 1, "2⁶³-1": 2**63 - 1, "2²⁴": 2**24}
            assert names.get(row.group(1)) == high or row.group(1) == str(high), (kind, field, row.group(1))


def test_documented_levels() -> None:
    rows = re.findall(r"^\| q \|(.*)\|$|^\| step \|(.*)\|$", DOCUMENT.read_text(), re.M)
    levels = [float(cell.strip().replace("−", "-")) for _, steps in rows if steps for cell in steps.split("|")]
    assert levels == pytest.approx(LEVELS.tolist(), abs=5e-4)

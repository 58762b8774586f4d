"""`starsd bench wire`: our bytes are those of real frames, the reference's follow from its documented arrays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from starsd.scripts.bench_wire import WireBench, chunks, grown, run
from starsd.scripts.cli import main
from starsd.shared import tree
from starsd.shared.codec import Layout


def rows(**changes: Any) -> dict[str, tuple[int, int]]:
    return {row["message"]: (row["bytes"], row["reference_bytes"]) for row in run(WireBench(**changes))}


def test_a_round_by_the_documented_layouts() -> None:
    """25, 11, 22 and 16 bytes are the headers; 18 bits a token; 18 + 6 + 4 bits a node."""
    found = rows()
    row = 2 * 32 + 2048
    assert found["verdict"] == (25 + 7, 8 * 503)
    assert found["features"] == (3 * (11 + row), 3 * 2 * 4096)
    assert found["prefix"] == (16 + 500 * 18 // 8, 8 * 500)
    assert found["prefix features"] == (499 * (11 + row), 500 * 2 * 4096)
    assert found["draft"][0] == 22 + 60 * (18 + 6 + 4) // 8
    assert found["round up"] == tuple(a + b for a, b in zip(found["verdict"], found["features"], strict=True))
    assert found["round down"] == found["draft"]


def test_the_reference_draft_by_hand() -> None:
    """Ids, mask and positions of 60 nodes take 15,360 bytes; the rest are paths, one for every leaf."""
    draft = grown(60, 151_936, base=503)
    parents = [-1, *(int(parent) + 1 for parent in draft.parents)]
    tree.check(parents)
    leaves = [node for node in range(61) if node not in parents]
    longest = max(len(tree.path_to(parents, leaf)) for leaf in leaves)
    assert rows()["draft"][1] == 60 * 8 + 60 * 60 * 4 + 60 * 8 + len(leaves) * longest * 8
    assert 16_000 < rows()["draft"][1] < 19_000


def test_what_the_figures_depend_on() -> None:
    assert rows(context=1000)["verdict"] == (32, 8 * 1003)
    assert rows(accepted=0)["features"] == (11 + 2112, 2 * 4096)
    assert rows(codec="fp16")["features"][0] == 3 * (11 + 8192)
    assert rows(hidden=576)["features"] == (11 + 3 * (2 * 5 + 288), 3 * 2 * 576)
    assert rows(vocab=1024)["prefix"][0] == 16 + 500 * 10 // 8
    assert rows(nodes=1)["draft"][0] == 22 + 3
    assert rows(nodes=1, vocab=2)["draft"][0] == 22 + 1
    assert rows(nodes=1024, vocab=3)["draft"][0] > 1024


def test_chunks_hold_4096_bytes_or_a_row() -> None:
    sizes = [len(chunk.rows) for chunk in chunks(0, 10, Layout(9, 1500))]
    assert sizes == [3000] * 5
    assert [len(chunk.rows) for chunk in chunks(0, 2, Layout(9, 8192))] == [8192] * 2
    assert [chunk.start for chunk in chunks(3, 5, Layout(9, 2000))] == [3, 5, 7]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "wire", "--hidden", "4096", "--nodes", "60", "--accepted", "2", "--context", "500"]
    assert main([*arguments, "--codec", "int4", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["message"] for row in found] == [
        "verdict",
        "features",
        "draft",
        "prefix",
        "prefix features",
        "round up",
        "round down",
    ]
    assert {tuple(row) for row in found} == {("message", "bytes", "reference_bytes")}
    assert main(arguments) == 0
    assert "round down                232 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1025"], "nodes is 1025, expected 1 to 1024"),
        (["--context", "1"], "context is 1, expected 2 to 131072"),
        (["--accepted", "-1"], "accepted is -1, expected 0 to 4095"),
        (["--hidden", "0"], "hidden is 0, expected 1 to 65536"),
        (["--vocab", "1"], "vocab is 1, expected 2 to 16777216"),
        (["--codec", "int3"], "codec 'int3' is unknown, expected one of fp16, int8, int4"),
        (["--hidden", "40000", "--codec", "fp16"], "a feature row takes 80000 bytes, expected at most 65536: use int4"),
    ],
)
def test_what_cannot_be_sent_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", *arguments]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""

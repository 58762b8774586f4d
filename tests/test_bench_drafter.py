"""`starsd bench drafter`: its rows, and that it refuses what it cannot measure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch_helpers import GOLDEN, golden_target

from starsd.scripts import bench_drafter
from starsd.scripts.bench_drafter import DrafterBench
from starsd.scripts.cli import main

HEAD = ["--head", str(GOLDEN / "e3_gqa_d2t" / "head"), "--target", str(golden_target("e3_gqa_d2t"))]
SMALL = ["--context", "20", "--seconds", "0.05", "--threads", "1"]


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "drafter", "--sessions", "1,3", "--dtype", "fp32", *HEAD, *SMALL]
    assert main([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    found = [json.loads(line) for line in output.out.splitlines()]
    assert [(row["sessions"], row["schedule"]) for row in found] == [
        (1, "fifo"),
        (1, "batched"),
        (3, "fifo"),
        (3, "batched"),
    ]
    for row in found:
        assert sorted(row) == ["dtype", "schedule", "sessions", "tree_ms_p50", "trees_per_s"]
        assert row["dtype"] == "fp32"
        assert row["trees_per_s"] > 0
        assert row["tree_ms_p50"] > 0
    assert output.err == ""
    assert main(arguments) == 0
    assert "3 sessions batched" in capsys.readouterr().out


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With calls of 10 ms, and 12 ms for a batch, three sessions get 100 and 250 trees a second."""

    def seconds(call: Any, chosen: Any, shape: Any) -> float:
        call(chosen, shape)
        return 0.01 if len(chosen) == 1 else 0.012

    monkeypatch.setattr(bench_drafter, "_seconds", seconds)
    bench = DrafterBench(sessions=(3,), context=10, seconds=0.2, dtype="fp32", threads=1)
    layer = bench_drafter.open_layer(bench, HEAD[1], HEAD[3])
    fifo, batched = bench_drafter.run(bench, layer)
    assert (fifo["trees_per_s"], fifo["tree_ms_p50"]) == (100.0, 10.0)
    assert (batched["trees_per_s"], batched["tree_ms_p50"]) == (250.0, 12.0)


@pytest.mark.parametrize(("slow", "kept"), [(1, 2), (2, 1)])
def test_the_faster_number_of_threads_is_kept(slow: int, kept: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        bench_drafter._set_threads(lambda: 2.0 if torch.get_num_threads() == slow else 1.0)
        assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


def test_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--total", "5", "--depth", "1", "--top-k", "2"]
    assert main(["bench", "drafter", "--sessions", "1", *sizes, *SMALL, "--head", "random", "--json"]) == 0
    output = capsys.readouterr()
    assert {json.loads(line)["dtype"] for line in output.out.splitlines()} == {"int8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sessions", "1,x"], "sessions is '1,x', expected positive integers by commas, such as 1,4,16"),
        (["--sessions", "0"], "sessions is '0'"),
        (HEAD[:2], "head and target go together"),
        (["--depth", "0", "--total", "60"], "depth 0 and top_k 10 give 11 nodes, expected 60"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "drafter", *SMALL, *arguments]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""

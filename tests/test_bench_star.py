"""`starsd bench star`: more and more targets on one drafter, by both schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from star import DEVICE, LIMITS
from toy_recordings import ToyHead, record_one, toy_recordings

from starsd.edge.policy import Policy
from starsd.edge.recordings import Recordings
from starsd.scripts import demo_star
from starsd.scripts.bench_star import StarBench, run
from starsd.scripts.cli import main
from starsd.scripts.demo_star import Demo
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.star_clocks import on_real_clock, on_virtual_clock
from starsd.scripts.virtual_edge import Star
from starsd.scripts.virtual_head import DraftCost


@pytest.fixture(scope="module")
def recordings() -> Recordings:
    return toy_recordings()


def rows_of(recordings: Recordings, cost: DraftCost, **bench: Any) -> list[dict[str, Any]]:
    star = Star(profile=DEVICE, link=LinkSettings(rtt_ms=5), codec="fp16", cost=cost, limits=LIMITS, ngrams=False)
    asked = StarBench(seconds=5, **bench)
    head: Any = ToyHead()
    return list(run(asked, DEVICE.plain_tok_s, "virtual", on_virtual_clock(star, head, recordings, asked.seconds)))


def test_targets_share_a_drafter(recordings: Recordings) -> None:
    one, four = rows_of(recordings, DraftCost(base=2.0, row=0.0), counts=(1, 4), schedules=("batched",))
    assert (one["n"], four["n"], one["policy"], one["clock"]) == (1, 4, "never-wait", "virtual")
    assert one["plain_tok_s"] == 20.0
    assert one["system_tok_s"] == one["per_target_tok_s"] > 25
    assert four["system_tok_s"] == pytest.approx(4 * four["per_target_tok_s"], abs=0.05)
    assert four["vs_plain"] > 1.2
    assert four["drafter_idle"] < one["drafter_idle"] < 1
    assert one["n_full_predicted"] == four["n_full_predicted"] == round(1 / (1 - one["drafter_idle"]), 1)


def test_one_tree_at_a_time_makes_targets_wait(recordings: Recordings) -> None:
    """With a drafter that takes as long for a tree as a target for its pass."""
    slow = DraftCost(base=10.0, row=0.0)
    (alone, fifo, batched) = [
        *rows_of(recordings, slow, counts=(1, 6), schedules=("fifo",)),
        *rows_of(recordings, slow, counts=(6,), schedules=("batched",)),
    ]
    assert (fifo["policy"], fifo["schedule"]) == ("stop-and-wait", "fifo")
    assert alone["queue_ms_p99"] < 10
    assert fifo["queue_ms_p99"] > 100  # five trees of six passes each are ahead
    assert fifo["drafter_idle"] < 0.1 < alone["drafter_idle"]
    assert fifo["vs_plain"] < alone["vs_plain"]
    assert batched["vs_plain"] > 1 > fifo["vs_plain"]


def test_a_policy_goes_for_both_schedules(recordings: Recordings) -> None:
    rows = rows_of(recordings, DraftCost(), counts=(1,), schedules=("batched", "fifo"), policy=Policy.STOP_AND_WAIT)
    assert [(row["schedule"], row["policy"]) for row in rows] == [
        ("batched", "stop-and-wait"),
        ("fifo", "stop-and-wait"),
    ]


def test_on_the_real_clock_it_is_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Demo] = []
    told = {"identical": True, "tok_s": 30.0, "tau": 2.0, "drafter_idle": 0.8, "late_passes": 1}

    def shown(demo: Demo) -> Any:
        asked.append(demo)
        return [], told

    monkeypatch.setattr(demo_star, "run", shown)
    bench = StarBench(counts=(2,), schedules=("fifo",), seconds=3)
    (row,) = run(bench, 20.0, "real", on_real_clock(Demo(rtt_ms=7, seconds=3)))
    assert (asked[0].edges, asked[0].schedule, asked[0].policy, asked[0].rtt_ms) == (2, "fifo", Policy.STOP_AND_WAIT, 7)
    assert (row["system_tok_s"], row["vs_plain"], row["queue_ms_p99"], row["n_full_predicted"]) == (60, 1.5, None, 10)
    told["identical"] = False
    with pytest.raises(AssertionError, match="an edge's text is not that of plain decoding"):
        next(run(bench, 20.0, "real", on_real_clock(Demo())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "lifo"], "schedule is 'lifo', expected one of batched, fifo"),
        (["--n", "0"], "n is '0', expected positive integers by commas"),
        (["--n", "65"], "n is 65, expected at most the 64 sessions of a drafter"),
        (["--policy", "hope"], "policy is 'hope', expected plain, "),
        (["--seconds", "0"], "seconds is 0, expected 1 to 3600"),
        (["--clock", "sun"], "clock is 'sun', expected one of virtual, real"),
        (["--server", "ws://there:1"], "got --server ws://there:1 with --clock virtual, expected --clock real"),
        (["--clock", "real", "--model", "m"], "got --model or --recording with --clock real, expected neither"),
        (
            ["--clock", "real", "--server", "ws://there:1"],
            "schedule is batched,fifo, expected the one that ws://there:1",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "star", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.model
def test_rows_of_the_real_head(
    smollm2_bundle: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = record_one(smollm2_bundle("int8"), tmp_path)
    capsys.readouterr()
    assert main(["bench", "star", "--recording", str(out), "--n", "1,2", "--seconds", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["n"], row["schedule"]) for row in rows] == [(1, "batched"), (2, "batched"), (1, "fifo"), (2, "fifo")]
    for row in rows:
        assert row["vs_plain"] > 1
        assert 0 < row["drafter_idle"] < 1

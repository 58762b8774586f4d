"""`starsd plan`: from one device to many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from star import DEVICE, LIMITS
from toy_recordings import ToyHead, record_one, toy_recordings

from starsd.edge.policy import Policy
from starsd.scripts.cli import main
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.plan import predict
from starsd.scripts.star_clocks import simulate
from starsd.scripts.virtual_edge import Star
from starsd.scripts.virtual_head import DraftCost
from starsd.shared.errors import UsageError

HELPED = {"per_target_tok_s": 40.0, "tau": 2.0, "drafter_idle": 0.75, "queue_ms_p99": 2.5}
ALONE = {"per_target_tok_s": 20.0, "tau": 1.0, "drafter_idle": 1.0, "queue_ms_p99": None}


def test_up_to_full_everybody_has_all_of_it() -> None:
    one, four = predict(HELPED, ALONE, 16.0, [1, 4])
    assert (one["per_target_tok_s"], one["queue_ms_p99"], one["drafter_idle"]) == (40.0, 2.5, 0.75)
    assert (four["per_target_tok_s"], four["system_tok_s"], four["drafter_idle"]) == (40.0, 160.0, 0.0)
    assert (four["n"], four["n_full_predicted"], four["vs_plain"], four["clock"]) == (4, 4.0, 2.5, "predicted")


def test_beyond_it_a_drafter_is_shared_and_nobody_is_slower_than_alone() -> None:
    eight, many = predict(HELPED, ALONE, 16.0, [8, 4000])
    assert (eight["per_target_tok_s"], eight["tau"], eight["drafter_idle"]) == (30.0, 1.5, 0.0)
    assert eight["queue_ms_p99"] is None
    assert (many["per_target_tok_s"], many["tau"]) == (20.02, 1.001)


def test_a_drafter_that_is_never_asked_has_no_limit() -> None:
    (row,) = predict({**HELPED, "drafter_idle": 1.0}, ALONE, 16.0, [100])
    assert (row["n_full_predicted"], row["drafter_idle"], row["per_target_tok_s"]) == (None, 1.0, 40.0)


def test_a_measured_star_does_no_worse() -> None:
    recordings = toy_recordings()
    head: Any = ToyHead()
    cost = DraftCost(base=8.0, row=0.0)
    star = Star(profile=DEVICE, link=LinkSettings(rtt_ms=5), codec="fp16", cost=cost, limits=LIMITS, ngrams=False)

    def measured(count: int, *, connected: bool = True) -> dict[str, Any]:
        return simulate(star, head, recordings, count, 5.0, Policy.NEVER_WAIT, connected=connected)

    helped, alone = measured(1), measured(1, connected=False)
    assert alone["per_target_tok_s"] == pytest.approx(DEVICE.plain_tok_s, abs=0.01)
    assert alone["drafter_idle"] == 1.0
    (row,) = predict(helped, alone, DEVICE.plain_tok_s, [6])
    assert row["drafter_idle"] == 0
    assert measured(6)["per_target_tok_s"] >= 0.97 * row["per_target_tok_s"] > DEVICE.plain_tok_s


def test_a_time_in_which_nobody_says_anything_is_refused() -> None:
    head: Any = ToyHead()
    star = Star(profile=DEVICE, link=LinkSettings(rtt_ms=5), codec="fp16", limits=LIMITS, ngrams=False)
    with pytest.raises(UsageError, match=r"^0.05 seconds are too short for an answer's second token, expected more"):
        simulate(star, head, toy_recordings(), 1, 0.05, Policy.NEVER_WAIT)


def test_numbers_of_devices_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--n", "many"]) == 1
    assert "n is 'many', expected positive integers by commas" in capsys.readouterr().err


@pytest.mark.model
def test_rows_for_the_real_head(
    smollm2_bundle: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = record_one(smollm2_bundle("int8"), tmp_path)
    capsys.readouterr()
    assert main(["plan", "--recording", str(out), "--rtt", "20", "--n", "1,1000", "--json"]) == 0
    one, many = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["vs_plain"] >= many["vs_plain"] > 1
    assert many["drafter_idle"] == 0

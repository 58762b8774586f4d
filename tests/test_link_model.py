"""The link as a model of time: exact figures, no clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd.scripts.link_model import Direction, Link, LinkSettings, parse_kbit
from starsd.scripts.link_trace import TraceEvent, read_trace
from starsd.shared.errors import UsageError


def way(kbit: float, **settings: Any) -> Direction[str]:
    return Direction(kbit, LinkSettings(**settings), 0)


def arrivals(direction: Direction[str], until: float = math.inf) -> list[tuple[float, str]]:
    """Everything that comes out, with its time, looking exactly when told to."""
    found = []
    while (now := direction.next()) < until:
        while (item := direction.pop(now)) is not None:
            found.append((round(now, 9), item))
    return found


def test_line_time_and_half_a_round_trip() -> None:
    direction = way(8, rtt_ms=100)  # 1,000 bytes a second
    direction.push(1.0, 500, "a")
    direction.push(1.0, 250, "b")
    direction.push(3.0, 100, "c")
    assert arrivals(direction) == [(1.55, "a"), (1.8, "b"), (3.15, "c")]


def test_a_faster_line_serves_what_is_left_in_the_queue() -> None:
    direction = way(8)
    direction.push(0.0, 1000, "a")
    direction.push(0.0, 1000, "b")
    direction.change(0.5, 80, LinkSettings())
    assert arrivals(direction) == [(0.55, "a"), (0.65, "b")]


def test_a_change_of_delay_is_for_what_leaves_later_and_keeps_order() -> None:
    direction = way(1e6, rtt_ms=1000)
    direction.push(0.0, 0, "a")
    assert direction.pop(0.1) is None
    direction.change(0.1, 1e6, LinkSettings(rtt_ms=0))
    direction.push(0.2, 0, "b")
    assert arrivals(direction) == [(0.5, "a"), (0.5, "b")]


def test_a_stall_holds_line_and_way() -> None:
    direction = way(8, rtt_ms=200)
    direction.push(0.0, 100, "on the way")
    direction.push(0.1, 100, "half through the line")
    direction.stall(0.15, 1.0)
    assert arrivals(direction) == [(1.15, "on the way"), (1.3, "half through the line")]


def test_a_stall_without_end_is_ended_by_resume() -> None:
    direction = way(8)
    direction.push(0.0, 100, "a")
    direction.stall(0.05, math.inf)
    assert direction.next() == math.inf
    assert direction.pop(100.0) is None
    direction.resume(100.0)
    assert arrivals(direction) == [(100.05, "a")]


def test_dropped_is_gone() -> None:
    direction = way(8, rtt_ms=100, queue_bytes=1000)
    direction.push(0.0, 100, "a")
    direction.push(0.11, 300, "b")
    direction.drop()
    assert direction.next() == math.inf
    assert direction.room(0.2) == 1000
    direction.push(0.2, 100, "c")
    assert arrivals(direction) == [(0.35, "c")]


def test_room_is_what_the_queue_holds_no_more() -> None:
    direction = way(8, queue_bytes=1000)
    assert direction.room(0.0) == 1000
    direction.push(0.0, 800, "a")
    assert direction.room(0.0) == 200
    assert direction.room(0.3) == 500
    direction.push(0.3, 700, "b")
    assert direction.room(0.3) == 0


def test_what_nobody_takes_fills_the_way_and_then_the_queue() -> None:
    direction = way(8, rtt_ms=1000, queue_bytes=1000)  # 500 bytes are on the way
    for second in range(10):
        if room := direction.room(float(second)):
            direction.push(float(second), room, "x")
    assert direction.room(100.0) == 0
    taken = 0
    while direction.pop(100.0) is not None:
        taken += 1
    assert taken == 2  # 1,000 bytes, and 500 when those were half through
    assert direction.room(100.0) == 1000


@pytest.mark.parametrize(("kbit", "room"), [(8, 4096), (800, 100_000), (1e6, 262_144)])
def test_a_queue_holds_a_second_within_limits(kbit: float, room: int) -> None:
    assert way(kbit).room(0.0) == room


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(0, 3000), st.floats(20, 5000), st.booleans()), max_size=30),
    st.floats(0, 100),
)
def test_order_is_kept_nothing_is_lost_and_nothing_is_early(
    steps: list[tuple[float, int, float, bool]], jitter: float
) -> None:
    direction, now, found, fastest = way(100, rtt_ms=40, jitter_ms=jitter), 0.0, [], 5000.0
    sent: dict[str, float] = {}
    for number, (pause, size, kbit, stalls) in enumerate(steps):
        now += pause
        direction.change(now, kbit, LinkSettings(rtt_ms=40, jitter_ms=jitter))
        if stalls:
            direction.stall(now, 0.05)
        while (item := direction.pop(now)) is not None:
            found.append(item)
        direction.push(now, size, str(number))
        sent[str(number)] = now + size * 8e-3 / fastest + 0.02
    for at, item in arrivals(direction):
        assert at >= sent[item] - 1e-6
        found.append(item)
    assert found == list(sent)
    assert direction.room(now + 1e6) == way(steps[-1][2] if steps else 100).room(0.0)


def test_jitter_is_the_seeds_and_the_links() -> None:
    def delays(seed: int, number: int) -> list[tuple[float, str]]:
        link: Link[str] = Link(LinkSettings(jitter_ms=50, seed=seed), number)
        for second in range(20):
            link.up.push(float(second), 0, str(second))
        return arrivals(link.up)

    assert delays(1, 0) == delays(1, 0)
    assert delays(1, 0) != delays(2, 0)
    assert delays(1, 0) != delays(1, 1)
    spread = [at - second for second, (at, _) in enumerate(delays(1, 0))]
    assert 0 <= min(spread) < 0.015
    assert 0.035 < max(spread) <= 0.05


@pytest.mark.parametrize(
    ("text", "kbit"), [("64kbit", 64), ("5mbit", 5000), ("1 Gbit", 1e6), ("1.5mbit", 1500), ("8000bit", 8)]
)
def test_rates(text: str, kbit: float) -> None:
    assert parse_kbit(text) == pytest.approx(kbit)


@pytest.mark.parametrize("text", ["5", "mbit", "-5mbit", "5mb", "5mbit/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a number and a unit, such as 64kbit or 5mbit$"):
        parse_kbit(text)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("rtt_ms", math.nan, "0 to 60,000"),
        ("jitter_ms", -1.0, "0 to 60,000"),
        ("up_kbit", 0.0, "1 to 1,000,000"),
        ("down_kbit", math.inf, "1 to 1,000,000"),
        ("queue_bytes", 1 << 30, "0 to 67,108,864"),
    ],
)
def test_settings_out_of_range(field: str, value: float, expected: str) -> None:
    with pytest.raises(UsageError) as error:
        LinkSettings(**{field: value})  # type: ignore[arg-type]
    assert str(error.value) == f"{field} is {value}, expected {expected}"
    with pytest.raises(UsageError, match=f"^{field} is "):
        LinkSettings().changed(**{field: value})


def test_none_changes_nothing() -> None:
    settings = LinkSettings(rtt_ms=5)
    assert settings.changed(rtt_ms=None, up_kbit=7.0) == LinkSettings(rtt_ms=5, up_kbit=7)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[{"at": 0, "rtt_ms": 20}, {"at": 5.5, "stall_ms": 300, "cut": "hole"}]')
    assert read_trace(path) == (TraceEvent(at=0, rtt_ms=20), TraceEvent(at=5.5, stall_ms=300, cut="hole"))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "is empty, expected at least one event"),
        ([{"at": -1}], "event 1: at is -1.0, expected 0 or more"),
        ([{"at": 1}, {"at": 0.5}], "event 2: at is 0.5, expected 1.0 or more"),
        ([{"at": 1, "rtt_ms": -3}], "event 1: rtt_ms is -3.0, expected 0 to 60,000"),
        ([{"at": 1, "stall_ms": -3}], "event 1: stall_ms is -3.0, expected 0 or more"),
        ([{"at": 1, "cut": "off"}], "cannot be read: Invalid enum value 'off' - at `$[0].cut`"),
        ([{"at": 1, "rtt": 3}], "cannot be read: Object contains unknown field `rtt` - at `$[0]`"),
        ([{"rtt_ms": 3}], "cannot be read: Object missing required field `at` - at `$[0]`"),
    ],
)
def test_traces_that_are_refused(tmp_path: Path, events: Any, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert str(error.value) == f"trace {path} {message}"


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.json cannot be read: no such file or directory$"):
        read_trace(tmp_path / "none.json")

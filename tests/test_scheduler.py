"""Fair shares of a pass, and the sizes of trees and messages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd.server.limits import LIMITS, ServerLimits
from starsd.server.scheduler import DeficitRoundRobin, FirstCome, least_nodes, tree_nodes
from starsd.shared.errors import UsageError


@given(
    wants=st.dictionaries(st.integers(0, 30), st.integers(0, 200), max_size=12),
    room=st.integers(1, 64),
    quantum=st.integers(1, 16),
)
def test_no_row_is_left_while_anybody_wants_one(wants: dict[int, int], room: int, quantum: int) -> None:
    turns: DeficitRoundRobin[int] = DeficitRoundRobin(room, quantum)
    for _ in range(3):
        granted = turns.next(wants)
        assert granted.keys() == wants.keys()
        assert all(0 <= granted[key] <= wants[key] for key in wants)
        assert sum(granted.values()) == min(room, sum(wants.values()))


@given(
    greedy=st.integers(1, 1000),
    others=st.integers(1, 9),
    room=st.integers(1, 40),
    quantum=st.integers(1, 16),
    passes=st.integers(1, 60),
)
def test_nobody_starves_beside_one_who_wants_all(
    greedy: int, others: int, room: int, quantum: int, passes: int
) -> None:
    """Whoever always wants more than a turn gets the same as everybody else, up to a turn."""
    turns: DeficitRoundRobin[int] = DeficitRoundRobin(room, quantum)
    wants = {0: 1000 + greedy} | dict.fromkeys(range(1, others + 1), 60)
    total = dict.fromkeys(wants, 0)
    for _ in range(passes):
        for key, rows in turns.next(wants).items():
            total[key] += rows
    assert max(total.values()) - min(total.values()) <= quantum or room > 60 * others


def test_one_who_wants_little_does_not_wait() -> None:
    turns: DeficitRoundRobin[str] = DeficitRoundRobin(8, 8)
    crowd = {f"greedy {number}": 100 for number in range(5)}
    for _ in range(3):
        turns.next(crowd)
    served = [turns.next(crowd | {"small": 1})["small"] for _ in range(6)]
    assert served == [1] * 6
    many = {f"small {number}": 1 for number in range(9)}
    granted = turns.next({"greedy": 100} | many)
    assert sum(granted[key] for key in many) >= 4
    assert granted["greedy"] > 0 or turns.next({"greedy": 100} | many)["greedy"] > 0  # nor does it starve


def test_a_turn_that_a_pass_cut_goes_on_in_the_next() -> None:
    turns: DeficitRoundRobin[str] = DeficitRoundRobin(6, 4)
    assert turns.next({"a": 9, "b": 9}) == {"a": 4, "b": 2}
    assert turns.next({"a": 9, "b": 9}) == {"a": 4, "b": 2}
    assert turns.next({"a": 9, "b": 9, "c": 2}) == {"a": 2, "b": 4, "c": 0}
    assert turns.next({"b": 9, "c": 1}) == {"b": 5, "c": 1}
    assert turns.next({}) == {}


def test_first_come_first_served() -> None:
    turns: FirstCome[str] = FirstCome()
    assert turns.next({"b": 1}) == {"b": 1}
    assert turns.next({"a": 1, "b": 1, "c": 0}) == {"b": 1}  # who is not done keeps the place
    assert turns.next({"c": 1, "a": 1, "b": 0}) == {"a": 1}
    assert turns.next({"c": 1, "b": 1}) == {"c": 1}
    assert turns.next({"b": 1}) == {"b": 1}
    assert turns.next({"b": 0}) == {}


@pytest.mark.parametrize(("sessions", "nodes"), [(0, 60), (1, 60), (32, 60), (33, 58), (64, 30), (120, 16), (9000, 16)])
def test_trees_get_smaller_before_anybody_is_refused(sessions: int, nodes: int) -> None:
    assert (LIMITS.nodes, LIMITS.full_trees, LIMITS.least_nodes) == (60, 32, 16)
    assert tree_nodes(sessions, LIMITS) == nodes


@pytest.mark.parametrize(
    ("sessions", "lag", "nodes"), [(1, 0, 60), (1, 2, 180), (1, 9, 240), (16, 9, 120), (64, 9, 30)]
)
def test_trees_grow_with_the_distance_while_there_is_room(sessions: int, lag: int, nodes: int) -> None:
    assert LIMITS.farthest == 4
    assert tree_nodes(sessions, LIMITS, lag) == nodes


def test_small_trees_stay_as_they_are() -> None:
    assert tree_nodes(64, ServerLimits(nodes=10)) == 10


@pytest.mark.parametrize(
    ("bare", "resting", "least"),
    [(True, False, 1), (False, True, 1), (True, True, 1), (False, False, LIMITS.nodes_per_draft)],
)
def test_what_is_worth_a_message(bare: bool, resting: bool, least: int) -> None:
    assert least_nodes(LIMITS, bare=bare, resting=resting) == least


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots is 0, expected more than 0"),
        ({"retry_seconds": -1.0}, "retry_seconds is -1.0, expected more than 0"),
        ({"max_nodes": 59}, "max_nodes is 59, expected at least a whole tree of 60"),
        ({"unread": 1000}, "unread is 1000, expected at least a message of"),
        ({"nodes": 120, "depth": 1, "top_k": 3}, "depth 1 and top_k 3 give 13 nodes, expected 120"),
    ],
)
def test_limits_that_make_no_sense(change: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        msgspec.structs.replace(LIMITS, **change)
    with pytest.raises(UsageError, match=message):
        ServerLimits(**change)  # type: ignore[arg-type]

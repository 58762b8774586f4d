from __future__ import annotations

import pytest

from starsd.edge.estimates import PassCosts
from starsd.edge.policy import Budget, Patience, budget


def costs(*points: tuple[int, float]) -> PassCosts:
    known = PassCosts()
    for rows, seconds in points:
        known.observe(rows, seconds)
    return known


ORIN = costs((1, 0.057), (64, 0.138))
DEAR = costs((1, 0.010), (2, 0.019), (64, 0.64))


def test_cheap_rows_are_filled_dear_ones_are_not() -> None:
    likely = [0.7, 0.5, 0.35, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01]
    many, few = budget(likely, ORIN), budget(likely, DEAR)
    assert many.drafts >= 6
    assert few.drafts == 0
    assert many.tokens == pytest.approx(1 + sum(likely[: many.drafts]))


def test_the_best_number_is_found_behind_a_dear_first_row() -> None:
    assert budget([0.9, 0.85, 0.8, 0.75], costs((1, 0.010), (2, 0.0195), (8, 0.020))).drafts == 4


def test_without_drafts_a_pass_is_a_plain_step() -> None:
    assert budget([], ORIN) == Budget(0, 1.0, 0.057)


def steady(tokens: int, seconds: float, fresh: Budget) -> Patience:
    patience = Patience()
    for _ in range(50):
        patience.passed(tokens, seconds)
        patience.saw_fresh(fresh)
    return patience


def test_nobody_waits_before_anything_is_known() -> None:
    assert not Patience().worth_waiting(Budget(0, 1.0, 0.057), 0.0)


def test_waiting_pays_on_a_short_link_only() -> None:
    fresh, plain = Budget(8, 2.2, 0.068), Budget(0, 1.0, 0.057)
    patience = steady(2, 0.080, fresh)
    assert patience.worth_waiting(plain, 0.010)
    assert not patience.worth_waiting(plain, 0.100)


def test_nobody_waits_who_holds_as_much() -> None:
    fresh = Budget(8, 2.2, 0.068)
    assert not steady(2, 0.080, fresh).worth_waiting(fresh, 0.010)

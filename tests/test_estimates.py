from __future__ import annotations

import math

import pytest

from starsd.edge.drafts import Node, Source
from starsd.edge.estimates import Average, Calibration, PassCosts, Response


def node(step: float, source: Source = Source.REMOTE, sure: bool = False) -> Node:
    return Node(7, step, source, None, sure=sure)


def test_what_the_server_passed_over_is_believed_less() -> None:
    calibration = Calibration()
    beside, alone = node(math.log(0.5), Source.PHRASE), node(math.log(0.5), Source.PHRASE)
    beside.passed_over = True
    assert calibration.probability(alone) == pytest.approx(0.8 * 0.5)
    assert calibration.probability(beside) == pytest.approx(0.8 * 0.5 * 0.15)
    for _ in range(100):
        calibration.observe(beside, True)
    assert calibration.probability(beside) > 0.8
    assert calibration.probability(alone) == pytest.approx(0.8 * 0.5)


def test_costs_lie_on_lines_between_what_was_seen() -> None:
    costs = PassCosts()
    assert not costs.known
    costs.observe(1, 0.050)
    costs.observe(16, 0.080)
    assert costs.known
    assert costs.seconds(1) == 0.050
    assert costs.seconds(16) == pytest.approx(0.080)
    assert costs.seconds(6) == pytest.approx(0.060)
    assert costs.seconds(64) > costs.seconds(16)


def test_more_rows_never_cost_less() -> None:
    costs = PassCosts()
    for rows, seconds in ((1, 0.05), (8, 0.04), (32, 0.09)):
        costs.observe(rows, seconds)
    curve = [costs.seconds(rows) for rows in range(1, 65)]
    assert curve == sorted(curve)


def test_one_hiccup_moves_a_cost_little() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.observe(4, 0.05)
    costs.observe(4, 5.0)
    assert costs.seconds(4) == pytest.approx(0.075)
    for _ in range(20):
        costs.observe(4, 0.05)
    assert costs.seconds(4) == pytest.approx(0.05, rel=0.01)


def test_probabilities_begin_with_what_the_drafter_says_and_end_with_what_happens() -> None:
    calibration = Calibration()
    draft = node(math.log(0.8))
    assert calibration.probability(draft) == pytest.approx(0.8 * 0.8)
    for number in range(400):
        calibration.observe(draft, number % 4 == 0)
    assert calibration.probability(draft) == pytest.approx(0.25, abs=0.06)
    assert calibration.probability(node(math.log(0.8), Source.NGRAM)) == pytest.approx(0.8 * 0.8)
    assert calibration.probability(node(math.log(0.1))) == pytest.approx(0.8 * 0.1)


def test_what_a_pass_foretold_is_all_but_certain_and_teaches_nothing() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(node(0.0, sure=True), False)
    assert calibration.probability(node(0.0, sure=True)) > 0.9
    assert calibration.probability(node(0.0)) == pytest.approx(0.8 * 0.98)


def test_a_response_is_late_when_it_is_out_of_the_ordinary() -> None:
    response = Response()
    assert math.isinf(response.mean)
    for number in range(200):
        response.observe(0.100 + 0.01 * (number % 2))
    assert response.mean == pytest.approx(0.105, abs=0.003)
    assert 0.11 < response.late < 0.14


def test_an_average_starts_at_the_first_value() -> None:
    average = Average(0.5)
    average.observe(4.0)
    assert average.value == 4.0
    average.observe(8.0)
    assert average.value == 6.0

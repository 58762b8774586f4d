from __future__ import annotations

import pytest
from tiny_session import ToyTarget

from starsd.edge.paced_target import PacedTarget
from starsd.edge.target import Target
from starsd.scripts.virtual_clock import VirtualClock
from starsd.shared.clock import REAL
from starsd.shared.profiles import Profile

PROFILE = Profile(name="toy", hidden=8, pass_ms=((1, 20.0), (5, 28.0)), interpolation="linear", prefill_tok_s=100.0)


def test_passes_take_the_profiles_time_on_a_virtual_clock() -> None:
    times: list[float] = []

    def loop() -> None:
        target = PacedTarget(ToyTarget(), PROFILE, clock)
        target.prefill([5, 6, 7, 8])
        times.append(clock.now())
        target.score([9], [-1])
        times.append(clock.now())
        target.commit([0])
        target.truncate(3)
        times.append(clock.now())
        target.score([8, 9, 10], [-1, 0, 0])
        times.append(clock.now())
        assert (target.late, target.late_seconds) == (0, 0.0)

    with VirtualClock() as clock:
        clock.spawn(loop)
        clock.run()
    assert times == pytest.approx([0.04, 0.06, 0.06, 0.084])


def test_computation_counts_towards_the_time_on_the_real_clock() -> None:
    class Slow(ToyTarget):
        def score(self, tokens, parents):  # type: ignore[no-untyped-def]
            REAL.sleep(seconds)
            return super().score(tokens, parents)

    target = PacedTarget(Slow(), PROFILE)
    seconds = 0.01
    started = REAL.now()
    target.score([9], [-1])
    assert 0.02 <= REAL.now() - started < 0.03
    assert target.late == 0

    seconds = 0.05
    started = REAL.now()
    target.score([9], [-1])
    assert 0.05 <= REAL.now() - started < 0.07
    assert target.late == 1
    assert 0.03 <= target.late_seconds < 0.05


def test_everything_else_is_the_other_targets() -> None:
    inner = ToyTarget(context=50, noise=0.25)
    inner.branch_noise = 0.5
    with VirtualClock() as clock:

        def loop() -> None:
            target: Target = PacedTarget(inner, PROFILE, clock)
            alone = ToyTarget(context=50)
            assert (target.prefill([5, 6]) == alone.prefill([5, 6])).all()
            assert (target.score([7, 8], [-1, 0]) == alone.score([7, 8], [-1, 0])).all()
            assert (target.commit([0, 1]) == alone.commit([0, 1])).all()
            assert (target.length, target.context) == (4, 50)
            assert (target.shape, target.features) == (inner.shape, inner.features)
            assert (target.noise, target.branch_noise) == (0.25, 0.5)
            target.truncate(1)
            assert inner.rows == [5]

        clock.spawn(loop)
        clock.run()

"""The window against a simulated path: a queue of a given rate behind a given delay."""

from __future__ import annotations

import pytest

from starsd.edge.uplink import LEAST, QUEUE, Uplink


def drive(uplink: Uplink, rate: float, delay: float, seconds: float, chunk: int) -> tuple[float, list[float]]:
    """Send as much as it allows; bytes per second that came through, and the queueing delay each chunk met."""
    now, free, waits, delivered = 0.0, 0.0, [], 0
    acks: list[tuple[float, int]] = []
    while now < seconds:
        while uplink.room:
            begin = max(now, free)
            free = begin + chunk / rate
            waits.append(begin - now)
            uplink.on_sent(chunk, now)
            acks.append((free + delay, uplink.sent))
        now, received = acks.pop(0)
        uplink.on_ack(received, now)
        delivered += chunk
    return delivered / now, waits


@pytest.mark.parametrize("delay", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("rate", [125_000.0, 1_250_000.0])
def test_a_path_is_kept_busy_and_its_queue_short(rate: float, delay: float) -> None:
    reached, waits = drive(Uplink(), rate, delay, 40 * delay + 10, 1024)
    assert reached > 0.6 * rate
    late = sorted(waits[len(waits) // 2 :])
    assert late[int(0.95 * len(late))] < 2.5 * QUEUE


def test_a_slow_path_is_not_flooded() -> None:
    _, waits = drive(Uplink(), 8_000.0, 0.05, 30, 512)
    assert max(waits[len(waits) // 2 :]) < 2 * LEAST / 8_000.0 + QUEUE


def test_acknowledgements_are_believed_as_far_as_they_can_be_true() -> None:
    uplink = Uplink()
    uplink.on_sent(100, 0.0)
    uplink.on_ack(10**9, 0.1)
    assert (uplink.acked, uplink.in_flight) == (100, 0)
    uplink.on_ack(50, 0.2)
    assert uplink.acked == 100

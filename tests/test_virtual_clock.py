"""Loops on simulated time: who runs when, that runs repeat exactly, and that they end with a reason."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest

from starsd.scripts import virtual_clock
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.link_trace import TraceEvent
from starsd.scripts.virtual_clock import SimulationError, VirtualClock
from starsd.scripts.virtual_link import VirtualLink
from starsd.shared.clock import REAL, Clock, Mailbox
from starsd.shared.errors import CapacityError


def test_hours_pass_at_once_and_in_order() -> None:
    log: list[tuple[str, float]] = []
    started = time.perf_counter()

    def worker(name: str, hours: float) -> None:
        for _ in range(3):
            clock.sleep(3600 * hours)
            log.append((name, clock.now() / 3600))

    with VirtualClock() as clock:
        clock.spawn(lambda: worker("a", 2))
        clock.spawn(lambda: worker("b", 3))
        clock.run()
        assert clock.now() == 9 * 3600
    # at hour 6 it is b's turn first: it went to sleep at 3, a at 4
    assert log == [("a", 2), ("b", 3), ("a", 4), ("b", 6), ("a", 6), ("b", 9)]
    assert time.perf_counter() - started < 5


def test_exactly_one_runs_at_a_time() -> None:
    inside = 0

    def worker() -> None:
        nonlocal inside
        for _ in range(50):
            inside += 1
            time.sleep(1e-5)  # others would come in here
            assert inside == 1
            inside -= 1
            clock.sleep(0.001)

    with VirtualClock() as clock:
        for _ in range(4):
            clock.spawn(worker)
        clock.run()


def test_take_waits_for_items_or_its_timeout() -> None:
    log: list[tuple[float, list[object]]] = []

    def sender() -> None:
        clock.sleep(0.25)
        inbox.put("one")
        inbox.put("two")
        clock.sleep(0.5)
        inbox.put("three")

    def taker() -> None:
        for timeout in (1.0, 1.0, 1.0, 0.0, math.inf):
            got = inbox.take(timeout)
            log.append((clock.now(), got))
            if len(log) == 4:
                clock.call_at(9.0, lambda: inbox.put("late"))

    with VirtualClock() as clock:
        inbox = clock.mailbox()
        clock.spawn(sender)
        clock.spawn(taker)
        clock.run()
    assert log == [(0.25, ["one", "two"]), (0.75, ["three"]), (1.75, []), (1.75, []), (9.0, ["late"])]


@pytest.mark.parametrize("virtual", [True, False])
def test_one_loop_runs_on_either_clock(virtual: bool) -> None:
    clock: Clock = VirtualClock() if virtual else REAL
    inbox: Mailbox[object] = clock.mailbox()
    got: list[list[object]] = []

    def loop() -> None:
        inbox.put(1)
        got.append(inbox.take(0.5))
        started = clock.now()
        got.append(inbox.take(0.02))
        clock.sleep(0.02)
        assert clock.now() - started >= 0.04

    if isinstance(clock, VirtualClock):
        with clock:
            clock.spawn(loop)
            clock.run()
        assert clock.now() == 0.04
    else:
        loop()
    assert got == [[1], []]


def test_an_item_put_by_oneself_or_before_the_run_is_there() -> None:
    got = []
    with VirtualClock() as clock:
        inbox = clock.mailbox()
        inbox.put("before")
        clock.spawn(lambda: got.extend(inbox.take(math.inf)))
        clock.run()
    assert got == ["before"]


def test_a_timeout_that_an_item_made_void_wakes_nobody_later() -> None:
    woken = []

    def taker() -> None:
        inbox.take(1.0)
        clock.sleep(10.0)  # the void timeout lies within
        woken.append(clock.now())

    with VirtualClock() as clock:
        inbox = clock.mailbox()
        clock.spawn(taker)
        clock.call_at(0.5, lambda: inbox.put("x"))
        clock.run()
    assert woken == [10.5]


def simulation(seed: int) -> list[tuple[float, str]]:
    """Edges and a server that exchange messages at random times over links with jitter."""
    log: list[tuple[float, str]] = []

    def edge(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for step in range(20):
            clock.sleep(rng.choice([0.0, 0.01, 0.02]))
            links[number].up.send(50, lambda step=step: inbox.put((number, step)))  # type: ignore[misc]
            for got in answers[number].take(rng.choice([0.0, 0.01, 0.05])):
                log.append((clock.now(), f"edge {number} got {got}"))

    def server() -> None:
        while True:
            for item in inbox.take(math.inf):
                number, step = item  # type: ignore[misc]
                clock.sleep(0.003)
                log.append((clock.now(), f"server answers {number} {step}"))
                links[number].down.send(80, lambda n=number, s=step: answers[n].put(s))  # type: ignore[misc]

    with VirtualClock() as clock:
        inbox = clock.mailbox()
        settings = LinkSettings(rtt_ms=20, jitter_ms=10, up_kbit=200, seed=seed)
        links = [VirtualLink(clock, settings, number) for number in range(5)]
        answers = [clock.mailbox() for _ in links]
        for number in range(5):
            clock.spawn(lambda number=number: edge(number), f"edge {number}")  # type: ignore[misc]
        clock.spawn(server, "server", daemon=True)
        clock.run()
    return log


def test_runs_repeat_exactly() -> None:
    first = simulation(1)
    assert len(first) > 120
    assert [simulation(1) for _ in range(3)] == [first] * 3
    assert simulation(2) != first


def test_what_is_due_together_goes_in_the_order_it_was_scheduled() -> None:
    log: list[str] = []
    with VirtualClock() as clock:
        for name in "abc":
            clock.spawn(lambda name=name: (clock.sleep(1.0), log.append(name)))  # type: ignore[misc]
        clock.call_at(1.0, lambda: log.append("called"))
        clock.run()
    assert log == ["called", "a", "b", "c"]


def test_run_until_and_on() -> None:
    log: list[float] = []

    def worker() -> None:
        while True:
            clock.sleep(1.0)
            log.append(clock.now())

    with VirtualClock() as clock:
        clock.spawn(worker)
        clock.run(until=2.5)
        assert (clock.now(), log) == (2.5, [1.0, 2.0])
        clock.run(until=4.0)
        assert (clock.now(), log) == (4.0, [1.0, 2.0, 3.0, 4.0])


def test_callbacks_alone_and_daemons_alone() -> None:
    log: list[float] = []
    with VirtualClock() as clock:
        clock.call_at(3.0, lambda: log.append(clock.now()))
        clock.run()
        assert clock.now() == 3.0
        clock.call_at(1.0, lambda: log.append(clock.now()))  # is past: next
        clock.run(until=5.0)
        assert clock.now() == 5.0
        clock.spawn(lambda: clock.sleep(100), daemon=True)
        clock.run(until=50.0)
        assert clock.now() == 50.0
    assert log == [3.0, 3.0]


def test_a_participant_may_spawn_others() -> None:
    log: list[tuple[str, float]] = []

    def parent() -> None:
        clock.sleep(1.0)
        clock.spawn(child)
        log.append(("parent", clock.now()))

    def child() -> None:
        clock.sleep(1.0)
        log.append(("child", clock.now()))

    with VirtualClock() as clock:
        clock.spawn(parent)
        clock.run()
    assert log == [("parent", 1.0), ("child", 2.0)]


def test_the_run_ends_with_the_last_that_is_no_daemon_and_daemons_clean_up() -> None:
    log: list[str] = []

    def daemon() -> None:
        try:
            while True:
                clock.sleep(1.0)
        finally:
            log.append("cleaned up")
            clock.sleep(1.0)  # must not hang
            log.append("never")

    with VirtualClock() as clock:
        clock.spawn(lambda: clock.sleep(10.0), "main")
        clock.spawn(daemon, "background", daemon=True)
        clock.run()
        assert clock.now() == 10.0
        assert log == []
    assert log == ["cleaned up"]
    assert not [thread for thread in threading.enumerate() if thread.name in ("main", "background")]


@pytest.mark.parametrize("where", ["participant", "callback"])
def test_an_error_ends_the_run_and_is_raised(where: str) -> None:
    after: list[float] = []

    def fail() -> None:
        raise ValueError("broken")

    def failing() -> None:
        clock.sleep(1.0)
        fail()

    def other() -> None:
        while True:
            clock.sleep(0.3)
            after.append(clock.now())

    clock = VirtualClock()
    clock.spawn(other, "other")
    if where == "participant":
        clock.spawn(failing)
    else:
        clock.call_at(1.0, fail)
    with pytest.raises(ValueError, match=r"^broken$"):
        clock.run()
    assert after[-1] == pytest.approx(0.9)
    assert not [thread for thread in threading.enumerate() if thread.name == "other"]
    with pytest.raises(SimulationError, match=r"^the clock is closed or running, expected one that waits to be run$"):
        clock.run()


def test_a_deadlock_names_who_waits() -> None:
    with VirtualClock() as clock:
        boxes = [clock.mailbox() for _ in range(3)]
        clock.spawn(lambda: (clock.sleep(2.5), boxes[0].take(math.inf)), "edge 1")
        clock.spawn(lambda: boxes[1].take(math.inf), "edge 2")
        clock.spawn(lambda: boxes[2].take(math.inf), "server", daemon=True)
        with pytest.raises(
            SimulationError, match=r"^nothing is due after 2\.500 s and these still wait: edge 1, edge 2$"
        ):
            clock.run()


@pytest.mark.parametrize("how", ["sleep", "take", "call"])
def test_going_on_without_time_passing_is_an_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_clock, "MOST_STEPS", 1000)

    def spin() -> None:
        clock.sleep(0.5)
        while True:
            if how == "sleep":
                clock.sleep(0.0)
            elif how == "take":
                box.take(0.0)
            else:
                again()
                clock.sleep(1.0)

    def again() -> None:
        clock.call_at(clock.now(), again)

    with VirtualClock() as clock:
        box = clock.mailbox()
        clock.spawn(spin)
        with pytest.raises(SimulationError, match=r"^1,000 steps at 0\.500 s, expected time to pass: somebody never"):
            clock.run()


def test_many_steps_are_none_too_many_while_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_clock, "MOST_STEPS", 20)

    def worker() -> None:
        for _ in range(200):
            clock.sleep(0.001)
            box.take(0.0)

    with VirtualClock() as clock:
        box = clock.mailbox()
        clock.spawn(worker)
        clock.run()
        assert clock.now() == pytest.approx(0.2)


def test_misuse_is_refused() -> None:
    with VirtualClock() as clock:
        box = clock.mailbox()
        outside = "outside the participant whose turn it is, expected it to be called by that one$"
        with pytest.raises(SimulationError, match=f"^sleep {outside}"):
            clock.sleep(1.0)
        clock.call_at(0.0, lambda: box.take(1.0) and None)
        with pytest.raises(SimulationError, match=f"^take {outside}"):
            clock.run()
    with VirtualClock() as clock:
        box = clock.mailbox()
        clock.spawn(lambda: box.take(1.0), "a")
        clock.spawn(lambda: box.take(1.0), "b")
        with pytest.raises(SimulationError, match=r"^b and a take from one mailbox, expected one of them$"):
            clock.run()
    with VirtualClock() as clock:
        box = clock.mailbox()

        def foreign() -> None:
            errors: list[Exception] = []

            def put() -> None:
                try:
                    box.put(1)
                except SimulationError as error:
                    errors.append(error)

            thread = threading.Thread(target=put)
            thread.start()
            thread.join()
            raise errors[0]

        clock.spawn(foreign)
        with pytest.raises(
            SimulationError, match=r"^put from outside while the clock runs, expected a participant or a"
        ):
            clock.run()
    with VirtualClock() as clock, pytest.raises(SimulationError, match=r"^time is not a number, expected seconds$"):
        clock.call_at(math.nan, lambda: None)


def test_thousands_of_switches_a_second() -> None:
    def worker() -> None:
        for _ in range(1000):
            clock.sleep(0.001)

    with VirtualClock() as clock:
        for _ in range(8):
            clock.spawn(worker)
        started = time.perf_counter()
        clock.run()
        rate = 8000 / (time.perf_counter() - started)
    print(f"\n{rate:.0f} switches a second")  # pytest -s shows it, docs/rigs.md quotes it
    assert rate > 2000


def test_a_link_delivers_on_time() -> None:
    log: list[tuple[str, float]] = []

    def sender() -> None:
        link.up.send(1000, lambda: log.append(("a", clock.now())))
        link.up.send(500, lambda: log.append(("b", clock.now())))
        link.down.send(500, lambda: log.append(("down", clock.now())))
        clock.sleep(3.0)

    with VirtualClock() as clock:
        link = VirtualLink(clock, LinkSettings(rtt_ms=200, up_kbit=8, down_kbit=80))
        clock.spawn(sender)
        clock.run()
    assert [(name, round(at, 9)) for name, at in log] == [("down", 0.15), ("a", 1.1), ("b", 1.6)]


def test_a_link_changes_stalls_and_is_cut() -> None:
    log: list[tuple[int, float]] = []

    def sender() -> None:
        for number in range(12):
            link.up.send(10, lambda number=number: log.append((number, round(clock.now(), 3))))  # type: ignore[misc]
            clock.sleep(1.0)

    with VirtualClock() as clock:
        link = VirtualLink(clock, LinkSettings(rtt_ms=200))
        link.play(
            [
                TraceEvent(at=0.5, rtt_ms=1000),  # 0 was faster
                TraceEvent(at=1.9, stall_ms=500),  # 2 waits for its end, and its half round trip
                TraceEvent(at=2.5, rtt_ms=20),
                TraceEvent(at=3.5, cut="hole"),  # 4 and 5 wait
                TraceEvent(at=5.5, cut="none"),
                TraceEvent(at=6.5, cut="close"),  # 7 and 8 are lost
                TraceEvent(at=8.5, cut="none"),
                TraceEvent(at=9.0, rtt_ms=1000),
                TraceEvent(at=10.2, cut="close"),  # 10 is lost on the way
                TraceEvent(at=10.9, cut="none"),
                TraceEvent(at=10.9, rtt_ms=0),
            ]
        )
        clock.spawn(sender)
        clock.run()
    assert log[:3] == [(0, 0.1), (1, 1.5), (2, 2.9)]
    assert [number for number, _ in log] == [0, 1, 2, 3, 4, 5, 6, 9, 11]
    times = dict(log)
    assert (times[3], times[4], times[5], times[6], times[9]) == (3.01, 5.51, 5.51, 6.01, 9.5)
    assert times[11] == 11.0


def test_a_full_queue_is_refused_until_there_is_room() -> None:
    def sender() -> None:
        link.up.send(900, lambda: None)
        assert link.up.room == 100
        link.up.send(300, lambda: None)
        with pytest.raises(
            CapacityError, match=r"^queue of the link is full, 50 bytes do not fit: send when there is room$"
        ):
            link.up.send(50, lambda: None)
        clock.sleep(0.3)
        assert link.up.room == 100
        link.up.send(50, lambda: None)

    with VirtualClock() as clock:
        link = VirtualLink(clock, LinkSettings(up_kbit=8, queue_bytes=1000))
        clock.spawn(sender)
        clock.run()

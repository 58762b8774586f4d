"""What is known of the device: readings that age, energy, and a child process that is kept alive."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from starsd.edge import telemetry_process
from starsd.edge.telemetry import STALE, Telemetry
from starsd.edge.telemetry_energy import LONGEST, Energy, Work, spent
from starsd.edge.telemetry_process import LONGEST_LINE, ProcessTelemetry
from starsd.edge.telemetry_reading import BOARD, NOTHING, Reading
from starsd.shared.messages import EDGE_FIGURES

HOT = Reading(source="sysfs", power_w=10.0, power_of=BOARD, temperature_c=90.0, throttled=True, memory_used=5)


class Hand:
    time = 50.0

    def __call__(self) -> float:
        return self.time


def known() -> tuple[Telemetry, Hand]:
    now = Hand()
    telemetry = Telemetry(now)
    telemetry.saw(HOT)
    return telemetry, now


def test_by_itself_it_knows_nothing() -> None:
    telemetry = Telemetry()
    assert (telemetry.reading(), telemetry.throttled(), telemetry.figures()) == (NOTHING, False, {})
    telemetry.begin()
    telemetry.end(9)
    assert (telemetry.spent(telemetry.mark()), telemetry.tokens_per_joule, telemetry.joules) == (None, None, 0.0)


def test_readings_age_until_they_say_nothing() -> None:
    telemetry, now = known()
    now.time += STALE
    assert telemetry.reading() == msgspec.structs.replace(HOT, age_s=STALE)
    assert telemetry.throttled()
    now.time += 0.01
    assert (telemetry.reading(), telemetry.throttled(), telemetry.figures()) == (NOTHING, False, {})


def test_a_server_hears_of_what_is_known() -> None:
    telemetry, _ = known()
    assert telemetry.figures() == {"power_w": 10.0, "temperature_c": 90.0, "throttled": 1.0, "memory_used": 5.0}
    telemetry.saw(msgspec.structs.replace(HOT, temperature_c=float("nan"), throttled=False))
    assert telemetry.figures() == {"power_w": 10.0, "throttled": 0.0, "memory_used": 5.0}
    assert set(EDGE_FIGURES) == set(Reading.__struct_fields__) - {"source", "power_of", "age_s"}


def test_energy_is_power_times_time() -> None:
    energy = Energy()
    energy.saw(10.0, 5.0)
    start = energy.mark(10.0)
    energy.saw(12.0, 7.0)
    assert spent(start, energy.mark(13.0)) == pytest.approx(2 * 5 + 7)
    assert spent(energy.mark(13.0), energy.mark(13.5)) == pytest.approx(3.5)
    energy.saw(14.0, 0.0)
    assert energy.joules == pytest.approx(2 * 5 + 2 * 7)


def test_energy_with_a_gap_is_unknown() -> None:
    energy = Energy()
    assert energy.mark(1.0) is None
    energy.saw(1.0, 5.0)
    start = energy.mark(2.0)
    energy.saw(3.0, None)
    assert energy.mark(3.0) is None
    energy.saw(4.0, 5.0)
    after = energy.mark(4.0)
    assert after is not None
    assert spent(start, after) is None
    assert after.joules == pytest.approx(10.0)
    energy.saw(4.0 + LONGEST + 1, 5.0)  # a sensor that was silent for too long
    late = energy.mark(4.0 + LONGEST + 1)
    assert (spent(after, late), late is not None and late.joules) == (None, pytest.approx(10.0))
    assert energy.mark(20.0) is None


def test_time_that_answers_share_counts_once() -> None:
    energy, work = Energy(), Work()
    for second in range(20):
        energy.saw(float(second), 10.0)
    work.begin(energy.mark(19.0))
    energy.saw(20.0, 10.0)
    work.begin(energy.mark(20.0))
    energy.saw(22.0, 20.0)
    work.end(energy.mark(22.0), 30)
    energy.saw(23.0, 20.0)
    work.end(energy.mark(23.0), 20)
    assert (work.joules, work.tokens) == (pytest.approx(10 + 20 + 20), 50)
    energy.saw(30.0, 1.0)
    work.begin(energy.mark(30.0))
    energy.saw(31.0, None)
    work.end(energy.mark(31.0), 1000)  # nobody knows what these took
    assert work.tokens_per_joule == pytest.approx(1.0)


def test_joules_of_an_answer() -> None:
    telemetry, now = known()
    before = telemetry.mark()
    telemetry.begin()
    now.time += 3
    telemetry.end(60)
    assert telemetry.spent(before) == pytest.approx(30.0)
    assert (telemetry.tokens_per_joule, telemetry.answer_joules) == (pytest.approx(2.0), pytest.approx(30.0))


LINE = msgspec.json.encode(HOT).decode()
PRELUDE = f"import sys, time\nLINE = {LINE!r}\ndef say(text):\n    print(text, flush=True)\n"


@contextmanager
def watching(script: str, **options: Any) -> Iterator[ProcessTelemetry]:
    telemetry = ProcessTelemetry([sys.executable, "-c", PRELUDE + textwrap.dedent(script)], first_wait=0.01, **options)
    try:
        yield telemetry
    finally:
        telemetry.close()


def eventually(right: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not right():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_childs_lines_are_readings() -> None:
    with watching("say('no JSON')\nsay('{\"power_w\": \"hot\"}')\nsay(LINE)\ntime.sleep(60)") as telemetry:
        eventually(telemetry.throttled)
        assert msgspec.structs.replace(telemetry.reading(), age_s=None) == HOT
        assert telemetry.starts == 1


def test_a_child_that_ends_is_started_again() -> None:
    with watching("say(LINE)") as telemetry:
        eventually(lambda: telemetry.starts == 3)
        assert telemetry.throttled()


def test_it_is_started_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            if len(waits) == 8:
                self.set()
            return self.is_set()

    watched = SimpleNamespace(Event=Impatient, Thread=threading.Thread)
    monkeypatch.setattr(telemetry_process, "threading", watched)
    telemetry = ProcessTelemetry(["/no/such/command"])
    telemetry._thread.join(10)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


ENDLESS = f"while True:\n    sys.stdout.write('x' * {LONGEST_LINE})\n    time.sleep(0.01)"


@pytest.mark.parametrize("script", ["time.sleep(60)", ENDLESS])
def test_a_child_that_says_nothing_of_use_is_started_again(script: str) -> None:
    with watching(script, silent=0.5) as telemetry:
        eventually(lambda: telemetry.starts == 2)
        assert telemetry.reading() == NOTHING


def test_a_command_that_is_not_there_harms_nobody() -> None:
    telemetry = ProcessTelemetry(["/no/such/command"], first_wait=0.01)
    time.sleep(0.05)
    assert (telemetry.starts, telemetry.reading()) == (0, NOTHING)
    telemetry.close()


def test_closing_ends_child_and_thread_at_once() -> None:
    with watching("say(LINE)\ntime.sleep(60)") as telemetry:
        eventually(telemetry.throttled)
        child = telemetry._child
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert child is not None
    assert child.returncode is not None
    assert not telemetry._thread.is_alive()
    telemetry.close()


def test_this_machine_is_read() -> None:
    telemetry = ProcessTelemetry()
    try:
        eventually(lambda: telemetry.reading() != NOTHING)
        reading = telemetry.reading()
        assert reading.memory_total is not None
        assert reading.memory_used is not None
        assert 0 < reading.memory_used < reading.memory_total
    finally:
        telemetry.close()

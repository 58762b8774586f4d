"""A block that signals end as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from starsd.shared.signals import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_block_and_later_ones_let_it_tidy_up(number: signal.Signals) -> None:
    before, tidied = signal.getsignal(number), []

    def work() -> None:
        with ended_by_signals():
            try:
                os.kill(os.getpid(), number)
            finally:
                for again in (signal.SIGTERM, signal.SIGHUP):
                    os.kill(os.getpid(), again)
                tidied.append(number)

    with pytest.raises(SystemExit) as stop:
        work()
    assert (stop.value.code, tidied) == (128 + number, [number])
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_it_changes_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with ended_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]

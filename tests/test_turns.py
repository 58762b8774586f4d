"""Turns are had in the order in which they were asked for, and an interrupted waiter holds nobody up."""

from __future__ import annotations

import threading
import time

import pytest

from starsd.edge.turns import Turns


def test_first_come_first_served() -> None:
    turns, order, threads = Turns(), list[int](), list[threading.Thread]()

    def wait(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        for number in range(8):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    with turns:
        pass


def test_who_had_a_turn_goes_behind_those_who_wait() -> None:
    turns, order = Turns(), list[str]()

    def work(name: str) -> None:
        for _ in range(20):
            with turns:
                order.append(name)
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list("abc") * 20


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("granted", [False, True])
def test_an_interrupted_waiter_is_passed_over(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt may come while it waits, or when its turn has just come."""
    turns = Turns()

    class Interrupted:
        """In place of a lock that is waited for."""

        calls = 0

        def acquire(self) -> bool:
            self.calls += 1
            if self.calls > 1:
                if granted:
                    turns.__exit__(None, None, None)
                raise Stopped
            return True

        def release(self) -> None:
            pass

    turns.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr("starsd.edge.turns.threading.Lock", Interrupted)
        with pytest.raises(Stopped):
            turns.__enter__()
    if not granted:
        turns.__exit__(None, None, None)
    assert not turns._taken
    assert not turns._waiting

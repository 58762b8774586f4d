"""An answer may be ended at any time, by whoever holds it; its end is told once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest

from starsd.edge.answer import Outcome, Piece
from starsd.edge.generation import Generation
from starsd.shared.errors import EngineError

OUTCOME = Outcome(
    token_ids=[1], text="a", finish_reason="stop", new_tokens=1, passes=0, near_ties=0, seconds=1, prefill_seconds=1
)


class Source:
    """Pieces, and what became of whoever makes them."""

    def __init__(self, count: int = 3, during: Callable[[int], None] = lambda number: None) -> None:
        self.count, self.during = count, during
        self.closed = False
        self.ended = 0

    def generation(self) -> Generation:
        return Generation(self._pieces(), self._end)

    def _pieces(self) -> Generator[Piece, None, None]:
        try:
            for number in range(self.count):
                self.during(number)
                yield Piece(str(number), [number])
            yield Piece("", [], OUTCOME)
        finally:
            self.closed = True

    def _end(self) -> None:
        assert self.closed or self.count < 0
        self.ended += 1


def test_it_ends_with_the_outcome() -> None:
    """Not only when one asks for what comes behind it."""
    source = Source()
    generation = source.generation()
    texts = [next(generation).text for _ in range(3)]
    assert (texts, source.ended) == (["0", "1", "2"], 0)
    assert next(generation).outcome == OUTCOME
    assert source.ended == 1
    assert list(generation) == []
    generation.close()
    assert source.ended == 1


def test_it_may_be_closed_early() -> None:
    source = Source()
    generation = source.generation()
    next(generation)
    generation.close()
    assert (source.closed, source.ended, list(generation)) == (True, 1, [])


def test_one_that_nobody_holds_any_more_ends() -> None:
    source = Source()
    next(source.generation())
    assert (source.closed, source.ended) == (True, 1)


def test_one_that_never_began_ends() -> None:
    source = Source(count=-1)
    generation = source.generation()
    generation.close()
    assert (source.closed, source.ended) == (False, 1)
    del generation
    assert source.ended == 1


def test_an_exception_ends_it() -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise EngineError("broken")

    source = Source(during=fail)
    generation = source.generation()
    next(generation)
    with pytest.raises(EngineError, match="broken"):
        next(generation)
    assert (source.closed, source.ended, list(generation)) == (True, 1, [])


def test_thrown_into_it_ends_too() -> None:
    source = Source()
    generation = source.generation()
    next(generation)
    with pytest.raises(KeyboardInterrupt):
        generation.throw(KeyboardInterrupt)
    assert (source.closed, source.ended) == (True, 1)


def test_closed_by_another_thread_it_ends_with_its_step() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        if number == 1:
            reached.set()
            assert go_on.wait(10)

    source = Source(during=wait)
    generation = source.generation()
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.extend(piece.text for piece in generation))
    thread.start()
    assert reached.wait(10)
    generation.close()
    assert (generation.closing, source.ended) == (True, 0)
    with pytest.raises(EngineError, match=r"^generation is at a step already, expected one consumer at a time$"):
        next(generation)
    go_on.set()
    thread.join()
    assert (taken, source.closed, source.ended) == (["0", "1"], True, 1)


def test_the_step_itself_ends_it() -> None:
    """Nobody asks for another piece."""
    held: list[Generation] = []
    source = Source(during=lambda number: held[0].close())
    held.append(source.generation())
    assert next(held[0]).text == "0"
    assert (source.closed, source.ended) == (True, 1)

"""A runtime under asyncio: the same answers, and what ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from runtime_helpers import LIMITS, PROMPT, WARM, SlowTarget, all_of, alone, eventually, run

from starsd.edge import Drafting, Limits, Piece, Runtime
from starsd.edge.policy import Policy
from starsd.edge.text import Text
from starsd.shared.errors import EngineError

pytest_plugins = ("runtime_fixtures",)


def test_the_async_twin_says_the_same(open_one: Callable[..., Runtime], text: Text) -> None:
    runtime = open_one(SlowTarget())

    async def many() -> list[list[Piece]]:
        prompts = [[first, 8, 9] for first in range(5, 13)]
        return await asyncio.gather(
            *(all_of(runtime.agenerate(prompt, sampling=WARM, limits=LIMITS)) for prompt in prompts)
        )

    for first, pieces in enumerate(asyncio.run(many()), start=5):
        assert [token for piece in pieces for token in piece.tokens] == alone(text, [first, 8, 9])
        assert pieces[-1].outcome is not None
    assert runtime.status().busy == 0


@pytest.mark.parametrize("how", ["cancel", "aclose", "leave", "timeout"])
def test_a_cancelled_answer_ends_within_a_step(open_one: Callable[..., Runtime], text: Text, how: str) -> None:
    target = SlowTarget()
    target.seconds = 0.02
    runtime = open_one(target, conversations=1, drafting=Drafting(policy=Policy.PLAIN))

    async def talk() -> None:
        pieces = runtime.agenerate(PROMPT, sampling=WARM, limits=Limits(max_new_tokens=3000))
        if how == "aclose":
            for _ in range(3):
                await pieces.__anext__()
            await pieces.aclose()  # type: ignore[attr-defined]
        elif how == "leave":
            async for _ in pieces:
                break
        else:
            async for _ in pieces:
                pass

    async def main() -> int:
        task = asyncio.ensure_future(talk())
        if how == "cancel":
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(task, 0.1)
        else:
            await task
        passes = len(target.log)
        answer = await all_of(runtime.agenerate([5, 8], sampling=WARM, limits=LIMITS))  # waits for the last step
        assert [token for piece in answer for token in piece.tokens] == alone(text, [5, 8])
        return passes

    passes = asyncio.run(main())
    assert len(target.log) - passes <= 24 + 2 + 1  # the answer's, what it read, and one that was under way
    eventually(lambda: runtime.status().busy == 0)


def test_an_answer_cancelled_before_it_began_holds_nothing(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(conversations=1)

    async def main() -> None:
        for delay in (0.0, 0.0, 0.0005, 0.001, 0.002):
            task = asyncio.ensure_future(all_of(runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    eventually(lambda: runtime.status().busy == 0)
    run(runtime, PROMPT)


def test_leaving_the_loop_gives_the_conversation_back_at_once(open_one: Callable[..., Runtime]) -> None:
    """Nothing is awaited between: there is no `aclose`, and no task of asyncio's own."""
    runtime = open_one(conversations=1)

    async def fail() -> None:
        async for piece in runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS):
            len(piece.tokens) / 0

    async def main() -> None:
        async for _ in runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS):
            break
        assert runtime.status().busy == 0
        with pytest.raises(ZeroDivisionError):
            await fail()
        assert runtime.status().busy == 0
        held = runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)
        async for _ in held:
            break
        assert runtime.status().busy == 1  # whoever holds it may go on
        await held.aclose()
        assert runtime.status().busy == 0

    asyncio.run(main())


def test_one_that_is_over_stays_over(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one()

    async def main() -> None:
        for ask in (1, 0):
            pieces = runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)
            for _ in range(ask):
                await anext(pieces)
            for _ in range(2):
                await pieces.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(pieces)
        whole = runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)
        assert len(await all_of(whole)) > 1
        assert await all_of(whole) == []
        thrown = runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)
        await anext(thrown)
        with pytest.raises(ValueError, match="enough"):
            await thrown.athrow(ValueError("enough"))
        assert await all_of(thrown) == []

    asyncio.run(main())
    assert runtime.status().busy == 0


def test_two_tasks_cannot_share_an_answer(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(SlowTarget())

    async def main() -> None:
        pieces = runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)
        one, two = (asyncio.ensure_future(all_of(pieces)) for _ in range(2))
        with pytest.raises(EngineError, match=r"^generation is at a step already, expected one consumer at a time$"):
            await two
        assert len(await one) > 1  # who came first gets it all

    asyncio.run(main())


def test_event_loops_share_a_runtime(open_one: Callable[..., Runtime], text: Text) -> None:
    runtime = open_one(SlowTarget())
    found: dict[int, list[int]] = {}

    def talk(first: int) -> None:
        pieces = asyncio.run(all_of(runtime.agenerate([first, 8], sampling=WARM, limits=LIMITS)))
        found[first] = [token for piece in pieces for token in piece.tokens]

    threads = [threading.Thread(target=talk, args=(first,)) for first in (5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: alone(text, [first, 8]) for first in (5, 6)}

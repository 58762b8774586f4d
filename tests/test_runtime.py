"""A runtime's answers: those of one conversation alone, whoever else asks or ends early."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from runtime_helpers import ENDLESS, GREEDY, LIMITS, PROMPT, WARM, SlowTarget, alone, run
from star import MarkedTarget
from tiny_session import ToyTarget, outcome_of

from starsd.edge import Drafting, Grammar, Limits, Piece, Runtime, Sampling
from starsd.edge.policy import Policy
from starsd.edge.session import READ_AT_ONCE, Session
from starsd.edge.text import Text
from starsd.shared.errors import CapacityError

pytest_plugins = ("runtime_fixtures",)


def test_prompts_are_a_turn_messages_or_ids(open_one: Callable[..., Runtime], text: Text) -> None:
    runtime = open_one()
    ids = text.encode_chat([{"role": "user", "content": "Is this so?"}])
    for prompt in ("Is this so?", [{"role": "user", "content": "Is this so?"}], ids, tuple(ids), np.array(ids)):
        assert run(runtime, prompt).token_ids == alone(text, ids)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(temperature=1.3, top_k=9, seed=2)])
@pytest.mark.parametrize("policy", [Policy.PLAIN, Policy.NEVER_WAIT])
def test_answers_are_those_of_a_conversation_alone(
    open_one: Callable[..., Runtime], text: Text, policy: Policy, sampling: Sampling
) -> None:
    """Many at a time, private ones among them, with neighbours that are ended, and more of them than caches."""
    runtime = open_one(SlowTarget(), drafting=Drafting(policy=policy), conversations=4)
    grammar = Grammar.json_object(text)
    system = text.encode("be kind", add_special_tokens=False) * 4
    wrong: list[str] = []

    def talk(seed: int) -> None:
        chance = random.Random(seed)
        for turn in range(4):
            prompt = [*system, *(chance.randrange(2, 290) for _ in range(5))]
            options: dict[str, Any] = {"choice": chance.randrange(3), "private": chance.random() < 0.5}
            if chance.random() < 0.3:
                options["grammar"] = grammar
            pieces = runtime.generate(prompt, sampling=sampling, limits=LIMITS, **options)
            options.pop("private")
            expected = alone(text, prompt, sampling, **options)
            if chance.random() < 0.3:
                got = [token for _ in range(3) for token in next(pieces, Piece("", [])).tokens]
                pieces.close()
                expected = expected[: len(got)]
            else:
                got = [token for piece in pieces for token in piece.tokens]
            if got != expected:
                wrong.append(f"talk {seed}, turn {turn}")

    threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert runtime.status().busy == 0


def test_conversations_advance_at_the_same_pace(open_one: Callable[..., Runtime]) -> None:
    target = SlowTarget()
    runtime = open_one(target, drafting=Drafting(policy=Policy.PLAIN))
    together = threading.Barrier(3)

    def talk(first: int) -> None:
        pieces = runtime.generate([first, 8, 9], sampling=ENDLESS, limits=Limits(max_new_tokens=60))
        next(pieces)
        together.wait()
        for _ in pieces:
            pass

    threads = [threading.Thread(target=talk, args=(first,)) for first in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passes = [who for who, what, _ in target.log if what == "score"][6:-9]
    counts = dict.fromkeys(set(passes), 0)
    assert len(counts) == 3
    for who in passes:
        counts[who] += 1
        assert max(counts.values()) - min(counts.values()) <= 3, counts


def test_a_long_prompt_is_read_in_turns(open_one: Callable[..., Runtime]) -> None:
    target = SlowTarget()
    runtime = open_one(target, drafting=Drafting(policy=Policy.PLAIN))
    pieces = runtime.generate([5, 8, 9], sampling=ENDLESS, limits=Limits(max_new_tokens=4000))
    thread = threading.Thread(target=lambda: [next(pieces) for _ in range(40)])
    long = runtime.generate([7] * (5 * READ_AT_ONCE), sampling=ENDLESS, limits=Limits(max_new_tokens=1))
    thread.start()
    parts = list(long)
    thread.join()
    assert [piece.tokens for piece in parts[:4]] == [[]] * 4
    kinds = [what for _, what, count in target.log if what == "score" or count > 100]
    first, last = kinds.index("read"), len(kinds) - 1 - kinds[::-1].index("read")
    assert kinds[first : last + 1].count("read") == 5
    assert kinds[first : last + 1].count("score") >= 3  # the other went on between


def test_the_next_turn_reads_only_what_is_new(open_one: Callable[..., Runtime], text: Text) -> None:
    target = ToyTarget()
    runtime = open_one(target)
    said = run(runtime, PROMPT).token_ids
    longer = [*PROMPT, *said, 50, 51]
    assert run(runtime, longer).token_ids == alone(text, longer)
    assert target.read == [4, 2]


def test_other_chats_copy_what_they_share(open_one: Callable[..., Runtime], text: Text) -> None:
    """And the first keeps what is its own."""
    target = MarkedTarget()
    siblings: list[MarkedTarget] = []
    target.sibling = lambda: siblings.append(MarkedTarget()) or siblings[-1]  # type: ignore[method-assign,func-returns-value]
    runtime = open_one(target, conversations=2)
    system = list(range(60, 90))
    first = [*system, 100, 101]
    longer = Limits(max_new_tokens=60)
    said = run(runtime, first, limits=longer).token_ids
    again = outcome_of(Session(MarkedTarget(), text), [*system, 200], WARM, LIMITS).token_ids
    assert run(runtime, [*system, 200]).token_ids == again
    (second,) = siblings
    assert (target.read, second.read) == ([31], [])  # all but its tip came from the first
    run(runtime, [*first, *said, 110])
    assert (target.read, second.read) == ([31, 1], [])
    run(runtime, [*system, 210, 211, 212])  # no room for a third: the one idle for longest takes it
    assert (target.read, second.read) == ([31, 1], [2])
    assert runtime.status().busy == 0


def test_choices_of_one_prompt_read_it_once(open_one: Callable[..., Runtime], text: Text) -> None:
    target = SlowTarget()
    runtime = open_one(target)
    prompt = [*range(60, 90)]
    running = [runtime.generate(prompt, sampling=WARM, limits=LIMITS, choice=choice) for choice in range(3)]
    heads = [next(pieces).tokens for pieces in running]
    answers = [
        [*head, *(t for piece in pieces for t in piece.tokens)] for head, pieces in zip(heads, running, strict=True)
    ]
    assert answers == [alone(text, prompt, choice=choice) for choice in range(3)]
    assert [count for _, what, count in target.log if what == "read"] == [29]


def test_when_all_are_busy_it_says_so(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(conversations=2)
    one, two = (runtime.generate([first, 8], limits=LIMITS) for first in (5, 6))
    assert runtime.status().busy == 2
    with pytest.raises(CapacityError, match=r"^all 2 conversations are busy: try again when an answer has ended$"):
        runtime.generate(PROMPT)
    next(one)
    one.close()
    run(runtime, PROMPT)
    del two  # never begun
    gc.collect()
    assert runtime.status().busy == 0


def test_whoever_comes_while_an_answer_is_being_ended_waits_for_it(
    open_one: Callable[..., Runtime], text: Text
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Gated(ToyTarget):
        def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
            reached.set()
            assert go_on.wait(10)
            return super().score(tokens, parents)

    runtime = open_one(Gated(), conversations=1)
    running = runtime.generate([5, 8], limits=LIMITS)
    thread = threading.Thread(target=lambda: next(running))
    thread.start()
    assert reached.wait(10)
    running.close()
    threading.Timer(0.05, go_on.set).start()
    assert run(runtime, PROMPT).token_ids == alone(text, PROMPT)
    thread.join()


def test_the_system_message_stays_when_a_chat_overflows(open_one: Callable[..., Runtime], text: Text) -> None:
    target = ToyTarget(context=60)
    runtime = open_one(target)
    messages = [{"role": "system", "content": "is so"}, *({"role": "user", "content": "is this so?"} for _ in range(9))]
    limits = Limits(max_new_tokens=4, overflow="truncate")
    run(runtime, messages, limits=limits)
    system = text.leading_tokens(messages[:1])
    assert target.rows[:system] == text.encode_chat(messages)[:system]
    assert len(text.encode_chat(messages)) > 60


def test_reading_a_long_prompt_may_be_ended(open_one: Callable[..., Runtime], text: Text) -> None:
    target = SlowTarget()
    runtime = open_one(target, conversations=1)
    pieces = runtime.generate([7] * (8 * READ_AT_ONCE), limits=LIMITS)
    assert next(pieces) == Piece("", [])
    pieces.close()
    assert len(target.log) == 1
    assert run(runtime, PROMPT).token_ids == alone(text, PROMPT)


def test_logprobs_and_sources_come_with_the_tokens(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one()
    prompt = [*range(50, 60)] * 3
    pieces = list(runtime.generate(prompt, sampling=WARM, limits=LIMITS, top_logprobs=2))
    for piece in pieces:
        assert [one.token for one in piece.logprobs] == piece.tokens
        assert len(piece.sources) == len(piece.tokens)
        assert all(len(one.top) == 2 and one.logprob <= one.top[0][1] for one in piece.logprobs)
    assert {source for piece in pieces for source in piece.sources} <= {"target", "ngram"}
    assert all(not piece.logprobs for piece in runtime.generate(prompt, sampling=WARM, limits=LIMITS))

"""A runtime's answers: those of one conversation alone, whoever else asks, ends early, or keeps things to himself."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from edge_ends import FINGERPRINT
from recording_link import RecordingLink
from star import MarkedTarget, marks
from tiny_session import EOS, ToyTarget, outcome_of, write_text_files

from starsd.edge import Drafting, Grammar, Limits, Outcome, Piece, Runtime, Sampling, Status
from starsd.edge.policy import Policy
from starsd.edge.session import READ_AT_ONCE, Session
from starsd.edge.text import Text
from starsd.shared.errors import CapacityError, ContextOverflowError, UsageError

LIMITS = Limits(max_new_tokens=24)
ENDLESS = Sampling(logit_bias={EOS: -100})
GREEDY, WARM = Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=7, logit_bias={EOS: -100})
PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


@pytest.fixture
def open_one(text: Text) -> Iterator[Callable[..., Runtime]]:
    opened: list[Runtime] = []

    def make(target: Any = None, **options: Any) -> Runtime:
        opened.append(Runtime.around(target or ToyTarget(), text, name="toy", **options))
        return opened[-1]

    yield make
    for runtime in opened:
        runtime.close()


def run(runtime: Runtime, prompt: Any, sampling: Sampling = WARM, limits: Limits = LIMITS, **options: Any) -> Outcome:
    *_, last = runtime.generate(prompt, sampling=sampling, limits=limits, **options)
    assert last.outcome is not None
    return last.outcome


def alone(
    text: Text, prompt: Sequence[int], sampling: Sampling = WARM, limits: Limits = LIMITS, **options: Any
) -> list[int]:
    """What plain decoding says in a session that nobody else uses."""
    return outcome_of(Session(ToyTarget(), text), prompt, sampling, limits, **options).token_ids


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


class SlowTarget(ToyTarget):
    """A pass takes a while, and everybody's are noted: who, whether it read, and how many tokens."""

    seconds = 0.002

    def __init__(self, context: int = 4096, log: list[tuple[int, str, int]] | None = None) -> None:
        super().__init__(context)
        self.log: list[tuple[int, str, int]] = [] if log is None else log
        self.gate: threading.Event | None = None
        self.at_work = threading.Lock()

    def sibling(self) -> SlowTarget:
        other = type(self)(self.context, self.log)
        other.at_work = self.at_work
        return other

    def prefill(self, tokens: Sequence[int], *progress: Any) -> Any:
        self._work("read", len(tokens))
        return super().prefill(tokens, *progress)

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        self._work("score", len(tokens))
        return super().score(tokens, parents)

    def _work(self, what: str, count: int) -> None:
        assert self.at_work.acquire(blocking=False), "two passes at a time"
        try:
            self.log.append((id(self), what, count))
            time.sleep(self.seconds)
        finally:
            self.at_work.release()


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


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, UsageError, "prompt is empty, expected at least one token"),
        ([5, "a"], {}, UsageError, "prompt holds 'str' object cannot be interpreted as an integer, expected token ids"),
        ([5, {"role": "user"}], {}, UsageError, "prompt mixes messages and token ids, expected one or the other"),
        ([7] * 50, {}, ContextOverflowError, "prompt has 50 tokens, expected at most 40: shorten it"),
        (PROMPT, {"sampling": Sampling(top_p=2)}, UsageError, "top_p is 2, expected more than 0 and at most 1"),
        (PROMPT, {"limits": Limits(stop=("",))}, UsageError, "stop string is empty, expected at least one character"),
        (PROMPT, {"top_logprobs": -1}, UsageError, "top_logprobs is -1, expected 0 or more"),
        (PROMPT, {"choice": -1}, UsageError, "choice is -1, expected 0 or more"),
    ],
)
def test_what_cannot_be_met_is_refused_and_holds_nothing(
    open_one: Callable[..., Runtime], prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    runtime = open_one(ToyTarget(context=40), conversations=1)
    with pytest.raises(error) as refusal:
        runtime.generate(prompt, **options)
    assert str(refusal.value).startswith(message)
    assert runtime.status().busy == 0
    with pytest.raises(error):
        asyncio.run(_all(runtime.agenerate(prompt, **options)))
    assert run(runtime, PROMPT).new_tokens == 24


def test_runtimes_need_a_conversation(open_one: Callable[..., Runtime]) -> None:
    with pytest.raises(UsageError, match=r"^conversations are 0, expected 1 or more$"):
        open_one(conversations=0)


def test_the_system_message_stays_when_a_chat_overflows(open_one: Callable[..., Runtime], text: Text) -> None:
    target = ToyTarget(context=60)
    runtime = open_one(target)
    messages = [{"role": "system", "content": "is so"}, *({"role": "user", "content": "is this so?"} for _ in range(9))]
    limits = Limits(max_new_tokens=4, overflow="truncate")
    run(runtime, messages, limits=limits)
    system = text.leading_tokens(messages[:1])
    assert target.rows[:system] == text.encode_chat(messages)[:system]
    assert len(text.encode_chat(messages)) > 60


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def test_the_async_twin_says_the_same(open_one: Callable[..., Runtime], text: Text) -> None:
    runtime = open_one(SlowTarget())

    async def many() -> list[list[Piece]]:
        prompts = [[first, 8, 9] for first in range(5, 13)]
        return await asyncio.gather(
            *(_all(runtime.agenerate(prompt, sampling=WARM, limits=LIMITS)) for prompt in prompts)
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
        if how == "leave":
            await asyncio.sleep(0.01)  # asyncio closes what nobody holds any more in a task of its own
        passes = len(target.log)
        answer = await _all(runtime.agenerate([5, 8], sampling=WARM, limits=LIMITS))  # waits for the last step
        assert [token for piece in answer for token in piece.tokens] == alone(text, [5, 8])
        return passes

    passes = asyncio.run(main())
    assert len(target.log) - passes <= 24 + 2 + 1  # the answer's, what it read, and one that was under way
    eventually(lambda: runtime.status().busy == 0)


def test_an_answer_cancelled_before_it_began_holds_nothing(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(conversations=1)

    async def main() -> None:
        for delay in (0.0, 0.0, 0.0005, 0.001, 0.002):
            task = asyncio.ensure_future(_all(runtime.agenerate(PROMPT, sampling=WARM, limits=LIMITS)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    eventually(lambda: runtime.status().busy == 0)
    run(runtime, PROMPT)


def test_reading_a_long_prompt_may_be_ended(open_one: Callable[..., Runtime], text: Text) -> None:
    target = SlowTarget()
    runtime = open_one(target, conversations=1)
    pieces = runtime.generate([7] * (8 * READ_AT_ONCE), limits=LIMITS)
    assert next(pieces) == Piece("", [])
    pieces.close()
    assert len(target.log) == 1
    assert run(runtime, PROMPT).token_ids == alone(text, PROMPT)


def test_closing_ends_everything(open_one: Callable[..., Runtime]) -> None:
    runtime = open_one(SlowTarget())
    ended = threading.Event()
    running = runtime.generate(PROMPT, sampling=WARM, limits=Limits(max_new_tokens=3000))
    idle = runtime.generate([5, 8], sampling=WARM)
    next(idle)
    thread = threading.Thread(target=lambda: (list(running), ended.set()))
    thread.start()
    eventually(lambda: runtime.status().busy == 2)
    runtime.close()
    assert ended.wait(5)
    assert list(idle) == []
    assert runtime.status().busy == 0
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"):
        runtime.generate(PROMPT)
    with pytest.raises(UsageError, match=r"^runtime is closed, expected an open one$"):
        asyncio.run(_all(runtime.agenerate(PROMPT)))
    runtime.close()


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


@pytest.fixture
def linked(text: Text, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runtime, RecordingLink]]:
    """Features are marked with their token and place."""
    link = RecordingLink()
    monkeypatch.setattr("starsd.edge.runtime.open_link", lambda *_: link)
    drafting = Drafting(server="ws://localhost:1")
    runtime = Runtime.around(MarkedTarget(), text, fingerprint=FINGERPRINT, drafting=drafting, conversations=3)
    with runtime:
        yield runtime, link


def test_a_server_hears_of_answers(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    said = run(runtime, PROMPT).token_ids
    (heard,) = link.texts.values()
    assert heard == [*PROMPT, *said]
    assert {row for _, row, _ in link.rows} == set(range(len(heard) - 1))
    run(runtime, [*PROMPT, *said, 50])
    assert link.opened == 1


def test_private_tokens_never_leave(linked: tuple[Runtime, RecordingLink], text: Text) -> None:
    """Whatever the order of public and private requests, and whoever reuses whose cache."""
    runtime, link = linked
    chance = random.Random(3)
    public: list[list[int]] = []
    chats: list[list[int]] = [[*range(60, 70)]]
    for _ in range(120):
        prompt = [*chance.choice(chats)[: chance.randrange(8, 40)], *(chance.randrange(2, 290) for _ in range(3))]
        private = chance.random() < 0.5
        pieces = runtime.generate(prompt, sampling=WARM, limits=Limits(max_new_tokens=12), private=private)
        said = [token for _ in range(chance.choice([1, 3, 99])) for token in next(pieces, Piece("", [])).tokens]
        pieces.close()
        assert (
            said
            == outcome_of(Session(MarkedTarget(), text), prompt, WARM, Limits(max_new_tokens=12)).token_ids[: len(said)]
        )
        chats.append([*prompt, *said])
        if not private:
            public.append([*prompt, *said])
    assert len(link.told) > 200
    for heard in link.told:
        assert any(chat[: len(heard)] == heard for chat in public), "a server was told what was not public"
    for heard, row, value in link.rows:
        assert value == marks(row, [heard[row]])[0, 0], "a feature is of another token than the server was told"


def test_private_conversations_have_no_session(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    run(runtime, PROMPT, private=True)
    assert (link.opened, link.told) == (0, [])
    run(runtime, PROMPT)
    assert link.opened == 1
    for first in (5, 6, 7):  # they take the places of all, the public one's too
        run(runtime, [first, 8, 9], private=True)
    assert (link.opened, link.ended, link.open) == (1, 1, set())


def test_a_public_request_reads_what_only_private_ones_have_read(linked: tuple[Runtime, RecordingLink]) -> None:
    """The server has to see its features."""
    runtime, link = linked
    prompt, long = [*range(60, 90)], Limits(max_new_tokens=60)
    for first in range(3):  # a new conversation, and from the third on one that a private one had
        run(runtime, [first, *prompt], limits=long, private=True)
        run(runtime, [first, *prompt, 99], limits=long)
        assert {row for heard, row, _ in link.rows if heard[0] == first} >= set(range(31))
    for last in range(3):  # all are private, and have read what comes
        run(runtime, [9, *prompt, last], limits=long, private=True)
    run(runtime, [9, *prompt, 99], limits=long)
    assert {row for heard, row, _ in link.rows if heard[0] == 9} >= set(range(31))


def test_copied_rows_bring_their_features(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    system = [*range(60, 90)]
    run(runtime, [*system, 99], limits=Limits(max_new_tokens=60))
    run(runtime, [*system, 98])
    assert link.opened == 2
    assert {row for heard, row, _ in link.rows if heard[30] == 98} >= set(range(30))


def test_status(linked: tuple[Runtime, RecordingLink], open_one: Callable[..., Runtime]) -> None:
    runtime, link = linked
    status = runtime.status()
    assert (status.link, status.regime, status.server, status.notice) == ("up", "idle", "ws://localhost:1", "")
    run(runtime, PROMPT)
    assert runtime.status().regime in ("device only", "waits")  # nothing of the server's was right, if it waited for it
    link.channel.disconnected()
    assert (runtime.status().link, runtime.status().regime) == ("lost", "device only")
    link.reconnects = -1
    assert (runtime.status().link, runtime.status().regime) == ("connecting", "connecting")
    alone = open_one(ToyTarget(context=99), precision="int8", conversations=5)
    assert alone.status() == Status(
        model="toy",
        precision="int8",
        context=99,
        conversations=5,
        busy=0,
        link="off",
        server="",
        rtt_ms=None,
        regime="device only",
        notice="",
    )


def test_importing_the_package_is_cheap_and_tells_what_there_is() -> None:
    code = "import sys, starsd.edge as e; print('numpy' in sys.modules, *dir(e)); e.Runtime; e.Nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(
        "False Drafting Engine Grammar Limits Outcome Piece Runtime Sampling Status TokenLogprob"
    )
    assert "module 'starsd.edge' has no attribute 'Nothing'" in done.stderr


def test_a_server_needs_its_library(monkeypatch: pytest.MonkeyPatch, open_one: Callable[..., Runtime]) -> None:
    monkeypatch.setitem(sys.modules, "starsd.edge.link", None)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(UsageError, match="is not installed: run pip install"):
        open_one(drafting=Drafting(server="ws://localhost:1"))

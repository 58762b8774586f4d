"""The loop against the plainest one: same tokens, same text, whatever was drafted, read before, or went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import Drafting
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_session import EOS, VOCAB, NoisyBranches, ToyTarget, outcome_of, toy_logits, write_text_files

from starsd.edge.session import Session, fit
from starsd.edge.speculator import Speculator
from starsd.edge.target import open_target
from starsd.edge.text import Text
from starsd.shared.clock import Mailbox
from starsd.shared.config import Engine, Limits, Sampling
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.sampling import Sampler

PROMPT = [40, 41, 42, 43, 44]
GREEDY = Sampling()
WARM = Sampling(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


def plain(
    logits: Callable[[Sequence[int]], Any], text: Text, prompt: list[int], sampling: Sampling, limits: Limits
) -> tuple[list[int], str, str]:
    """Token by token, everything computed anew each time: ids, text and finish reason."""
    sampler = Sampler(sampling, prompt=prompt)
    ids: list[int] = []
    while len(ids) < limits.max_new_tokens:
        token = sampler.choose(logits([*prompt, *ids]), ids, len(ids)).token
        if token in text.eos:
            return ids, text.decode(ids), "stop"
        ids.append(token)
        shown = text.decode(ids)
        if found := [(at + len(stop), at) for stop in limits.stop if (at := shown.find(stop)) >= 0]:
            return ids, shown[: min(found)[1]], "stop"
    return ids, text.decode(ids), "length"


class Scripted(ToyTarget):
    """Says these tokens."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script = iter(script)

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        logits = np.zeros_like(super().score(tokens, parents))
        logits[0, next(self.script)] = 9
        return logits


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**40),
)


@settings(max_examples=120, deadline=None)
@given(
    sampling=samplings,
    prompt=st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=12),
    most=st.integers(1, 40),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=2),
    seed=st.integers(0, 2**20) | st.none(),
)
def test_equals_plain_decoding(
    text: Text,
    sampling: Sampling,
    prompt: list[int],
    most: int,
    cuts: list[tuple[int, int]],
    seed: int | None,
) -> None:
    """Stop strings are taken out of the answer itself, so that they are met, mostly across tokens."""
    truth, whole, _ = plain(toy_logits, text, prompt, sampling, Limits(max_new_tokens=most))
    stops = tuple(stop for at, size in cuts if (stop := whole[at : at + size]) and "\ufffd" not in stop)
    limits = Limits(max_new_tokens=most, stop=stops)
    target = ToyTarget()
    session = Session(target, text) if seed is None else Drafting(target, text, prompt, truth, seed)
    outcome = outcome_of(session, prompt, sampling, limits)
    expected = plain(toy_logits, text, prompt, sampling, limits)
    assert (outcome.token_ids, outcome.text, outcome.finish_reason) == expected
    assert outcome.passes <= max(0, outcome.new_tokens)
    assert target.rows == [*prompt, *outcome.token_ids][: target.length]  # nothing that was rejected stayed
    assert target.rows == session._cached


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(temperature=1.2, top_p=0.8, seed=9)])
def test_a_real_network_equals_reading_everything_anew(tmp_path: Path, text: Text, sampling: Sampling) -> None:
    helpers = pytest.importorskip("torch_helpers")
    helpers.tiny_llama(vocab_size=VOCAB).save_pretrained(tmp_path)
    target = open_target("torch", tmp_path, Engine(initial_context=4, prefill_chunk=3))

    def logits(context: Sequence[int]) -> Any:
        target.truncate(0)
        target.prefill(context[:-1])
        return target.score(context[-1:], [-1])[0].copy()

    limits = Limits(max_new_tokens=25)
    expected = plain(logits, text, PROMPT, sampling, limits)
    outcome = outcome_of(Session(target, text), PROMPT, sampling, limits)
    assert (outcome.token_ids, outcome.text, outcome.finish_reason) == expected
    assert len(set(outcome.token_ids)) > 5


def test_plain_decoding_commits_one_token_a_pass(text: Text) -> None:
    outcome = outcome_of(Session(ToyTarget(), text), PROMPT, Sampling(logit_bias={EOS: -100}), Limits(max_new_tokens=9))
    assert (outcome.new_tokens, outcome.passes, outcome.finish_reason) == (9, 8, "length")
    assert (outcome.accepted_remote, outcome.accepted_ngram, outcome.bytes_up, outcome.bytes_down) == (0, 0, 0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.1])
@pytest.mark.parametrize("seed", range(6))
def test_noisy_branches_change_no_token(text: Text, temperature: float, seed: int) -> None:
    limits, sampling = Limits(max_new_tokens=60), Sampling(temperature=temperature, seed=seed, logit_bias={EOS: -100})
    truth, *_ = plain(toy_logits, text, PROMPT, sampling, limits)
    outcome = outcome_of(Drafting(NoisyBranches(), text, PROMPT, truth, seed), PROMPT, sampling, limits)
    assert (outcome.token_ids, outcome.near_ties, outcome.passes < 40) == (truth, 0, True)


def test_right_drafts_save_passes(text: Text) -> None:
    limits, sampling = Limits(max_new_tokens=30), Sampling(logit_bias={EOS: -100})
    truth, *_ = plain(toy_logits, text, PROMPT, sampling, limits)
    outcome = outcome_of(Drafting(ToyTarget(), text, PROMPT, truth, 1), PROMPT, sampling, limits)
    assert (outcome.token_ids, outcome.passes < 20) == (truth, True)


def test_an_answer_may_be_empty(text: Text) -> None:
    outcome = outcome_of(Session(ToyTarget(), text), PROMPT, Sampling(logit_bias={EOS: 100}), Limits())
    assert (outcome.token_ids, outcome.text, outcome.finish_reason, outcome.passes) == ([], "", "stop", 0)


def test_near_ties_are_choices_closer_than_the_targets_noise(text: Text) -> None:
    sampling = Sampling(temperature=0.8, logit_bias={EOS: -100})
    sampler, ids, gaps = Sampler(sampling), [], []
    for index in range(20):
        choice = sampler.choose(toy_logits([*PROMPT, *ids]), ids, index)
        gaps.append(choice.gap)
        ids.append(choice.token)
    noise = sorted(gaps)[3]
    limits = Limits(max_new_tokens=20)
    assert outcome_of(Session(ToyTarget(noise=noise), text), PROMPT, sampling, limits).near_ties == 3
    assert outcome_of(Session(ToyTarget(), text), PROMPT, sampling, limits).near_ties == 0


def test_a_stop_string_may_take_tokens_apart(text: Text) -> None:
    said = text.encode("the user said", add_special_tokens=False)
    target = Scripted([*said, EOS])
    assert len(said) > 3
    outcome = outcome_of(Session(target, text), PROMPT, GREEDY, Limits(stop=("er s",)))
    assert (outcome.text, outcome.finish_reason) == ("the us", "stop")
    assert outcome.token_ids == said[: len(outcome.token_ids)]
    assert "er s" in text.decode(outcome.token_ids)
    assert "er s" not in text.decode(outcome.token_ids[:-1])


def test_a_stop_string_may_be_complete_only_at_the_end(text: Text) -> None:
    """Half a character becomes a replacement character once nothing follows."""
    a, half = text.encode("a👋", add_special_tokens=False)[:2]
    limits = Limits(max_new_tokens=2, stop=("\ufffd",))
    outcome = outcome_of(Session(Scripted([a, half]), text), PROMPT, GREEDY, limits)
    assert (outcome.token_ids, outcome.text, outcome.finish_reason) == ([a, half], "a", "stop")


class Timed(ToyTarget):
    """Reading a prompt takes a second, a pass two; it is the clock, too."""

    seconds = 10.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def mailbox(self) -> Mailbox[Any]:
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Any:
        self.seconds += 1
        return super().prefill(tokens, progress)

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        self.seconds += 2
        return super().score(tokens, parents)


def test_seconds_are_those_of_start_first_token_and_end(text: Text) -> None:
    target = Timed()
    session = Session(target, text, Speculator(clock=target))
    [*_, last] = session.generate(PROMPT, Sampling(logit_bias={EOS: -100}), Limits(max_new_tokens=5))
    assert last.outcome is not None
    assert (last.outcome.prefill_seconds, last.outcome.seconds, last.outcome.tokens_per_second) == (3.0, 11.0, 0.5)


def test_pieces_never_hold_half_a_character(text: Text) -> None:
    said = text.encode("añ 你 👋🏽", add_special_tokens=False)
    target = Scripted([*said, EOS])
    pieces = [piece.text for piece in Session(target, text).generate(PROMPT, GREEDY, Limits())]
    assert len(said) > 10
    assert [piece for piece in pieces if piece] == ["a", "ñ", " 你", " ", "👋", "🏽"]


def test_choices_differ_and_repeat(text: Text) -> None:
    session, limits = Session(ToyTarget(), text), Limits(max_new_tokens=8)
    first, second, again = (outcome_of(session, PROMPT, WARM, limits, choice).token_ids for choice in (0, 1, 0))
    assert first == again != second


def test_the_next_turn_reads_only_what_is_new(text: Text) -> None:
    target = ToyTarget()
    session, limits = Session(target, text), Limits(max_new_tokens=6)
    sampling = Sampling(temperature=0.8, logit_bias={EOS: -100})
    said = outcome_of(session, PROMPT, sampling, limits).token_ids
    longer = [*PROMPT, *said, 50, 51, 52]
    assert outcome_of(session, longer, sampling, limits).token_ids == fresh(text, longer, sampling, limits)
    assert target.read == [4, 3]  # all but the tip; the last of the old answer, and all but the last of the new
    other = [*PROMPT[:3], 60, 61]
    assert outcome_of(session, other, sampling, limits).token_ids == fresh(text, other, sampling, limits)
    assert target.read == [4, 3, 1]
    assert outcome_of(session, other, sampling, limits).token_ids == fresh(text, other, sampling, limits)
    assert target.read == [4, 3, 1]
    session.forget()
    assert target.length == 0
    assert outcome_of(session, other, sampling, limits).token_ids == fresh(text, other, sampling, limits)
    assert target.read == [4, 3, 1, 4]


def fresh(text: Text, prompt: list[int], sampling: Sampling, limits: Limits) -> list[int]:
    return outcome_of(Session(ToyTarget(), text), prompt, sampling, limits).token_ids


def test_progress_is_reported_while_reading(text: Text) -> None:
    told: list[tuple[str, int, int]] = []
    pieces = Session(ToyTarget(), text).generate(PROMPT, GREEDY, Limits(), progress=lambda *said: told.append(said))
    assert told == []
    next(pieces)
    assert told == [("reading the prompt", 4, 4)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    "where",
    [
        "prefill before",
        "prefill after",
        "truncate before",
        "truncate after",
        "score",
        "commit before",
        "commit after",
        "nan",
    ],
)
@pytest.mark.parametrize("then", ["the old conversation", "the same", "what it said"])
def test_after_an_exception_the_session_goes_on(text: Text, where: str, steps: int, then: str) -> None:
    """Before: the engine failed. After: the engine was done, but its caller was interrupted.

    Whatever is asked next must not find tokens that the cache does not hold.
    """
    target = ToyTarget()
    session, limits = Session(target, text), Limits(max_new_tokens=10)
    sampling = Sampling(temperature=0.9, seed=3, logit_bias={EOS: -100})
    old = [*PROMPT[:2], 70, 71]
    said = outcome_of(session, PROMPT, sampling, limits).token_ids
    outcome_of(session, old, sampling, limits)
    name, _, when = where.replace("nan", "score").partition(" ")
    original, calls = getattr(target, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= steps and name not in ("prefill", "truncate"):
            return original(*arguments)
        if where == "nan":
            return original(*arguments) * np.float32("nan")
        if when == "after":
            original(*arguments)
        raise Broken

    setattr(target, name, failing)
    with pytest.raises(EngineError if where == "nan" else Broken):
        list(session.generate(PROMPT, sampling, limits))
    setattr(target, name, original)
    following = {"the old conversation": [*old, 72], "the same": PROMPT, "what it said": [*PROMPT, *said]}
    for prompt in (following[then], [*PROMPT[:4], 80, 81], [*PROMPT, 90]):
        assert outcome_of(session, prompt, sampling, limits).token_ids == fresh(text, prompt, sampling, limits)
        assert target.rows == session._cached


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_after_an_early_close_the_session_goes_on(text: Text, taken: int) -> None:
    session, limits = Session(ToyTarget(), text), Limits(max_new_tokens=10)
    sampling = Sampling(logit_bias={EOS: -100})
    pieces = session.generate(PROMPT, sampling, limits)
    ids = [token for _ in range(taken) for token in next(pieces).tokens]
    pieces.close()
    again = outcome_of(session, PROMPT, sampling, limits).token_ids
    assert again[:taken] == ids
    assert again == fresh(text, PROMPT, sampling, limits)


def test_a_newer_generation_ends_an_older_one(text: Text) -> None:
    session, limits = Session(ToyTarget(), text), Limits(max_new_tokens=10)
    old = session.generate(PROMPT, WARM, limits)
    next(old)
    assert outcome_of(session, [7, 8], WARM, limits).token_ids == fresh(text, [7, 8], WARM, limits)
    with pytest.raises(EngineError, match="generation was overtaken by a newer one, expected one at a time"):
        next(old)
    assert outcome_of(session, PROMPT, WARM, limits).token_ids == fresh(text, PROMPT, WARM, limits)


@pytest.mark.parametrize(
    ("prompt", "sampling", "limits", "message"),
    [
        ([], GREEDY, Limits(), "prompt is empty, expected at least one token"),
        (PROMPT, GREEDY, Limits(max_new_tokens=0), "max_new_tokens is 0, expected 1 or more"),
        (PROMPT, GREEDY, Limits(overflow="wrap"), "overflow is 'wrap', expected one of error, truncate"),
        (PROMPT, GREEDY, Limits(stop=("",)), "stop string is empty, expected at least one character"),
        (PROMPT, Sampling(top_p=2), Limits(), "top_p is 2, expected more than 0 and at most 1"),
        (list(range(2, 12)), GREEDY, Limits(), "prompt has 10 tokens, expected at most 9: shorten it, or set overflow"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_runs(
    text: Text, prompt: list[int], sampling: Sampling, limits: Limits, message: str
) -> None:
    target = ToyTarget(context=9)
    with pytest.raises(UsageError, match=f"^{message}"):
        Session(target, text).generate(prompt, sampling, limits)
    assert target.read == []


@pytest.mark.parametrize(("size", "new"), [(1, 9), (5, 5), (9, 1)])
def test_a_full_context_ends_the_answer(text: Text, size: int, new: int) -> None:
    """The last token needs no row of its own."""
    target = ToyTarget(context=9)
    outcome = outcome_of(Session(target, text), [30] * size, Sampling(logit_bias={EOS: -100}), Limits())
    assert (outcome.new_tokens, outcome.finish_reason, target.length) == (new, "length", 9)


def test_truncation_drops_the_oldest_after_the_system_part(text: Text) -> None:
    limits = Limits(max_new_tokens=8, overflow="truncate")
    prompt = list(range(2, 2 + 33))
    assert fit(prompt[:33], limits, 40) == prompt  # 33 tokens and 8 new ones, of which the last needs no row
    assert fit([*prompt, 99], limits, 40, keep=3) == [*prompt[:3], *prompt[13:], 99]  # a quarter went
    assert fit([99] * 3, Limits(overflow="truncate"), 1) == [99]
    target = ToyTarget(context=40)
    sampling = Sampling(logit_bias={EOS: -100})
    pieces = list(Session(target, text).generate([*prompt, 99], sampling, limits, keep=3))
    assert pieces[-1].outcome is not None
    assert target.rows[:24] == [*prompt[:3], *prompt[13:], 99][:24]
    assert pieces[-1].outcome.token_ids == fresh(
        text, [*prompt[:3], *prompt[13:], 99], sampling, Limits(max_new_tokens=8)
    )


def test_a_growing_conversation_moves_seldom() -> None:
    limits = Limits(max_new_tokens=20, overflow="truncate")
    talk = list(range(1000))
    starts = [fit(talk[:size], limits, 100, keep=4)[4] for size in range(81, 181)]
    assert len(set(starts)) == 5  # once every 25 tokens
    assert all(len(fit(talk[:size], limits, 100, keep=4)) <= 81 for size in range(1, 1000))


def test_a_system_part_that_leaves_no_room_is_refused() -> None:
    limits = Limits(max_new_tokens=8, overflow="truncate")
    assert len(fit([5] * 60, limits, 40, keep=32)) == 33
    with pytest.raises(ContextOverflowError, match="system message has 33 tokens, expected at most 32"):
        fit([5] * 60, limits, 40, keep=33)


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 80), st.integers(0, 30))
def test_truncation_always_fits(context: int, size: int, new: int, keep: int) -> None:
    prompt = list(range(size))
    try:
        kept = fit(prompt, Limits(max_new_tokens=new, overflow="truncate"), context, min(keep, size))
    except ContextOverflowError:
        assert keep > context - max(1, context // 4)
        return
    assert 1 <= len(kept) <= context
    assert kept[-1] == prompt[-1]
    assert kept[: min(keep, len(kept))] == prompt[: min(keep, len(kept))]
    assert sorted(kept) == kept

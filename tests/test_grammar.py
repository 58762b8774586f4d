"""Grammars: what they allow, and that drafts, forced tokens and branches change nothing of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import Scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from test_session import PROMPT
from tiny_session import EOS, VOCAB, NoisyBranches, ToyTarget, outcome_of, toy_logits, write_text_files

from starsd.edge.estimates import PassCosts
from starsd.edge.grammar import Grammar, Matcher
from starsd.edge.policy import Policy
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.text import Text
from starsd.shared import tree
from starsd.shared.config import Limits, Sampling
from starsd.shared.errors import UsageError
from starsd.shared.sampling import Sampler, gumbel

PERSON = {
    "type": "object",
    "properties": {"user": {"type": "string", "maxLength": 4}, "kind": {"enum": ["red", "reddish", "blue"]}},
    "required": ["user", "kind"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"enum": [1, 12, 123, True, None]}, "minItems": 1, "maxItems": 6}
FIXED = {
    "type": "object",
    "properties": {"the user said so": {"const": "yes, it is so"}, "n": {"enum": [1, 2]}},
    "required": ["the user said so", "n"],
    "additionalProperties": False,
}
SCHEMAS = [PERSON, NUMBERS, FIXED]
WARM = Sampling(temperature=0.9, seed=3)
LIMITS = Limits(max_new_tokens=120)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


def plain(grammar: Grammar, sampling: Sampling, limits: Limits) -> list[int]:
    """Token by token, the mask found anew each time, and the choice made the slow way."""
    ids: list[int] = []
    while len(ids) < limits.max_new_tokens:
        logits = toy_logits([*PROMPT, *ids]).astype(np.float64)
        allowed = grammar.matcher().allowed(ids)
        scores = np.full(VOCAB, -np.inf)
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        scores[allowed] = logits[allowed]
        if sampling.temperature:
            scores = scores / sampling.temperature + gumbel(sampling.seed, 0, len(ids), VOCAB)
        token = int(scores.argmax())
        if token == EOS:
            break
        ids.append(token)
    return ids


class Grafting(Scripted):
    """Grafts drafts that are partly right, mostly such as the grammar forbids, and goes on as any speculator does."""

    propose = Speculator.propose  # type: ignore[assignment]

    def _collect(self, wait: float) -> bool:
        self._drafts.graft(self._draft())
        return True


class Noting(ToyTarget):
    """Remembers every path that was scored, and what was committed before."""

    def __init__(self, context: int = 4096) -> None:
        super().__init__(context)
        self.scored: list[list[int]] = []

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        answered = self.rows[len(PROMPT) :]
        for row in range(1, len(tokens)):
            path = [tokens[at] for at in tree.path_to(parents, row)]
            self.scored.append([*answered, *path] if self.length >= len(PROMPT) else path[1:])
        return super().score(tokens, parents)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    logit_bias=st.sampled_from([{}, {EOS: 30.0}, {EOS: -30.0}]),
    seed=st.integers(0, 2**40),
)


@settings(max_examples=60, deadline=None)
@given(
    sampling=samplings,
    schema=st.sampled_from(SCHEMAS),
    most=st.sampled_from([1, 7, 30, 120]),
    seed=st.integers(0, 2**20) | st.none(),
    noisy=st.booleans(),
)
def test_equals_plain_constrained_decoding(
    text: Text, sampling: Sampling, schema: dict[str, Any], most: int, seed: int | None, noisy: bool
) -> None:
    grammar, limits = Grammar.json_schema(text, schema), Limits(max_new_tokens=most)
    truth = plain(grammar, sampling, limits)
    target = NoisyBranches() if noisy else ToyTarget()
    speculator = Grafting([*PROMPT, *truth], VOCAB, seed) if seed is not None else Speculator(Policy.NEVER_WAIT)
    for one in (speculator, Speculator(Policy.PLAIN)):
        session = Session(target, text, one)
        session.forget()
        outcome = outcome_of(session, PROMPT, sampling, limits, grammar=grammar)
        assert outcome.token_ids == truth
        ended = grammar.matcher().finished(truth)
        assert outcome.finish_reason == ("stop" if ended or len(truth) < most else "length")
        assert target.rows == session.cached
    if outcome.finish_reason == "stop":
        json.loads(outcome.text)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_is_forbidden_is_verified(text: Text, schema: dict[str, Any], seed: int) -> None:
    grammar = Grammar.json_schema(text, schema)
    truth = plain(grammar, WARM, LIMITS)
    target = Noting()
    session = Session(target, text, Grafting([*PROMPT, *truth], VOCAB, seed))
    assert outcome_of(session, PROMPT, WARM, LIMITS, grammar=grammar).token_ids == truth
    assert target.scored
    for path in target.scored:
        assert grammar.matcher().allows(path), text.decode(path)


def test_forced_tokens_need_no_pass_of_their_own(text: Text) -> None:
    grammar = Grammar.json_schema(text, FIXED)
    truth = plain(grammar, WARM, LIMITS)
    said = text.decode(truth)
    assert said in ('{"the user said so": "yes, it is so", "n": 1}', '{"the user said so": "yes, it is so", "n": 2}')
    free = [i for i in range(len(truth)) if len(grammar.matcher().allowed(truth[:i])) > 1]
    assert len(truth) > 20
    outcome = outcome_of(
        Session(ToyTarget(), text, Speculator(Policy.NEVER_WAIT)), PROMPT, WARM, LIMITS, grammar=grammar
    )
    assert (outcome.token_ids, outcome.finish_reason) == (truth, "stop")
    assert (outcome.passes, len(free)) == (0, 1)  # the number is the only choice, and one pass made it
    assert (outcome.accepted_remote, outcome.accepted_ngram) == (0, 0)
    slow = outcome_of(Session(ToyTarget(), text), PROMPT, WARM, LIMITS, grammar=grammar)
    assert (slow.token_ids, slow.passes) == (truth, free[0])  # all before the choice, and none behind it


def test_forced_tokens_are_verified_however_dear_rows_are(text: Text) -> None:
    grammar = Grammar.json_schema(text, {"enum": [["user", "so it is"], ["user", "is it so"]]})
    truth = plain(grammar, WARM, LIMITS)
    free = [i for i in range(len(truth)) if len(grammar.matcher().allowed(truth[:i])) > 1]
    costs = PassCosts()
    for rows in (1, 2, 64):
        costs.observe(rows, rows**2)
    session = Session(ToyTarget(), text, Speculator(Policy.NEVER_WAIT, costs=costs))
    outcome = outcome_of(session, PROMPT, WARM, LIMITS, grammar=grammar)
    assert (outcome.token_ids, outcome.passes + 1) == (truth, len(free))
    assert 0 < len(free) < len(truth) / 2


def test_sources_say_what_the_grammar_forced(text: Text) -> None:
    grammar = Grammar.json_schema(text, FIXED)
    session = Session(ToyTarget(), text, Speculator(Policy.NEVER_WAIT))
    pieces = list(session.generate(PROMPT, WARM, LIMITS, grammar=grammar))
    sources = [source for piece in pieces for source in piece.sources]
    ids = [token for piece in pieces for token in piece.tokens]
    assert len(sources) == len(ids)
    forced = ["grammar" if len(grammar.matcher().allowed(ids[:i])) == 1 else "target" for i in range(len(ids))]
    assert sources == forced


@settings(max_examples=40, deadline=None)
@given(schema=st.sampled_from([*SCHEMAS, {"type": "object"}]), seed=st.integers(0, 2**20))
def test_a_mask_depends_on_the_path_alone(text: Text, schema: dict[str, Any], seed: int) -> None:
    """Whatever was asked before, in whatever order: rejected branches leave no trace."""
    grammar, chance = Grammar.json_schema(text, schema), random.Random(seed)
    matcher, paths = grammar.matcher(), [list[int]()]
    for _ in range(40):
        path = chance.choice(paths)
        allowed = matcher.allowed(path)
        fresh = grammar.matcher()
        for size in range(len(path)):
            if chance.random() < 0.3:
                fresh.allowed(path[:size])
        assert allowed.tolist() == fresh.allowed(path).tolist()
        assert matcher.finished(path) == (allowed.tolist() == [EOS])
        for token in chance.sample(range(2, VOCAB), 10):
            if matcher.allows([*path, token]) != (token in allowed):
                assert len(allowed) == 1  # another spelling of what is forced
        others = [int(token) for token in allowed if token != EOS]
        if others:
            paths.append([*path, chance.choice(others)])


def test_the_end_token_is_allowed_only_where_the_grammar_may_end(text: Text) -> None:
    matcher = Grammar.regex(text, "[ab]+c?").matcher()
    a, b, c = (text.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    assert EOS not in matcher.allowed([])
    assert {a, b, c, EOS} <= set(matcher.allowed([a]).tolist())
    assert matcher.allowed([a, b, c]).tolist() == [EOS]
    assert [matcher.finished(path) for path in ([], [a], [a, c])] == [False, False, True]
    assert matcher.allows([a, b, EOS])
    assert not matcher.allows([EOS])
    assert not matcher.allows([a, c, a])


def test_an_answer_ends_early_where_it_may(text: Text) -> None:
    grammar = Grammar.regex(text, "[ab]{3,}")
    outcome = outcome_of(Session(ToyTarget(), text), PROMPT, Sampling(logit_bias={EOS: 50}), LIMITS, grammar=grammar)
    assert (len(outcome.text), outcome.finish_reason) == (3, "stop")
    endless = outcome_of(Session(ToyTarget(), text), PROMPT, Sampling(logit_bias={EOS: -50}), LIMITS, grammar=grammar)
    assert (endless.new_tokens, endless.finish_reason) == (120, "length")


def test_json_comes_on_one_line(text: Text) -> None:
    grammar = Grammar.json_object(text)
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed, logit_bias={text.encode("}", add_special_tokens=False)[0]: 6})
        outcome = outcome_of(Session(ToyTarget(), text), PROMPT, sampling, LIMITS, grammar=grammar)
        if outcome.finish_reason == "stop":
            assert isinstance(json.loads(outcome.text), dict)
            assert "\n" not in outcome.text


def test_near_ties_are_those_among_what_is_allowed(text: Text) -> None:
    class Tied(ToyTarget):
        """All tokens are nearly as likely; the engine's noise is larger than their differences."""

        def logits(self, context: Sequence[int]) -> Any:
            return super().logits(context) * np.float32(1e-5)

    grammar = Grammar.json_schema(text, FIXED)
    outcome = outcome_of(Session(Tied(noise=1e-3), text), PROMPT, Sampling(), LIMITS, grammar=grammar)
    assert outcome.new_tokens > 20
    assert outcome.near_ties == 1  # between 1 and 2


def test_a_sampler_with_a_mask_is_one_of_fewer_tokens() -> None:
    class Some:
        def allowed(self, path: Sequence[int]) -> Any:
            return np.array([3, 7, 20, 21, 90, 399])  # the last is beyond the vocabulary

    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    ids = [3, 7, 20, 21, 90]
    for seed in range(200):
        greedy = Sampler(Sampling(), masks=Some()).choose(logits, [], seed)
        first, second = np.sort(logits[ids])[::-1][:2]
        assert (logits[greedy.token], greedy.gap) == (first, pytest.approx(float(first - second)))
        warm = Sampler(Sampling(temperature=0.8, seed=seed), masks=Some()).choose(logits, [], 4)
        scores = logits[ids] / 0.8 + gumbel(seed, 0, 4, 100)[ids]
        assert warm.token == ids[int(scores.argmax())]
        assert warm.gap == pytest.approx(0.8 * float(np.diff(np.sort(scores)[-2:])[0]), rel=1e-4)
        cut = Sampler(Sampling(temperature=0.8, top_k=2, top_p=0.9, seed=seed), masks=Some()).choose(logits, [], 4)
        assert logits[cut.token] >= second
        assert 0 <= cut.gap < np.inf


def test_logprobs_are_those_of_what_is_allowed(text: Text) -> None:
    grammar = Grammar.json_schema(text, NUMBERS)
    session = Session(ToyTarget(), text, Speculator(Policy.NEVER_WAIT))
    pieces = list(session.generate(PROMPT, WARM, LIMITS, grammar=grammar, top_logprobs=3))
    ids = [token for piece in pieces for token in piece.tokens]
    told = [one for piece in pieces for one in piece.logprobs]
    assert [one.token for one in told] == ids
    for i, one in enumerate(told):
        allowed = grammar.matcher().allowed(ids[:i])
        logits = toy_logits([*PROMPT, *ids[:i]])[allowed].astype(np.float64)
        logs = dict(zip(allowed.tolist(), (logits - np.log(np.exp(logits).sum())).tolist(), strict=True))
        assert one.logprob == pytest.approx(logs[one.token], abs=1e-6)
        best = sorted(logs, key=lambda token: -logs[token])[:3]
        assert [token for token, _ in one.top] == best
        assert [log for _, log in one.top] == pytest.approx([logs[token] for token in best], abs=1e-6)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "JSON schema cannot be used: Invalid type: foo"),
        ({"not": {"type": "string"}}, 'JSON schema cannot be used: Unimplemented keys: ["not"]'),
        (
            {"type": "string", "pattern": "("},
            "JSON schema cannot be used: regex parse error:; (; error: unclosed",
        ),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "JSON schema cannot be used: Unsatisfiable schema"),
        ({"type": [["string"]]}, "JSON schema cannot be used: type must be a string"),
        ({"enum": [object()]}, "JSON schema cannot be used: Encoding objects of type object is unsupported"),
        ({"$ref": "#"}, "JSON schema cannot be used: NoExtension"),
        ({"const": "\ud800"}, "JSON schema cannot be used: 'utf-8' codec can't encode"),
        (True, "JSON schema is a bool, expected an object"),
        ({"x-guidance": {"lenient": True}, "not": {}}, 'JSON schema cannot be used: Unimplemented keys: ["not"]'),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(text: Text, schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Grammar.json_schema(text, schema)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_other_grammars(text: Text) -> None:
    with pytest.raises(UsageError, match=r"^regular expression cannot be used: .*unclosed group"):
        Grammar.regex(text, "(")
    with pytest.raises(UsageError, match=r"^grammar cannot be read: 'utf-8' codec can't encode"):
        Grammar.regex(text, "\ud800")
    with pytest.raises(UsageError, match=r"^grammar cannot be used: "):
        Grammar.lark(text, "start: nothing")
    call = Grammar.lark(text, 'start: "so: " thing\nthing: %json {"enum": ["a", "b"]}')
    outcome = outcome_of(Session(ToyTarget(), text), PROMPT, WARM, LIMITS, grammar=call)
    assert outcome.text in ('so: "a"', 'so: "b"')


def test_a_grammar_of_another_text_is_refused(text: Text, tmp_path: Path) -> None:
    other = Grammar.regex(Text.open(write_text_files(tmp_path)), "a")
    with pytest.raises(UsageError, match=r"^grammar is for another text, expected one made with this session's$"):
        Session(ToyTarget(), text).generate(PROMPT, WARM, LIMITS, grammar=other)


def test_a_path_that_the_grammar_forbids_is_no_crash(text: Text) -> None:
    matcher = Grammar.regex(text, "a+").matcher()
    with pytest.raises(UsageError, match=r"^grammar cannot be followed behind 0 tokens, expected a simpler one: "):
        matcher.allowed([EOS + 1])


def test_a_model_without_end_token_ends_with_the_grammar(tmp_path: Path) -> None:
    folder = write_text_files(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    text = Text.open(folder)
    assert not text.eos
    grammar = Grammar.regex(text, "ab?")
    a, b = (text.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    assert grammar.matcher().allowed([a]).tolist() == [b]
    assert grammar.matcher().finished([a, b])
    outcome = outcome_of(Session(ToyTarget(), text), PROMPT, WARM, LIMITS, grammar=grammar)
    assert (outcome.text, outcome.finish_reason) == ("ab", "stop")


def test_masks_of_long_answers_are_forgotten(text: Text) -> None:
    matcher = Grammar.regex(text, "a+").matcher()
    (a,) = text.encode("a", add_special_tokens=False)
    for size in range(300):
        matcher.allowed([a] * size)
    assert isinstance(matcher, Matcher)
    assert len(matcher._masks) == 128
    assert matcher.allowed([a]).tolist() == Grammar.regex(text, "a+").matcher().allowed([a]).tolist()

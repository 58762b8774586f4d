"""Drafting any tree and accepting only equal tokens gives what plain decoding gives (promise 1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from starsd.edge.verify import Verdict, verify
from starsd.shared.config import Sampling
from starsd.shared.errors import EngineError
from starsd.shared.sampling import Sampler
from starsd.shared.tree import path_to

VOCAB = 6
PROMPT = [1, 2]


def toy(context: Sequence[int]) -> NDArray[np.float32]:
    """A language model: logits are a fixed function of the whole context."""
    digest = hashlib.sha256(bytes(context)).digest()
    return (np.frombuffer(digest[: 2 * VOCAB], np.uint16) / 2**14).astype(np.float32)


def score(committed: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
    """The toy as a target engine: `committed` excludes the tip, which is tokens[0]."""
    paths = [path_to(parents, row) for row in range(len(tokens))]
    return np.stack([toy([*committed, *(tokens[row] for row in path)]) for path in paths])


def plain(params: Sampling, length: int, eos: Sequence[int] = ()) -> list[int]:
    sampler, out = Sampler(params, prompt=PROMPT), []
    while len(out) < length and not (out and out[-1] in eos):
        out.append(sampler.choose(toy([*PROMPT, *out]), out, len(out)).token)
    return out


params = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**32),
)
trees = st.lists(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, VOCAB - 1)), max_size=14), min_size=1, max_size=12
)


@given(params, trees, st.sampled_from([(), (3,), (0, 5)]))
@settings(max_examples=150, deadline=None)
def test_drafts_of_any_shape_never_change_the_output(
    options: Sampling, drafts: list[list[tuple[int, int]]], eos: tuple[int, ...]
) -> None:
    expected = plain(options, 24, eos)
    sampler, out, step, accepted = Sampler(options, prompt=PROMPT), [], 0, 0
    while len(out) < 24 and not (out and out[-1] in eos):
        context = [*PROMPT, *out]
        tokens, parents = [context[-1]], [-1]
        for parent, token in drafts[step % len(drafts)]:
            parents.append(parent % len(tokens))
            tokens.append(token)
        logits = score(context[:-1], tokens, parents)
        verdict = verify(logits, tokens, parents, sampler, out, index=len(out), eos=eos, limit=24 - len(out))
        assert len(verdict.rows) == len(verdict.tokens)
        assert verdict.rows == path_to(parents, verdict.rows[-1])
        assert [tokens[row] for row in verdict.rows[1:]] == verdict.tokens[:-1]
        out += verdict.tokens
        accepted += verdict.accepted
        step += 1
    assert out == expected
    assert step + accepted == len(out)


def test_a_tree_that_holds_the_truth_is_walked_to_its_end() -> None:
    truth = plain(Sampling(), 5)
    tokens, parents = [PROMPT[-1]], [-1]
    for depth, token in enumerate(truth[:4]):  # at every depth a wrong sibling, then the true one
        tokens += [(token + 1) % VOCAB, token]
        parents += [2 * depth, 2 * depth]
    verdict = verify(score(PROMPT[:-1], tokens, parents), tokens, parents, Sampler(Sampling()), [], index=0)
    assert verdict.tokens == truth
    assert verdict.rows == [0, 2, 4, 6, 8]


def fixed(*winners: int) -> NDArray[np.float32]:
    """One row of logits a winner; the runner-up is half a logit below."""
    logits = np.zeros((len(winners), VOCAB), np.float32)
    for row, winner in enumerate(winners):
        logits[row, winner] = 0.5
    return logits


def test_nothing_is_accepted_after_an_end_token() -> None:
    verdict = verify(fixed(4, 5, 1), [9, 4, 5], [-1, 0, 1], Sampler(Sampling()), [], index=0, eos={5})
    assert verdict == Verdict(rows=[0, 1], tokens=[4, 5], near_ties=0)


@pytest.mark.parametrize(
    ("limit", "tokens"), [(1, [4]), (2, [4, 5]), (3, [4, 5, 1]), (9, [4, 5, 1]), (None, [4, 5, 1])]
)
def test_no_more_than_the_limit_is_accepted(limit: int | None, tokens: list[int]) -> None:
    verdict = verify(fixed(4, 5, 1), [9, 4, 5], [-1, 0, 1], Sampler(Sampling()), [], index=0, limit=limit)
    assert verdict.tokens == tokens
    assert verdict.rows == list(range(len(tokens)))
    assert verdict.accepted == len(tokens) - 1


def test_the_first_of_equal_siblings_counts() -> None:
    verdict = verify(fixed(4, 5, 3), [9, 4, 4], [-1, 0, 0], Sampler(Sampling()), [], index=0)
    assert verdict.rows == [0, 1]
    assert verdict.tokens == [4, 5]


@pytest.mark.parametrize(("epsilon", "count"), [(0.0, 0), (0.5, 0), (0.51, 2)])
def test_near_ties_are_choices_whose_gap_is_below_epsilon(epsilon: float, count: int) -> None:
    verdict = verify(fixed(4, 5), [9, 4], [-1, 0], Sampler(Sampling()), [], index=0, epsilon=epsilon)
    assert verdict.near_ties == count


def test_the_callers_path_is_left_alone() -> None:
    path = [3, 3]
    verify(fixed(4, 5), [3, 4], [-1, 0], Sampler(Sampling(frequency_penalty=1.0)), path, index=2)
    assert path == [3, 3]


def test_rows_that_disagree_and_empty_limits_are_refused() -> None:
    with pytest.raises(EngineError, match="2 rows of logits for 1 tokens and 1 parents"):
        verify(fixed(4, 5), [9], [-1], Sampler(Sampling()), [], index=0)
    with pytest.raises(EngineError, match="limit is 0 new tokens, expected 1 or more"):
        verify(fixed(4), [9], [-1], Sampler(Sampling()), [], index=0, limit=0)


def test_untrusted_rows_commit_nothing_but_say_what_they_expect() -> None:
    # the root chooses 4; its children are 3 (row 1, trunk) and 4 (row 2, a branch, which chooses 5 and then 1)
    logits = np.stack([one_hot(4), one_hot(0), one_hot(5), one_hot(1)])
    verdict = verify(logits, [9, 3, 4, 5], [-1, 0, 0, 2], Sampler(Sampling()), [], index=0, trusted=2)
    assert verdict == Verdict([0], [4], 0, [5, 1])
    assert verify(logits, [9, 3, 4, 5], [-1, 0, 0, 2], Sampler(Sampling()), [], index=0) == Verdict(
        [0, 2, 3], [4, 5, 1], 0
    )


def test_a_preview_ends_at_the_limit_and_at_an_end_token() -> None:
    logits = np.stack([one_hot(4), one_hot(0), one_hot(5), one_hot(1)])
    for options, preview in (({"limit": 2}, [5]), ({"eos": (5,)}, [5]), ({"eos": (4,)}, [])):
        verdict = verify(logits, [9, 3, 4, 5], [-1, 0, 0, 2], Sampler(Sampling()), [], index=0, trusted=1, **options)
        assert verdict.preview == preview, options


def one_hot(token: int) -> NDArray[np.float32]:
    return np.eye(VOCAB, dtype=np.float32)[token]

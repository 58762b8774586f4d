"""Promise 1: exact distributions, reproducible noise, processors as their conventions say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from starsd.shared.config import Sampling
from starsd.shared.errors import EngineError, UsageError
from starsd.shared.sampling import Sampler, check, gumbel
from starsd.shared.truncation import keep

DRAWS = 6000
SMALL = np.array([1.5, 0.2, -1.0, 0.9, 1.4, -0.3, 0.0, -2.5], np.float32)
ALPHA = 1e-4  # draws are fixed by the seed: a test passes always or never


def softmax(scores: NDArray[Any]) -> NDArray[np.float64]:
    mass = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(mass / mass.sum())


def naive_kept(logits: NDArray[np.float32], params: Sampling) -> set[int]:
    """Top-k, top-p, min-p with a full sort and plain loops."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if params.top_k:
        order = order[: params.top_k]
    p = softmax(np.array([float(logits[t]) / params.temperature for t in order]))
    kept, held = [], 0.0
    for token, share in zip(order, p, strict=True):
        if held >= params.top_p < 1:
            break
        kept.append(token)
        held += share
    return {t for t, share in zip(kept, p, strict=False) if share >= params.min_p * p[0] * (1 - 1e-12)}


def naive_processed(logits: NDArray[np.float32], params: Sampling, prompt: Sequence[int], path: Sequence[int]) -> Any:
    out = [float(x) for x in logits]
    for token in {*prompt, *path}:
        out[token] *= params.repetition_penalty if out[token] < 0 else 1 / params.repetition_penalty
    for token in set(path):
        out[token] -= params.presence_penalty + params.frequency_penalty * list(path).count(token)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.25},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
        {"logit_bias": {2: 3.0, 0: -1.0}},
    ],
)
def test_the_distribution_is_the_softmax_over_what_stays(options: dict[str, Any]) -> None:
    params = Sampling(**{"temperature": 1.0, "seed": 2, **options})
    sampler = Sampler(params)
    drawn = [sampler.choose(SMALL, [], index).token for index in range(DRAWS)]
    processed = np.array(naive_processed(SMALL, params, [], []), np.float32)
    kept = sorted(naive_kept(processed, params))
    assert set(drawn) <= set(kept)
    expected = softmax(processed[kept] / params.temperature) * DRAWS
    assert stats.chisquare([drawn.count(t) for t in kept], expected).pvalue > ALPHA


@pytest.mark.parametrize("other", [{"choice": 1}, {"seed": 8}, {"shift": 1}])
def test_choices_seeds_and_indices_are_independent(other: dict[str, int]) -> None:
    one = Sampler(Sampling(temperature=1.0, seed=7))
    two = Sampler(Sampling(temperature=1.0, seed=other.get("seed", 7)), choice=other.get("choice", 0))
    shift = other.get("shift", 0)
    table = np.zeros((4, 4))
    flat = SMALL[[0, 1, 3, 4]]
    for index in range(DRAWS):
        table[one.choose(flat, [], index).token, two.choose(flat, [], index + shift).token] += 1
    assert stats.chi2_contingency(table).pvalue > ALPHA


@given(st.integers(0, 2**32), st.integers(2, 3000), st.floats(0.05, 3), st.floats(0, 8))
@settings(max_examples=60, deadline=None)
def test_pruned_noise_chooses_as_noise_for_every_token(seed: int, vocab: int, temperature: float, width: float) -> None:
    logits = (np.random.default_rng(seed).normal(size=vocab) * width).astype(np.float32)
    got = Sampler(Sampling(temperature=temperature, seed=seed)).choose(logits, [], 4)
    scores = (logits.astype(np.float64) - float(logits.max())) / temperature + gumbel(seed, 0, 4, vocab)
    ranked = np.argsort(-scores, kind="stable")
    assert got.token == ranked[0]
    assert got.gap == pytest.approx((scores[ranked[0]] - scores[ranked[1]]) * temperature, abs=1e-9)


@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 70, 2000]),
    st.builds(
        Sampling,
        temperature=st.floats(0.1, 3),
        top_k=st.integers(0, 90),
        top_p=st.one_of(st.floats(0.01, 0.99), st.just(1.0)),
        min_p=st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
    ),
)
@settings(max_examples=80, deadline=None)
def test_filters_keep_what_a_full_sort_keeps(seed: int, vocab: int, params: Sampling) -> None:
    logits = (np.random.default_rng(seed).normal(size=vocab) * 3).astype(np.float32)
    got, expected = set(keep(logits, params).ids.tolist()), naive_kept(logits, params)
    assert len(got) >= 1
    assert len(got ^ expected) <= 1  # rounding of the mass right at the boundary


@given(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 1e-40, -3e8, 2.0]), min_size=1, max_size=200), st.integers(1, 250))
def test_top_k_keeps_the_first_k_of_a_stable_sort(logits: list[float], top_k: int) -> None:
    kept = keep(np.array(logits, np.float32), Sampling(temperature=1.0, top_k=top_k))
    assert kept.ids.tolist() == sorted(range(len(logits)), key=lambda t: -logits[t])[:top_k]


def test_ties_go_to_the_lowest_id_even_at_the_boundary() -> None:
    equal = np.zeros(300, np.float32)
    assert Sampler(Sampling()).choose(equal, [], 0).token == 0
    assert Sampler(Sampling()).choose(equal, [], 0).gap == 0
    assert keep(equal, Sampling(temperature=1.0, top_k=5)).ids.tolist() == [0, 1, 2, 3, 4]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Sampling, list[int], list[list[int]], int]:
    tokens = st.integers(0, 11)
    params = Sampling(
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -0.5, 0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
        logit_bias=draw(st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=3)),
    )
    trunk = draw(st.lists(tokens, max_size=6))
    branches = draw(st.lists(st.tuples(st.integers(0, 6), st.lists(tokens, max_size=5)), min_size=1, max_size=6))
    paths = [trunk[:keep] + tail for keep, tail in branches]
    return params, draw(st.lists(tokens, max_size=6)), paths, draw(st.integers(0, 2**20))


@given(histories())
@settings(max_examples=150, deadline=None)
def test_penalties_follow_each_paths_own_history(case: tuple[Sampling, list[int], list[list[int]], int]) -> None:
    """One sampler asked about branch after branch, against the plain formulas on that branch alone."""
    params, prompt, paths, seed = case
    sampler = Sampler(params, prompt=prompt)
    for number, path in enumerate(paths):
        logits = np.random.default_rng(seed + number).normal(size=12).astype(np.float32)
        before = logits.copy()
        got = sampler.choose(logits, path, len(path))
        np.testing.assert_array_equal(logits, before)
        expected = naive_processed(logits, params, prompt, path)
        ranked = sorted(expected, reverse=True)
        assert expected[got.token] == pytest.approx(ranked[0], abs=1e-5)
        assert got.gap == pytest.approx(ranked[0] - ranked[1], abs=1e-5)


def test_the_same_seed_and_index_choose_the_same_whatever_happened_between() -> None:
    params = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=3)
    sampler = Sampler(params, prompt=[1, 2])
    first = sampler.choose(SMALL, [3, 4], 2)
    for index, path in enumerate([[], [3], [3, 4, 5, 6], [7, 7, 7], [3, 5]]):
        sampler.choose(SMALL[::-1].copy(), path, index)
    assert sampler.choose(SMALL, [3, 4], 2) == first
    assert Sampler(params, prompt=[1, 2]).choose(SMALL, [3, 4], 2) == first


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
def test_a_token_changes_under_noise_only_where_the_gap_is_small(options: dict[str, Any]) -> None:
    """Promise 2's other half: logits moved by up to ±ε/2 change a token only if its gap was below ε."""
    epsilon, changed, near = 0.05, 0, 0
    rng = np.random.default_rng(0)
    sampler = Sampler(Sampling(temperature=0.8, seed=1, **options))
    for index in range(4000):
        logits = rng.normal(size=12).astype(np.float32)
        moved = logits + rng.uniform(-epsilon / 2, epsilon / 2, 12).astype(np.float32)
        choice, other = sampler.choose(logits, [], index), sampler.choose(moved, [], index)
        near += choice.gap < epsilon
        if other.token != choice.token:
            changed += 1
            assert choice.gap < epsilon + 1e-6
    assert changed > 10
    assert near < 4000 * 0.15


def test_gap_is_in_logits_whatever_the_temperature() -> None:
    logits = np.array([0.0, 30.0, 29.0], np.float32)
    assert Sampler(Sampling()).choose(logits, [], 0).gap == 1.0
    assert Sampler(Sampling(temperature=1e-6)).choose(logits, [], 0).gap == pytest.approx(1.0, abs=1e-4)
    assert Sampler(Sampling(temperature=1.0)).choose(logits[:1], [], 0).gap == math.inf


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6])
def test_extreme_temperatures_are_no_error(temperature: float) -> None:
    for options in ({}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 3}):
        choice = Sampler(Sampling(temperature=temperature, **options)).choose(SMALL, [], 0)  # type: ignore[arg-type]
        assert choice.token == 0 if temperature < 1 else choice.token in range(8)
        assert choice.gap >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0 or more"),
        ({"temperature": math.nan}, "temperature is nan, expected 0 or more"),
        ({"top_k": -1}, "top_k is -1, expected 0 (off) or more"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01, expected more than 0 and at most 1"),
        ({"min_p": 2.0}, "min_p is 2.0, expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected more than 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf, expected a finite number"),
        ({"seed": 2**64}, f"seed is {2**64}, expected -2^63 to 2^64 - 1"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias names token -3, expected 0 to 2147483647"),
        ({"logit_bias": {3: -math.inf}}, "logit_bias of token 3 is -inf, expected a finite number"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(Sampling(**options))
    assert str(caught.value) == message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = SMALL.copy()
    logits[5] = bad
    with pytest.raises(EngineError, match=f"logit of token 5 at output 9 is {bad}, expected a finite number"):
        Sampler(Sampling()).choose(logits, [], 9)


@pytest.mark.parametrize(
    ("sampler", "path", "error", "message"),
    [
        (Sampler(Sampling(logit_bias={8: 1.0})), [], UsageError, "logit_bias names token 8, the vocabulary ends at 7"),
        (Sampler(Sampling(presence_penalty=1.0)), [8], EngineError, "path has token 8, expected 0 to 7"),
        (
            Sampler(Sampling(repetition_penalty=2.0), prompt=[1, 9]),
            [],
            UsageError,
            "prompt has tokens 1 to 9, expected 0 to 7",
        ),
        (Sampler(Sampling(repetition_penalty=1e-45)), [0], UsageError, "out of the range of float32"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    sampler: Sampler, path: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sampler.choose(SMALL, path, 0)


def test_logits_of_another_shape_or_type_are_refused() -> None:
    for logits in (SMALL.astype(np.float64), SMALL[None], SMALL[:0]):
        with pytest.raises(EngineError, match="expected float32"):
            Sampler(Sampling()).choose(logits, [], 0)  # type: ignore[arg-type]

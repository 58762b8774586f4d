"""The ONNX Runtime engine: row independence, trees, the cache, against itself and the slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_model import ENGINE, VOCAB, export, open_pair, plain_logits, write_folder
from torch_helpers import tokens

from starsd.edge import onnx_host
from starsd.edge.target import open_target
from starsd.edge.target_onnx import OnnxTarget, open_bundle, physical_cores
from starsd.edge.target_torch import TorchTarget
from starsd.shared import tree
from starsd.shared.config import Engine
from starsd.shared.errors import ContextOverflowError, EngineError, UsageError
from starsd.shared.graph_contract import Padding

PRECISIONS = ("fp32", "int8", "int4")
TOLERANCE = {"fp32": 2e-5, "int8": 0.15, "int4": 0.3}  # a last bit, which roundings of activations may amplify
IDS = st.integers(0, VOCAB - 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("engine") / "m")


@pytest.fixture(scope="module")
def bundles(source: Path) -> dict[str, Path]:
    return {p: export(source, source.parent / p, p, taps=(1, 4), last_hidden=True) for p in PRECISIONS}


@pytest.fixture(scope="module")
def opened(bundles: dict[str, Path]) -> dict[str, OnnxTarget]:
    return {precision: open_bundle(bundle, ENGINE) for precision, bundle in bundles.items()}


@pytest.fixture
def target(opened: dict[str, OnnxTarget]) -> OnnxTarget:
    opened["fp32"].truncate(0)
    return opened["fp32"]


def random_tree(draw: Any, most: int = 12) -> tuple[list[int], list[int]]:
    size = draw(st.integers(1, most))
    parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, size))]
    return draw(st.lists(IDS, min_size=size, max_size=size)), parents


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_path_of_a_tree_is_plain_decoding(
    opened: dict[str, OnnxTarget], precision: str, data: st.DataObject
) -> None:
    target, prompt = opened[precision], tokens(data.draw(st.integers(0, 60)), VOCAB)
    ids, parents = random_tree(data.draw)
    target.truncate(0)
    target.prefill(prompt)
    logits = target.score(ids, parents)
    kept = tree.path_to(parents, data.draw(st.integers(0, len(ids) - 1)))
    features = target.commit(kept)
    following = target.score([5], [-1])[0]
    target.truncate(len(prompt))
    plain = plain_logits(target, [ids[row] for row in kept])
    tolerance, exact = TOLERANCE[precision], sum(row < tree.trunk(parents) for row in kept)
    assert target.noise == 0
    np.testing.assert_array_equal(logits[kept[:exact]], plain[:exact])
    np.testing.assert_allclose(logits[kept], plain, rtol=0, atol=tolerance)
    np.testing.assert_allclose(following, target.score([5], [-1])[0], rtol=0, atol=tolerance)
    target.truncate(0)
    again = target.prefill([*prompt, *(ids[row] for row in kept)])[len(prompt) :]
    np.testing.assert_allclose(features, again, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_trunk_is_plain_decoding_to_the_last_bit(
    opened: dict[str, OnnxTarget], precision: str, data: st.DataObject
) -> None:
    """Whatever hangs from it; and what follows its commit is plain decoding too."""
    target, prompt = opened[precision], tokens(data.draw(st.integers(0, 60)), VOCAB)
    length = data.draw(st.integers(1, 6))
    others = data.draw(st.lists(st.integers(0, length - 1), max_size=8))
    ids = tokens(length + len(others), VOCAB, seed=data.draw(st.integers(0, 99)))
    target.truncate(0)
    target.prefill(prompt)
    logits = target.score(ids, [*tree.chain(length), *others])
    target.commit(range(length))
    following = target.score([5], [-1])
    target.truncate(len(prompt))
    np.testing.assert_array_equal(logits[:length], plain_logits(target, ids[:length]))
    np.testing.assert_array_equal(following, target.score([5], [-1]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("past", [0, 1, 40, 300])
def test_a_row_does_not_depend_on_how_many_there_are(opened: dict[str, OnnxTarget], precision: str, past: int) -> None:
    target = opened[precision]
    parents, ids = [-1, *(row // 2 for row in range(16))], tokens(17, VOCAB)
    target.truncate(0)
    target.prefill(tokens(past, VOCAB, seed=1))
    whole = target.score(ids, parents)
    for count in (1, 2, 3, 4, 5, 8, 16):
        np.testing.assert_array_equal(target.score(ids[:count], parents[:count]), whole[:count])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_siblings_change_nothing(opened: dict[str, OnnxTarget], precision: str) -> None:
    """The same places in the pass, other tokens in those that a node does not see."""
    target, parents = opened[precision], [-1, 0, 0, 1, 1, 3, 2, 5]
    target.truncate(0)
    target.prefill(tokens(20, VOCAB))
    ids, path = tokens(8, VOCAB, seed=8), [0, 1, 3, 5, 7]
    logits = target.score(ids, parents)
    others = [ids[row] if row in path else (ids[row] + 99) % VOCAB for row in range(8)]
    changed = target.score(others, parents)
    np.testing.assert_array_equal(changed[path], logits[path])
    assert np.abs(changed[2] - logits[2]).max() > 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_noise_is_measured_and_published(bundles: dict[str, Path], precision: str) -> None:
    target = open_bundle(bundles[precision], ENGINE)
    assert 0 <= target.noise <= target.branch_noise <= TOLERANCE[precision]
    assert target.padding in (Padding(1, 2), Padding(2, 2))
    assert target.length == 0


def test_padding_is_the_cheapest_that_helps(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor whose kernel for one row rounds differently in linear layers, or in everything."""
    run = OnnxTarget._run

    def odd_rows_differ(self: OnnxTarget, ids: Sequence[int], parents: Sequence[int] | None) -> Any:
        logits, features = run(self, ids, parents)
        return logits + 0.5 * (self.padding.rows(len(ids)) % 2), features

    monkeypatch.setattr(OnnxTarget, "_run", odd_rows_differ)
    target = open_bundle(bundles["fp32"], ENGINE)
    assert target.padding == Padding(2, 2)
    assert target.noise < 1e-4

    def any_rows_differ(self: OnnxTarget, ids: Sequence[int], parents: Sequence[int] | None) -> Any:
        logits, features = run(self, ids, parents)
        return logits + 0.25 * len(ids), features

    monkeypatch.setattr(OnnxTarget, "_run", any_rows_differ)
    assert open_bundle(bundles["fp32"], ENGINE).noise == pytest.approx(0.25 * 7, abs=1e-3)


@pytest.mark.parametrize("padding", [Padding(2, 2), Padding(4, 4), Padding(1, 1)])
def test_any_padding_gives_the_same_answers(bundles: dict[str, Path], padding: Padding) -> None:
    plain, padded = open_bundle(bundles["fp32"], ENGINE), open_bundle(bundles["fp32"], ENGINE)
    padded._padding = padding
    for target in (plain, padded):
        assert target.prefill([]).shape == (0, 96)
    ids, parents = tokens(5, VOCAB), [-1, 0, 0, 2, 1]
    np.testing.assert_allclose(padded.prefill(ids), plain.prefill(ids), atol=2e-5)
    for count in (1, 2, 3, 5):
        got, expected = (target.score(ids[:count], parents[:count]) for target in (padded, plain))
        assert got.shape == (count, VOCAB)
        np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(padded.commit([0, 2, 3]), plain.commit([0, 2, 3]), atol=2e-5)
    np.testing.assert_allclose(padded.score([7], [-1]), plain.score([7], [-1]), atol=2e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunks_growth_and_reuse_change_nothing(bundles: dict[str, Path], precision: str) -> None:
    ids = tokens(140, VOCAB)
    seen: list[tuple[str, int, int]] = []
    chunked = open_bundle(bundles[precision], Engine(threads=1, initial_context=1, prefill_chunk=48))
    rows = chunked.prefill(ids, lambda *event: seen.append(event))
    assert seen == [("reading the prompt", done, 140) for done in (48, 96, 140)]
    whole = open_bundle(bundles[precision], Engine(threads=1, initial_context=512, prefill_chunk=512))
    np.testing.assert_array_equal(rows, whole.prefill(ids))
    chunked.truncate(60)
    again = chunked.prefill(ids[60:])
    np.testing.assert_array_equal(again, rows[60:])
    np.testing.assert_array_equal(chunked.score([3], [-1]), whole.score([3], [-1]))


def test_the_cache_doubles_up_to_the_context(bundles: dict[str, Path]) -> None:
    target = open_bundle(bundles["fp32"], Engine(threads=1, initial_context=32, max_context=150, prefill_chunk=64))
    one = 2 * 7 * 2 * 16 * 4  # bytes of a row: K and V of 7 layers, 2 heads of 16 values in float32
    sizes = [target.cache_bytes // one]
    expected = open_bundle(bundles["fp32"], Engine(threads=1, initial_context=512)).prefill(tokens(150, VOCAB))
    got = []
    for start in range(0, 150, 10):
        got.append(target.prefill(tokens(150, VOCAB)[start : start + 10]))
        sizes.append(target.cache_bytes // one)
    np.testing.assert_array_equal(np.concatenate(got), expected)
    dummies = sizes[0] - 32
    assert 0 < dummies <= 8
    assert sorted(set(sizes)) == [rows + dummies for rows in (32, 64, 128, 150)]


def test_overflow_and_bad_ids_leave_the_cache_whole(bundles: dict[str, Path]) -> None:
    target = open_bundle(bundles["int8"], Engine(threads=1, max_context=20))
    target.prefill(tokens(18, VOCAB))
    before = target.score([1, 2], [-1, 0])
    with pytest.raises(ContextOverflowError, match=r"^21 tokens do not fit, the context holds 20$"):
        target.score([1, 2, 3], [-1, 0, 1])
    with pytest.raises(ContextOverflowError, match=r"^21 tokens do not fit, the context holds 20$"):
        target.prefill(tokens(3, VOCAB))
    for bad in (VOCAB, -1):
        message = rf"^token id {bad} is outside the vocabulary, expected 0 to {VOCAB - 1}$"
        with pytest.raises(UsageError, match=message):
            target.prefill([4, bad])
        with pytest.raises(UsageError, match=message):
            target.score([4, bad], [-1, 0])
    assert (target.length, target.context) == (18, 20)
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


@pytest.mark.parametrize(
    "rows", [[1], [0, 2], [0, 1, 1], [0, 9], [9], [0, -1], [0, 1, -1], [0, 1, 2, -1], [-1], [2, 1, 0], []]
)
def test_commit_refuses_what_is_no_path(target: OnnxTarget, rows: list[int]) -> None:
    target.score([1, 2, 3], [-1, 0, 1])
    with pytest.raises(EngineError, match=r"are not a path from the root of the newest pass$"):
        target.commit(rows)
    target.commit([0, 1])
    assert target.length == 2


def test_out_of_order_calls_are_refused(target: OnnxTarget) -> None:
    message = r"^commit without a pass: score a tree first$"
    with pytest.raises(EngineError, match=message):
        target.commit([0])
    target.score([1], [-1])
    target.commit([0])
    with pytest.raises(EngineError, match=message):
        target.commit([0])
    target.score([1], [-1])
    target.prefill([1])
    with pytest.raises(EngineError, match=message):
        target.commit([0])
    target.score([1], [-1])
    target.truncate(1)
    with pytest.raises(EngineError, match=message):
        target.commit([0])
    for length in (2, -1):
        with pytest.raises(EngineError, match=rf"^truncate to {length} rows, expected 0 to 1$"):
            target.truncate(length)
    assert target.length == 1


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        ([1, 2], [-1], "^2 tokens and 1 parents, expected as many$"),
        ([1, 2], [-1, 1], "^node 1 has parent 1, expected 0 to 0$"),
        ([1], [0], "^root has parent 0, expected -1$"),
        ([], [], "^tree is empty, expected at least the root$"),
    ],
)
def test_what_is_no_tree_is_refused(target: OnnxTarget, ids: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        target.score(ids, parents)


class Broken:
    """A runtime session that fails when told to, before or after it has written into the cache."""

    def __init__(self, session: Any, *, late: bool) -> None:
        self._session, self._late = session, late

    def run_with_iobinding(self, binding: Any) -> None:
        if self._late:
            self._session.run_with_iobinding(binding)
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_failing_runtime_leaves_the_cache_whole(bundles: dict[str, Path], precision: str, late: bool) -> None:
    target = open_bundle(bundles[precision], ENGINE)
    target.prefill(tokens(30, VOCAB))
    before = target.score([1, 2], [-1, 0])
    session = target._graph.session
    target._graph.session = Broken(session, late=late)
    for call in (lambda: target.score([8, 9, 7], [-1, 0, 0]), lambda: target.prefill([5, 6])):
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
        with pytest.raises(EngineError, match="commit without a pass"):
            target.commit([0])
        assert target.length == 30
    target._graph.session = session
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


def test_an_exception_between_pass_and_commit_changes_nothing(target: OnnxTarget) -> None:
    """Whoever verifies may fail: the next pass finds the cache as it was."""
    target.prefill(tokens(30, VOCAB))
    before = target.score([1, 2], [-1, 0])
    target.score([8, 9, 7], [-1, 0, 0])  # its verdict never comes
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)
    target.commit([0, 1])
    assert target.length == 32


def test_growth_that_fails_leaves_the_cache_whole(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_bundle(bundles["fp32"], Engine(threads=1, initial_context=32))
    target.prefill(tokens(30, VOCAB))
    before, size = target.score([1, 2], [-1, 0]), target.cache_bytes

    def no_memory(*arguments: Any) -> None:
        raise MemoryError

    more = tokens(40, VOCAB)
    with monkeypatch.context() as patched:
        patched.setattr(onnx_host.np, "zeros", no_memory)
        with pytest.raises(MemoryError):
            target.prefill(more)
    assert (target.length, target.cache_bytes) == (30, size)
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


def test_what_was_returned_stays(target: OnnxTarget) -> None:
    features = target.prefill(tokens(9, VOCAB))
    logits = target.score([1, 2, 3], [-1, 0, 0])
    kept = target.commit([0, 2])
    copies = [array.copy() for array in (features, logits, kept)]
    target.prefill(tokens(200, VOCAB, seed=4))
    target.score([9, 8, 7, 6], [-1, 0, 1, 2])
    target.commit([0, 1])
    target.truncate(0)
    target.prefill(tokens(9, VOCAB, seed=5))
    for array, copy in zip((features, logits, kept), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    logits[:] = 0  # nor does writing to them reach the engine
    kept[:] = 0
    target.score([1], [-1])
    assert np.abs(target.commit([0])).max() > 0


def test_features_of_width_zero(source: Path, tmp_path: Path) -> None:
    target = open_bundle(export(source, tmp_path / "b", taps=()), ENGINE)
    assert target.features.width == 0
    assert target.prefill([1, 2, 3]).shape == (3, 0)
    assert target.score([1, 2], [-1, 0]).shape == (2, VOCAB)
    assert target.commit([0, 1]).shape == (2, 0)
    assert target.length == 5


def test_settings(bundles: dict[str, Path]) -> None:
    fp32 = bundles["fp32"]
    assert open_bundle(fp32, Engine(threads=1)).context == 512
    assert open_bundle(fp32, Engine(threads=1, max_context=100)).context == 100
    for wrong in (15, -4, 513):
        with pytest.raises(UsageError, match=rf"^context is {wrong} tokens, expected 16 to 512, or 0 for all$"):
            open_bundle(fp32, Engine(max_context=wrong))
    with pytest.raises(UsageError, match=r"^prefill chunk is 0 tokens, expected at least 1$"):
        open_bundle(fp32, Engine(prefill_chunk=0))
    for threads in (-1, 2 * physical_cores() + 1):
        with pytest.raises(UsageError, match=rf"^threads are {threads}, expected 0 to {2 * physical_cores()} with"):
            open_bundle(fp32, Engine(threads=threads))
    opened = open_target("onnx", fp32, ENGINE)
    assert (opened.shape.vocab, opened.features.width, opened.length) == (VOCAB, 96, 0)
    assert physical_cores() >= 1


class Interleaved(RuleBasedStateMachine):
    """Any order of calls: the engine keeps the rows, and says the words, of the slow reference."""

    bundle: Path
    source: Path

    @initialize(first=st.integers(1, 60))
    def begin(self, first: int) -> None:
        engine = Engine(threads=1, initial_context=first, prefill_chunk=7, max_context=120)
        self.target, self.reference = open_pair(self.source, self.bundle, engine)
        self.parents: list[int] = []

    @rule(ids=st.lists(IDS, max_size=20))
    def prefill(self, ids: list[int]) -> None:
        self.parents = []
        self._same(lambda target: target.prefill(ids))

    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        ids, parents = random_tree(data.draw, 9)
        self.parents = parents if self._same(lambda target: target.score(ids, parents)) else []

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rows = tree.path_to(self.parents, data.draw(st.integers(0, len(self.parents) - 1)))
        self.parents = []
        assert self._same(lambda target: target.commit(rows))

    @rule(back=st.integers(0, 30))
    def truncate(self, back: int) -> None:
        self.parents = []
        for target in (self.target, self.reference):
            target.truncate(max(0, target.length - back))

    @invariant()
    def as_long(self) -> None:
        assert self.target.length == self.reference.length

    def _same(self, call: Any) -> bool:
        """Both answer alike, or both refuse for want of room."""
        answers = []
        for target in (self.target, self.reference):
            try:
                answers.append(call(target))
            except ContextOverflowError:
                answers.append(None)
        if answers[0] is None or answers[1] is None:
            assert answers == [None, None]
            return False
        np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=1e-4)
        return True


def test_any_order_of_calls_agrees_with_the_reference(source: Path, bundles: dict[str, Path]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (Interleaved,), {"bundle": bundles["fp32"], "source": source})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=12, deadline=None))


def test_the_reference_keeps_the_same_contract(source: Path, bundles: dict[str, Path]) -> None:
    pair = open_pair(source, bundles["fp32"])
    assert isinstance(pair[1], TorchTarget)
    assert pair[0].features == pair[1].features
    assert pair[0].shape == pair[1].shape


def test_the_callers_arithmetic_stays_as_it_is(bundles: dict[str, Path]) -> None:
    """The runtime flushes subnormal numbers to zero in its own threads only."""
    target = open_bundle(bundles["fp32"], Engine())
    target.score([1], [-1])
    assert np.float32(1e-38) * np.float32(0.01) > 0

"""Flavours `portable` and `decomposed`: against eager transformers for every family, as engines, and what is in them.

`pytest -s tests/test_flavours.py` prints the errors that docs/targets.md lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import SHARES, on_the_grid
from test_target_onnx import Broken, random_tree
from tiny_families import CASES, CONTEXT, TAPS, VOCAB, compare, plain, write_family
from tiny_model import ENGINE, export, plain_logits
from torch_helpers import tokens

from starsd.edge.target_onnx import OnnxTarget, open_bundle
from starsd.export import recipe
from starsd.export.check import Runner
from starsd.shared import manifest, tree
from starsd.shared.config import FLAVOURS, PRECISIONS, Engine
from starsd.shared.errors import EngineError, UsageError
from starsd.shared.graph_contract import Padding, Pass, contract_of, runs_on
from starsd.shared.manifest import GRAPH_FILE

PLAIN = [
    pytest.param(flavour, marks=pytest.mark.skipif(not runs_on(flavour, ort.__version__), reason="old onnxruntime"))
    for flavour in ("portable", "decomposed")
]
# what plain operators exist when: nothing newer may be in a graph for older runtimes
DECOMPOSED = {
    "Add",
    "Cast",
    "Concat",
    "Div",
    "Gather",
    "Gelu",
    "Gemm",
    "MatMul",
    "Mul",
    "ReduceMean",
    "Reshape",
    "Shape",
}
DECOMPOSED |= {"Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Sub", "Tanh", "Transpose", "Unsqueeze"}
WEIGHTS = {"fp32": set(), "fp16": set(), "int8": {"DequantizeLinear"}, "int4": {"DequantizeLinear", "ReduceSum"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("flavours")
    return {case: write_family(place / str(i) / "m", case) for i, case in enumerate(CASES)}


@pytest.mark.parametrize("flavour", PLAIN)
@pytest.mark.parametrize("precision", SHARES)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, precision: str, flavour: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders[case]
    if precision == "int4":
        source = on_the_grid(source, tmp_path / "m")
    bundle = export(source, tmp_path / "b", precision, flavour=flavour, taps=TAPS, last_hidden=True)
    errors = compare(source, bundle)
    print(f"{case} | {flavour} | {precision} | {' | '.join(f'{error:.1e}' for error in errors)}")
    assert max(errors.logits_share, errors.features_share) < SHARES[precision]
    if precision == "fp32":
        assert max(errors.logits, errors.features) < 1e-4
    else:
        assert errors.logits_share > 1e-4  # it is not fp32 under another name


Engines = dict[tuple[str, str], OnnxTarget]


@pytest.fixture(scope="module")
def bundles(folders: dict[str, Path]) -> dict[tuple[str, str], Path]:
    """Of a model with windows and grouped heads, by flavour and precision."""
    source, place = folders["gemma3"], folders["gemma3"].parent
    chosen = [flavour for flavour in FLAVOURS[1:] if runs_on(flavour, ort.__version__)]
    return {
        (flavour, precision): export(
            source, place / f"{flavour}-{precision}", precision, flavour=flavour, taps=TAPS, last_hidden=True
        )
        for flavour in chosen
        for precision in PRECISIONS
    }


@pytest.fixture(scope="module")
def engines(bundles: dict[tuple[str, str], Path]) -> Engines:
    return {form: open_bundle(bundle, ENGINE) for form, bundle in bundles.items()}


@pytest.mark.parametrize("flavour", PLAIN)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_path_of_a_tree_is_plain_decoding(engines: Engines, flavour: str, data: st.DataObject) -> None:
    target, prompt = engines[flavour, "fp32"], tokens(data.draw(st.integers(0, 60)), VOCAB)
    ids, parents = random_tree(data.draw)
    target.truncate(0)
    target.prefill(prompt)
    logits = target.score(ids, parents)
    kept = tree.path_to(parents, data.draw(st.integers(0, len(ids) - 1)))
    features = target.commit(kept)
    following = target.score([5], [-1])[0]
    target.truncate(len(prompt))
    np.testing.assert_allclose(logits[kept], plain_logits(target, [ids[row] for row in kept]), atol=2e-5)
    np.testing.assert_allclose(following, target.score([5], [-1])[0], atol=2e-5)
    target.truncate(0)
    again = target.prefill([*prompt, *(ids[row] for row in kept)])[len(prompt) :]
    np.testing.assert_allclose(features, again, atol=2e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trunk_of_portable_is_plain_decoding_to_the_last_bit(engines: Engines, precision: str) -> None:
    if ("portable", precision) not in engines:
        pytest.skip("old onnxruntime")
    target, ids, drafted = engines["portable", precision], tokens(60, VOCAB), tokens(6, VOCAB, seed=4)
    assert target.noise == 0
    for past in (1, 40, 60):
        target.truncate(0)
        target.prefill(ids[:past])
        logits = target.score([*drafted, 9, 9, 9], [*tree.chain(6), 0, 2, 3])
        np.testing.assert_array_equal(plain_logits(target, drafted), logits[:6])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_noise_of_decomposed_is_small(engines: Engines, precision: str) -> None:
    """Its own rows are added to the past's in a sum of their own, so that even a trunk is rounded otherwise."""
    target = engines["decomposed", precision]
    most = 2e-5 if precision == "fp32" else 0.02
    assert 0 <= target.noise <= target.branch_noise <= most
    ids, drafted = tokens(60, VOCAB), tokens(6, VOCAB, seed=4)
    target.truncate(0)
    target.prefill(ids)
    logits = target.score([*drafted, 9, 9, 9], [*tree.chain(6), 0, 2, 3])
    np.testing.assert_allclose(plain_logits(target, drafted), logits[:6], rtol=0, atol=most)


@pytest.mark.parametrize("flavour", PLAIN)
@pytest.mark.parametrize("padding", [Padding(1, 1), Padding(2, 2), Padding(3, 3)])
def test_any_padding_gives_the_same_answers(
    bundles: dict[tuple[str, str], Path], flavour: str, padding: Padding
) -> None:
    plainly, padded = (open_bundle(bundles[flavour, "fp32"], ENGINE) for _ in range(2))
    padded._padding = padding
    ids, parents = tokens(37, VOCAB), [-1, 0, 0, 2, 1]
    np.testing.assert_allclose(padded.prefill(ids), plainly.prefill(ids), atol=2e-4)
    for count in (1, 2, 3, 5):
        got, expected = (target.score(ids[:count], parents[:count]) for target in (padded, plainly))
        assert got.shape == (count, VOCAB)
        np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(padded.commit([0, 2, 3]), plainly.commit([0, 2, 3]), atol=2e-4)
    np.testing.assert_allclose(padded.score([7], [-1]), plainly.score([7], [-1]), atol=2e-5)


@pytest.mark.parametrize("flavour", PLAIN)
def test_the_capacity_of_buffers_changes_nothing(bundles: dict[tuple[str, str], Path], flavour: str) -> None:
    """Though every column of them is multiplied; so plain and drafted decoding may grow at different times."""
    ids, answers = tokens(140, VOCAB), []
    for initial in (1, 200, 256):
        target = open_bundle(bundles[flavour, "fp32"], Engine(threads=1, initial_context=initial, prefill_chunk=48))
        features = target.prefill(ids)
        answers.append((features, target.score([3, 4, 5], [-1, 0, 0])))
    for features, logits in answers[1:]:
        np.testing.assert_array_equal(features, answers[0][0])
        np.testing.assert_array_equal(logits, answers[0][1])


@pytest.mark.parametrize("flavour", PLAIN)
def test_what_lies_in_buffers_changes_nothing(bundles: dict[tuple[str, str], Path], flavour: str) -> None:
    target = open_bundle(bundles[flavour, "fp32"], ENGINE)
    ids = tokens(20, VOCAB)
    target.prefill(ids)
    before = target.score([1, 2], [-1, 0])
    target.prefill(tokens(90, VOCAB, seed=3))
    target.truncate(20)
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("flavour", PLAIN)
def test_a_failing_runtime_leaves_the_cache_whole(
    bundles: dict[tuple[str, str], Path], flavour: str, late: bool
) -> None:
    target = open_bundle(bundles[flavour, "fp16"], ENGINE)
    target.prefill(tokens(30, VOCAB))
    before = target.score([1, 2], [-1, 0])
    session = target._graph.session
    target._graph.session = Broken(session, late=late)
    for call in (lambda: target.score([8, 9, 7], [-1, 0, 0]), lambda: target.prefill([5, 6])):
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
        with pytest.raises(EngineError, match="commit without a pass"):
            target.commit([0])
    target._graph.session = session
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), before)


@pytest.mark.parametrize("flavour", PLAIN)
def test_siblings_have_caches_of_their_own(engines: Engines, flavour: str) -> None:
    target = engines[flavour, "fp32"]
    target.truncate(0)
    target.prefill(tokens(30, VOCAB))
    expected = target.score([1, 2], [-1, 0])
    other = target.sibling()
    other.prefill(tokens(50, VOCAB, seed=8))
    other.score([4], [-1])
    np.testing.assert_array_equal(target.score([1, 2], [-1, 0]), expected)
    other.adopt(target, 30)
    np.testing.assert_array_equal(other.score([1, 2], [-1, 0]), expected)


@pytest.mark.parametrize("flavour", PLAIN)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_last_token_of_the_context_is_reached(engines: Engines, flavour: str, precision: str) -> None:
    target, ids = engines[flavour, precision], tokens(CONTEXT, VOCAB)
    target.truncate(0)
    target.prefill(ids[:-1])
    assert np.isfinite(target.score(ids[-1:], [-1])).all()
    target.commit([0])
    assert target.length == target.context == CONTEXT


@pytest.mark.parametrize("flavour", PLAIN)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_runner_says_what_the_engine_says(
    bundles: dict[tuple[str, str], Path], engines: Engines, flavour: str, precision: str
) -> None:
    """What measures quality at export."""
    target, ids = engines[flavour, precision], tokens(60, VOCAB)
    runner = Runner(bundles[flavour, precision], target.shape, 64, flavour=flavour)
    target.truncate(0)
    features = target.prefill(ids[:-1])
    got = runner.run(ids[:-1], 0)
    tolerance = 1e-4 if precision == "fp32" else 0.05
    assert set(got) == {"features", "logits"}
    np.testing.assert_allclose(got["features"], features, atol=tolerance * np.abs(features).max())
    np.testing.assert_allclose(runner.run(ids[-1:], 59)["logits"], target.score(ids[-1:], [-1]), atol=tolerance)


@pytest.mark.parametrize("flavour", PLAIN)
def test_heads_of_any_even_size(flavour: str, tmp_path: Path) -> None:
    """Of 24, which GroupQueryAttention refuses."""
    source = write_family(tmp_path / "m", "llama", head_dim=24)
    errors = compare(source, export(source, tmp_path / "b", flavour=flavour, taps=TAPS, last_hidden=True))
    assert max(errors.logits, errors.features) < 1e-4


@pytest.mark.parametrize("flavour", PLAIN)
def test_quality_is_measured(flavour: str, folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(folders["qwen3"], tmp_path / "b", "int8", flavour=flavour, check=True)
    found = manifest.read(bundle)
    assert (found.flavour, found.precision) == (flavour, "int8")
    assert found.quality is not None
    assert 0 < found.quality.kl < 0.05


def graph_of(bundle: Path) -> Any:
    return onnx.load(bundle / GRAPH_FILE, load_external_data=False)


def symbols(values: Sequence[Any]) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3", "qwen3"])
def test_portable_has_operators_of_opset_24_alone(
    case: str, precision: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    bundle = export(folders[case], tmp_path / "b", precision, flavour="portable")
    model = graph_of(bundle)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    kinds = [node.op_type for node in model.graph.node]
    assert all(not node.domain for node in model.graph.node)
    assert kinds.count("TensorScatter") == 14
    assert kinds.count("RotaryEmbedding") == 14
    # TensorRT's Attention has no soft cap
    assert kinds.count("Attention") == (0 if case == "gemma2" else 7)
    shapes = {**symbols(model.graph.input), **symbols(model.graph.output)}
    for name, shape in shapes.items():
        if name.startswith(("past_", "present_")):
            assert shape == [1, 2, "capacity", 32 if case == "qwen3" else 16]
        elif name.endswith("mask"):
            assert shape == [1, 1, "rows", "capacity"]
    assert shapes["write"] == [1]
    onnx.checker.check_model(str(bundle / GRAPH_FILE))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3", "qwen3"])
def test_decomposed_has_plain_operators_alone(
    case: str, precision: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    bundle = export(folders[case], tmp_path / "b", precision, flavour="decomposed")
    model = graph_of(bundle)
    version = 21 if precision == "int4" else 20  # four bits came with 21
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", version)]
    assert {node.op_type for node in model.graph.node} <= DECOMPOSED | WEIGHTS[precision]
    shapes = {**symbols(model.graph.input), **symbols(model.graph.output)}
    past = {name: shape for name, shape in shapes.items() if name.startswith("past_")}
    head_dim = 32 if case == "qwen3" else 16
    assert all(shape == [1, 2, "capacity", head_dim] for shape in past.values())
    assert all(shapes[name.replace("past", "new")] == [1, 2, "rows", head_dim] for name in past)
    assert not any(name.startswith("present_") for name in shapes)
    onnx.checker.check_model(str(bundle / GRAPH_FILE))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3"])
def test_a_contract_feeds_every_input(flavour: str, case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(folders[case], tmp_path / "b", flavour=flavour)
    shape = manifest.read(bundle).shape
    names = {value.name for value in graph_of(bundle).graph.input if not value.name.startswith("past_")}
    fed = contract_of(flavour).feeds(Pass([1, 2], [-1, 0], 3, 2, 2, 8, 2), shape.window)
    assert names <= fed.keys()
    assert fed.keys() - names <= {"mask"}  # where every layer has a window
    masks = {name for name in names if name.endswith("mask")}
    assert masks == {"llama": {"mask"}, "mistral": {"local_mask"}, "gemma3": {"mask", "local_mask"}}[case]


def test_what_is_not_offered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {form: made for form, made in recipe._MADE.items() if form != ("decomposed", "int4")}
    monkeypatch.setattr(recipe, "_MADE", kept)
    with pytest.raises(UsageError, match=r"^flavour decomposed has no int4, expected one of fp32, fp16, int8$"):
        recipe.check_offered("decomposed", "int4")
    recipe.check_offered("decomposed", "int8")


def test_a_trees_logits_are_transformers(engines: Engines, folders: dict[str, Path]) -> None:
    """Of one engine by hand, without the helper that the rest relies on."""
    for flavour in {flavour for flavour, _ in engines}:
        target, ids = engines[flavour, "fp32"], tokens(50, VOCAB)
        target.truncate(0)
        target.prefill(ids)
        logits = target.score([7, 8, 9], [-1, 0, 0])
        for row, text in enumerate(([7], [7, 8], [7, 9])):
            np.testing.assert_allclose(logits[row], plain(folders["gemma3"], [*ids, *text], TAPS)[0][-1], atol=1e-4)

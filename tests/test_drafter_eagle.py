"""Sessions and tree shapes; the official trees themselves are in `test_golden.py`, layouts in `test_eagle_heads.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_builder import base_config, random_tensors, reference, rows, write_head
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch_helpers import tiny_llama

from starsd.server.drafter import Draft, DynamicTree, StaticTree, chain, open_drafter
from starsd.server.drafter_eagle import EagleDrafter
from starsd.shared import tree
from starsd.shared.errors import MissingExtraError, ModelError, UsageError

WIDTH = 96


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("drafter")
    tiny_llama().save_pretrained(base / "target")
    write_head(base / "head", base_config(draft_vocab_size=48), random_tensors())
    return str(base / "head"), str(base / "target")


@pytest.fixture(scope="module")
def drafter(folders: tuple[str, str]) -> EagleDrafter:
    opened = open_drafter("eagle", *folders)
    assert isinstance(opened, EagleDrafter)
    return opened


def same(a: Draft, b: Draft) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.parents.tolist() == b.parents.tolist()
    np.testing.assert_allclose(a.scores, b.scores, atol=3e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_dynamic_tree_is_well_formed_and_best(drafter: EagleDrafter, data: st.DataObject) -> None:
    depth, top_k = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 6))
    total = data.draw(st.integers(1, 1 + top_k + depth * top_k**2))
    session = drafter.open()
    session.extend(*rows(5, WIDTH, data.draw(st.integers(0, 99))))
    grown = session.draft(DynamicTree(total, depth, top_k))
    assert len(grown.tokens) == len(grown.parents) == len(grown.scores) == total
    tree.check(grown.parents.tolist())
    assert (grown.scores[1:] <= grown.scores[grown.parents[1:]]).all()
    siblings = {(int(p), int(t)) for p, t in zip(grown.parents[1:], grown.tokens[1:], strict=True)}
    assert len(siblings) == total - 1
    smaller = session.draft(DynamicTree(max(1, total // 2), depth, top_k))
    np.testing.assert_array_equal(np.sort(smaller.scores)[::-1], np.sort(grown.scores)[::-1][: len(smaller.scores)])


def test_dynamic_tree_equals_the_node_by_node_reference(folders: tuple[str, str], drafter: EagleDrafter) -> None:
    """The default shape over a context that makes the cache grow."""
    stored = load_file(Path(folders[1]) / "model.safetensors")
    head = reference(random_tensors(), base_config(), stored)
    features, following = rows(300, WIDTH)
    session = drafter.open()
    session.extend(features, following)
    head.extend(features, following.tolist())
    grown = session.draft(DynamicTree())
    expected_tokens, expected_parents, expected_scores = head.grow(int(following[-1]), 60, 7, 10)
    assert grown.tokens.tolist() == expected_tokens
    assert grown.parents.tolist() == expected_parents
    np.testing.assert_allclose(grown.scores, expected_scores, atol=3e-5)


def test_a_chain_is_the_best_child_each_time(drafter: EagleDrafter) -> None:
    session = drafter.open()
    session.extend(*rows(5, WIDTH))
    grown = session.draft(chain(4))
    assert grown.parents.tolist() == tree.chain(5)
    static = session.draft(StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))
    same(grown, static)
    assert session.draft(chain(0)).tokens.tolist() == grown.tokens[:1].tolist()


def test_a_static_tree_takes_the_ranks_it_names(folders: tuple[str, str], drafter: EagleDrafter) -> None:
    paths = ((2,), (0,), (0, 1), (2, 0), (0, 1, 3), (0, 0), (2, 0, 1), (0, 0, 0, 2), (0, 0, 0))
    session = drafter.open()
    session.extend(*rows(6, WIDTH))
    grown = session.draft(StaticTree(paths))
    ordered = [(), (0,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 3), (2, 0, 1), (0, 0, 0, 2)]
    assert grown.parents.tolist() == [-1, *(ordered.index(path[:-1]) for path in ordered[1:])]
    head = reference(random_tensors(), base_config(), load_file(Path(folders[1]) / "model.safetensors"))
    features, following = rows(6, WIDTH)
    head.extend(features, following.tolist())
    nodes: dict[tuple[int, ...], Any] = {(): (int(following[-1]), 0.0, head.lasting[-1].output, [])}
    for path in ordered[1:]:
        _, score, output, above = nodes[path[:-1]]
        draft_id, logp = head.children(output, 5)[path[-1]]
        token, position = head.target(draft_id), len(head.lasting) + len(path) - 1
        row = head.run(token, head.latent(output), position, head.visible(above, position))
        nodes[path] = (token, score + logp, row.output, [*above, row])
    assert grown.tokens.tolist() == [nodes[path][0] for path in ordered]
    np.testing.assert_allclose(grown.scores, [nodes[path][1] for path in ordered], atol=3e-5)


def test_rows_in_pieces_and_trees_between_change_nothing(drafter: EagleDrafter) -> None:
    features, following = rows(40, WIDTH)
    whole, pieces = drafter.open(), drafter.open()
    whole.extend(features, following)
    for start in range(0, 40, 7):
        pieces.extend(features[start : start + 7], following[start : start + 7])
        pieces.draft(DynamicTree(30, 5, 6))
    assert pieces.rows == whole.rows == 40
    same(pieces.draft(DynamicTree()), whole.draft(DynamicTree()))


def test_sessions_do_not_see_each_other(drafter: EagleDrafter) -> None:
    features, following = rows(12, WIDTH)
    alone, one, other = drafter.open(), drafter.open(), drafter.open()
    alone.extend(features, following)
    expected = alone.draft(DynamicTree())
    one.extend(features, following)
    other.extend(*rows(30, WIDTH, seed=9))
    other.draft(DynamicTree())
    same(one.draft(DynamicTree()), expected)


def test_truncate_forgets_rows_and_the_place_to_draft_from(drafter: EagleDrafter) -> None:
    features, following = rows(20, WIDTH)
    session, fresh = drafter.open(), drafter.open()
    session.extend(features, following)
    session.truncate(8)
    with pytest.raises(UsageError, match="nothing to draft from"):
        session.draft(DynamicTree())
    session.extend(features[8:12], following[8:12])
    fresh.extend(features[:12], following[:12])
    same(session.draft(DynamicTree()), fresh.draft(DynamicTree()))
    with pytest.raises(UsageError, match="truncate to 13 rows, expected 0 to 12"):
        session.truncate(13)


def test_bad_rows_are_refused_and_leave_the_session_whole(drafter: EagleDrafter) -> None:
    features, following = rows(5, WIDTH)
    session = drafter.open()
    session.extend(features, following)
    before = session.draft(DynamicTree())
    with pytest.raises(UsageError, match=r"features have shape \[5, 95\], expected \[5, 96\]"):
        session.extend(features[:, 1:], following)
    with pytest.raises(UsageError, match="features are not finite"):
        session.extend(features * np.float32(np.nan), following)
    with pytest.raises(UsageError, match="token ids run from"):
        session.extend(features, following + 96)
    session.extend(features[:0], following[:0])
    assert session.rows == 5
    same(session.draft(DynamicTree()), before)
    with pytest.raises(UsageError, match="nothing to draft from"):
        drafter.open().draft(DynamicTree())


def test_overflow_in_half_precision_is_an_error(tmp_path: Path, folders: tuple[str, str]) -> None:
    tensors = random_tensors()
    tensors["layers.0.mlp.down_proj.weight"] *= 1e5
    write_head(tmp_path / "head", base_config(draft_vocab_size=48), tensors)
    for dtype in ("fp16", "bf16"):
        session = open_drafter("eagle", str(tmp_path / "head"), folders[1], dtype=dtype).open()
        session.extend(*rows(5, WIDTH))
        if dtype == "bf16":
            session.draft(DynamicTree())
            continue
        with pytest.raises(ModelError, match="the head's outputs are not numbers in float16: load it as bf16 or fp32"):
            session.draft(DynamicTree())


def test_certain_children_do_not_displace_their_parents(tmp_path: Path, folders: tuple[str, str]) -> None:
    """With probabilities of one a child scores what its parent scores; the cut must still fall below the parent."""
    tensors = random_tensors()
    tensors["lm_head.weight"] *= 1e4
    write_head(tmp_path / "head", base_config(draft_vocab_size=48), tensors)
    session = open_drafter("eagle", str(tmp_path / "head"), folders[1]).open()
    session.extend(*rows(5, WIDTH))
    for total in range(2, 8):
        grown = session.draft(DynamicTree(total, 7, 10))
        assert grown.scores.tolist() == [0.0] * total
        assert grown.parents.tolist() == tree.chain(total)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda: DynamicTree(total=0), "total is 0, expected at least 1"),
        (lambda: DynamicTree(depth=-1), "depth is -1, expected at least 0"),
        (lambda: DynamicTree(total=2, top_k=0), "top_k is 0, expected at least 1"),
        (lambda: DynamicTree(total=60, depth=1, top_k=2), "depth 1 and top_k 2 give 7 nodes, expected 60"),
        (lambda: StaticTree(((0,), (0,))), "path twice"),
        (lambda: StaticTree(((0, 1),)), r"path \[0, 1\] without its parent \[0\]"),
        (lambda: StaticTree(((-1,),)), "negative rank"),
    ],
)
def test_impossible_shapes_are_refused(shape: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape()


def test_shapes_wider_than_the_vocabulary_are_refused(drafter: EagleDrafter) -> None:
    session = drafter.open()
    session.extend(*rows(3, WIDTH))
    with pytest.raises(UsageError, match="top_k is 49, expected at most the draft vocabulary's 48"):
        session.draft(DynamicTree(total=10, top_k=49))
    with pytest.raises(UsageError, match="static tree takes rank 48, the draft vocabulary has 48"):
        session.draft(StaticTree(((48,),)))


def test_unknown_drafters_are_refused() -> None:
    with pytest.raises(UsageError, match="drafter 'medusa' is unknown, expected one of eagle"):
        open_drafter("medusa", ".", ".")


def test_missing_libraries_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for name in ("starsd.server.drafter_eagle", "starsd.server.eagle_layer", "starsd.server.eagle_heads"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"safetensors is not installed: run pip install 'starsd\[server\]'"):
        open_drafter("eagle", ".", ".")


def test_nothing_is_recorded_for_gradients(drafter: EagleDrafter) -> None:
    session = drafter.open()
    session.extend(*rows(3, WIDTH))
    assert not any(tensor.requires_grad for tensor in drafter.layer._tensors.values())
    assert session._output is not None
    assert torch.is_inference(session._output)

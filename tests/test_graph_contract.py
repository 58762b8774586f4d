"""What graphs are fed, by hand: masks, positions and dummies of every flavour."""

from __future__ import annotations

import numpy as np
import pytest

from starsd.shared.config import FLAVOURS
from starsd.shared.errors import BundleError
from starsd.shared.graph_contract import DUMMIES, Padding, Pass, contract_of, require_runtime

TREE = (-1, 0, 0, 2)
PLAIN = ("portable", "decomposed")


def tree_pass(rows: int = 4, start: int = 2, capacity: int = 8) -> Pass:
    return Pass([5, 6, 7, 8], TREE, start, rows, rows, capacity, rows)


def drawn(mask: np.ndarray) -> list[str]:
    """A row of text for each row: x where the row sees."""
    assert mask.dtype == np.float32
    assert mask.shape[:2] == (1, 1)
    assert set(np.unique(mask)) <= {0, mask.min()}
    return ["".join(".x"[int(value == 0)] for value in row) for row in mask[0, 0]]


def test_portable_rows_lie_behind_the_past() -> None:
    feeds = contract_of("portable").feeds(tree_pass(), 0)
    assert drawn(feeds["mask"]) == ["xxx.....", "xxxx....", "xxx.x...", "xxx.xx.."]
    assert feeds["position_ids"].tolist() == [[2, 3, 3, 4]]
    assert feeds["write"].tolist() == [2]
    assert feeds["input_ids"].tolist() == [5, 6, 7, 8]
    assert feeds["logit_rows"].tolist() == [0, 1, 2, 3]
    assert "local_mask" not in feeds


def test_decomposed_rows_lie_behind_the_buffer() -> None:
    feeds = contract_of("decomposed").feeds(tree_pass(), 0)
    assert drawn(feeds["mask"]) == ["xx......x...", "xx......xx..", "xx......x.x.", "xx......x.xx"]
    assert feeds["position_ids"].tolist() == [[2, 3, 3, 4]]
    assert "write" not in feeds


@pytest.mark.parametrize("flavour", PLAIN)
def test_a_text_sees_what_comes_before(flavour: str) -> None:
    feeds = contract_of(flavour).feeds(Pass([5, 6, 7], None, 2, 3, 3, 6, 1), 0)
    own = ["x..", "xx.", "xxx"]
    expected = {"portable": [f"xx{row}." for row in own], "decomposed": [f"xx....{row}" for row in own]}
    assert drawn(feeds["mask"]) == expected[flavour]
    assert feeds["position_ids"].tolist() == [[2, 3, 4]]
    assert feeds["logit_rows"].tolist() == [0]


@pytest.mark.parametrize("flavour", PLAIN)
def test_dummies_see_no_row_and_none_sees_them(flavour: str) -> None:
    feeds = contract_of(flavour).feeds(tree_pass(rows=6), 0)
    rows = drawn(feeds["mask"])
    assert rows[4:] == {
        "portable": ["xx....x.", "xx.....x"],
        "decomposed": ["xx..........x.", "xx...........x"],
    }.get(flavour)
    own = {"portable": 2, "decomposed": 8}[flavour]
    assert all(row[own + 4 : own + 6] == ".." for row in rows[:4])
    assert feeds["position_ids"].tolist() == [[2, 3, 3, 4, 2, 2]]
    assert feeds["input_ids"].tolist() == [5, 6, 7, 8, 0, 0]


def test_windows_go_by_position() -> None:
    """Of three positions, the row's own included; a tree's rows lie at their depth."""
    portable = contract_of("portable").feeds(tree_pass(), 3)
    assert drawn(portable["mask"])[0] == "xxx....."
    assert drawn(portable["local_mask"]) == ["xxx.....", ".xxx....", ".xx.x...", "..x.xx.."]
    decomposed = contract_of("decomposed").feeds(tree_pass(), 3)
    assert drawn(decomposed["local_mask"]) == ["xx......x...", ".x......xx..", ".x......x.x.", "........x.xx"]
    ort = contract_of("ort").feeds(Pass([5, 6, 7, 8], TREE, 2, 4, 4, 8, 4), 3)
    # what lies behind a row the operator hides by itself
    assert drawn(ort["local_mask"]) == ["xxx...", ".xxx..", ".xx.x.", "..x.xx"]


def test_ort_has_a_dummy_for_attention_alone() -> None:
    feeds = contract_of("ort").feeds(Pass([5], [-1], 3, 1, 2, 9, 1), 0)
    assert feeds["input_ids"].tolist() == [5]
    assert feeds["attention_rows"].tolist() == [[0, 0]]
    assert feeds["own_rows"].tolist() == [0]
    assert feeds["position_ids"].tolist() == [[3, 3]]
    assert drawn(feeds["mask"]) == ["xxxxx", "xxx.x"]
    assert (feeds["last_row"].tolist(), feeds["total"].tolist()) == ([4], 5)


def test_ort_numbers_no_row_of_a_first_pass() -> None:
    feeds = contract_of("ort").feeds(Pass([5, 6], [-1, 0], 0, 2, 2, 9, 2), 2)
    assert feeds["mask"].shape == feeds["local_mask"].shape == (1, 1, 2, 3)
    assert (feeds["last_row"].tolist(), feeds["total"].tolist()) == ([1], 3)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_hidden_is_hidden_in_half_precision_too(flavour: str) -> None:
    """Where a graph turns masks into float16, what is hidden stays a number, or every row but the first is lost."""
    hidden = contract_of(flavour).feeds(tree_pass(), 0)["mask"].min()
    assert np.exp(np.float32(hidden) + 1000) == 0
    if flavour in PLAIN:
        assert np.isfinite(np.float16(hidden) - np.float16(1000))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_buffers_have_room_for_every_padding(flavour: str) -> None:
    for padding in contract_of(flavour).paddings:
        for count in range(1, 10):
            rows = padding.rows(count)
            assert rows % padding.multiple == 0
            assert max(rows, padding.attending) - count <= DUMMIES
    assert Padding(4, 1).rows(5) == 8


def test_a_runtime_that_is_too_old_is_named() -> None:
    for flavour in FLAVOURS:
        require_runtime(flavour, "1.32.0")
    for flavour in ("ort", "decomposed"):
        require_runtime(flavour, "1.23.2")
    require_runtime("portable", "1.25.1+build7")
    message = (
        r"^flavour portable needs onnxruntime 1\.25\.1 or newer, this is 1\.23\.2: export ort or decomposed instead$"
    )
    with pytest.raises(BundleError, match=message):
        require_runtime("portable", "1.23.2")

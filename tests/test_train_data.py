"""Files of chats, who wrote which token, and batches of nearly equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_helpers import random_chats

from starsd.export.train_data import Role, batches, choose, held_out, joined, read_chats, write_chats
from starsd.shared.errors import UsageError

TOKENS = [1, 2, 9, 8, 3, 4, 1, 2, 7, 3, 6, 5]
ARRAYS: dict[str, Any] = {"tokens": np.array(TOKENS, np.uint16), "offsets": np.array([0, 6, 12], np.int32)}
ARRAYS["answer_start"] = np.array([4, 3], np.int32)


def saved(path: Path, **changes: Any) -> Path:
    arrays = {**ARRAYS, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_roles_follow_from_answer_start_and_what_all_chats_begin_with(tmp_path: Path) -> None:
    chats = read_chats(saved(tmp_path / "a.npz"), 10)
    assert chats.tokens.tolist() == TOKENS
    assert chats.roles.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 2, 2, 2]
    assert chats.lengths.tolist() == [6, 6]


def test_given_roles_are_kept_and_a_folder_is_all_its_files(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.npz", random_chats(3))
    write_chats(tmp_path / "b.npz", random_chats(2, seed=1))
    chats = read_chats(tmp_path, 300)
    assert len(chats) == 5
    for chat, source, place in ((2, random_chats(3), 2), (3, random_chats(2, seed=1), 0)):
        assert chats.tokens[chats.rows(chat)].tolist() == source.tokens[source.rows(place)].tolist()
        assert chats.roles[chats.rows(chat)].tolist() == source.roles[source.rows(place)].tolist()


def test_written_files_have_the_documented_layout(tmp_path: Path) -> None:
    chats = random_chats(3)
    write_chats(tmp_path / "a.npz", chats)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["tokens"].dtype == np.uint16
        assert arrays["answer_start"].tolist() == [6, 6, 6]
    wide = joined([([70_000, 1, 2, 3], [0, 1, 2, 2])])
    write_chats(tmp_path / "b.npz", wide)
    assert read_chats(tmp_path / "b.npz", 80_000).tokens.tolist() == [70_000, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "lacks tokens, expected tokens, offsets, answer_start"),
        ({"tokens": np.ones(12)}, r"tokens is float64 of shape \[12\], expected integers in one dimension"),
        (
            {"tokens": np.array([*TOKENS[:-1], 10])},
            "token ids run from 1 to 10, the target has 0 to 9: these chats are",
        ),
        ({"offsets": np.array([0, 6, 11])}, "offsets do not rise from 0 to the 12 tokens there are"),
        ({"offsets": np.array([0, 6, 6, 12])}, "offsets do not rise"),
        ({"answer_start": np.array([4])}, "answer_start does not name a place in each of the 2 chats"),
        ({"answer_start": np.array([4, 7])}, "answer_start does not name a place"),
        ({"roles": np.zeros(11, np.uint8)}, "roles are 11 values, expected 12 of 0, 1 and 2"),
        ({"roles": np.full(12, 3, np.uint8)}, "roles are 12 values, expected 12 of 0, 1 and 2"),
    ],
)
def test_wrong_arrays_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_chats(saved(tmp_path / "a.npz", **changes), 10)


def test_no_files_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \.npz of chats$"):
        read_chats(tmp_path, 10)
    (tmp_path / "a.npz").write_bytes(b"not a zip")
    with pytest.raises(UsageError, match=r"a\.npz cannot be read"):
        read_chats(tmp_path, 10)
    np.save(tmp_path / "b.npy", np.arange(3))
    with pytest.raises(UsageError, match="is a single array"):
        read_chats(tmp_path / "b.npy", 10)


def test_choosing_is_seeded_and_bounded() -> None:
    chats = random_chats(60)
    some = choose(chats, 400, 1000, 1)
    assert 400 <= len(some.tokens) < 430
    assert some.tokens.tolist() == choose(chats, 400, 1000, 1).tokens.tolist()
    assert some.tokens.tolist() != choose(chats, 400, 1000, 2).tokens.tolist()
    cut = choose(chats, 0, 15, 1)
    assert len(cut) == 60
    assert cut.lengths.max() == 15
    assert {tuple(cut.tokens[cut.rows(i)].tolist()) for i in range(60)} == {
        tuple(chats.tokens[chats.rows(i)][:15].tolist()) for i in range(60)
    }


def test_too_few_chats_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^there are 7 chats of 4 tokens or more, expected at least 8$"):
        choose(random_chats(7), 0, 1000, 0)
    with pytest.raises(UsageError, match=r"^there are 0 chats"):
        choose(random_chats(20), 0, 3, 0)


@pytest.mark.parametrize(("count", "wanted", "held"), [(8, 48, 1), (100, 48, 12), (1000, 48, 48)])
def test_some_chats_are_held_out(count: int, wanted: int, held: int) -> None:
    assert held_out(count, wanted) == held


def test_batches_hold_every_chat_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, 400)
    chosen = np.arange(10, 400)
    groups = batches(lengths, chosen, 1200, np.random.default_rng(1))
    assert sorted(np.concatenate(groups).tolist()) == chosen.tolist()
    padded = [len(group) * lengths[group].max() for group in groups]
    assert max(padded) <= 1200
    assert sum(padded) < 1.15 * lengths[chosen].sum()
    assert len(groups) < 1.5 * lengths[chosen].sum() / 1200
    again = batches(lengths, chosen, 1200, np.random.default_rng(2))
    assert [group.tolist() for group in again] != [group.tolist() for group in groups]
    firsts = [lengths[group].max() for group in groups]
    assert firsts != sorted(firsts)


def test_a_chat_longer_than_a_batch_is_alone() -> None:
    groups = batches(np.array([10, 900, 10]), np.arange(3), 100, np.random.default_rng(0))
    assert sorted(group.tolist() for group in groups if 1 in group) == [[1]]


def test_picking_keeps_roles() -> None:
    chats = random_chats(4)
    picked = chats.pick([2, 0])
    assert picked.roles[picked.rows(1)].tolist() == chats.roles[chats.rows(0)].tolist()
    assert set(picked.roles.tolist()) == set(map(int, Role))

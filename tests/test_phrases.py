"""A phrasebook says what followed what, likeliest first; files that are no phrasebook are refused."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_session import VOCAB
from train_helpers import random_chats, target_folder

from starsd.export.cli import main
from starsd.export.phrases import FOLLOWERS, count_phrases, write_phrases
from starsd.export.train_data import Role, joined, write_chats
from starsd.shared.errors import ModelError
from starsd.shared.phrases import Phrasebook, read_phrases


def book(tmp_path: Path, *chats: list[int]) -> Phrasebook:
    """Of chats in which everything is an answer."""
    arrays = count_phrases(joined([(tokens, [int(Role.ANSWER)] * len(tokens)) for tokens in chats]), 100)
    write_phrases(tmp_path / "p.npz", arrays)
    return read_phrases(tmp_path / "p.npz", 100)


def test_what_follows_two_tokens_counts_and_else_what_follows_one(tmp_path: Path) -> None:
    found = book(tmp_path, [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4], [7, 2, 5])
    assert [token for token, _ in found.follow(1, 2)] == [3, 4]
    steps = [step for _, step in found.follow(1, 2)]
    assert steps == pytest.approx([math.log(2 / 4), math.log(1 / 4)], abs=1 / 64)  # of three sightings and one more
    # 7, 2 was seen once, which is no phrase; so all that followed 2 counts
    assert [token for token, _ in found.follow(7, 2)] == [3, 4, 5]
    assert found.follow(50, 2) == found.follow(-1, 2) == found.follow(7, 2)
    assert found.follow(1, 50) == []
    assert found.follow(2, 4) == []  # nothing came after the end of a chat


def test_no_phrase_runs_from_chat_to_chat_or_into_the_template(tmp_path: Path) -> None:
    roles = [int(Role.TEMPLATE), int(Role.USER), int(Role.ANSWER), int(Role.TEMPLATE)]
    arrays = count_phrases(joined([([1, 2, 3, 4], roles)] * 3), 100)
    write_phrases(tmp_path / "p.npz", arrays)
    found = read_phrases(tmp_path / "p.npz", 100)
    after = {token: [t for t, _ in found.follow(-1, token)] for token in (1, 2, 3, 4)}
    assert after == {1: [2], 2: [3], 3: [], 4: []}
    assert [t for t, _ in found.follow(1, 2)] == [3]


def test_few_followers_are_kept_the_most_frequent_and_the_smallest_among_equals(tmp_path: Path) -> None:
    chats = [[1, token] for token in (30, 20, 10, 50, 40, 40)]
    found = book(tmp_path, *chats).follow(-1, 1)
    assert [token for token, _ in found] == [40, 10, 20, 30]
    assert len(found) == FOLLOWERS
    rare = book(tmp_path, *[[1, 2]] * 50, [1, 3])
    assert [token for token, _ in rare.follow(-1, 1)] == [2]


def test_counting_agrees_with_counting_by_hand(tmp_path: Path) -> None:
    chats = random_chats(30)
    write_phrases(tmp_path / "p.npz", count_phrases(chats, VOCAB))
    found = read_phrases(tmp_path / "p.npz", VOCAB)
    seen: dict[int, dict[int, int]] = {}
    for chat in range(len(chats)):
        tokens, roles = chats.tokens[chats.rows(chat)].tolist(), chats.roles[chats.rows(chat)].tolist()
        for newer, follower, role in zip(tokens, tokens[1:], roles[1:], strict=False):
            if role != Role.TEMPLATE:
                counts = seen.setdefault(newer, {})
                counts[follower] = counts.get(follower, 0) + 1
    assert seen
    for newer, counts in seen.items():
        total = sum(counts.values()) + 1
        expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:FOLLOWERS]
        expected = [(token, count) for token, count in expected if count / total >= 0.03]
        got = found.follow(-1, newer)
        assert [token for token, _ in got] == [token for token, _ in expected]
        assert [step for _, step in got] == pytest.approx([math.log(n / total) for _, n in expected], abs=1 / 63)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": np.array(90)}, "is for 90 tokens, the target has 100"),
        ({"vocab": np.array([100])}, r"is for \[100\] tokens, the target has 100"),
        ({"pairs_keys": None}, r"has \['pairs_first', 'pairs_steps', .*\], expected \['pairs_first', 'pairs_keys', "),
        ({"more": np.array(1)}, r"has \['more', "),
        (
            {"singles_tokens": np.array([[1.5]])},
            r"singles_tokens as float64 of shape \[1, 1\], expected integers",
        ),
        ({"singles_first": np.array([0, 9])}, "singles_first does not rise from 0 to its 2 tokens"),
        ({"singles_steps": np.array([1], np.uint8)}, "singles has 1 steps, or keys that do not ascend"),
        ({"singles_keys": np.array([3, 1])}, "singles has 2 steps, or keys that do not ascend"),
        ({"singles_tokens": np.array([1, 100])}, "singles names tokens 1 to 100 of 100"),
        ({"singles_tokens": np.array([-1, 5])}, "singles names tokens -1 to 5 of 100"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = count_phrases(joined([([1, 2, 3], [2, 2, 2])]), 100)
    write_phrases(tmp_path / "p.npz", {name: a for name, a in {**arrays, **changes}.items() if a is not None})
    with pytest.raises(ModelError, match=message):
        read_phrases(tmp_path / "p.npz", 100)


def test_files_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"phrasebook .*p.npz cannot be read: "):
        read_phrases(tmp_path / "p.npz", 100)
    (tmp_path / "p.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        read_phrases(tmp_path / "p.npz", 100)
    with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vocab.npy", b"\0" * 70_000_000)
    with pytest.raises(ModelError, match="unpacks to 70000000 bytes, expected at most 64000000"):
        read_phrases(tmp_path / "p.npz", 100)


def test_the_command_counts_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    write_chats(tmp_path / "chats.npz", random_chats(20))
    argv = ["phrases", "--target", str(target), "--data", str(tmp_path / "chats.npz"), "--out", str(tmp_path / "p.npz")]
    assert main([*argv, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["bytes"] == (tmp_path / "p.npz").stat().st_size
    assert len(read_phrases(tmp_path / "p.npz", VOCAB)) == row["contexts"] > 0
    assert main(argv) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'p.npz'}\n"

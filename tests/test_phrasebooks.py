"""A phrasebook beside an engine comes first, then the home's, then the package's; a broken one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd.edge.phrasebooks import find_phrases
from starsd.export.phrases import count_phrases, write_phrases
from starsd.export.train_data import Role, joined
from starsd.shared.errors import ModelError

PACKAGED = "smollm2-135m", 49152


def put(file: Path, follower: int, vocab: int = PACKAGED[1]) -> None:
    """A phrasebook that knows one thing: what follows token 1."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_phrases(file, count_phrases(joined([([1, follower], [int(Role.ANSWER)] * 2)]), vocab))


def test_the_nearest_counts(starsd_home: Path, tmp_path: Path) -> None:
    packaged = find_phrases(*PACKAGED, tmp_path)
    assert packaged is not None
    assert len(packaged) > 100_000
    put(starsd_home / "phrases" / "smollm2-135m.npz", 7)
    of_home = find_phrases(*PACKAGED, tmp_path)
    put(tmp_path / "phrases.npz", 8)
    beside = find_phrases(*PACKAGED, tmp_path)
    assert of_home is not None
    assert beside is not None
    assert [book.follow(-1, 1)[0][0] for book in (of_home, beside)] == [7, 8]
    assert find_phrases("another-model", 300, tmp_path / "empty") is None


def test_one_of_another_model_is_named(starsd_home: Path, tmp_path: Path) -> None:
    put(tmp_path / "phrases.npz", 7, vocab=300)
    with pytest.raises(ModelError, match=r"phrases.npz is for 300 tokens, the target has 49152$"):
        find_phrases(*PACKAGED, tmp_path)

"""A few hundred random schedules; `tests/schedules.py` runs as many as you like."""

from __future__ import annotations

from collections import Counter

import pytest
import schedules
from tiny_session import write_text_files

from starsd.edge.session import Session
from starsd.edge.text import Text

AT_ONCE, COUNT = 30, 300


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


@pytest.mark.parametrize("first", range(1, COUNT + 1, AT_ONCE))
def test_no_schedule_changes_a_token(text: Text, first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + AT_ONCE):
        counts += schedules.run(seed, text)
    assert min(counts[what] for what in ("cut", "hole", "restart", "replace", "remote", "features", "drawn")) > 5
    assert counts["tokens"] > 30 * AT_ONCE


def test_a_schedule_runs_the_same_every_time(text: Text) -> None:
    for seed in (3, 4):
        assert schedules.run(seed, text) == schedules.run(seed, text)


def test_a_wrong_token_is_found_and_its_seed_named(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where branches are noisy they must not decide."""
    monkeypatch.setattr(Session, "_trust", lambda self, parents: (len(parents), 0.0))
    with pytest.raises(AssertionError, match=r"^schedule \d+: AssertionError: "):
        all(schedules.run(seed, text) for seed in range(1, 100))

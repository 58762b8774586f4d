"""Rows that an engine takes over from a sibling are worth what it would have read itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_target_replay import HEADER, PROMPTS, recorded
from tiny_model import VOCAB, export, open_pair, write_folder
from tiny_session import ToyTarget
from torch_helpers import tokens

from starsd.edge.paced_target import PacedTarget
from starsd.edge.recordings import Recordings
from starsd.edge.target_replay import ReplayTarget
from starsd.shared.errors import EngineError
from starsd.shared.profiles import Profile


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = write_folder(tmp_path_factory.mktemp("adopt") / "m")
    return open_pair(folder, export(folder, folder.parent / "int8", "int8", taps=(1,), last_hidden=True))


@pytest.mark.parametrize("kind", [0, 1], ids=["onnx", "torch"])
@pytest.mark.parametrize("length", [0, 1, 30, 70])
def test_copied_rows_are_those_that_were_read(pair: tuple[Any, Any], kind: int, length: int) -> None:
    donor = pair[kind].sibling()
    noise = 10 * donor.noise  # the torch engine's; the other is exact
    ids = tokens(70, VOCAB)
    donor.prefill(ids)
    donor.score([1, 2, 3], [-1, 0, 1])
    other = donor.sibling()
    other.prefill(tokens(9, VOCAB))  # of no importance
    other.adopt(donor, length)
    assert other.length == length
    donor.commit([0, 1])
    fresh = donor.sibling()
    fresh.prefill(ids[:length])
    np.testing.assert_allclose(other.score([4, 5], [-1, 0]), fresh.score([4, 5], [-1, 0]), rtol=0, atol=noise)
    np.testing.assert_allclose(other.commit([0, 1]), fresh.commit([0, 1]), rtol=0, atol=noise)
    assert donor.length == 72
    donor.truncate(0)
    donor.prefill(tokens(70, VOCAB)[::-1])  # whatever the donor does then
    np.testing.assert_allclose(other.score([6], [-1]), fresh.score([6], [-1]), rtol=0, atol=noise)


def test_only_what_a_sibling_has_can_be_copied(pair: tuple[Any, Any]) -> None:
    donor, other = pair[0].sibling(), pair[0].sibling()
    donor.prefill(tokens(5, VOCAB))
    with pytest.raises(EngineError, match=r"^adopt 6 rows of a sibling, expected 0 to 5$"):
        other.adopt(donor, 6)
    with pytest.raises(EngineError, match=r"^rows of another engine cannot be adopted, expected a sibling's$"):
        other.adopt(pair[1], 0)
    with pytest.raises(EngineError, match=r"^rows of another engine cannot be adopted"):
        other.adopt(ToyTarget(), 0)


def test_a_replay_goes_on_where_another_was() -> None:
    runs = recorded()
    donor = ReplayTarget(Recordings(HEADER, runs))
    donor.prefill(PROMPTS[0][:-1])
    other = donor.sibling()
    other.adopt(donor, 3)
    donor.truncate(0)
    assert (other.score(PROMPTS[0][-1:], [-1])[0].argmax(), other.length) == (runs[0].tokens[4], 3)


@pytest.mark.parametrize("wrap", [lambda target: target, lambda target: PacedTarget(target, PROFILE)])
def test_a_paced_engine_passes_it_on(wrap: Callable[[Any], Any]) -> None:
    donor = ToyTarget()
    donor.prefill([4, 5, 6])
    other = PacedTarget(donor.sibling(), PROFILE)
    other.adopt(wrap(donor), 2)
    assert (other.length, other.late) == (2, 0)


PROFILE = Profile(name="quick", hidden=1, pass_ms=((1, 0.1), (64, 0.2)), interpolation="linear", prefill_tok_s=None)

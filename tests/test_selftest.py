"""The replay at load: silent for the head it was made with, a warning for any other."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_helpers import GOLDEN, golden_target, recording

from starsd.server.drafter import chain
from starsd.server.drafter_eagle import EagleDrafter, open_drafter
from starsd.server.recording import read_recording
from starsd.server.selftest import FILE_NAME, guessed


def opened(folder: Path, variant: str, dtype: str = "fp32") -> EagleDrafter:
    return open_drafter(str(folder), str(golden_target(variant)), dtype=dtype)


def record(variant: str) -> dict[str, Any]:
    """A recorded prompt, cut so that all but its first eight tokens are rounds of one token each."""
    arrays = recording(variant, "prefill")
    features = arrays["target_taps" if variant.startswith("e3") else "target_last_hidden"]
    text = np.append(arrays["prompt"], arrays["root0"])
    out = {"prompt": text[:8], "root0": text[8], "r0_feat": features[:8]}
    for at in range(8, len(text) - 1):
        number = at - 7
        out |= {f"r{number}_feat": features[at : at + 1], f"r{number}_accepted_tokens": text[at : at + 1]}
        out[f"r{number}_bonus"] = text[at + 1]
    return out


@pytest.fixture(params=["e3_gqa_d2t", "e1_gqa_nobias"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, variant: str) -> Path:
    return Path(shutil.copytree(GOLDEN / variant / "head", tmp_path / "head"))


def own_text(drafter: EagleDrafter, arrays: dict[str, Any]) -> dict[str, Any]:
    """The same features beside a text that the drafter itself would have guessed, token for token."""
    session, out = drafter.open(), dict(arrays)
    session.extend(arrays["r0_feat"], np.append(arrays["prompt"][1:], arrays["root0"]))
    root = arrays["root0"]
    for number in range(1, len(arrays) // 3):
        bonus = session.draft(chain(1)).tokens[1]
        out[f"r{number}_accepted_tokens"], out[f"r{number}_bonus"], root = np.array([root]), bonus, bonus
        session.extend(arrays[f"r{number}_feat"], np.array([root]))
    return out


def test_one_pass_guesses_what_one_row_after_the_other_does(folder: Path, variant: str) -> None:
    drafter = opened(folder, variant)
    hits = []
    for arrays in (record(variant), own_text(drafter, record(variant))):
        np.savez(folder / "any.npz", **arrays)
        rounds = read_recording(folder / "any.npz", drafter.features.width, drafter.vocab)
        session, wanted = drafter.open(), []
        for one, after in pairwise(rounds):
            session.extend(one.features, one.next_tokens)
            wanted.append(session.draft(chain(1)).tokens[1] == after.next_tokens[0])
        hits.append(guessed(drafter.layer, rounds))
        assert hits[-1].tolist() == wanted
    assert hits[1].all()
    assert not hits[0].all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_right_head_is_silent_and_others_are_not(folder: Path, variant: str, dtype: str) -> None:
    drafter = opened(folder, variant)
    assert drafter.warnings == ()
    arrays = own_text(drafter, record(variant))
    accepted = np.array([1, 2] * 5 + [0])  # ten of eleven; a warning needs more than half a token less
    np.savez(folder / FILE_NAME, chain_accepted=accepted, **arrays)
    assert opened(folder, variant, dtype).warnings == ()
    for name in [name for name in arrays if name.endswith("feat")]:
        arrays[name] = np.roll(arrays[name], 1, axis=1)
    np.savez(folder / FILE_NAME, chain_accepted=accepted, **arrays)
    (warning,) = opened(folder, variant, dtype).warnings
    assert re.search(r"self-test guesses \d+\.\d% of 11 tokens, expected 90\.9%: the head, its target or its", warning)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chain_accepted": None}, "lacks chain_accepted"),
        ({"r0_feat": np.zeros((2, 2), np.float32)}, r"r0_feat is float32 of shape \[2, 2\]"),
        ({"chain_accepted": np.ones(99, np.int64)}, r"chain_accepted has 99 rounds, expected at most \d+"),
        ({"r0_feat": "nan"}, "features are not finite"),
    ],
)
def test_broken_recordings_only_warn(folder: Path, variant: str, changed: dict[str, Any], message: str) -> None:
    arrays = record(variant) | {"chain_accepted": np.ones(3, np.int64)} | changed
    if isinstance(arrays["r0_feat"], str):
        arrays["r0_feat"] = record(variant)["r0_feat"] * np.float32(np.nan)
    np.savez(folder / FILE_NAME, **{name: value for name, value in arrays.items() if value is not None})
    (warning,) = opened(folder, variant).warnings
    assert warning.startswith("self-test was not run: ")
    assert re.search(message, warning)
    (folder / FILE_NAME).write_bytes(b"PK")
    assert "cannot be read" in opened(folder, variant).warnings[0]

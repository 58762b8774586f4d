"""Recorded trees and whole decoding loops of the official implementation, reproduced exactly."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from torch_helpers import GOLDEN, VARIANTS, golden_target, recording

from starsd.edge.target_torch import open_folder
from starsd.server.drafter import DynamicTree
from starsd.server.drafter_eagle import EagleDrafter, open_drafter
from starsd.server.recording import read_recording
from starsd.shared.config import Engine
from starsd.shared.tree import path_to

TREES = [(variant, path.stem) for variant in VARIANTS for path in sorted((GOLDEN / variant).glob("trees_*.npz"))]
LOOPS = [
    (variant, number)
    for variant in VARIANTS
    for number in range(len(json.loads((GOLDEN / variant / "loop.json").read_text())))
]


@pytest.fixture(scope="module")
def drafters() -> dict[str, EagleDrafter]:
    return {variant: open_drafter(str(GOLDEN / variant / "head"), str(golden_target(variant))) for variant in VARIANTS}


@pytest.mark.parametrize(("variant", "name"), TREES)
def test_recorded_trees(drafters: dict[str, EagleDrafter], variant: str, name: str) -> None:
    arrays, drafter = recording(variant, name), drafters[variant]
    total, depth, top_k = map(int, re.findall(r"\d+", name))
    session = drafter.open()
    rounds = read_recording(GOLDEN / variant / f"{name}.npz", drafter.features.width, drafter.vocab)
    assert len(rounds) == 4
    for number, step in enumerate(rounds):
        expected = {key: arrays[f"r{number}_{key}"] for key in ("draft_tokens", "parents", "node_logprob")}
        assert session.rows == arrays[f"r{number}_kv_len_before"]
        session.extend(step.features, step.next_tokens)
        for _ in range(2):  # growing a tree must leave nothing behind
            tree = session.draft(DynamicTree(total, depth, top_k))
            assert session.rows == arrays[f"r{number}_kv_len_after"]
            assert tree.tokens.tolist() == expected["draft_tokens"].tolist()
            assert tree.parents.tolist() == expected["parents"].tolist()
            np.testing.assert_allclose(tree.scores, expected["node_logprob"], atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_rows_do_not_depend_on_how_they_arrive(drafters: dict[str, EagleDrafter], variant: str) -> None:
    """The head's output for every row of the prompt, fed one by one, against the recorded one-pass outputs."""
    arrays, session = recording(variant, "trees_T16_D4_K4"), drafters[variant].open()
    following = np.append(arrays["prompt"][1:], arrays["root0"])
    for row, token in enumerate(following):
        session.extend(arrays["r0_feat"][row : row + 1], np.array([token]))
        assert session._output is not None
        np.testing.assert_allclose(session._output[0].numpy(), arrays["r0_draft_hidden"][row], atol=3e-5)


@pytest.mark.parametrize(("variant", "number"), LOOPS)
def test_recorded_loops(drafters: dict[str, EagleDrafter], variant: str, number: int) -> None:
    """Draft, verify and commit through the two protocols until the recorded loop's end."""
    loop: dict[str, Any] = json.loads((GOLDEN / variant / "loop.json").read_text())[number]
    drafter = drafters[variant]
    shape = DynamicTree(loop["params"]["total_tokens"], loop["params"]["depth"], loop["params"]["top_k"])
    spec = drafter.features
    target = open_folder(golden_target(variant), Engine(), taps=spec.taps, last_hidden=spec.last_hidden)
    session = drafter.open()
    prompt, new_ids = loop["prompt"], []
    features = target.prefill(prompt[:-1])
    root = int(target.score(prompt[-1:], [-1])[0].argmax())
    session.extend(np.concatenate([features, target.commit([0])]), np.array([*prompt[1:], root]))
    for expected in loop["rounds"]:
        tree = session.draft(shape)
        assert tree.tokens.tolist() == expected["tokens"]
        assert tree.parents.tolist() == expected["parents"]
        choice = target.score(tree.tokens.tolist(), tree.parents.tolist()).argmax(-1)
        path = longest_accepted(tree.tokens.tolist(), tree.parents.tolist(), choice.tolist())
        accepted = tree.tokens[path]
        assert accepted.tolist() == expected["accepted_tokens"]
        root = int(choice[path[-1]])
        assert root == expected["next_root"]
        session.extend(target.commit(path), np.append(accepted[1:], root))
        new_ids += accepted.tolist()
    assert new_ids == loop["new_ids"]
    assert root == loop["pending_root"]
    assert new_ids[: len(loop["ar_ids"])] == loop["ar_ids"][: len(new_ids)]


def longest_accepted(tokens: list[int], parents: list[int], choice: list[int]) -> list[int]:
    """Nodes from the root down that the target itself would have chosen."""
    accepted = [True] * len(tokens)
    for node in range(1, len(tokens)):
        accepted[node] = accepted[parents[node]] and tokens[node] == choice[parents[node]]
    return max((path_to(parents, node) for node in range(len(tokens)) if accepted[node]), key=len)

"""A head can be trained on from where an earlier one ended, also when other tokens have become frequent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import target_folder

from starsd.export.checkpoint import Checkpoint
from starsd.export.train_drafter import head_rope
from starsd.export.train_head import Head, HeadShape, initialise
from starsd.export.train_save import save_head
from starsd.export.train_start import start_from
from starsd.shared.errors import ModelError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(target_folder(tmp_path_factory.mktemp("start") / "target"))


def new_head(source: Checkpoint, ids: np.ndarray, seed: int) -> Head:
    head = Head(HeadShape.of(source, len(ids)), head_rope(source))
    initialise(head, source, torch.from_numpy(ids), seed)
    return head


def test_weights_are_the_earlier_heads_but_for_tokens_it_did_not_know(source: Checkpoint, tmp_path: Path) -> None:
    earlier_ids, ids = np.arange(0, 64, 2), np.arange(0, 48, 1)
    earlier = new_head(source, earlier_ids, seed=5)
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.add_(0.125)
    save_head(tmp_path, earlier, source, earlier_ids, 512)
    head, untouched = new_head(source, ids, seed=6), new_head(source, ids, seed=6)
    assert start_from(head, tmp_path, ids) == 24
    stored = load_file(tmp_path / "model.safetensors")
    for name, parameter in head.named_parameters():
        if name != "lm_head.weight":
            assert torch.equal(parameter, stored[name].float())
    assert torch.equal(head.lm_head.weight[::2], stored["lm_head.weight"][:24].float())
    learnt = stored["lm_head.weight"][:24].float() - untouched.lm_head.weight[::2]
    unknown = head.lm_head.weight[1::2] - untouched.lm_head.weight[1::2]
    assert torch.allclose(unknown, learnt.mean(0).expand_as(unknown), atol=1e-6)


def test_a_folder_that_is_no_such_head_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    ids = np.arange(32)
    head = new_head(source, ids, seed=1)
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: "):
        start_from(head, tmp_path, ids)
    save_head(tmp_path, head, source, ids, 512)
    whole = load_file(tmp_path / "model.safetensors")
    save_file({**whole, "fc.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has fc.weight \[3, 4\], expected \[\d+, \d+\]: it is another target's"):
        start_from(head, tmp_path, ids)
    save_file({name: t for name, t in whole.items() if name != "norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks norm.weight, expected an EAGLE-3 head made here$"):
        start_from(head, tmp_path, ids)
